"""Parse calls of matmul, bmm, mm, baddbmm and einsum as products q @ k.mT, or as averages weights @ v."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

MATMUL_NAMES = frozenset(("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum"))
ELLIPSIS_LABELS = "0123456789"  # labels for the dims of `...` in an einsum


class MatrixProduct(NamedTuple):
    """scale * left @ right.mT + added."""

    left: Tensor  # *lead i d
    right: Tensor  # *lead j d
    scale: float = 1.0
    added: Tensor | None = None  # broadcasts to *lead i j


class Average(NamedTuple):
    """The average of values by weights with dims *lead i j."""

    v: Tensor  # *lead j e
    heads: Callable[[Tensor], Tensor]  # rearranges the output of the call to *lead i e
    weights: Callable[[Tensor], Tensor] = lambda x: x  # rearranges weights, keys last, to *lead i j
    summed: bool = False  # the weights have no dim of queries


def parse_product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
    """Return the product that a call computes; None if it cannot be q @ k.mT, e.g. because k is a parameter."""
    if name == "einsum":
        return _einsum_product(args)
    if name == "baddbmm":
        start, left, right = _arguments(("input", "batch1", "batch2"), args, kwargs)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        return MatrixProduct(left, right.mT, alpha, None if beta == 0 else start if beta == 1 else start * beta)
    left, right = _arguments(_ARGUMENT_NAMES[name], args, kwargs)
    return MatrixProduct(left, right.mT) if _may_be_scores(left, right) else None


def parse_average(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor, *, behind: int
) -> Average | None:
    """Return the average that a call computes with these weights, which have `behind` dims behind their keys."""
    if name == "einsum":
        return _einsum_average(args, weights, behind)
    if name == "baddbmm":
        return None
    left, right = _arguments(_ARGUMENT_NAMES[name], args, kwargs)
    if left.ndim < 2 or right.ndim < 2:
        return None
    if left is weights and behind == 0:
        return Average(right, lambda out: out)
    if right is weights and behind == 1:
        return Average(left.mT, lambda out: out.mT)
    return None


_ARGUMENT_NAMES = {
    "matmul": ("input", "other"),
    "__matmul__": ("self", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
}


def _arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [*args, *(kwargs[name] for name in names[len(args) :])][: len(names)]


def _may_be_scores(left: Tensor, right: Tensor) -> bool:
    """Whether left @ right can be q @ k.mT: float matrices, and right is not a parameter."""
    matrices = left.ndim >= 2 and right.ndim >= 2 and (right.ndim > 2 or left.ndim == 2)
    return matrices and left.is_floating_point() and not isinstance(right, nn.Parameter)


def _einsum_product(args: Sequence[Any]) -> MatrixProduct | None:
    if (parsed := parse_einsum(args)) is None:
        return None
    (a, x), (b, y), out = parsed
    if len(out) < 2:
        return None
    *lead, row, column = list(out)
    if row in b and row not in a:  # swap the operands, so that a has the rows
        (a, x), (b, y) = (b, y), (a, x)
    summed = [label for label in a if label in b and label not in out]
    if not summed or row not in a or row in b or column not in b or column in a or set(a + b) - {*out, *summed}:
        return None
    left, right = _arrange(x, a, lead, row, summed), _arrange(y, b, lead, column, summed)
    return MatrixProduct(left, right) if left.shape[-1] == right.shape[-1] else None


def _einsum_average(args: Sequence[Any], weights: Tensor, behind: int) -> Average | None:
    if (parsed := parse_einsum(args)) is None:
        return None
    (a, x), (b, y), out = parsed
    if y is weights:
        (a, x), (b, y) = (b, y), (a, x)
    if x is not weights or len(a) < 2 or not out:
        return None
    key = a[-1 - behind]
    others = [label for label in a if label != key]
    rows = others[-1:] if others[-1] not in b else [label for label in others if label not in b]
    lead, features = [label for label in others if label not in rows], [label for label in b if label not in a]
    if key not in b or key in out or len(rows) > 1 or set(out) != {*others, *features}:
        return None
    order = [others.index(label) for label in (*lead, *rows)]

    def arrange_weights(w: Tensor) -> Tensor:
        w = w.permute(*order, -1)
        return w if rows else w.unsqueeze(-2)

    def heads(x: Tensor) -> Tensor:
        return _arrange(
            x if rows else x[..., None], out if rows else out + "?", lead, rows[0] if rows else "?", features
        )

    return Average(_arrange(y, b, lead, key, features), heads, arrange_weights, not rows)


def parse_einsum(args: Sequence[Any]) -> tuple[tuple[str, Tensor], tuple[str, Tensor], str] | None:
    """Return the two operands of an einsum as (labels, tensor), and its output labels; None for other einsums."""
    text = args[0] if args else None
    if not isinstance(text, str) or "->" not in text:
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, out = text.replace(" ", "").split("->")
    names = inputs.split(",")
    if len(operands) != 2 or len(names) != 2:
        return None
    if "..." in text:
        extra = [x.ndim - len(dims.replace("...", "")) for x, dims in zip(operands, names, strict=True)]
        most = max(extra)
        names = [dims.replace("...", ELLIPSIS_LABELS[most - n : most]) for dims, n in zip(names, extra, strict=True)]
        out = out.replace("...", ELLIPSIS_LABELS[:most])
    if any(len(set(dims)) < len(dims) for dims in names):
        return None
    return (names[0], operands[0]), (names[1], operands[1]), out


def _arrange(x: Tensor, dims: str, lead: Sequence[str], row: str, flat: Sequence[str]) -> Tensor:
    """Permute a tensor with labels `dims` to (*lead, row, flat): missing dims become 1, `flat` becomes one dim."""
    x = x.permute([dims.index(label) for label in (*lead, row, *flat) if label in dims])
    for at, label in enumerate(lead):
        x = x if label in dims else x.unsqueeze(at)
    return x.flatten(len(lead) + 1) if flat else x.unsqueeze(-1)


def has_data(x: Tensor) -> bool:
    """Whether a tensor has a dense memory with values: it is neither nested nor on the meta device."""
    return not (x.is_nested or x.is_meta)
