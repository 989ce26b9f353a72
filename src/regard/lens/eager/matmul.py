"""Products of matrices by whatever function of PyTorch: what is multiplied, in one layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

MATMUL_NAMES = frozenset(("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum"))
DIGITS = "0123456789"  # stand for the dims of `...` in an einsum


class MatrixProduct(NamedTuple):
    """scale * left @ right.mT + added."""

    left: Tensor  # *lead i d
    right: Tensor  # *lead j d
    scale: float = 1.0
    added: Tensor | None = None  # broadcasts to *lead i j


class Average(NamedTuple):
    """Values that weights, *lead i j, were multiplied with."""

    v: Tensor  # *lead j e
    heads: Callable[[Tensor], Tensor]  # makes *lead i e of the output
    weights: Callable[[Tensor], Tensor] = lambda x: x  # makes *lead i j of weights whose keys are in the last dim
    summed: bool = False  # have they no dim of queries?


def parse_product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
    """What a call multiplies, if it may be queries with keys: those are no parameters."""
    if name == "einsum":
        return _summed(args)
    if name == "baddbmm":
        start, left, right = _given(("input", "batch1", "batch2"), args, kwargs)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        return MatrixProduct(left, right.mT, alpha, None if beta == 0 else start if beta == 1 else start * beta)
    left, right = _given(_NAMES[name], args, kwargs)
    return MatrixProduct(left, right.mT) if _may_score(left, right) else None


def parse_average(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor, *, behind: int
) -> Average | None:
    """The values a call averages by these weights, which have so many dims `behind` their keys."""
    if name == "einsum":
        return _averaged(args, weights, behind)
    if name == "baddbmm":
        return None
    left, right = _given(_NAMES[name], args, kwargs)
    if left.ndim < 2 or right.ndim < 2:
        return None
    if left is weights and behind == 0:
        return Average(right, lambda out: out)
    if right is weights and behind == 1:
        return Average(left.mT, lambda out: out.mT)
    return None


_NAMES = {
    "matmul": ("input", "other"),
    "__matmul__": ("self", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
}


def _given(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [*args, *(kwargs[name] for name in names[len(args) :])][: len(names)]


def _may_score(left: Tensor, right: Tensor) -> bool:
    matrices = left.ndim >= 2 and right.ndim >= 2 and (right.ndim > 2 or left.ndim == 2)
    return matrices and left.is_floating_point() and not isinstance(right, nn.Parameter)


def _summed(args: Sequence[Any]) -> MatrixProduct | None:
    if (read := equation(args)) is None:
        return None
    (a, x), (b, y), out = read
    if len(out) < 2:
        return None
    *lead, row, column = list(out)
    if row in b and row not in a:  # of b: the operands in the order of rows and columns
        (a, x), (b, y) = (b, y), (a, x)
    over = [label for label in a if label in b and label not in out]
    if not over or row not in a or row in b or column not in b or column in a or set(a + b) - {*out, *over}:
        return None
    left, right = _laid(x, a, lead, row, over), _laid(y, b, lead, column, over)
    return MatrixProduct(left, right) if left.shape[-1] == right.shape[-1] else None


def _averaged(args: Sequence[Any], weights: Tensor, behind: int) -> Average | None:
    if (read := equation(args)) is None:
        return None
    (a, x), (b, y), out = read
    if y is weights:
        (a, x), (b, y) = (b, y), (a, x)
    if x is not weights or len(a) < 2 or not out:
        return None
    key = a[-1 - behind]
    rest = [label for label in a if label != key]
    rows = rest[-1:] if rest[-1] not in b else [label for label in rest if label not in b]
    lead, wide = [label for label in rest if label not in rows], [label for label in b if label not in a]
    if key not in b or key in out or len(rows) > 1 or set(out) != {*rest, *wide}:
        return None
    order = [rest.index(label) for label in (*lead, *rows)]

    def laid(w: Tensor) -> Tensor:
        w = w.permute(*order, -1)
        return w if rows else w.unsqueeze(-2)

    def heads(x: Tensor) -> Tensor:
        return _laid(x if rows else x[..., None], out if rows else out + "?", lead, rows[0] if rows else "?", wide)

    return Average(_laid(y, b, lead, key, wide), heads, laid, not rows)


def equation(args: Sequence[Any]) -> tuple[tuple[str, Tensor], tuple[str, Tensor], str] | None:
    """Both operands of an einsum, each behind the names of its dims, and those of its output."""
    text = args[0] if args else None
    if not isinstance(text, str) or "->" not in text:
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, out = text.replace(" ", "").split("->")
    names = inputs.split(",")
    if len(operands) != 2 or len(names) != 2:
        return None
    if "..." in text:
        more = [x.ndim - len(dims.replace("...", "")) for x, dims in zip(operands, names, strict=True)]
        most = max(more)
        names = [dims.replace("...", DIGITS[most - n : most]) for dims, n in zip(names, more, strict=True)]
        out = out.replace("...", DIGITS[:most])
    if any(len(set(dims)) < len(dims) for dims in names):
        return None
    return (names[0], operands[0]), (names[1], operands[1]), out


def _laid(x: Tensor, dims: str, lead: Sequence[str], one: str, wide: Sequence[str]) -> Tensor:
    """The tensor with its dims in this order, those it has not as 1, and the last ones as one."""
    held = [label for label in (*lead, one, *wide) if label in dims]
    x = x.permute([dims.index(label) for label in held])
    for at, label in enumerate(lead):
        x = x if label in dims else x.unsqueeze(at)
    return x.flatten(len(lead) + 1) if wide else x.unsqueeze(-1)


def has_data(x: Tensor) -> bool:
    """Does a tensor hold the numbers it stands for?"""
    return not (x.is_nested or x.is_meta)
