"""Parse calls of matmul, einsum, tensordot, linear and their kin as products q @ k.mT, or as averages weights @ v."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLAIN_NAMES = {
    "matmul": ("input", "other"),
    "__matmul__": ("self", "other"),
    "linalg_matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
}
ADDING_NAMES = {"baddbmm": ("input", "batch1", "batch2"), "addmm": ("input", "mat1", "mat2")}
EINSUM_NAMES = frozenset(("einsum", "tensordot", "inner", "linear", "linalg_multi_dot", "chain_matmul"))
MATMUL_NAMES = PLAIN_NAMES.keys() | ADDING_NAMES.keys() | EINSUM_NAMES


class MatrixProduct(NamedTuple):
    """scale * left @ right.mT + added."""

    left: Tensor  # *lead i d
    right: Tensor  # *lead j d
    scale: float = 1.0
    added: Tensor | None = None  # broadcasts to *lead i j


class Projection(NamedTuple):
    """The averages of values within a call that also maps them to its output."""

    averages: Tensor
    apply: Callable[[Tensor], Tensor]  # averages -> output of the call, a linear map

    def gradient_of_averages(self, grad: Tensor) -> Tensor:
        """Return the gradient of the averages from that of the output."""
        gradient: Tensor = torch.func.vjp(self.apply, self.averages.detach())[1](grad)[0]
        return gradient


class Average(NamedTuple):
    """The average of values by weights with dims *lead i j."""

    v: Tensor  # *lead j e
    heads: Callable[[Tensor], Tensor]  # rearranges the output of the call to *lead i e
    weights: Callable[[Tensor], Tensor] = lambda x: x  # rearranges weights, keys last, to *lead i j
    summed: bool = False  # the weights have no dim of queries
    projection: Projection | None = None  # set if the call also maps the averages to its output


def parse_product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
    """Return the product that a call computes; None if it cannot be q @ k.mT, e.g. because k is a parameter."""
    if name in EINSUM_NAMES:
        return _einsum_product(name, args, kwargs)
    if name in ADDING_NAMES:
        start, left, right = _arguments(ADDING_NAMES[name], args, kwargs)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        if name == "addmm" and not _may_be_scores(left, right):
            return None
        return MatrixProduct(left, right.mT, alpha, None if beta == 0 else start if beta == 1 else start * beta)
    left, right = _arguments(PLAIN_NAMES[name], args, kwargs)
    return MatrixProduct(left, right.mT) if _may_be_scores(left, right) else None


def parse_average(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor, *, behind: int
) -> Average | None:
    """Return the average that a call computes with these weights, which have `behind` dims behind their keys."""
    if name in EINSUM_NAMES:
        return _einsum_average(name, args, kwargs, weights, behind)
    if name in ADDING_NAMES:
        _, left, right = _arguments(ADDING_NAMES[name], args, kwargs)
        if kwargs.get("beta", 1) != 0 or kwargs.get("alpha", 1) != 1:
            return None
    else:
        left, right = _arguments(PLAIN_NAMES[name], args, kwargs)
    if left.ndim < 2 or right.ndim < 2:
        return None
    if left is weights and behind == 0:
        return Average(right, lambda out: out)
    if right is weights and behind == 1:
        return Average(left.mT, lambda out: out.mT)
    return None


def operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tensors that a call multiplies."""
    given = args[1:] if name == "einsum" else (*args, *kwargs.values())
    return given[0] if given and isinstance(given[0], (list, tuple)) else given


def _arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [*args, *(kwargs[name] for name in names[len(args) :])][: len(names)]


def _may_be_scores(left: Tensor, right: Tensor) -> bool:
    """Whether left @ right can be q @ k.mT: float matrices, and right is not a parameter."""
    matrices = left.ndim >= 2 and right.ndim >= 2 and (right.ndim > 2 or left.ndim == 2)
    return matrices and left.is_floating_point() and not isinstance(right, nn.Parameter)


def _einsum_product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
    if (parsed := parse_contraction(name, args, kwargs)) is None:
        return None
    *factors, out = parsed
    if name != "einsum" and any(x.ndim != 2 or isinstance(x, nn.Parameter) for _, x in factors):
        return None  # a linear map
    if len(out) < 2:
        return None
    *lead, row, column = list(out)
    pair = factors if len(factors) == 2 else _contract_to_two(factors, out, row, column)
    if pair is None:
        return None
    (a, x), (b, y) = pair
    if row in b and row not in a:  # swap the operands, so that a has the rows
        (a, x), (b, y) = (b, y), (a, x)
    summed = [label for label in a if label in b and label not in out]
    if not summed or row not in a or row in b or column not in b or column in a or set(a + b) - {*out, *summed}:
        return None
    left, right = _arrange(x, a, lead, row, summed), _arrange(y, b, lead, column, summed)
    return MatrixProduct(left, right) if left.shape[-1] == right.shape[-1] else None


def _contract_to_two(factors: Sequence[Factor], out: str, row: str, column: str) -> list[Factor] | None:
    """Return two factors of the same product: those with rows but no columns are multiplied first."""
    last = [factor for factor in factors if column in factor[0]]
    others = [factor for factor in factors if column not in factor[0]]
    if len(last) != 1 or not any(row in labels for labels, _ in others):
        return None
    kept = "".join(dict.fromkeys(label for labels, _ in others for label in labels if label in out + last[0][0]))
    text = ",".join(labels for labels, _ in others)
    return [(kept, torch.einsum(f"{text}->{kept}", *(x for _, x in others))), last[0]]


def _einsum_average(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor, behind: int
) -> Average | None:
    if (parsed := parse_contraction(name, args, kwargs)) is None:
        return None
    *factors, out = parsed
    given = [n for n, (_, x) in enumerate(factors) if x is weights]
    if len(given) != 1:
        return None
    a, x = factors.pop(given[0])
    if len(a) < 2 or not out:
        return None
    key = a[-1 - behind]
    values = [n for n, (labels, _) in enumerate(factors) if key in labels]
    if len(values) != 1:
        return None
    b, y = factors.pop(values[0])
    projection = None
    if any(label in a and label not in b for labels, _ in factors for label in labels):
        return None  # the weights are mixed first
    if factors:
        used = out + "".join(labels for labels, _ in factors)
        averaged = "".join(dict.fromkeys(label for label in a + b if label != key and label in used))
        averages, text = torch.einsum(f"{a},{b}->{averaged}", x, y), [averaged, *(labels for labels, _ in factors)]
        projection = _projection(averages, f"{','.join(text)}->{out}", [matrix for _, matrix in factors])
        out = averaged
    others = [label for label in a if label != key]
    rows = others[-1:] if others[-1] not in b else [label for label in others if label not in b]
    lead, features = [label for label in others if label not in rows], [label for label in b if label not in a]
    if key in out or len(rows) > 1 or set(out) != {*others, *features}:
        return None
    order = [others.index(label) for label in (*lead, *rows)]

    def arrange_weights(w: Tensor) -> Tensor:
        w = w.permute(*order, -1)
        return w if rows else w.unsqueeze(-2)

    def heads(x: Tensor) -> Tensor:
        return _arrange(
            x if rows else x[..., None], out if rows else out + "?", lead, rows[0] if rows else "?", features
        )

    return Average(_arrange(y, b, lead, key, features), heads, arrange_weights, not rows, projection)


def _projection(averages: Tensor, text: str, matrices: Sequence[Tensor]) -> Projection:
    return Projection(averages, lambda x: torch.einsum(text, x, *matrices))


Factor = tuple[str, Tensor]  # labels of the dims of a tensor, and the tensor


def parse_contraction(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[*tuple[Factor, ...], str] | None:
    """Return the factors of an einsum, or of a call that is one, and its output labels; None for other calls."""
    if name == "einsum":
        return parse_einsum(args)
    given = operands(name, args, kwargs)
    if name in ("linalg_multi_dot", "chain_matmul"):
        labels = string.ascii_letters[: len(given) + 1]
        if any(x.ndim != 2 for x in given):
            return None
        return (*((labels[n : n + 2], x) for n, x in enumerate(given)), labels[0] + labels[-1])
    names = {"inner": ("input", "other"), "tensordot": ("a", "b", "dims"), "linear": ("input", "weight", "bias")}[name]
    x, y, *rest = _arguments(names, args, {"dims": 2, "bias": None, **kwargs})
    a, b = string.ascii_letters[: x.ndim], string.ascii_letters[x.ndim : x.ndim + y.ndim]
    if not (a and b) or (name == "linear" and rest[0] is not None):
        return None
    summed = rest[0] if name == "tensordot" else ([-1], [-1])
    if isinstance(summed, Tensor):
        summed = summed.tolist()
    if isinstance(summed, int):
        summed = range(x.ndim - summed, x.ndim), range(summed)
    of_x, of_y = ([dims] if isinstance(dims, int) else list(dims) for dims in summed)
    for m, n in zip(of_x, of_y, strict=True):
        b = b.replace(b[n], a[m])
    return (a, x), (b, y), "".join(label for label in a + b if (label in a) != (label in b))


def parse_einsum(args: Sequence[Any]) -> tuple[*tuple[Factor, ...], str] | None:
    """Return the operands of an einsum as (labels, tensor), and its output labels; None for other einsums."""
    text = args[0] if args else None
    given = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(text, str) or len(given) < 2:
        return None
    inputs, arrow, out = text.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(given) != len(names):
        return None
    dots = "".join(label for label in string.ascii_letters if label not in text)  # labels for the dims of `...`
    if "..." in text:
        extra = [x.ndim - len(dims.replace("...", "")) for x, dims in zip(given, names, strict=True)]
        most = max(extra)
        names = [dims.replace("...", dots[most - n : most]) for dims, n in zip(names, extra, strict=True)]
        out = out.replace("...", dots[:most])
    labels = "".join(names)
    if not arrow:  # dims of `...` first, then the labels that occur once, by the alphabet
        once = sorted(label for label in set(labels) - set(dots) if labels.count(label) == 1)
        out = "".join([*(label for label in dots if label in labels), *once])
    if any(len(set(dims)) < len(dims) for dims in names):
        return None
    return (*zip(names, given, strict=True), out)


def _arrange(x: Tensor, dims: str, lead: Sequence[str], row: str, flat: Sequence[str]) -> Tensor:
    """Permute a tensor with labels `dims` to (*lead, row, flat): missing dims become 1, `flat` becomes one dim."""
    x = x.permute([dims.index(label) for label in (*lead, row, *flat) if label in dims])
    for at, label in enumerate(lead):
        x = x if label in dims else x.unsqueeze(at)
    return x.flatten(len(lead) + 1) if flat else x.unsqueeze(-1)


def has_data(x: Tensor) -> bool:
    """Whether a tensor has a dense memory with values: it is neither nested nor on the meta device."""
    return not (x.is_nested or x.is_meta)
