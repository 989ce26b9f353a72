"""Summarization: from documents to what matters in them, with rare words copied as they stand there."""

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
from .metrics import MetricValue, RougeWords
from .pairs import TextPair, Tokenizers, check_pairs
from .seq2seq_task import GeneratedText, Network, ShowProgress, Writer, tokenizers_class
from .vocabulary import Vocabulary, WordVocabulary

TASK = "summarization"
Sketch = Callable[[Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class SummarizationModelSettings:
    """A summarization model in a few words: called with the tokenizer, it gives the model's config.

    `pointer` is recurrent, and copies words of the document, those it does not know among them (See et al. 2017);
    `rnn` is the same without copying.
    """

    kind: Annotated[Literal["pointer", "rnn", "transformer"], "what it is made of", "--model"] = "pointer"
    dim: Annotated[int, "the width of embeddings, and of a Transformer's states"] = 128
    hidden: Annotated[int | None, "the width of feed-forwards (4 dim), or of recurrent states (2 dim)"] = None
    depth: Annotated[int | None, "the layers of encoder and decoder each (Transformer 3, recurrent 1)"] = None
    heads: Annotated[int, "the attention heads of a Transformer"] = 4
    cell: Annotated[Literal["gru", "lstm"], "the cell of a recurrent model"] = "lstm"
    coverage: Annotated[float | None, "the price of looking twice at a word, against repetitions (recurrent)"] = None
    encoder_mask: Annotated[
        str | None, "what a Transformer's encoder sees of a long document, as 'Window(128) | Global(4)'"
    ] = None
    segment: Annotated[int | None, "a Transformer's encoder reads so many tokens at a time"] = None
    memory: Annotated[int, "and sees so many states of what it read before"] = 0
    dropout: Annotated[float, "the share of activations left out while training"] = 0.1
    smoothing: Annotated[float | None, "label smoothing (0.1, and 0 with a pointer, which takes none)"] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "transformer":
            check_left_at_default(self, "coverage", "cell", whose="recurrent models", got="a Transformer")
        else:
            check_left_at_default(self, "heads", whose="a Transformer", got=f"kind={self.kind!r}")
        if self.kind != "transformer" and (self.encoder_mask, self.segment, self.memory) != (None, None, 0):
            raise ValueError(
                f"encoder_mask, segment and memory are of a Transformer's encoder, got kind={self.kind!r}; leave them "
                "out, or choose kind='transformer'"
            )

    def __call__(self, tokenizer: Tokenizer) -> Network:
        """The config for this vocabulary."""
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
        # A vocabulary without a token for the unknown has no word outside of it.
        return PointerConfig(**common, unknown=tokenizer.pad if tokenizer.unk is None else tokenizer.unk)


@dataclass(frozen=True, kw_only=True)
class DocumentBatching(Batching):
    """Batches of documents, of which the first 400 tokens are read, as by See et al. 2017, unless told otherwise."""

    tokens: Annotated[int, "the most tokens of a batch: rows times longest row, padding included", "--batch-tokens"] = (
        8192
    )
    limit: Annotated[int, "the most tokens a document or a summary may have"] = 400
    long: Annotated[Long, "what becomes of longer ones; how many there are is said"] = "truncate"


Model = SummarizationModelSettings  # short, for `summarization.Model(...)`
SMALL, LEARNED, SIZES = SummarizationModelSettings(), WordVocabulary(), DocumentBatching()
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
    model: Sketch = SMALL,
    vocabulary: Vocabulary = LEARNED,
    batching: Batching = SIZES,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
) -> Outcome:
    """Train a summarizer on documents, the sources, and their summaries, into the folder `out`.

        train(parallel("a.txt", "a.summary"), valid=parallel("b.txt", "b.summary"), out="runs/news")
        Summarizer.load("runs/news").summarize([document])

    Both sides share one vocabulary. A model that is trained on documents cut at a limit (`batching.long="truncate"`)
    reads as much of every document later. An evaluation gives `rouge1`, `rouge2`, `rougeL` and `loss`, of greedy
    summaries. The rest is as in `translation.train`.
    """

    def new() -> tuple[Network, Tokenizers]:
        one = vocabulary.learn(text for pair in pairs for text in (pair.source, pair.target))
        network = model(one)
        return network, tokenizers_class(network)(one, one)

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
    )


class Summarizer(Writer):
    """A trained summarizer, or several that decode as one.

        summarizer = Summarizer.load("runs/news")
        [best] = summarizer.summarize([document])

    It reads as much of a document as its training has read.
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
        """The best summary of each document, as `write` has it; `n_best` has more of them."""
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
        max_length: int | None = None,
        no_repeat: int | None = None,
        words: RougeWords = "english",
        show: ShowProgress | None = None,
    ) -> dict[str, MetricValue]:
        """`rouge1`, `rouge2` and `rougeL` of summaries against the targets, and the `loss` of those a token."""
        check_pairs(pairs)
        documents, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        found = self.summarize(documents, beam=beam, max_length=max_length, no_repeat=no_repeat, show=show)
        written = [one.text for one in found]
        return {
            **metrics.rouge(written, targets, words=words),
            "loss": self.loss(pairs),
        }
