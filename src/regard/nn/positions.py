"""Positions of tokens: as vectors added to embeddings, as rotations of queries and keys, or as biases on scores.

Modules take position ids, integers with dims (n,) or (b, n), so that a step of decoding and a row padded on the left
can pass their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..checks import check_int, check_number
from ..ops.terms.biases import Relative
from ..ops.torch_state import can_read_values, is_traced

TABLE_POSITIONS = 256  # the sinusoids of these first positions are stored, since decoding asks for one at a time


class Sinusoidal(nn.Module):
    """sin(p / base^(2m / dim)) and cos of the same, for position p and pair m (Vaswani et al. 2017, sec. 3.5).

    >>> Sinusoidal(5)(torch.tensor([0, 1])).round(decimals=2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000, 0.0000],
            [0.8400, 0.5400, 0.0300, 1.0000, 0.0000]])

    Sines and cosines are interleaved as in the paper, or, with `layout="halves"`, all sines come first. Any length.
    Always float32, because distant positions are equal in half precision.
    """

    def __init__(
        self, dim: int, *, base: float = 10_000.0, layout: Literal["interleaved", "halves"] = "interleaved"
    ) -> None:
        super().__init__()
        check_int("dim", dim, least=1)
        if layout not in ("interleaved", "halves"):
            raise ValueError(f"layout must be 'interleaved' or 'halves', got {layout!r}")
        self.dim, self.base, self.layout = dim, base, layout
        self._table: Tensor | None = None

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n dim"]:
        if type(positions) is Tensor and positions.numel() == 1 and positions.device.type == "cpu":
            return self._one(positions)
        return self._all(positions)

    def _one(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n dim"]:
        """Return the sinusoids of one position, as each step of decoding needs, from a table of the first positions."""
        if is_traced() or not 0 <= int(positions) < TABLE_POSITIONS:
            return self._all(positions)
        if self._table is None:
            with torch.inference_mode(False):
                self._table = self._all(torch.arange(TABLE_POSITIONS, device=positions.device))
        return torch.embedding(self._table, positions)

    def _all(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n dim"]:
        angles = _angles(positions, _frequencies(self.dim, self.base, positions.device))
        if self.layout == "halves":
            return torch.cat((angles.sin(), angles.cos()), -1)[..., : self.dim]
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., : self.dim]

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}, layout={self.layout!r}"


class LearnedPositions(nn.Module):
    """A learned vector for each position from 0 to count - 1 (Gehring et al. 2017)."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        check_int("count", count, least=1)
        self.count = count
        self.weight = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n dim"]:
        _check_integer(positions)
        if can_read_values(positions) and positions.numel():
            low, high = (int(x) for x in positions.aminmax())
            if low < 0 or high >= self.count:
                raise ValueError(
                    f"positions must be from 0 to {self.count - 1}, got {low if low < 0 else high}; "
                    "shorten the input or build LearnedPositions with a larger count"
                )
        return nn.functional.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{self.count}, {self.weight.shape[1]}"


class Rotary(nn.Module):
    """Rotates queries and keys by angles proportional to their positions; scores depend on i - j (Su et al. 2021).

    >>> x = torch.randn(1, 2, 5, 8)
    >>> torch.equal(Rotary(8)(x, torch.zeros(5, dtype=torch.long)), x)
    True

    The first `width` features are rotated, feature m together with m + width / 2, as in Llama and GPT-NeoX
    checkpoints, or with `layout="interleaved"` feature 2m with 2m + 1, as in GPT-J and Helium; the others pass
    unchanged. `scaling` maps the frequencies, highest first, before they are used: `lambda f: f / 4` extends the
    context fourfold. `regard.models` has `LinearStretch`, `DynamicStretch`, `YarnStretch` and Llama 3.1's `Stretch`.
    Angles are computed in float32 or better and never stored, so a cast of the model does not round them.
    """

    def __init__(
        self,
        width: int,
        *,
        base: float = 10_000.0,
        scaling: Callable[..., Tensor] | None = None,
        layout: Literal["halves", "interleaved"] = "halves",
    ) -> None:
        super().__init__()
        if layout not in ("halves", "interleaved"):
            raise ValueError(f"layout must be 'halves' or 'interleaved', got {layout!r}")
        check_int("width", width, least=2)
        check_number("base", base, above=0)
        if width % 2:
            raise ValueError(f"width must be even, features are rotated in pairs, got {width}; pass {width - 1}")
        self.width, self.base, self.scaling, self.layout = width, base, scaling, layout

    def forward(self, x: Float[Tensor, "b h n d"], positions: Int[Tensor, "*b n"]) -> Float[Tensor, "b h n d"]:
        return self.rotate(x, *self.angles(x, positions))

    def angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of every angle: `n width/2`, or `b 1 n width/2` for positions `(b, n)`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies = _frequencies(self.width, self.base, x.device, wide)
        if self.scaling is not None and positions.numel():
            length = (positions.amax(-1, keepdim=True)[..., None] + 1,) if self._is_by_length else ()
            frequencies = self.scaling(frequencies, *length)  # pairs, or b 1 pairs
        angles = _angles(positions, frequencies)
        angles = angles[:, None] if angles.ndim == 3 else angles
        amplitude = getattr(self.scaling, "amplitude", 1.0)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)

    @property
    def _is_by_length(self) -> bool:
        return bool(getattr(self.scaling, "by_length", False))

    def rotate(self, x: Float[Tensor, "b h n d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n d"]:
        """Rotate the first `width` features of x by these angles."""
        if x.shape[-1] < self.width:
            raise ValueError(
                f"Rotary rotates {self.width} features, got x of width {x.shape[-1]}; pass a smaller width"
            )
        turned = x[..., : self.width].to(cos.dtype)
        interleaved = self.layout == "interleaved"
        left, right = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        rotated = [half.to(x.dtype) for half in (left * cos - right * sin, right * cos + left * sin)]
        if interleaved:
            rotated = [torch.stack(rotated, -1).flatten(-2)]
        return torch.cat((*rotated, x[..., self.width :]), -1)

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}" + (", layout='interleaved'" if self.layout == "interleaved" else "")


class T5Bias(nn.Module):
    """A learned number for each head and logarithmic bucket of j - i (Raffel et al. 2020, sec. 2.1).

    Pass it as the `bias` of `Attention`; layers may share one module, as in T5.
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(heads, buckets))
        nn.init.normal_(self.table, std=0.02)
        self.forward()  # raises if the number of buckets does not fit

    def forward(self) -> Relative:
        return Relative.t5(self.table, self.max_distance, self.bidirectional)

    def extra_repr(self) -> str:
        heads, buckets = self.table.shape
        return f"{heads}, buckets={buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class ShawBias(nn.Module):
    """q_i . a_(j - i) / sqrt(d): a learned key for each distance up to `reach` (Shaw et al. 2018, eq. 5).

    Heads share the keys. Pass it as the `bias` of `Attention`.
    """

    def __init__(self, head_dim: int, *, reach: int) -> None:
        super().__init__()
        check_int("reach", reach)
        self.keys = nn.Parameter(torch.empty(2 * reach + 1, head_dim))
        nn.init.xavier_uniform_(self.keys)

    def forward(self) -> Relative:
        return Relative.shaw(self.keys)

    def extra_repr(self) -> str:
        return f"{self.keys.shape[1]}, reach={self.keys.shape[0] // 2}"


def positions_of(keep: Bool[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return the position of each real token among the real tokens of its row.

    Padding gets the position of the real token before it, or 0.

    >>> positions_of(torch.tensor([[False, False, True, True, True]]))
    tensor([[0, 0, 0, 1, 2]])
    """
    return (keep.long().cumsum(-1) - 1).clamp(min=0)


def _frequencies(
    dim: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " pairs"]:
    """base^(-2m / dim) for each pair m; with an odd dim the last pair has one feature."""
    return 1.0 / base ** (torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    _check_integer(positions)
    return positions[..., None].to(frequencies.dtype) * frequencies


def _check_integer(positions: Tensor) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be whole numbers, got {positions.dtype}; write torch.arange(n)")
