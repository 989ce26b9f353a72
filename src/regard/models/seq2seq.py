"""Seq2Seq: a recurrent encoder that reads and a recurrent decoder that writes, with attention between them or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..checks import (
    check_choice,
    check_flag,
    check_int,
    check_keys,
    check_number,
    check_probability,
    check_tied_vocabularies,
    check_token_id,
    check_token_rows,
)
from ..nn import BahdanauAttention, Coverage, LocalAttention, LocationScore, LuongAttention, TokenEmbedding
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy_per_target, shift_right
from .padding import check_lengths, counted_targets
from .recurrent_decoder import CELLS, Cell, RecurrentDecoder, RecurrentState, run

Looking = Literal["bahdanau", "dot", "general", "concat", "location", "local_monotonic", "local_predictive"]
How = Literal["concatenate", "gate", "dot"]
Tied = Literal["none", "output", "all"]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """What a `Seq2Seq` is made of.

    `start` is what the decoder reads before the first token it writes. `hidden` is the width of the decoder and of
    the encoder, both its directions together. `attention` names a layer, None is a sequence squeezed into one vector;
    `places` is the longest source `"location"` can score, `radius` how far the local ones see. `modulate` says how
    the context acts on the state, and `feed` feeds the result into the next step. With `coverage`, attention knows
    what it has looked at, and looking twice costs so much of the loss (See et al. 2017, eq. 13). `tied` says whether
    the output reads the table of the target's embedding backwards, and whether the source uses the same table.
    `smoothing` acts in training only.
    """

    source_vocabulary: int
    target_vocabulary: int
    start: int
    dim: int = 256
    hidden: int = 512
    layers: int = 1
    cell: Cell = "gru"
    bidirectional: bool = True
    attention: Looking | None = "bahdanau"
    places: int = 100
    radius: float = 10.0
    modulate: How = "concatenate"
    feed: bool = False
    coverage: float | None = None
    tied: Tied = "none"
    dropout: float = 0.1
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("source_vocabulary", "target_vocabulary", "dim", "hidden", "layers", "places"):
            check_int(name, getattr(self, name), least=1)
        for name, known in (("cell", Cell), ("modulate", How), ("tied", Tied)):
            check_choice(name, getattr(self, name), known)
        for name in ("dropout", "smoothing"):
            check_probability(name, getattr(self, name))
        check_token_id("start", self.start, self.target_vocabulary)
        for name in ("bidirectional", "feed"):
            check_flag(name, getattr(self, name))
        check_number("radius", self.radius, above=0)
        if self.coverage is not None:
            check_number("coverage", self.coverage)
        check_tied_vocabularies(self.tied, self.source_vocabulary, self.target_vocabulary)
        if self.attention is not None:
            check_choice("attention", self.attention, Looking)
        if self.bidirectional and self.hidden % 2:
            raise ValueError(f"hidden must be even, half for each direction, got {self.hidden}")
        if self.coverage is not None and self.attention != "bahdanau":
            raise ValueError(
                f"coverage enters an additive score, got attention={self.attention!r}; pass attention='bahdanau'"
            )


class Seq2Seq(nn.Module):
    """p(target | source) by two recurrent networks (Bahdanau et al. 2015; Luong et al. 2015; Cho et al. 2014).

    >>> config = Seq2SeqConfig(source_vocabulary=90, target_vocabulary=70, start=2, dim=16, hidden=32)
    >>> model = Seq2Seq(config)
    >>> batch = {"source": torch.randint(4, 90, (2, 9)), "source_lengths": torch.tensor([9, 5])}
    >>> model(batch["source"], torch.tensor([[2, 5, 7]] * 2), source_lengths=batch["source_lengths"]).shape
    torch.Size([2, 3, 70])

    It decodes as a stepper, the batch its source, and shows its attention:

    >>> from regard.decode import beam
    >>> best = beam(model.eval(), batch, [[2], [2]], width=3, end=3, max_length=8)[1][0]
    >>> best.attention["source"].shape == (1, len(best.tokens), 9)
    True

    A layer of your own in place of the one the config names: `Seq2Seq(config, attention=layer)`, from queries and to
    states of `config.hidden`.
    """

    def __init__(self, config: Seq2SeqConfig, *, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = RecurrentEncoder(config)
        self.decoder = RecurrentDecoder(
            config.target_vocabulary,
            dim=config.dim,
            hidden=config.hidden,
            state_dim=config.hidden,
            layers=config.layers,
            cell=config.cell,
            attention=_attention(config) if attention is None else attention,
            modulate=config.modulate,
            feed=config.feed,
            tied=config.tied != "none",
            dropout=config.dropout,
        )
        if config.tied == "all":
            self.decoder.embedding = self.encoder.embedding

    def forward(
        self,
        source: Int[Tensor, "b n"],
        inputs: Int[Tensor, "b m"],
        *,
        source_lengths: Int[Tensor, " b"] | None = None,
        forcing: float = 1.0,
    ) -> Float[Tensor, "b m vocabulary"]:
        """The logits of what follows each of the inputs, which begin with the start; `forcing` as in `loss`."""
        logits, _ = self.decoder(inputs, self._start(source, source_lengths), forcing=forcing)
        return logits

    def loss(self, batch: Mapping[str, Tensor], *, forcing: float = 1.0) -> Loss:
        """The cross entropy of `target` (the end included, the start not), given `source`; with coverage, its price.

        `source_lengths` and `target_lengths` say how many tokens of each row are real; all, where they are absent.
        `forcing` is the probability with which a step reads the true token rather than the decoder's own: 1 is
        teacher forcing, less is scheduled sampling (Bengio et al. 2015), 0 is decoding by itself.
        """
        if not 0 <= forcing <= 1:
            raise ValueError(f"forcing must be a probability, got {forcing}")
        check_keys(batch, "source", "target")
        target, counted = counted_targets(batch)
        state = self._start(batch["source"], batch.get("source_lengths"))
        logits, state = self.decoder(shift_right(target, start=self.config.start), state, forcing=forcing)
        smoothing = self.config.smoothing if self.training else 0.0
        each = cross_entropy_per_target(logits, target, counted=counted, smoothing=smoothing)
        if self.config.coverage is not None:
            each = each + self.config.coverage * coverage_overlap(state.weights()[:, 0]) * counted
        return Loss(each.sum(), counted.sum())

    def start(self, batch: Mapping[str, Tensor]) -> RecurrentState:
        """The state before the first token, from `source` and, where rows are padded, `source_lengths`."""
        check_keys(batch, "source")
        return self._start(batch["source"], batch.get("source_lengths"))

    def step(
        self, tokens: Int[Tensor, " rows *n"], state: RecurrentState
    ) -> tuple[Float[Tensor, " rows *n vocabulary"], RecurrentState]:
        """Read tokens `(rows,)` or `(rows, n)`; the logits of what follows each, and the state after the last."""
        return self.decoder.step(tokens, state)

    def _start(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        states, hidden = self.encoder(source, lengths)
        return self.decoder.start(hidden, states, lengths)


class RecurrentEncoder(nn.Module):
    """States of a source, each having read up to its place from either side, and the state a decoder begins with."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.layers, self.directions = config.layers, 1 + config.bidirectional
        self.embedding = TokenEmbedding(config.source_vocabulary, config.dim)
        self.dropout = Dropout(config.dropout)
        self.cell = CELLS[config.cell](
            config.dim,
            config.hidden // self.directions,
            config.layers,
            batch_first=True,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.layers > 1 else 0.0,
        )
        kinds = 2 if config.cell == "lstm" else 1
        self.bridges = nn.ModuleList(nn.Linear(config.hidden, config.hidden) for _ in range(kinds))

    def forward(
        self, source: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b n hidden"], tuple[Float[Tensor, "layers b hidden"], ...]]:
        """The states, and tanh(W [forward; backward]) of the last ones of each layer (and cell, in an LSTM)."""
        check_token_rows("source", source)
        x = self.dropout(self.embedding(source))
        if lengths is None:
            states, last = run(self.cell, x)
        else:
            check_lengths("source_lengths", lengths, source)
            # A packed row must have a token. One with none reads a token of padding, and attention sees none of it.
            packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
            packed, last = run(self.cell, packed)
            states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        return states, tuple(
            torch.tanh(bridge(x.unflatten(0, (self.layers, self.directions)).transpose(1, 2).flatten(2)))
            for bridge, x in zip(self.bridges, last, strict=True)
        )


def coverage_overlap(A: Float[Tensor, "b t n"]) -> Float[Tensor, "b t"]:
    """sum_j min(A_tj, sum of A_sj over s < t): what each step looks at again (See et al. 2017, eq. 12)."""
    return torch.minimum(A, A.cumsum(1) - A).sum(-1)


def _attention(config: Seq2SeqConfig) -> nn.Module | None:
    hidden = config.hidden
    match config.attention:
        case None:
            return None
        case "bahdanau":
            coverage = None if config.coverage is None else Coverage(hidden)
            return BahdanauAttention(hidden, hidden, hidden, coverage=coverage)
        case "local_monotonic" | "local_predictive":
            return LocalAttention(hidden, radius=config.radius, center=config.attention.removeprefix("local_"))
        case "location":
            return LuongAttention(hidden, score=LocationScore(hidden, places=config.places))
        case score:
            return LuongAttention(hidden, score=score)
