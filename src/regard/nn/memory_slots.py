"""Memory slots: learned keys and values behind those of the tokens, and terms that know where the tokens end."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..checks import check_int
from ..ops.terms.biases import Added, Bias, Mod, Sum
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

    They come after the tokens, so the tokens keep their positions: slots are columns j, j + 1, ... of the weights, and
    carry no bias. One slot is the `add_bias_kv` of `nn.MultiheadAttention`.
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
        return self.after_keys(k), _after(v, self.values)

    def after_keys(self, k: Float[Tensor, "b g j d"]) -> Float[Tensor, "b g more d"]:
        """The keys, then those of the slots."""
        return _after(k, self.keys)

    def shown(self, mask: Mask | None, n: int) -> Mask | None:
        """A mask over n keys, and the slots behind them for all."""
        return None if mask is None else _widened(mask, n, self.slots) | ~Prefix(n)

    def extra_repr(self) -> str:
        return f"slots={self.slots}"


def _after(x: Tensor, slots: Tensor) -> Tensor:
    return torch.cat((x, slots.to(x.dtype).expand(x.shape[0], -1, -1, -1)), 2)


def _widened(mask: Mask, n: int, slots: int) -> Mask:
    """The same mask where tensors that have a column for each of n keys have one for each slot too."""

    def wide(x: Tensor) -> Tensor:
        return _wide(x, n, n + slots)

    match mask:
        case And() | Or():
            return type(mask)(_widened(mask.left, n, slots), _widened(mask.right, n, slots))
        case Not():
            return Not(_widened(mask.mask, n, slots))
        case Dense():
            return Dense(wide(mask.keep))
        case Padding(keys=Tensor(ndim=2) as keep):
            return Padding(wide(keep))
        case Documents():
            return Documents(mask.query_ids, wide(mask.query_ids if mask.key_ids is None else mask.key_ids))
        case Blocks():
            return Blocks(_wide(mask.layout, -(-n // mask.size), -(-(n + slots) // mask.size)), mask.size)
        case Rule():
            return Rule(_before(mask.fn, n))
        case _:
            return mask


def _wide(x: Tensor, n: int, more: int) -> Tensor:
    """A tensor that has n columns with so many more, of zeros; one that has others is left for the checks to tell."""
    return F.pad(x, (0, more - n)) if x.shape[-1] == n else x


@lru_cache(maxsize=256)  # a function that is new at each call would be compiled at each call
def _before(fn: Function, n: int) -> Function:
    """The function at keys before n; from there on as at the last of them, which nobody asks for."""
    return lambda b, h, i, j: fn(b, h, i, j.clamp(max=max(0, n - 1)))


def until(bias: Bias | None, n: int, slots: int) -> Bias | None:
    """A bias over n keys, and none at the slots behind them."""

    def wide(bias: Bias) -> Bias:
        match bias:
            case Sum():
                return Sum(wide(bias.left), wide(bias.right))
            case Added():
                return Added(_wide(bias.values, n, n + slots))
            case _:
                return bias

    return None if bias is None else Until(wide(bias), n)


def tapered_until(normalize: Normalizer | None, n: int, slots: int) -> Normalizer | None:
    """A normalizer that tapers weights of n keys, and not those of the slots behind them."""
    if not isinstance(normalize, Tapered):
        return normalize
    inner, taper = tapered_until(normalize.inner, n, slots), until(normalize.taper, n, slots)
    assert inner is not None
    assert taper is not None
    return Tapered(inner, taper)


@term
class Until(Bias):
    """The bias at keys before n, 0 from there on."""

    bias: Bias
    n: int

    def check(self, sizes: Sizes) -> None:
        self.bias.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return torch.where(at.j < self.n, self.bias.over(at), 0.0)

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> Mod:
        bias = self.bias.bind(q, k, offset)
        return lambda b, h, i, j: torch.where(j < self.n, bias(b, h, i, j), 0.0)
