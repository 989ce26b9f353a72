"""RecurrentDecoder: a GRU or LSTM with attention to the states of a source at every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..checks import check_token_rows
from ..nn import LocalAttention, Memory, Modulate, TokenEmbedding
from ..nn.dropout import Dropout
from ..ops.weights import Weights

Cell = Literal["gru", "lstm"]
CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}

StatesT = TypeVar("StatesT", Tensor, PackedSequence)


def run_rnn(
    cell: nn.GRU | nn.LSTM, x: StatesT, hidden: tuple[Tensor, ...] | None = None
) -> tuple[StatesT, tuple[Tensor, ...]]:
    """Run an RNN from `hidden` or zeros; return the states and the last state per layer (two tensors for an LSTM).

    On the CPU it runs outside of autocast, since the fused LSTM has no bfloat16 kernel for some shapes.
    """
    weight = next(cell.parameters())
    device, dtype = weight.device.type, weight.dtype
    if device == "cpu" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return run_rnn(cell, x.to(dtype), None if hidden is None else tuple(h.to(dtype) for h in hidden))
    states, last = cell(x, hidden[0] if hidden is not None and len(hidden) == 1 else hidden)
    return states, last if isinstance(last, tuple) else (last,)


class RecurrentDecoder(nn.Module):
    """h_t = RNN(y_t, h_(t-1)); c_t = attention(h_t); p(y_(t+1)) = softmax(W modulate(h_t, c_t)) (Luong et al. 2015).

    With `feed`, the modulated state of the step before enters each step beside its token (section 3.3). Without
    attention, the last state of the source enters there instead, at every step (Cho et al. 2014, section 2.2).

    The attention is any layer of `regard.nn` for recurrent decoders, from queries of width `hidden` to states of width
    `state_dim`. All steps are computed at once, unless a step depends on the attention of the one before, by `feed` or
    coverage.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        dim: int,
        hidden: int,
        state_dim: int,
        layers: int = 1,
        cell: Cell = "gru",
        attention: nn.Module | None = None,
        modulate: str | nn.Module = "concatenate",
        feed: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if feed and attention is None:
            raise ValueError(
                "feed=True feeds back the output of attention, got no attention; pass an attention layer or feed=False"
            )
        self.feed = feed
        self.attention: Any = attention
        self.embedding = TokenEmbedding(vocabulary, dim)
        beside = hidden if feed or attention is None else 0
        between = dropout if layers > 1 else 0.0
        self.cell = CELLS[cell](dim + beside, hidden, layers, batch_first=True, dropout=between)
        self.modulate = None if attention is None else Modulate(hidden, state_dim, how=modulate)
        self.dropout = Dropout(dropout)
        self.narrow = nn.Linear(hidden, dim, bias=False) if tied and hidden != dim else nn.Identity()
        self.out = None if tied else nn.Linear(hidden, vocabulary)

    @property
    def stepwise(self) -> bool:
        """Whether a step depends on the attention of the step before."""
        return self.feed or getattr(self.attention, "coverage", None) is not None

    def start(
        self,
        hidden: tuple[Float[Tensor, "layers b hidden"], ...],
        states: Float[Tensor, "b n state_dim"],
        lengths: Int[Tensor, " b"] | None = None,
    ) -> RecurrentState:
        """Return the state before the first token, from a state of the RNN (two tensors for an LSTM) and the source."""
        top = hidden[0][-1]
        memory = None if self.attention is None else self.attention.remember(states, lengths)
        beside = top if self.attention is None else torch.zeros_like(top) if self.feed else None
        sources = torch.arange(len(top), device=top.device)
        return RecurrentState(hidden=hidden, beside=beside, memory=memory, sources=sources)

    def forward(
        self, inputs: Int[Tensor, "b t"], state: RecurrentState, *, forcing: float = 1.0
    ) -> tuple[Float[Tensor, "b t vocabulary"], RecurrentState]:
        """Return the logits of each next token after the inputs, and the state after them.

        Each token but the first is read with probability `forcing`, otherwise the most probable token of the step
        before: 1 is teacher forcing, with 0 the decoder reads its own predictions alone. If steps do not depend on
        each other, a pass of its own, with its own dropout, makes these predictions.
        """
        check_token_rows("inputs", inputs)
        if self.stepwise:
            logits, state, _ = self._one_by_one(inputs, state, forcing)
            return logits, state
        if forcing < 1:
            # A first pass, step by step and without gradients, decides which tokens the second pass reads at once.
            with torch.no_grad():
                inputs = self._one_by_one(inputs, state, forcing)[2]
        return self._advance(inputs, state)

    def step(
        self, tokens: Int[Tensor, " rows *n"], state: RecurrentState
    ) -> tuple[Float[Tensor, " rows *n vocabulary"], RecurrentState]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        logits, state = self(tokens.view(len(tokens), -1), state)
        if state.memory is not None:
            A = state.weights()
            state = replace(state, attention={"source": A[:, :, 0] if tokens.ndim == 1 else A})
        return logits.view(*tokens.shape, -1), state

    def read(
        self, inputs: Int[Tensor, "b t"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b t hidden"], RecurrentState]:
        """Run the RNN over the tokens; return its states, before attention to the source."""
        x = self.dropout(self.embedding(inputs))
        if state.beside is not None:
            x = torch.cat((x, state.beside[:, None].expand(-1, x.shape[1], -1)), -1)
        h, hidden = run_rnn(self.cell, x, state.hidden)
        return h, replace(state, hidden=hidden, position=state.position + inputs.shape[1])

    def look(self, h: Float[Tensor, "b t hidden"], state: RecurrentState) -> tuple[Tensor, Weights]:
        """Attend from RNN states to the source; return the contexts, `b t state_dim`, and the attention weights."""
        step = {"step": state.position - h.shape[1]} if isinstance(self.attention, LocalAttention) else {}
        return self.attention(h, state.memory, **step), self.attention.weights(h, state.memory, **step)

    def write(
        self, h: Float[Tensor, "b t hidden"], context: Float[Tensor, "b t state_dim"] | None, state: RecurrentState
    ) -> tuple[Float[Tensor, "b t vocabulary"], RecurrentState]:
        """Return the logits from RNN states and their contexts."""
        if self.modulate is not None:
            h = self.modulate(h, context)
        state = replace(state, beside=h[:, -1]) if self.feed else state
        h = self.dropout(h)
        return self.embedding.logits(self.narrow(h)) if self.out is None else self.out(h), state

    def _one_by_one(
        self, inputs: Tensor, state: RecurrentState, forcing: float
    ) -> tuple[Tensor, RecurrentState, Tensor]:
        """Return logits and state as `forward` does, and the tokens that were read."""
        logits: list[Tensor] = []
        read: list[Tensor] = []
        seen: list[Weights] = []
        for tokens in inputs.split(1, 1):
            if logits and forcing < 1:
                tokens = choose_fed_tokens(tokens, logits[-1].argmax(-1), forcing)
            step_logits, state = self._advance(tokens, state)
            logits.append(step_logits)
            read.append(tokens)
            seen += state.seen
        return torch.cat(logits, 1), replace(state, seen=tuple(seen)), torch.cat(read, 1)

    def _advance(self, inputs: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        h, state = self.read(inputs, state)
        if state.memory is None:
            return self.write(h, None, state)
        context, A = self.look(h, state)
        memory = state.memory if state.memory.coverage is None else state.memory.cover(A)
        return self.write(h, context, replace(state, memory=memory, seen=(A,)))


def choose_fed_tokens(tokens: Int[Tensor, "b t"], predicted: Int[Tensor, "b t"], forcing: float) -> Int[Tensor, "b t"]:
    """Return each true token with probability `forcing`, otherwise the predicted one."""
    return torch.where(torch.rand(predicted.shape, device=predicted.device) < forcing, tokens, predicted)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentState:
    """The state of a recurrent decoder, one row per hypothesis."""

    hidden: tuple[Float[Tensor, "layers rows hidden"], ...]
    beside: Float[Tensor, "rows hidden"] | None  # input of the RNN beside the next token
    memory: Memory | None
    sources: Int[Tensor, " rows"]  # the source row of each hypothesis
    position: int = 0  # position of the next token
    seen: tuple[Weights, ...] = ()  # the attention of the steps just made
    attention: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of hypotheses."""
        return len(self.sources)

    def weights(self) -> Float[Tensor, "rows heads t source"]:
        """Return the attention weights of the steps just made."""
        return torch.cat([A[...] for A in self.seen], 2)

    def select(self, rows: Int[Tensor, " chosen"]) -> RecurrentState:
        """Return the state of the given rows, in their order; a row may repeat."""
        sources, memory = self.sources[rows], self.memory
        if memory is not None and not torch.equal(sources, self.sources):
            memory = memory.select(rows)
        elif memory is not None and memory.coverage is not None:
            memory = replace(memory, coverage=memory.coverage[rows])
        return RecurrentState(
            hidden=tuple(x[:, rows] for x in self.hidden),
            beside=None if self.beside is None else self.beside[rows],
            memory=memory,
            sources=sources,
            position=self.position,
        )
