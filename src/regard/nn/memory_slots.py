"""Memory slots: learned keys and values after those of the tokens, and the terms of a layer extended to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_int
from ..ops.terms.biases import Added, Bias, FunctionBias, ScaledBias, ScoreMod, Sum
from ..ops.terms.coordinates import Coordinates
from ..ops.terms.masks import Blocks, Dense, Documents, Padding, Prefix, Rule
from ..ops.terms.masks.mask_algebra import And, Mask, Not, Or
from ..ops.terms.normalizers import Normalizer, Tapered
from ..ops.terms.term import term

if TYPE_CHECKING:
    from ..ops.shape import Sizes

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MemorySlots(nn.Module):
    """Learned keys and values that every query may attend to, whatever the mask (Sukhbaatar et al. 2019).

    They come after the tokens, so the tokens keep their positions: slots are columns j, j + 1, ... of the weights. They
    get no bias. One slot is the `add_bias_kv` of `nn.MultiheadAttention`.
    """

    def __init__(self, slots: int, heads: int, head_dim: int, *, value_dim: int | None = None) -> None:
        super().__init__()
        check_int("slots", slots, least=1)
        self.slots = slots
        self.keys = nn.Parameter(torch.empty(heads, slots, head_dim))
        self.values = nn.Parameter(torch.empty(heads, slots, value_dim or head_dim))
        nn.init.normal_(self.keys, std=head_dim**-0.5)
        nn.init.normal_(self.values, std=slots**-0.5)

    def forward(
        self, k: Float[Tensor, "b g j d"], v: Float[Tensor, "b g j e"]
    ) -> tuple[Float[Tensor, "b g more d"], Float[Tensor, "b g more e"]]:
        return self.after_keys(k), _append_slots(v, self.values)

    def after_keys(self, k: Float[Tensor, "b g j d"]) -> Float[Tensor, "b g more d"]:
        """Return the keys followed by those of the slots."""
        return _append_slots(k, self.keys)

    def extend_mask(self, mask: Mask | None, n: int) -> Mask | None:
        """Return a mask over n keys, extended by the slots, which every query sees."""
        return None if mask is None else _extend_mask(mask, n, self.slots) | ~Prefix(n)

    def extra_repr(self) -> str:
        return f"slots={self.slots}"


def _append_slots(x: Tensor, slots: Tensor) -> Tensor:
    return torch.cat((x, slots.to(x.dtype).expand(x.shape[0], -1, -1, -1)), 2)


def _extend_mask(mask: Mask, n: int, slots: int) -> Mask:
    """Return the mask with tensors of n key columns extended by a column per slot."""

    def wide(x: Tensor) -> Tensor:
        return _pad_columns(x, n, n + slots)

    match mask:
        case And() | Or():
            return type(mask)(_extend_mask(mask.left, n, slots), _extend_mask(mask.right, n, slots))
        case Not():
            return Not(_extend_mask(mask.mask, n, slots))
        case Dense():
            return Dense(wide(mask.keep))
        case Padding(keys=Tensor(ndim=2) as keep):
            return Padding(wide(keep))
        case Documents():
            return Documents(mask.query_ids, wide(mask.query_ids if mask.key_ids is None else mask.key_ids))
        case Blocks():
            cols = mask.sizes[1]
            return Blocks(_pad_columns(mask.layout, -(-n // cols), -(-(n + slots) // cols)), mask.size)
        case Rule():
            return Rule(_clamp_keys(mask.fn, n))
        case _:
            return mask


def _pad_columns(x: Tensor, n: int, more: int) -> Tensor:
    """Pad a tensor of n columns with zeros to `more`; return any other tensor unchanged, for the checks to reject."""
    return F.pad(x, (0, more - n)) if x.shape[-1] == n else x


@lru_cache(maxsize=256)  # a new function at each call would be compiled at each call
def _clamp_keys(fn: Function, n: int) -> Function:
    """Clamp the key index of a mask function to n - 1; the values at later keys are not used."""
    return lambda b, h, i, j: fn(b, h, i, j.clamp(max=max(0, n - 1)))


def extend_bias(bias: Bias | None, n: int, slots: int) -> Bias | None:
    """Return a bias over n keys that is 0 at the slots after them."""

    def wide(bias: Bias) -> Bias:
        match bias:
            case Sum():
                return Sum(wide(bias.left), wide(bias.right))
            case ScaledBias():
                return ScaledBias(wide(bias.bias), bias.factor)
            case FunctionBias():
                return Bias.of(_clamp_keys(bias.fn.fn, n))
            case Added():
                return Added(_pad_columns(bias.values, n, n + slots))
            case _:
                return bias

    return None if bias is None else Until(wide(bias), n)


def extend_taper(normalize: Normalizer | None, n: int, slots: int) -> Normalizer | None:
    """Return the normalizer with a taper that applies to the n keys and not to the slots after them."""
    if not isinstance(normalize, Tapered):
        return normalize
    inner, taper = extend_taper(normalize.inner, n, slots), extend_bias(normalize.taper, n, slots)
    assert inner is not None
    assert taper is not None
    return Tapered(inner, taper)


@term
class Until(Bias):
    """A bias at keys before n, 0 at later keys."""

    bias: Bias
    n: int

    @property
    def reads_queries(self) -> bool:
        return self.bias.reads_queries

    def check(self, sizes: Sizes) -> None:
        self.bias.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return torch.where(at.j < self.n, self.bias.over(at), 0.0)

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> ScoreMod:
        bias = self.bias.bind(q, k, offset)
        return lambda b, h, i, j: torch.where(j < self.n, bias(b, h, i, j), 0.0)
