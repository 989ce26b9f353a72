"""PyTorch's functions of the lazy weights: `torch.matmul`, `torch.einsum` and `torch.topk`, without the matrix.

`torch.einsum` takes one `Weights` and at most one tensor. Any equation whose result does not hold both the queries and
the keys is one product with A or A.T, and a small einsum after it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

MATMUL = {"matmul", "__matmul__", "__rmatmul__"}


class LazyMatrix:
    """A matrix that is never stored, dims b h i j, or b h j i if `is_transposed`; PyTorch's functions take it."""

    is_transposed: ClassVar[bool] = False

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def T(self) -> LazyMatrix:
        """The transposed matrix, lazy too."""
        raise NotImplementedError

    def __matmul__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __rmatmul__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_torch_function(func, args, kwargs or {})


def call_torch_function(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a function of PyTorch that was called with `Weights` or `A.T` among its arguments."""
    name = getattr(func, "__name__", str(func))
    if name in MATMUL and not kwargs:
        x, y = args
        return matmul(y, x) if name == "__rmatmul__" else matmul(x, y)
    if name == "einsum":
        return einsum(*args, **kwargs)
    if name == "topk":
        return topk(*args, **kwargs)
    raise TypeError(
        f"torch.{name} would store the matrix; of a small one write torch.{name}(A.dense(), ...), of a part "
        "A[..., :9, :]. Without storing it: A @ v, torch.matmul, torch.einsum, torch.topk, A.received(), A.entropy(), "
        "A.max(), A.pool(rows, cols)"
    )


def matmul(x: LazyMatrix | Tensor, y: LazyMatrix | Tensor) -> Tensor:
    """x @ y of a lazy matrix and a tensor."""
    if isinstance(x, Tensor):
        found = y.__rmatmul__(x) if not isinstance(y, Tensor) else x @ y
    else:
        if not isinstance(y, Tensor):
            raise TypeError("a product of two lazy matrices is one that is stored; write A @ B.dense()")
        found = x @ y
    assert isinstance(found, Tensor)
    return found


def topk(A: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> torch.return_types.topk:
    """The k largest weights of each query and their keys, detached: `A.topk(k)`."""
    if A.is_transposed or dim not in (-1, len(A.shape) - 1) or not largest:
        raise ValueError(
            "torch.topk of lazy weights is that of the largest weights of each query, torch.topk(A, k); "
            "of a small matrix write A.dense().topk(...)"
        )
    found: torch.return_types.topk = A.topk(k)
    return found


class Axes(NamedTuple):
    """The letters of the lazy matrix in an equation, for instance b, h, i and j."""

    lead: str
    head: str
    query: str
    key: str


def einsum(equation: str, *operands: Any) -> Tensor:
    """`torch.einsum` with one lazy operand, as a product with A or A.T."""
    places = [n for n, x in enumerate(operands) if isinstance(x, LazyMatrix)]
    if len(places) != 1 or len(operands) > 2:
        raise ValueError(
            f"torch.einsum takes one lazy matrix and at most one tensor, got {len(places)} and "
            f"{len(operands) - len(places)}; multiply step by step, or write A.dense()"
        )
    lazy, others = operands[places[0]], [x for n, x in enumerate(operands) if n != places[0]]
    inputs, out = _letters(equation, [len(x.shape) for x in operands])
    subscript, rest = inputs[places[0]], [x for n, x in enumerate(inputs) if n != places[0]]
    if lazy.is_transposed:
        lazy, subscript = lazy.T, f"{subscript[:-2]}{subscript[-1]}{subscript[-2]}"
    axes = Axes(subscript[:-3], *subscript[-3:])
    other, letters = (others[0], rest[0]) if others else (None, "")
    for name in (subscript, letters):
        if len(set(name)) < len(name):
            raise ValueError(f"a diagonal of lazy weights is no product; write A.dense(), got {equation!r}")
    if {axes.query, axes.key} <= set(out) or {axes.query, axes.key} <= set(letters):
        raise ValueError(
            f"torch.einsum({equation!r}) needs every entry of the matrix, which is never stored; of a small one write "
            "A.dense(), of a part A[..., :9, :]"
        )
    over_queries = axes.key in out or (axes.query in letters and axes.query not in out)
    factor, kept = (axes.query, axes.key) if over_queries else (axes.key, axes.query)
    first = lazy.T if over_queries else lazy
    if other is None or factor not in letters:
        ones = torch.ones(lazy.shape[-2 if over_queries else -1], 1, dtype=lazy.dtype, device=lazy.device)
        found, made = (first @ ones)[..., 0], axes.lead + axes.head + kept
        return torch.einsum(f"{made}->{out}", found) if other is None else _last(made, letters, out, found, other)
    features = "".join(x for x in letters if x not in (*axes.lead, axes.head, factor))
    order = [x for x in (*axes.lead, axes.head, factor, *features) if x in letters]
    other = other.permute([letters.index(x) for x in order])
    sizes = dict(zip(order, other.shape, strict=True))
    lead = [sizes.get(x, 1) for x in axes.lead]
    width = [sizes[x] for x in features]
    other = other.reshape(*lead, sizes.get(axes.head, 1), sizes[factor], math.prod(width))
    other = other.expand(*lazy.shape[:-3], *other.shape[-3:])
    found = (first @ other).unflatten(-1, width or (1,))
    made = axes.lead + axes.head + kept + features
    return torch.einsum(f"{made}->{out}", found if features else found[..., 0])


def _last(made: str, letters: str, out: str, found: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(found.dtype, other.dtype)
    return torch.einsum(f"{made},{letters}->{out}", found.to(dtype), other.to(dtype))


def _letters(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, `...` written out."""
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ndims):
        raise ValueError(f"{equation!r} is for {len(inputs)} operands, got {len(ndims)}")
    free = [x for x in string.ascii_letters if x not in text]
    longest = max(n - len(x.replace("...", "")) for x, n in zip(inputs, ndims, strict=True))
    dots = "".join(free[: max(longest, 0)])
    for n, (x, dims) in enumerate(zip(inputs, ndims, strict=True)):
        named = len(x.replace("...", ""))
        if named > dims or ("..." not in x and named != dims):
            raise ValueError(f"{equation!r} names {named} dims of operand {n}, which has {dims}")
        inputs[n] = x.replace("...", dots[len(dots) - (dims - named) :])
    if not arrow:
        whole = "".join(inputs)
        once = sorted(x for x in set(whole) if whole.count(x) == 1 and x not in dots)
        return inputs, dots + "".join(once)
    return inputs, out.replace("...", dots)
