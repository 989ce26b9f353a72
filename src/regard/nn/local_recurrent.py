"""Local attention of recurrent decoders: each step attends to a window of source states around a centre."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_number
from ..ops.operator import weights
from ..ops.terms.biases import Gaussian
from ..ops.terms.masks import Near
from ..ops.terms.normalizers import Normalizer, Softmax, Tapered
from ..ops.weights import Weights
from .core import Core
from .recurrent import Memory, StepScore, step_score, with_step_dim, with_steps_of


class LocalAttention(nn.Module):
    """Attention to the source states within `radius` (D) of a centre p_t (Luong et al. 2015, section 3.2).

    `center="predictive"`, local-p: p_t = S sigmoid(v . tanh(W h_t)), S the source length (eq. 9); the weights of the
    window are multiplied by exp(-(s - p_t)^2 / (2 sigma^2)), sigma = D / 2, and not normalized again (eq. 10).
    `center="monotonic"`, local-m: p_t = t, plain softmax over the window.

    >>> layer = LocalAttention(16, radius=2, center="monotonic")
    >>> memory = layer.remember(torch.randn(2, 9, 16), torch.tensor([9, 6]))
    >>> layer(torch.randn(2, 5, 16), memory).shape, layer(torch.randn(2, 16), memory, step=4).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 16]))
    >>> layer.weights(torch.randn(2, 5, 16), memory).dense()[0, 0].count_nonzero(-1).tolist()
    [3, 4, 5, 5, 5]

    Source positions and target steps count from 0. A step whose window is outside of the source returns zeros. Scores
    are those of `LuongAttention`.
    """

    def __init__(
        self,
        query_dim: int,
        state_dim: int | None = None,
        *,
        radius: float,
        center: str | Center = "predictive",
        score: str | StepScore = "general",
    ) -> None:
        super().__init__()
        check_number("radius", radius, above=0)
        if isinstance(center, str) and center not in CENTERS:
            raise ValueError(f"center must be one of {', '.join(CENTERS)}, or a module, got {center!r}")
        self.radius = radius
        self.center = CENTERS[center](query_dim) if isinstance(center, str) else center
        self.score = step_score(score, query_dim, query_dim if state_dim is None else state_dim)
        self.core = Core()

    def remember(self, states: Float[Tensor, "b n state_dim"], lengths: Tensor | Sequence[int] | None = None) -> Memory:
        """Return the memory of a batch of sources; lengths are `(b,)`, None if all are equal."""
        if lengths is not None and torch.as_tensor(lengths).dtype == torch.bool:
            raise TypeError(
                "lengths must be whole numbers (b,), got a bool mask: local attention counts source positions from "
                "index 0, so padding must be on the right; pass keep.sum(1)"
            )
        return Memory.of(self.score.keys(states), states, lengths)

    def forward(
        self, query: Float[Tensor, "b *t query_dim"], memory: Memory, *, step: int | None = None
    ) -> Float[Tensor, "b *t state_dim"]:
        """Return the context of one step `(b, query_dim)` or all steps `(b, t, query_dim)`; `step` is the first."""
        q, k, terms = self._inputs(query, memory, step)
        return with_steps_of(query, self.core(q, k, memory.values[:, None], **terms))

    def weights(self, query: Float[Tensor, "b *t query_dim"], memory: Memory, *, step: int | None = None) -> Weights:
        """Return the lazy weights of the same call: b 1 t n, t = 1 for one step."""
        q, k, terms = self._inputs(query, memory, step)
        return weights(q, k, **terms)

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}"

    def _inputs(self, query: Tensor, memory: Memory, step: int | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        center = self.center(query, memory, step)[:, None]  # b h t
        near = Near(center, self.radius)
        mask = near if memory.padding is None else near & memory.padding
        q, score = self.score(with_step_dim(query))
        terms = {"score": score, "mask": mask, "normalize": self.center.normalize(center, self.radius)}
        return q[:, None], memory.keys[:, None], terms


class Center(Protocol):
    """The window centre of each step, `(b, t)` or `(1, t)`, and the normalizer of the window."""

    def __call__(self, query: Tensor, memory: Memory, step: int | None) -> Tensor: ...
    def normalize(self, center: Tensor, radius: float) -> Normalizer: ...


class MonotonicCenter(nn.Module):
    """p_t = t: source and target run side by side."""

    def forward(self, query: Tensor, memory: Memory, step: int | None) -> Tensor:
        if step is None and query.ndim == 2:
            raise ValueError(
                "center='monotonic' needs the number of the target step, from 0; write layer(query, memory, step=t)"
            )
        first = 0 if step is None else step
        return torch.arange(first, first + with_step_dim(query).shape[1], device=query.device)[None]

    def normalize(self, center: Tensor, radius: float) -> Normalizer:
        """Softmax over the window."""
        return Softmax()


class PredictiveCenter(nn.Module):
    """p_t = S sigmoid(v . tanh(W h_t)): a centre predicted from the query."""

    def __init__(self, query_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(query_dim, query_dim, bias=False)
        self.vector = nn.Linear(query_dim, 1, bias=False)

    def forward(self, query: Tensor, memory: Memory, step: int | None) -> Tensor:
        logit = self.vector(torch.tanh(self.hidden(with_step_dim(query)))).squeeze(-1)
        # In half precision neighbouring positions of a long source are equal.
        share = torch.sigmoid(logit.to(torch.promote_types(logit.dtype, torch.float32)))
        return share * _lengths(memory)

    def normalize(self, center: Tensor, radius: float) -> Normalizer:
        """Softmax over the window times a Gaussian, through which gradients reach the centre."""
        return Tapered(Softmax(), Gaussian(center, radius / 2))


CENTERS: dict[str, Callable[[int], Center]] = {
    "monotonic": lambda query_dim: MonotonicCenter(),
    "predictive": PredictiveCenter,
}


def _lengths(memory: Memory) -> Tensor | int:
    if memory.padding is None:
        return memory.keys.shape[1]
    assert isinstance(memory.padding.keys, Tensor)
    return memory.padding.keys[:, None]
