"""Biases: numbers added to the scores, as functions of `(b, h, i, j)`, summed by `+` and scaled by `*`."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ...checks import check_broadcast, check_int, check_number, check_tensor
from ..shape import Sizes
from .coordinates import Block, Coordinates, Point, leaves_of, look_up
from .term import Term, term
from .user_function import UserFunction

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskWarning(UserWarning):
    """A tensor that looks like a mask is added to the scores."""


class Bias(Term):
    """A number for each `(b, h, i, j)`, added to the score."""

    @property
    def reads_queries(self) -> bool:
        """Whether the bias depends on the queries; a kernel that takes it as a tensor gives them no gradient for it."""
        return True

    def over(self, at: Coordinates) -> Tensor:
        """Return the bias at these coordinates."""
        raise NotImplementedError

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.over(Point(b, h, i, j))

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> ScoreMod:
        """Return the bias as a function of `(b, h, row, j)`, for rows at positions `row + offset`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return lambda b, h, i, j: self.over(Point(b, h, i, j, offset, dtype))

    @staticmethod
    def of(fn: ScoreMod) -> FunctionBias:
        """Return the bias fn(b, h, i, j), any function of index tensors; tensors it closes over get gradients.

        >>> table = torch.zeros(8, 100, requires_grad=True)
        >>> bias = Bias.of(lambda b, h, i, j: table[h, (i - j).abs()])
        >>> bias, len(bias.tensors())
        (Bias.of(<lambda>), 1)
        """
        return FunctionBias(UserFunction("Bias.of", fn, "b, h, i, j"))

    def __add__(self, other: Bias | Tensor) -> Bias:
        bias = _as_bias(other)
        return NotImplemented if bias is None else Sum(self, bias)

    def __radd__(self, other: Tensor | int) -> Bias:
        if type(other) is int and other == 0:  # the start of sum([...])
            return self
        bias = _as_bias(other)
        return NotImplemented if bias is None else Sum(bias, self)

    def __sub__(self, other: Bias | Tensor) -> Bias:
        bias = _as_bias(other)
        return NotImplemented if bias is None else Sum(self, -bias)

    def __rsub__(self, other: Tensor) -> Bias:
        bias = _as_bias(other)
        return NotImplemented if bias is None else Sum(bias, -self)

    def __mul__(self, factor: float | Tensor) -> Bias:
        return ScaledBias(self, factor) if isinstance(factor, (numbers.Real, Tensor)) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Bias:
        return ScaledBias(self, 1 / divisor) if isinstance(divisor, (numbers.Real, Tensor)) else NotImplemented

    def __neg__(self) -> Bias:
        return ScaledBias(self, -1)


def _as_bias(value: object) -> Bias | None:
    return value if isinstance(value, Bias) else Added(value) if isinstance(value, Tensor) else None


@term
class Alibi(Bias):
    """-slope[h] * abs(i - j): attention with linear biases (Press et al. 2022); slopes fall geometrically with h.

    Pass the number of heads for the slopes of the paper, or `slopes`, a tensor with one per head, which may be learned.

    >>> Alibi(heads=2)(*(torch.tensor(x) for x in (0, 0, 5, 3)))
    tensor(-0.1250)
    """

    heads: int | None = None
    slopes: Tensor | None = None
    reads_queries = False

    def __post_init__(self) -> None:
        if (self.heads is None) == (self.slopes is None):
            raise ValueError(
                "Alibi takes the number of heads or a tensor of slopes, exactly one of them, "
                f"got {'neither' if self.heads is None else 'both'}; write Alibi(8) or Alibi(slopes=x)"
            )
        if self.slopes is not None:
            check_tensor("Alibi slopes", self.slopes)
            if self.slopes.ndim != 1:
                raise ValueError(f"Alibi slopes must have dims (h,), got shape {tuple(self.slopes.shape)}")
        else:
            check_int("Alibi heads", self.heads, least=1)

    def check(self, sizes: Sizes) -> None:
        n = self.heads if self.slopes is None else self.slopes.numel()
        if n != sizes.h:
            raise ValueError(f"Alibi must have one slope per head, got {n} for h={sizes.h} heads")

    def over(self, at: Coordinates) -> Tensor:
        return -at.slice_of(self._tensor(at.device, at.dtype), "h").to(at.dtype) * (at.i - at.j).abs()

    def with_tensors(self, device: torch.device, dtype: torch.dtype) -> Alibi:
        return Alibi(slopes=self._tensor(device, dtype))

    def _tensor(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self.slopes is not None:
            return self.slopes
        assert self.heads is not None
        return torch.tensor(_slopes(self.heads), dtype=dtype).to(device, non_blocking=True)


def _slopes(heads: int) -> list[float]:
    """Return 2^(-8/n), 2^(-16/n), ... for n a power of two; else the slopes of the power below, then of the next."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / below) for h in range(heads - below)]


@term
class Relative(Bias):
    """A learned number, or a learned key, for each bucket of the distance j - i.

    `Relative.t5(table)` adds `table[h, bucket(j - i)]` (Raffel et al. 2020); `Relative.shaw(keys)` adds
    `q_i . keys[clip(j - i)] * scale` (Shaw et al. 2018, eq. 5), in memory linear in the sequence.

    >>> Relative.t5(torch.zeros(8, 32)), Relative.shaw(torch.zeros(17, 64))
    (Relative(Logarithmic(32), table=float32[8, 32]), Relative(Clipped(8), keys=float32[17, 64]))
    """

    buckets: Logarithmic | Clipped
    table: Tensor | None = None
    keys: Tensor | None = None
    scale: float | None = None

    @classmethod
    def t5(cls, table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> Relative:
        """Add one number per head and logarithmic bucket: `table` has dims (h, buckets)."""
        check_tensor("Relative.t5 table", table)
        if table.ndim != 2:
            raise ValueError(f"Relative.t5 table must have dims (h, buckets), got shape {tuple(table.shape)}")
        return cls(Logarithmic(table.shape[-1], max_distance, bidirectional), table=table)

    @classmethod
    def shaw(cls, keys: Tensor, scale: float | None = None) -> Relative:
        """Add q_i . key for each distance from -n to n: `keys` is (2n + 1, d) or (h, 2n + 1, d), scale 1/sqrt(d)."""
        check_tensor("Relative.shaw keys", keys)
        if keys.ndim not in (2, 3) or keys.shape[-2] % 2 == 0:
            raise ValueError(
                f"Relative.shaw keys must have dims (2n + 1, d) or (h, 2n + 1, d), got shape {tuple(keys.shape)}"
            )
        return cls(Clipped(keys.shape[-2] // 2), keys=keys, scale=scale)

    def __post_init__(self) -> None:
        if (self.table is None) == (self.keys is None):
            raise ValueError(
                "Relative takes a table of numbers or of keys, exactly one of them; "
                "write Relative.t5(table) or Relative.shaw(keys)"
            )
        rows = self.table.shape[-1] if self.table is not None else self.keys.shape[-2] if self.keys is not None else 0
        if rows != self.buckets.count:
            raise ValueError(f"Relative needs one entry for each of the {self.buckets.count} buckets, got {rows}")

    def check(self, sizes: Sizes) -> None:
        if self.table is not None:
            check_broadcast("Relative table", self.table, {"h": sizes.h, "bucket": None})
        elif self.keys is not None:
            if self.keys.shape[-1] != sizes.d:
                raise ValueError(f"Relative keys must have the query's width d={sizes.d}, got {self.keys.shape[-1]}")
            check_broadcast("Relative keys", self.keys, {"h": sizes.h, "2n + 1": None, "d": None})

    def over(self, at: Coordinates) -> Tensor:
        bucket = self.buckets.of(at.j - at.i)
        if self.table is not None:
            # The gradient of the table is a sum over the block, so it is accumulated in the dtype of the block.
            table = at.leaf(self.table).to(at.dtype) if isinstance(at, Block) else self.table
            return look_up(table, at.h, bucket).to(at.dtype)
        if not isinstance(at, Block):
            raise TypeError("Relative.shaw reads the query; call bind(q, k, offset) and use what it returns")
        table = self._scores(at.queries(), at)
        local = torch.arange(table.shape[-2], device=at.device)[:, None]
        batch, heads = (torch.arange(n, device=at.device) for n in table.shape[:2])
        return table[batch[:, None, None, None], heads[:, None, None], local, bucket]

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> ScoreMod:
        dtype = torch.promote_types(q.dtype, torch.float32)
        if self.keys is not None:
            table = q.to(dtype) @ self.keys.to(dtype).mT * self._scale(q.shape[-1])
        elif self.table is not None and self.table.requires_grad and torch.is_grad_enabled():
            # One copy per query: FlexAttention adds gradients entry by entry, few to each copy; PyTorch sums copies.
            rows = self.table.to(dtype).unsqueeze(-2)
            table = rows.expand(*rows.shape[:-2], q.shape[2], -1).contiguous()
        else:
            return super().bind(q, k, offset)
        return lambda b, h, i, j: look_up(table, b, h, i, self.buckets.of(j - Point(b, h, i, j, offset).i))

    @property
    def reads_queries(self) -> bool:
        return self.keys is not None

    def _scores(self, q: Tensor, at: Block) -> Tensor:
        assert self.keys is not None
        if self.keys.ndim == 2:
            keys = at.leaf(self.keys)
        else:
            keys = at.take(self.keys, (at.selector("h") if self.keys.shape[0] > 1 else slice(None),))
        return q @ keys.to(q.dtype).mT * self._scale(q.shape[-1])

    def _scale(self, d: int) -> float:
        return d**-0.5 if self.scale is None else self.scale


@term
class Logarithmic(Term):
    """Buckets of T5: one per short distance, logarithmic up to `max_distance`, one for all that are longer."""

    count: int
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        sides = 2 if self.bidirectional else 1
        check_int("the number of buckets", self.count, least=2 * sides)
        exact = self.count // sides // 2
        if self.max_distance <= exact:
            raise ValueError(f"max_distance must be above the {exact} exact buckets, got {self.max_distance}")

    def of(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance j - i."""
        count = self.count // 2 if self.bidirectional else self.count
        base = (distance > 0).long() * count if self.bidirectional else torch.zeros_like(distance)
        far = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        exact = count // 2
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        logarithmic = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return base + torch.where(far < exact, far, logarithmic)


@term
class Clipped(Term):
    """Buckets of Shaw: one per distance from -reach to reach; longer distances are clipped."""

    reach: int

    @property
    def count(self) -> int:
        """The number of buckets."""
        return 2 * self.reach + 1

    def of(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance j - i."""
        return distance.clamp(-self.reach, self.reach) + self.reach


@term
class Gaussian(Bias):
    """-(j - center[b, h, row])^2 / (2 sigma^2): nearness to a centre per query; `center` broadcasts to b h i.

    As a bias it is added before the softmax, so rows still sum to 1. As a taper,
    `Tapered(Softmax(), Gaussian(center, sigma))`, it multiplies the weights after the softmax: Luong's local-p (Luong
    et al. 2015, eq. 10).
    """

    center: Tensor
    sigma: float | Tensor
    reads_queries = False

    def __post_init__(self) -> None:
        check_tensor("Gaussian center", self.center)
        if not isinstance(self.sigma, Tensor):
            check_number("Gaussian sigma", self.sigma, above=0)

    def check(self, sizes: Sizes) -> None:
        axes = {"b": sizes.b, "h": sizes.h, "i": sizes.i}
        check_broadcast("Gaussian center", self.center, axes)
        if isinstance(self.sigma, Tensor):
            check_broadcast("Gaussian sigma", self.sigma, axes)

    def over(self, at: Coordinates) -> Tensor:
        sigma = at.slice_of(self.sigma, "bhi").to(at.dtype) if isinstance(self.sigma, Tensor) else self.sigma
        return -((at.j - at.slice_of(self.center, "bhi").to(at.dtype)) ** 2) / (2 * sigma**2)


@term
class Added(Bias):
    """values[..., row, j]: any numbers, as a tensor that broadcasts to b h i j. -inf hides an entry."""

    values: Tensor
    reads_queries = False

    def __post_init__(self) -> None:
        check_tensor("Added values", self.values)
        if not self.values.is_floating_point():
            raise TypeError(
                f"Added values must be floating point, got {self.values.dtype}; "
                "for a mask, True = may attend, write mask=Dense(keep)"
            )
        if not 2 <= self.values.ndim <= 4:
            raise ValueError(f"Added values must have 2 to 4 dims (b h i j), got shape {tuple(self.values.shape)}")

    def check(self, sizes: Sizes) -> None:
        check_broadcast("Added values", self.values, {"b": sizes.b, "h": sizes.h, "i": sizes.i, "j": sizes.j})
        if sizes.readable and not self.values.requires_grad and _is_zeros_and_ones(self.values):
            warnings.warn(
                "all values of this Added bias are 0 or 1, and they are added to the scores; if they were meant as a "
                "mask, True = may attend, write mask=Dense(values.bool())",
                MaskWarning,
                stacklevel=6,  # from here to `Call.of`, `attend` in its decorator, and the caller
            )

    def over(self, at: Coordinates) -> Tensor:
        return at.slice_of(self.values, "bhij").to(at.dtype)


def _is_zeros_and_ones(values: Tensor) -> bool:
    x = values.detach()
    if not x.numel():
        return False
    last_row = x[(-1,) * (x.ndim - 1)]  # most biases need no pass over all values
    return all(bool(((y == 0) | (y == 1)).all()) for y in (last_row, x)) and bool((x == 0).any() & (x == 1).any())


@term
class Sum(Bias):
    """left + right."""

    left: Bias
    right: Bias

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return self.left.over(at) + self.right.over(at)

    @property
    def reads_queries(self) -> bool:
        return self.left.reads_queries or self.right.reads_queries

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> ScoreMod:
        left, right = self.left.bind(q, k, offset), self.right.bind(q, k, offset)
        return lambda b, h, i, j: left(b, h, i, j) + right(b, h, i, j)

    def __repr__(self) -> str:
        right = f"({self.right!r})" if isinstance(self.right, Sum) else repr(self.right)
        return f"{self.left!r} + {right}"


@term
class ScaledBias(Bias):
    """factor * bias: written `2 * Alibi(8)`; the factor is a number, or a tensor with one number or one per head."""

    bias: Bias
    factor: float | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Tensor):
            check_number("the factor of a bias", self.factor)
        elif not self.factor.is_floating_point():
            raise TypeError(f"the factor of a bias must be floating point, got {self.factor.dtype}; write x.float()")

    def check(self, sizes: Sizes) -> None:
        self.bias.check(sizes)
        if isinstance(self.factor, Tensor):
            check_broadcast("the factor of a bias", self.factor, {"h": sizes.h})

    def over(self, at: Coordinates) -> Tensor:
        factor = at.slice_of(self.factor, "h").to(at.dtype) if isinstance(self.factor, Tensor) else self.factor
        return self.bias.over(at) * factor

    @property
    def reads_queries(self) -> bool:
        return self.bias.reads_queries

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> ScoreMod:
        bias, factor = self.bias.bind(q, k, offset), self.factor
        if not isinstance(factor, Tensor):
            return lambda b, h, i, j: bias(b, h, i, j) * factor
        factor = factor.to(torch.promote_types(q.dtype, torch.float32))
        return lambda b, h, i, j: bias(b, h, i, j) * look_up(factor, h)

    def __repr__(self) -> str:
        factor = "tensor" if isinstance(self.factor, Tensor) else repr(self.factor)
        return f"{factor} * {f'({self.bias!r})' if isinstance(self.bias, (Sum, ScaledBias)) else repr(self.bias)}"


@term
class FunctionBias(Bias):
    """fn(b, h, i, j), written `Bias.of(fn)`; `captured` are the tensors that the function closes over."""

    fn: UserFunction
    captured: tuple[Tensor, ...] = ()
    reads_queries = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "captured", self.fn.tensors)

    def check(self, sizes: Sizes) -> None:
        self.fn.check_tensors()

    def over(self, at: Coordinates) -> Tensor:
        return self.fn(leaves_of(at, self.captured), at.b, at.h, at.i, at.j).to(at.dtype)

    def __repr__(self) -> str:
        return f"Bias.of({self.fn!r})"
