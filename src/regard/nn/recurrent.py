"""Attention of recurrent decoders: at each step, a query attends to the states of an encoder.

`remember` does the work per sentence, once. A call of the layer does the work per step, for one step or for all steps
at once, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..argument_hints import CALLS, PADDING, with_argument_hints
from ..ops.operator import weights
from ..ops.terms.masks import Padding
from ..ops.terms.normalizers import Normalizer
from ..ops.terms.scores import Additive, Bilinear, Dot, Location, Score
from ..ops.weights import Weights
from .core import Core
from .learned_terms import fill, slot


class BahdanauAttention(nn.Module):
    """softmax_j(v . tanh(W s_i + U h_j)) @ h: queries s and states h of any widths (Bahdanau et al. 2015).

    >>> layer = BahdanauAttention(query_dim=20, state_dim=24, dim=16)
    >>> memory = layer.remember(torch.randn(2, 7, 24), torch.tensor([7, 4]))  # U h, once per sentence
    >>> layer(torch.randn(2, 20), memory).shape, layer(torch.randn(2, 5, 20), memory).shape
    (torch.Size([2, 24]), torch.Size([2, 5, 24]))
    >>> layer.weights(torch.randn(2, 20), memory)
    Weights(2 x 1 x 1 x 7, score=Additive(float32[16]), mask=Padding(int64[2]))

    The score is that of appendix A.1.2, the context eq. 5. With `coverage=Coverage(dim)` the score also depends on how
    much each state has been attended to so far; then call the layer step by step, with `memory = memory.cover(A)`
    between the steps.
    """

    def __init__(
        self,
        query_dim: int,
        state_dim: int,
        dim: int,
        *,
        normalize: Normalizer | nn.Module | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        super().__init__()
        self.score = ConcatScore(query_dim, state_dim, dim)
        self.normalize = slot("normalize", normalize, Normalizer)
        self.coverage = coverage
        self.core = Core()

    @with_argument_hints(CALLS, renamed=PADDING)
    def remember(self, states: Float[Tensor, "b n state_dim"], keep: Tensor | Sequence[int] | None = None) -> Memory:
        """Return the memory of a batch of sources; `keep` is lengths `(b,)` or keep `(b, n)`, True = a real state."""
        memory = Memory.of(self.score.keys(states), states, keep)
        if self.coverage is None:
            return memory
        return replace(memory, coverage=states.new_zeros(states.shape[:2]))

    def forward(self, query: Float[Tensor, "b *t query_dim"], memory: Memory) -> Float[Tensor, "b *t state_dim"]:
        """Return the context of one step `(b, query_dim)`, or of all steps `(b, t, query_dim)`."""
        q, k, terms = self._inputs(query, memory)
        return with_steps_of(query, self.core(q, k, memory.values[:, None], **terms))

    def weights(self, query: Float[Tensor, "b *t query_dim"], memory: Memory) -> Weights:
        """Return the lazy weights of the same call: b 1 t n, t = 1 for one step."""
        q, k, terms = self._inputs(query, memory)
        return weights(q, k, **terms)

    def _inputs(self, query: Tensor, memory: Memory) -> tuple[Tensor, Tensor, dict[str, Any]]:
        keys = memory.keys
        if self.coverage is not None:
            if memory.coverage is None:
                raise ValueError("memory must hold a coverage, got none; make it with remember(...) of this layer")
            if query.ndim == 3 and query.shape[1] > 1:
                raise ValueError(
                    f"with coverage each step depends on the one before: query must be one step (b, query_dim), "
                    f"got shape {tuple(query.shape)}; loop over the steps with memory = memory.cover(A) between them"
                )
            keys = self.coverage(keys, memory.coverage)
        q, score = self.score(with_step_dim(query))
        terms = {"score": score, "mask": memory.padding, "normalize": fill(self.normalize)}
        return q[:, None], keys[:, None], terms


class LuongAttention(nn.Module):
    """softmax_j(score(h_t, s_j)) @ s: global attention with one of four scores (Luong et al. 2015, eq. 7 and 8).

    | score | | |
    |---|---|---|
    | `"dot"` | h . s | widths must be equal |
    | `"general"` | h . W s | |
    | `"concat"` | v . tanh(W [h; s]) | |
    | `"location"` | h . w_j | depends on the source position alone, up to the `places` of `LocationScore` |

    >>> layer = LuongAttention(16, 24, score="general")
    >>> memory = layer.remember(torch.randn(2, 7, 24))
    >>> layer(torch.randn(2, 5, 16), memory).shape
    torch.Size([2, 5, 24])

    `score` may also be a module of your own, with a method `keys(states)` and a call from queries to (queries, score
    term). The attentional vector of eq. 5 is `Modulate(..., how="concatenate")`.
    """

    def __init__(
        self,
        query_dim: int,
        state_dim: int | None = None,
        *,
        score: str | StepScore = "general",
        normalize: Normalizer | nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.score = step_score(score, query_dim, query_dim if state_dim is None else state_dim)
        self.normalize = slot("normalize", normalize, Normalizer)
        self.core = Core()

    @with_argument_hints(CALLS, renamed=PADDING)
    def remember(self, states: Float[Tensor, "b n state_dim"], keep: Tensor | Sequence[int] | None = None) -> Memory:
        """Return the memory of a batch of sources; `keep` is lengths `(b,)` or keep `(b, n)`, True = a real state."""
        return Memory.of(self.score.keys(states), states, keep)

    def forward(self, query: Float[Tensor, "b *t query_dim"], memory: Memory) -> Float[Tensor, "b *t state_dim"]:
        """Return the context of one step `(b, query_dim)`, or of all steps `(b, t, query_dim)`."""
        q, k, terms = self._inputs(query, memory)
        return with_steps_of(query, self.core(q, k, memory.values[:, None], **terms))

    def weights(self, query: Float[Tensor, "b *t query_dim"], memory: Memory) -> Weights:
        """Return the lazy weights of the same call: b 1 t n, t = 1 for one step."""
        q, k, terms = self._inputs(query, memory)
        return weights(q, k, **terms)

    def _inputs(self, query: Tensor, memory: Memory) -> tuple[Tensor, Tensor, dict[str, Any]]:
        q, score = self.score(with_step_dim(query))
        terms = {"score": score, "mask": memory.padding, "normalize": fill(self.normalize)}
        return q[:, None], memory.keys[:, None], terms


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """A key and a value for each source state, made by `remember` once per sentence, for a decoder to attend to."""

    keys: Float[Tensor, "b n d"]
    values: Float[Tensor, "b n e"]
    padding: Padding | None = None
    coverage: Float[Tensor, "b n"] | None = None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, keep: Tensor | Sequence[int] | None) -> Memory:
        """Build a memory of keys and values; `keep` is lengths `(b,)` or keep `(b, n)`, True = a real state."""
        if keep is None:
            return cls(keys=keys, values=values)
        keep = torch.as_tensor(keep, device=values.device)
        if tuple(keep.shape) not in (values.shape[:1], values.shape[:2]):
            b, n = values.shape[:2]
            raise ValueError(
                f"keep must be lengths of shape ({b},) or keep of shape ({b}, {n}), got shape {tuple(keep.shape)}"
            )
        return cls(keys=keys, values=values, padding=Padding(keep))

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of some batch rows, in their order; a row may repeat, as for the beams of one source."""
        return Memory(
            keys=self.keys[rows],
            values=self.values[rows],
            padding=None if self.padding is None else self.padding.map_tensors(lambda x: x[rows]),
            coverage=None if self.coverage is None else self.coverage[rows],
        )

    def cover(self, A: Weights) -> Memory:
        """Return the memory after a step with weights A: its coverage is the sum of all weights so far.

        See et al. 2017, eq. 10.
        """
        return replace(self, coverage=self._get_coverage() + _received_weights(A))

    def overlap(self, A: Weights) -> Float[Tensor, " b"]:
        """sum_j min(A_j, coverage_j), large if a step attends again: the coverage loss of See et al. 2017, eq. 12."""
        return torch.minimum(_received_weights(A), self._get_coverage()).sum(-1)

    def _get_coverage(self) -> Tensor:
        if self.coverage is None:
            raise ValueError("memory has no coverage; build the layer with coverage=Coverage(dim)")
        return self.coverage


class Coverage(nn.Module):
    """k_j + w c_j + b: adds to each key how much its state has been attended to (See et al. 2017, eq. 11)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_uniform(dim, fan_in=dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, keys: Float[Tensor, "b n dim"], coverage: Float[Tensor, "b n"]) -> Float[Tensor, "b n dim"]:
        return keys + coverage[..., None].to(self.weight.dtype) * self.weight + self.bias


class StepScore(Protocol):
    """A score between queries and states: `keys` does the work per state, once per sentence, the call that per step."""

    def keys(self, states: Tensor) -> Tensor: ...
    def __call__(self, query: Tensor) -> tuple[Tensor, Score]: ...


class DotScore(nn.Module):
    """h . s."""

    def __init__(self, query_dim: int, state_dim: int) -> None:
        super().__init__()
        if query_dim != state_dim:
            raise ValueError(
                f"score='dot' needs queries and states of one width, got query_dim={query_dim} and "
                f"state_dim={state_dim}; use score='general'"
            )

    def keys(self, states: Tensor) -> Tensor:
        """Return the states themselves."""
        return states

    def forward(self, query: Tensor) -> tuple[Tensor, Score]:
        return query, Dot(scale=1.0)


class GeneralScore(nn.Module):
    """h . W s."""

    def __init__(self, query_dim: int, state_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_uniform(query_dim, state_dim, fan_in=state_dim))

    def keys(self, states: Tensor) -> Tensor:
        """Return the states themselves; W is applied to the query."""
        return states

    def forward(self, query: Tensor) -> tuple[Tensor, Score]:
        return query, Bilinear(self.weight)


class ConcatScore(nn.Module):
    """v . tanh(W [h; s]), W in two halves, one for queries and one for states: Bahdanau's score too."""

    def __init__(self, query_dim: int, state_dim: int, dim: int | None = None) -> None:
        super().__init__()
        dim = query_dim if dim is None else dim
        self.query = nn.Linear(query_dim, dim, bias=False)
        self.key = nn.Linear(state_dim, dim, bias=False)
        self.vector = nn.Parameter(_uniform(dim, fan_in=dim))

    def keys(self, states: Tensor) -> Tensor:
        """Return the half of W [h; s] that belongs to the states."""
        return self.key(states)

    def forward(self, query: Tensor) -> tuple[Tensor, Score]:
        return self.query(query), Additive(self.vector)


class LocationScore(nn.Module):
    """h . w_j: a score for each of the first `places` source positions, whatever the state; longer sources raise."""

    def __init__(self, query_dim: int, *, places: int = 50) -> None:
        super().__init__()
        self.weight = nn.Parameter(_uniform(places, query_dim, fan_in=query_dim))

    def keys(self, states: Tensor) -> Tensor:
        """Return the states themselves; only their number matters."""
        return states

    def forward(self, query: Tensor) -> tuple[Tensor, Score]:
        return query, Location(self.weight)


SCORES: dict[str, Callable[[int, int], StepScore]] = {
    "dot": DotScore,
    "general": GeneralScore,
    "concat": ConcatScore,
    "location": lambda query_dim, state_dim: LocationScore(query_dim),
}


def step_score(score: str | StepScore, query_dim: int, state_dim: int) -> StepScore:
    """Return a score module unchanged, or build the one of this name."""
    if not isinstance(score, str):
        return score
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, or a score module, got {score!r}")
    return SCORES[score](query_dim, state_dim)


def with_step_dim(query: Tensor) -> Tensor:
    """Return a query as `(b, t, dim)`, with t = 1 for a single step."""
    if query.ndim not in (2, 3):
        raise ValueError(
            f"query must have dims (b, query_dim), one step, or (b, t, query_dim), got shape {tuple(query.shape)}"
        )
    return query[:, None] if query.ndim == 2 else query


def with_steps_of(query: Tensor, context: Tensor) -> Tensor:
    """Return the context `b 1 t e` as `b e` for a query of one step, `b t e` for all steps."""
    return context[:, 0, 0] if query.ndim == 2 else context[:, 0]


def _received_weights(A: Weights) -> Tensor:
    return A[:, 0].sum(1)


def _uniform(*shape: int, fan_in: int) -> Tensor:
    return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5)
