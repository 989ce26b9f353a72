"""Summarization of documents, with copying of rare words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from ..data import Tokenizer
from ..models import PointerConfig, Seq2SeqConfig, TransformerConfig
from ..train import InverseSquareRoot, Outcome, Progress, Recipe
from ..train.dataclass_json import check_left_at_default, check_types
from . import metrics, seq2seq_training
from .batching import Batching, Long
from .fine_tuning import FineTuning, check_kept
from .metrics import MetricValue, RougeWords
from .pairs import TextPair, Tokenizers, check_pairs
from .seq2seq_task import GeneratedText, Network, ShowProgress, Writer, tokenizers_class
from .vocabulary import Vocabulary, WordVocabulary

TASK = "summarization"
ModelConfigFunction = Callable[[Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class SummarizationModelSettings:
    """Settings of a summarizer; called with the tokenizer, they return the config of the model.

    `pointer` is recurrent and can copy words from the document, even unknown ones (See et al. 2017); `rnn` is the same
    without copying.
    """

    kind: Annotated[
        Literal["pointer", "rnn", "transformer"],
        "Architecture: recurrent with copying of words from the document, recurrent without copying, or a Transformer.",
        "--model",
    ] = "pointer"
    dim: Annotated[int, "Width of embeddings and of a Transformer's hidden states."] = 128
    hidden: Annotated[
        int | None,
        "Width of feed-forward layers (transformer; default: 4 x --dim) or of recurrent states (default: 2 x --dim).",
    ] = None
    depth: Annotated[
        int | None, "Number of layers of the encoder and of the decoder. Default: 3 (transformer) or 1 (recurrent)."
    ] = None
    heads: Annotated[int, "Number of attention heads (transformer only)."] = 4
    cell: Annotated[Literal["gru", "lstm"], "Recurrent cell (pointer and rnn only)."] = "lstm"
    coverage: Annotated[
        float | None,
        "Weight of the coverage loss, which penalizes attending to a word twice (pointer and rnn only). Default: none.",
    ] = None
    encoder_mask: Annotated[
        str | None,
        "Attention mask of the encoder, for long documents, e.g. 'Window(128) | Global(4)' (transformer only). "
        "Default: none.",
    ] = None
    segment: Annotated[
        int | None, "Number of tokens that the encoder reads at a time (transformer only). Default: the whole document."
    ] = None
    memory: Annotated[
        int, "Number of states of earlier segments that each segment also attends to (transformer with --segment only)."
    ] = 0
    dropout: Annotated[float, "Dropout probability in training."] = 0.1
    smoothing: Annotated[float | None, "Label smoothing. Default: 0.1; a pointer supports only 0."] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "transformer":
            check_left_at_default(self, "coverage", "cell", whose="recurrent models", got="a Transformer")
        else:
            check_left_at_default(self, "heads", whose="a Transformer", got=f"kind={self.kind!r}")
        if self.kind != "transformer" and (self.encoder_mask, self.segment, self.memory) != (None, None, 0):
            raise ValueError(
                f"encoder_mask, segment and memory are only for a Transformer, got kind={self.kind!r}; leave them out, "
                "or choose kind='transformer'"
            )

    def __call__(self, tokenizer: Tokenizer) -> Network:
        """Return the config for this vocabulary."""
        smoothing = self.smoothing if self.smoothing is not None else 0.0 if self.kind == "pointer" else 0.1
        common: dict[str, Any] = {
            "source_vocabulary": len(tokenizer),
            "target_vocabulary": len(tokenizer),
            "start": tokenizer.bos,
            "dim": self.dim,
            "tied": "all",
            "dropout": self.dropout,
            "smoothing": smoothing,
        }
        if self.kind == "transformer":
            return TransformerConfig(
                **common,
                heads=self.heads,
                hidden=self.hidden or 4 * self.dim,
                encoder_layers=3 if self.depth is None else self.depth,
                decoder_layers=3 if self.depth is None else self.depth,
                encoder_mask=self.encoder_mask,
                segment=self.segment,
                memory=self.memory,
            )
        common |= {
            "hidden": self.hidden or 2 * self.dim,
            "layers": 1 if self.depth is None else self.depth,
            "cell": self.cell,
            "coverage": self.coverage,
        }
        if self.kind == "rnn":
            return Seq2SeqConfig(**common)
        # A vocabulary without an unknown token covers every word.
        return PointerConfig(**common, unknown=tokenizer.pad if tokenizer.unk is None else tokenizer.unk)


@dataclass(frozen=True, kw_only=True)
class DocumentBatching(Batching):
    """Batch settings for documents, by default truncated to 400 tokens as in See et al. 2017."""

    tokens: Annotated[
        int, "Maximum number of tokens of a batch, padding included: rows x longest row.", "--batch-tokens"
    ] = 8192
    limit: Annotated[int, "Maximum number of tokens of a document, and of a summary."] = 400
    long: Annotated[
        Long,
        "Handling of longer documents and summaries: drop them, truncate them, or stop with an error. Their number "
        "is printed.",
    ] = "truncate"


Model = SummarizationModelSettings  # short, for `summarization.Model(...)`
DEFAULT_MODEL, DEFAULT_VOCABULARY, DEFAULT_BATCHING = SummarizationModelSettings(), WordVocabulary(), DocumentBatching()
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="rougeL",
    better="higher",
)


def train(
    pairs: Iterable[TextPair],
    *,
    out: str | Path,
    valid: Iterable[TextPair] | None = None,
    recipe: Recipe = RECIPE,
    model: ModelConfigFunction = DEFAULT_MODEL,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    batching: Batching = DEFAULT_BATCHING,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a summarizer on documents, the sources, and their summaries, into the folder `out`.

        train(parallel("a.txt", "a.summary"), valid=parallel("b.txt", "b.summary"), out="runs/news")
        Summarizer.load("runs/news").summarize([document])

    Both sides share one vocabulary. If training truncates documents (`batching.long="truncate"`), the summarizer also
    truncates every document to the same limit. An evaluation returns `rouge1`, `rouge2`, `rougeL` and `loss`, of greedy
    summaries. Other arguments are as in `translation.train`.
    """

    check_kept(base, model=model != DEFAULT_MODEL, vocabulary=vocabulary != DEFAULT_VOCABULARY)

    def new() -> tuple[Network, Tokenizers]:
        tokenizer = vocabulary.learn(text for pair in pairs for text in (pair.source, pair.target))
        network = model(tokenizer)
        return network, tokenizers_class(network)(tokenizer, tokenizer)

    return seq2seq_training.train(
        TASK,
        Summarizer,
        new,
        pairs,
        out=out,
        valid=valid,
        recipe=recipe,
        batching=batching,
        limit=batching.limit if batching.long == "truncate" else None,
        resume=resume,
        files=files,
        device=device,
        show=show,
        base=base,
    )


class Summarizer(Writer):
    """A trained summarizer, or an ensemble of several.

        summarizer = Summarizer.load("runs/news")
        [best] = summarizer.summarize([document])

    It reads as many tokens of a document as in training.
    """

    task = TASK

    def summarize(
        self,
        documents: Sequence[str],
        *,
        beam: int = 4,
        alpha: float = 0.6,
        min_length: int = 0,
        max_length: int | None = None,
        no_repeat: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """Return the best summary of each document; `n_best` returns several."""
        return self.write(
            documents,
            beam=beam,
            alpha=alpha,
            min_length=min_length,
            max_length=max_length,
            no_repeat=no_repeat,
            show=show,
        )

    def evaluate(
        self,
        pairs: Sequence[TextPair],
        *,
        beam: int = 4,
        alpha: float = 0.6,
        max_length: int | None = None,
        no_repeat: int | None = None,
        words: RougeWords = "english",
        references: Sequence[Sequence[str]] | None = None,
        show: ShowProgress | None = None,
    ) -> dict[str, MetricValue]:
        """Compute `rouge1`, `rouge2` and `rougeL` of summaries against the targets, and the `loss` per target token.

        `references` are all references of each document, by default the target; the best one counts.
        """
        check_pairs(pairs)
        documents = [pair.source for pair in pairs]
        found = self.summarize(documents, beam=beam, alpha=alpha, max_length=max_length, no_repeat=no_repeat, show=show)
        return self.measure([one.text for one in found], pairs, words=words, references=references)

    def measure(
        self,
        summaries: Sequence[str],
        pairs: Sequence[TextPair],
        *,
        words: RougeWords = "english",
        references: Sequence[Sequence[str]] | None = None,
    ) -> dict[str, MetricValue]:
        """Compute the metrics of `evaluate` for given summaries."""
        given = [[pair.target] for pair in pairs] if references is None else references
        return {**metrics.rouge(summaries, given, words=words), "loss": self.loss(pairs)}
