"""Translation: from the sentences of one language to those of another, with their alignments."""

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
from .metrics import MetricValue
from .pairs import PairVocabulary, TextPair, Tokenizers, check_pairs
from .seq2seq_task import GeneratedText, ShowProgress, Writer
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
Sketch = Callable[[Tokenizer, Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class TranslationModelSettings:
    """A translation model in a few words: called with the tokenizers of both sides, it gives the model's config.

    `rnn` has the attention of Bahdanau et al. 2015, `luong-*` those of Luong et al. 2015, `rnn-plain` none.
    """

    kind: Annotated[Kind, "what it is made of", "--model"] = "transformer"
    dim: Annotated[int, "the width of embeddings, and of a Transformer's states"] = 256
    hidden: Annotated[int | None, "the width of feed-forwards (4 dim), or of recurrent states (2 dim)"] = None
    depth: Annotated[int | None, "the layers of encoder and decoder each (Transformer 3, recurrent 1)"] = None
    heads: Annotated[int, "the attention heads of a Transformer"] = 4
    cell: Annotated[Literal["gru", "lstm"], "the cell of a recurrent model"] = "gru"
    dropout: Annotated[float, "the share of activations left out while training"] = 0.1
    smoothing: Annotated[float, "label smoothing"] = 0.1
    tied: Annotated[
        Literal["none", "output", "all"] | None, "which tables are one: output and target, or the source's too"
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "transformer":
            check_left_at_default(self, "cell", whose="recurrent models", got="a Transformer")
        else:
            check_left_at_default(self, "heads", whose="a Transformer", got=f"kind={self.kind!r}")

    def __call__(self, source: Tokenizer, target: Tokenizer) -> Network:
        """The config for these vocabularies."""
        vocabularies: dict[str, Any] = {
            "source_vocabulary": len(source),
            "target_vocabulary": len(target),
            "start": target.bos,
        }
        if self.tied == "all" and source is not target:
            raise ValueError("tied='all' needs one vocabulary for both sides, got one for each; learn a joint one")
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
SMALL, LEARNED, SIZES = TranslationModelSettings(), PairVocabulary(), Batching()
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
    model: Sketch = SMALL,
    vocabulary: PairVocabulary = LEARNED,
    batching: Batching = SIZES,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
) -> Outcome:
    """Train a translator on pairs of sentences, into the folder `out`.

        train(parallel("a.de", "a.en"), valid=parallel("b.de", "b.en"), out="runs/deen")
        Translator.load("runs/deen").translate(["ein kleines Haus"])

    Pairs may be iterated more than once. `model` is any function from the tokenizers to the config of a model, so
    that every choice of `TransformerConfig` and `Seq2SeqConfig` is open. An evaluation gives `loss`, `bleu`, `chrf`
    and `exact`, of greedy translations. `files` are kept in each checkpoint, as `fit` does. It trains on `device`, a
    GPU where there is one unless given. Before `fit` begins, nothing is written.

    A run that is resumed keeps the model and the tokenizers it began with, and wants the same pairs again. Here only
    their number is checked; `regard train --resume` compares the files.
    """

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
    )


class Translator(Writer):
    """A trained translator, or several that decode as one.

        translator = Translator.load("runs/deen")
        [best] = translator.translate(["ein kleines Haus"], beam=5)

    Pairs to score, align or evaluate by are anything with a `source` and a `target`.
    """

    task = TASK

    def translate(
        self,
        lines: Sequence[str],
        *,
        beam: int = 5,
        alpha: float = 0.6,
        max_length: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """The best translation of each line, as `write` has it; `n_best` has more of them."""
        return self.write(lines, beam=beam, alpha=alpha, max_length=max_length, show=show)

    def evaluate(
        self,
        pairs: Sequence[TextPair],
        *,
        beam: int = 5,
        max_length: int | None = None,
        tokenize: str = "13a",
        show: ShowProgress | None = None,
    ) -> dict[str, MetricValue]:
        """`bleu`, `chrf` and `exact` of translations against the targets, and the `loss` of those a token."""
        metrics.check_tokenizable(tokenize)
        check_pairs(pairs)
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        written = [one.text for one in self.translate(sources, beam=beam, max_length=max_length, show=show)]
        return {
            "bleu": metrics.bleu(written, targets, tokenize=tokenize),
            "chrf": metrics.chrf(written, targets),
            "exact": metrics.exact(written, targets),
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
        """Links between the words of each pair, which spaces separate: each target word with what it attends to most.

        With `reverse`, a translator the other way, only the links both agree on. The rest is as in `word_maps`.
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
        """Attention between the words of each pair, averaged over heads, and over models where there are several.

        A Transformer's is that of one `layer`, the one above the middle unless given, and of a `head` if one is given.
        Words attend `when` they are written; in deep Transformers they may do so more clearly one step later, when they
        are read (Chen et al. 2020).
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
