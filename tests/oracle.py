"""The judge: attention written out query by query, sharing no code with the library.

`attention` runs in any dtype. In float64 it is the truth; in the dtype under test it is plain PyTorch, whose error
the library may at most double (gradients: triple).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INF = float("inf")


@dataclass(frozen=True)
class Shape:
    b: int = 1
    h: int = 1
    g: int = 1
    i: int = 7
    j: int = 7
    d: int = 8
    e: int = 8
    offset: int | tuple[int, ...] | None = None
    strided: bool = False

    def shift(self, b: int) -> int:
        if isinstance(self.offset, tuple):
            return self.offset[b]
        return self.j - self.i if self.offset is None else self.offset

    def __str__(self) -> str:
        letters = f"b{self.b}h{self.h}g{self.g}i{self.i}j{self.j}d{self.d}e{self.e}"
        return letters + ("" if self.offset is None else f"o{self.offset}") + ("s" if self.strided else "")


@dataclass
class Row:
    """Where the oracle stands: one query, all keys."""

    b: int
    h: int
    r: int
    i: int
    n_j: int
    q: Tensor
    k: Tensor
    t: list[Tensor]  # the tensors of the term under test
    seen: Tensor | None = None  # the keys it sees

    @property
    def js(self) -> range:
        return range(self.n_j)

    @property
    def places(self) -> Tensor:
        return torch.arange(self.n_j, dtype=self.q.dtype)

    @property
    def away(self) -> Tensor:
        return (self.i - self.places).abs()


@dataclass(frozen=True)
class Case:
    """A term, and the same thing said in plain Python, for any shape."""

    name: str
    tensors: Callable[[Shape], list[Tensor]]
    terms: Callable[..., dict[str, Any]]
    visible: Callable[[Row, int], bool] = lambda row, j: True
    score: Callable[[Row], Tensor] = lambda row: row.k @ row.q / row.q.shape[-1] ** 0.5
    bias: Callable[[Row], Tensor] | None = None
    normalize: Callable[[Row, Tensor], Tensor] = lambda row, s: torch.softmax(s, -1)
    fits: Callable[[Shape], bool] = lambda shape: True
    smooth: bool = True
    key_width: Callable[[Shape], int] = lambda shape: shape.d

    def __str__(self) -> str:
        return self.name


def inputs(shape: Shape, case: Case, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and the tensors of the case, float64."""
    torch.manual_seed(seed)
    q = torch.randn(shape.b, shape.h, shape.i, shape.d, dtype=torch.float64)
    k = torch.randn(shape.b, shape.g, shape.j, case.key_width(shape), dtype=torch.float64)
    v = torch.randn(shape.b, shape.g, shape.j, shape.e, dtype=torch.float64)
    return [q, k, v], case.tensors(shape)


def weights(case: Case, shape: Shape, q: Tensor, k: Tensor, tensors: list[Tensor]) -> Tensor:
    """The matrix, b h i j, one row at a time."""
    rows = []
    for b in range(shape.b):
        for h in range(shape.h):
            keys = k[b, h // (shape.h // shape.g)]
            for r in range(shape.i):
                rows.append(_row(case, Row(b, h, r, r + shape.shift(b), shape.j, q[b, h, r], keys, tensors)))
    if not rows:
        return q.new_zeros(shape.b, shape.h, shape.i, shape.j)
    return torch.stack(rows).view(shape.b, shape.h, shape.i, shape.j)


def logits(case: Case, shape: Shape, q: Tensor, k: Tensor, tensors: list[Tensor]) -> Tensor:
    """The largest score of each row, b h i; -inf for a row that sees no key."""
    found = q.new_full((shape.b, shape.h, shape.i), -INF)
    for b in range(shape.b):
        for h in range(shape.h):
            keys = k[b, h // (shape.h // shape.g)]
            for r in range(shape.i):
                s = _scores(case, Row(b, h, r, r + shape.shift(b), shape.j, q[b, h, r], keys, tensors))
                found[b, h, r] = s.max() if s.numel() else -INF
    return found


def attention(case: Case, shape: Shape, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor]) -> Tensor:
    """The output, b h i e."""
    A = weights(case, shape, q, k, tensors)
    return A @ v.repeat_interleave(shape.h // shape.g, 1)


def _row(case: Case, row: Row) -> Tensor:
    s, weights = _scores(case, row), row.q.new_zeros(row.n_j)
    return weights.index_put((row.seen,), case.normalize(row, s)) if s.numel() else weights


def _scores(case: Case, row: Row) -> Tensor:
    """The scores of the keys that a row sees, which it then holds in `seen`."""
    seen = torch.tensor([bool(case.visible(row, j)) for j in row.js], dtype=torch.bool)
    bias = None if case.bias is None else case.bias(row)
    if bias is not None:
        seen = seen & (bias > -INF)
    row.seen = seen.nonzero().squeeze(-1)
    if not row.seen.numel():
        return row.q.new_zeros(0)
    s = case.score(row)[row.seen]
    return s if bias is None else s + bias[row.seen]
