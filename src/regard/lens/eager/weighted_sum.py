"""Weighted sums, (weights.unsqueeze(-1) * values).sum(1), as the averages they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .matmul import Average
from .symbolic_scores import Softmaxed


class Weighed(NamedTuple):
    """What a tensor is: values, each times its weight, not yet summed."""

    softmaxed: Softmaxed
    weights: Tensor  # one for each value, the same for all its features: their last dim is 1
    values: Tensor
    key: int  # the dim of keys, from behind

    @classmethod
    def of(cls, softmaxed: Softmaxed, weights: Tensor, values: Any) -> Weighed | None:
        """The product of two tensors, if each of one's last rows is weighed by one number of the other."""
        if not isinstance(values, Tensor) or values.ndim != weights.ndim or not softmaxed.behind:
            return None
        if weights.shape[-1] > 1 and weights.stride(-1) == 0:
            weights = weights[..., :1]
        key, wide = -1 - softmaxed.behind, values.shape[-1] > 1 == weights.shape[-1]
        fits = wide and values.shape[key] == weights.shape[key] and weights.numel() == softmaxed.logits.numel()
        return cls(softmaxed, weights, values, key) if fits else None

    def average(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Average | None:
        """What a sum makes of it: an average where it is over the keys, and dims match but for one of queries."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        ndim = self.values.ndim
        if not isinstance(dim, int) or dim % ndim != self.key % ndim:
            return None
        pairs = [(x, y) for n, (x, y) in enumerate(self._sizes()) if n not in (dim % ndim, ndim - 1)]
        rows = [n for n, (x, y) in enumerate(pairs) if x > y == 1]
        if len(rows) > 1 or any(x < y for x, y in pairs):
            return None
        v = self.values.movedim(dim, -2)
        shape = [x for x, _ in pairs]

        def rowed(x: Tensor) -> Tensor:
            return x.movedim(rows[0], -2) if rows else x.unsqueeze(-2)

        return Average(
            v.squeeze(rows[0]) if rows else v,
            lambda out: rowed(out.reshape(*shape, -1)),
            lambda x: rowed(x.squeeze(-2)),
            summed=True,
        )

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.weights.shape, self.values.shape, strict=True))
