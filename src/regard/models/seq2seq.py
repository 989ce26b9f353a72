"""Seq2Seq: a recurrent encoder and a recurrent decoder, with or without attention between them."""

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
from .recurrent_decoder import CELLS, Cell, RecurrentDecoder, RecurrentState, run_rnn

Looking = Literal["bahdanau", "dot", "general", "concat", "location", "local_monotonic", "local_predictive"]
How = Literal["concatenate", "gate", "dot"]
Tied = Literal["none", "output", "all"]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes and choices of a `Seq2Seq`.

    `start` is the token the decoder reads before the first one it writes. `hidden` is the width of the decoder and of
    the encoder, both directions together. `attention` names a layer; with None the decoder gets the source as one
    vector. `places` is the longest source that `"location"` can score, `radius` that of the windows of the local ones.
    `modulate` is the way the context changes the state (see `Modulate`), and `feed` feeds the result into the next
    step. With `coverage`, attention depends on the weights so far, and attending again adds to the loss with this
    weight (See et al. 2017, eq. 13). `tied="output"` shares the embedding table of the target with the output,
    `tied="all"` with the source too. `smoothing` acts in training only.
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
                f"coverage needs an additive score, got attention={self.attention!r}; pass attention='bahdanau'"
            )


class Seq2Seq(nn.Module):
    """p(target | source) by two recurrent networks (Bahdanau et al. 2015; Luong et al. 2015; Cho et al. 2014).

    >>> config = Seq2SeqConfig(source_vocabulary=90, target_vocabulary=70, start=2, dim=16, hidden=32)
    >>> model = Seq2Seq(config)
    >>> batch = {"source": torch.randint(4, 90, (2, 9)), "source_lengths": torch.tensor([9, 5])}
    >>> model(batch["source"], torch.tensor([[2, 5, 7]] * 2), source_lengths=batch["source_lengths"]).shape
    torch.Size([2, 3, 70])

    It is a stepper for `regard.decode`, with a batch as the source, and records its attention:

    >>> from regard.decode import beam
    >>> best = beam(model.eval(), batch, [[2], [2]], width=3, end=3, max_length=8)[1][0]
    >>> best.attention["source"].shape == (1, len(best.tokens), 9)
    True

    For a layer of your own write `Seq2Seq(config, attention=layer)`; its queries and states have width
    `config.hidden`.
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
        """Return the logits after each of the inputs, which begin with the start; `forcing` is that of `loss`."""
        logits, _ = self.decoder(inputs, self._start(source, source_lengths), forcing=forcing)
        return logits

    def loss(self, batch: Mapping[str, Tensor], *, forcing: float = 1.0) -> Loss:
        """Return the cross entropy of `target` (with the end, without the start) given `source`, and the coverage loss.

        `source_lengths` and `target_lengths` are the numbers of real tokens per row (default: all). `forcing` is the
        probability that a step reads the true token rather than the prediction of the decoder: 1 is teacher forcing,
        less is scheduled sampling (Bengio et al. 2015), with 0 the decoder reads its predictions alone.
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
        """Return the state before the first token, from `source` and, if rows are padded, `source_lengths`."""
        check_keys(batch, "source")
        return self._start(batch["source"], batch.get("source_lengths"))

    def step(
        self, tokens: Int[Tensor, " rows *n"], state: RecurrentState
    ) -> tuple[Float[Tensor, " rows *n vocabulary"], RecurrentState]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        return self.decoder.step(tokens, state)

    def _start(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        states, hidden = self.encoder(source, lengths)
        return self.decoder.start(hidden, states, lengths)


class RecurrentEncoder(nn.Module):
    """A bidirectional or forward RNN over the source, and the first state of the decoder."""

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
        """Return the states, and tanh(W [forward; backward]) of the last state of each layer (and cell, in an LSTM)."""
        check_token_rows("source", source)
        x = self.dropout(self.embedding(source))
        if lengths is None:
            states, last = run_rnn(self.cell, x)
        else:
            check_lengths("source_lengths", lengths, source)
            # A packed row must have a token: an empty row reads one token of padding, which attention does not see.
            packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
            packed, last = run_rnn(self.cell, packed)
            states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        return states, tuple(
            torch.tanh(bridge(x.unflatten(0, (self.layers, self.directions)).transpose(1, 2).flatten(2)))
            for bridge, x in zip(self.bridges, last, strict=True)
        )


def coverage_overlap(A: Float[Tensor, "b t n"]) -> Float[Tensor, "b t"]:
    """sum_j min(A_tj, sum of A_sj over s < t), large if a step attends again (See et al. 2017, eq. 12)."""
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
