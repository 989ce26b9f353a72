"""Translation of sentences, and word alignments by attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..data import Pair, Tokenizer
from ..lens import Links, argmax_links, mutual_links
from ..models import Seq2SeqConfig, TransformerConfig
from ..train import InverseSquareRoot, Outcome, Progress, Recipe
from ..train.dataclass_json import check_left_at_default, check_types
from . import metrics, seq2seq_training, word_alignment
from .batching import Batching
from .fine_tuning import FineTuning, check_kept
from .metrics import MetricValue
from .pairs import PairVocabulary, TextPair, Tokenizers, check_pairs
from .seq2seq_task import GeneratedText, Sampling, ShowProgress, Writer
from .word_alignment import When

TASK = "translation"
Kind = Literal[
    "transformer",
    "rnn",
    "rnn-plain",
    "luong-dot",
    "luong-general",
    "luong-concat",
    "luong-location",
    "luong-local-m",
    "luong-local-p",
]
ATTENTION: dict[str, Any] = {
    "rnn": "bahdanau",
    "rnn-plain": None,
    "luong-local-m": "local_monotonic",
    "luong-local-p": "local_predictive",
}
Network = Seq2SeqConfig | TransformerConfig
ModelConfigFunction = Callable[[Tokenizer, Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class TranslationModelSettings:
    """Settings of a translator; called with the tokenizers of both sides, they return the config of the model.

    `rnn` has the attention of Bahdanau et al. 2015, `luong-*` one of those of Luong et al. 2015, `rnn-plain` none.
    """

    kind: Annotated[
        Kind,
        "Architecture: a Transformer, or recurrent with the attention of Bahdanau et al. 2015 (rnn), without attention "
        "(rnn-plain), or with one of Luong et al. 2015 (luong-*).",
        "--model",
    ] = "transformer"
    dim: Annotated[int, "Width of embeddings and of a Transformer's hidden states."] = 256
    hidden: Annotated[
        int | None,
        "Width of feed-forward layers (transformer; default: 4 x --dim) or of recurrent states (default: 2 x --dim).",
    ] = None
    depth: Annotated[
        int | None, "Number of layers of the encoder and of the decoder. Default: 3 (transformer) or 1 (recurrent)."
    ] = None
    heads: Annotated[int, "Number of attention heads (transformer only)."] = 4
    cell: Annotated[Literal["gru", "lstm"], "Recurrent cell (all recurrent models)."] = "gru"
    dropout: Annotated[float, "Dropout probability in training."] = 0.1
    smoothing: Annotated[float, "Label smoothing; 0 for none."] = 0.1
    tied: Annotated[
        Literal["none", "output", "all"] | None,
        "Tables that share weights: none, output (target embedding and output layer), or all (the source embedding "
        "too). Default: all for a joint vocabulary, else output.",
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "transformer":
            check_left_at_default(self, "cell", whose="recurrent models", got="a Transformer")
        else:
            check_left_at_default(self, "heads", whose="a Transformer", got=f"kind={self.kind!r}")

    def __call__(self, source: Tokenizer, target: Tokenizer) -> Network:
        """Return the config for these vocabularies."""
        vocabularies: dict[str, Any] = {
            "source_vocabulary": len(source),
            "target_vocabulary": len(target),
            "start": target.bos,
        }
        if self.tied == "all" and source is not target:
            raise ValueError("tied='all' needs one vocabulary for both sides, got two; learn a joint vocabulary")
        tied: Literal["none", "output", "all"] = self.tied or ("all" if source is target else "output")
        if self.kind == "transformer":
            return TransformerConfig(
                **vocabularies,
                dim=self.dim,
                heads=self.heads,
                hidden=4 * self.dim if self.hidden is None else self.hidden,
                encoder_layers=3 if self.depth is None else self.depth,
                decoder_layers=3 if self.depth is None else self.depth,
                tied=tied,
                dropout=self.dropout,
                smoothing=self.smoothing,
            )
        return Seq2SeqConfig(
            **vocabularies,
            dim=self.dim,
            hidden=2 * self.dim if self.hidden is None else self.hidden,
            layers=1 if self.depth is None else self.depth,
            cell=self.cell,
            attention=ATTENTION.get(self.kind, self.kind.removeprefix("luong-")),
            tied=tied,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )


Model = TranslationModelSettings  # short, for `translation.Model(...)`
DEFAULT_MODEL, DEFAULT_VOCABULARY, DEFAULT_BATCHING = TranslationModelSettings(), PairVocabulary(), Batching()
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="chrf",
    better="higher",
)


def train(
    pairs: Iterable[TextPair],
    *,
    out: str | Path,
    valid: Iterable[TextPair] | None = None,
    recipe: Recipe = RECIPE,
    model: ModelConfigFunction = DEFAULT_MODEL,
    vocabulary: PairVocabulary = DEFAULT_VOCABULARY,
    batching: Batching = DEFAULT_BATCHING,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a translator on pairs of sentences, into the folder `out`.

        train(parallel("a.de", "a.en"), valid=parallel("b.de", "b.en"), out="runs/deen")
        Translator.load("runs/deen").translate(["ein kleines Haus"])

    Pairs may be iterated more than once. `model` is any function from the two tokenizers to the config of a model, so
    every field of `TransformerConfig` and `Seq2SeqConfig` can be set. An evaluation returns `loss`, `bleu`, `chrf` and
    `exact`, of greedy translations. `files` are stored in each checkpoint. `device` is by default a GPU if there is
    one. Nothing is written before all data and settings have been checked.

    A resumed run keeps its model and tokenizers, and needs the same pairs again: other tokens raise.

    `base`, the folder of a run or a `FineTuning`, begins with the weights and the tokenizers of that run instead of a
    new model; `model` and `vocabulary` must then be left out.
    """

    check_kept(base, model=model != DEFAULT_MODEL, vocabulary=vocabulary != DEFAULT_VOCABULARY)

    def new() -> tuple[Network, Tokenizers]:
        tokenizers = vocabulary.learn_both(pairs)
        network = model(*tokenizers)
        if isinstance(network, Seq2SeqConfig) and network.attention == "location":
            network = replace(network, places=max(network.places, batching.limit))
        return network, tokenizers

    return seq2seq_training.train(
        TASK,
        Translator,
        new,
        pairs,
        out=out,
        valid=valid,
        recipe=recipe,
        batching=batching,
        resume=resume,
        files=files,
        device=device,
        show=show,
        base=base,
    )


class Translator(Writer):
    """A trained translator, or an ensemble of several.

        translator = Translator.load("runs/deen")
        [best] = translator.translate(["ein kleines Haus"], beam=5)

    Pairs to score, align or evaluate are objects with a `source` and a `target`.
    """

    task = TASK

    def translate(
        self,
        lines: Sequence[str],
        *,
        beam: int = 5,
        alpha: float = 0.6,
        max_length: int | None = None,
        coverage: float = 0.0,
        prefixes: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """Return the best translation of each line; `n_best` returns several, and documents the arguments."""
        return self.write(
            lines,
            beam=beam,
            alpha=alpha,
            max_length=max_length,
            coverage=coverage,
            prefixes=prefixes,
            sampling=sampling,
            show=show,
        )

    def evaluate(
        self,
        pairs: Sequence[TextPair],
        *,
        beam: int = 5,
        alpha: float = 0.6,
        max_length: int | None = None,
        coverage: float = 0.0,
        tokenize: str = "13a",
        references: Sequence[Sequence[str]] | None = None,
        show: ShowProgress | None = None,
    ) -> dict[str, MetricValue]:
        """Compute `bleu`, `chrf` and `exact` of translations against the targets, and the `loss` per target token.

        `references` are all references of each pair, by default its target.
        """
        metrics.check_tokenizable(tokenize)
        check_pairs(pairs)
        sources = [pair.source for pair in pairs]
        found = self.translate(sources, beam=beam, alpha=alpha, max_length=max_length, coverage=coverage, show=show)
        return self.measure([one.text for one in found], pairs, tokenize=tokenize, references=references)

    def measure(
        self,
        translations: Sequence[str],
        pairs: Sequence[TextPair],
        *,
        tokenize: str = "13a",
        references: Sequence[Sequence[str]] | None = None,
    ) -> dict[str, MetricValue]:
        """Compute the metrics of `evaluate` for given translations."""
        given = [[pair.target] for pair in pairs] if references is None else references
        return {
            "bleu": metrics.bleu(translations, given, tokenize=tokenize),
            "chrf": metrics.chrf(translations, given),
            "exact": metrics.exact(translations, given),
            "loss": self.loss(pairs),
        }

    def align(
        self,
        pairs: Sequence[TextPair],
        *,
        layer: int | None = None,
        head: int | None = None,
        when: When = "written",
        reverse: Translator | None = None,
        show: ShowProgress | None = None,
    ) -> list[Links]:
        """Link each target word to the source word it attends to most; words are separated by spaces.

        With `reverse`, a translator of the opposite direction, return only the links that both agree on. Other
        arguments are as in `word_maps`.
        """
        maps = self.word_maps(pairs, layer=layer, head=head, when=when, show=show)
        if reverse is None:
            return [argmax_links(one) for one in maps]
        flipped = [Pair(pair.target, pair.source) for pair in pairs]
        back = reverse.word_maps(flipped, layer=layer, head=head, when=when, show=show)
        return list(map(mutual_links, maps, back))

    def word_maps(
        self,
        pairs: Sequence[TextPair],
        *,
        layer: int | None = None,
        head: int | None = None,
        when: When = "written",
        show: ShowProgress | None = None,
    ) -> list[Float[Tensor, "target source"]]:
        """Return the attention between the words of each pair, averaged over heads, and over the models of an ensemble.

        For a Transformer it is the attention of one `layer`, by default the one above the middle, and of one `head` if
        given. `when` selects the decoding step: the one that writes a word, or the next, which reads it and in deep
        Transformers may align it better (Chen et al. 2020).
        """
        names = [word_alignment.layer_of(model, layer) for model in self.models]
        for model, name in zip(self.models, names, strict=True):
            word_alignment.check_head(model, name, head)
        check_pairs(pairs)
        maps = [torch.empty(0, 0)] * len(pairs)
        for rows, batch in self._batches(self.tokenizers.encode(pairs), show):
            chosen = [pairs[row] for row in rows]
            found = [
                word_alignment.word_maps(model, self.tokenizers, chosen, batch, layer=name, head=head, when=when)
                for model, name in zip(self.models, names, strict=True)
            ]
            for row, each in zip(rows, zip(*found, strict=True), strict=True):
                maps[row] = torch.stack(each).mean(0)
        return maps
