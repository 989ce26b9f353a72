"""Where a term is evaluated: at single points, or over a block of rows and keys.

A term says once what it is, in `over(at)`, through its coordinates and one verb: `at.b, at.h, at.row, at.i, at.j`
(batch, head, query row, query position, key position) and `at.cut(tensor, "bhi")`, the entries of a tensor laid out
along those axes.
`Point` gathers them one by one (FlexAttention, scattered indices); `Block` cuts them by slices, and hands each cut
out as a leaf, so that gradients of a block flow back to the slice they came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Selector = slice | Tensor
AXES = "bhij"


class Place(Protocol):
    """Anything a term can be evaluated at."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def b(self) -> Tensor: ...
    @property
    def h(self) -> Tensor: ...
    @property
    def row(self) -> Tensor: ...
    @property
    def i(self) -> Tensor: ...
    @property
    def j(self) -> Tensor: ...
    def cut(self, tensor: Tensor, axes: str) -> Tensor: ...


@dataclass(frozen=True)
class Point:
    """Index tensors that broadcast together; `row` counts queries from 0, `i` is the query's position."""

    b: Tensor
    h: Tensor
    row: Tensor
    j: Tensor
    offset: int | Tensor = 0
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return self.j.device

    @property
    def i(self) -> Tensor:
        return self.row + self.offset

    def cut(self, tensor: Tensor, axes: str) -> Tensor:
        at = {"b": self.b, "h": self.h, "i": self.row, "j": self.j}
        return look_up(tensor, *(at[axis] for axis in axes))


def look_up(table: Tensor, *index: Tensor) -> Tensor:
    """`table[index]`, the dims of the table aligned right and broadcast where they are 1."""
    if not table.ndim:
        return table
    index = index[len(index) - table.ndim :]
    # `x * 0`, not 0: under vmap every index must stay a tensor.
    return table[tuple(x * 0 if n == 1 else x for x, n in zip(index, table.shape, strict=True))]


def pick(tensor: Tensor, index: tuple[Selector, ...]) -> Tensor:
    """`tensor[index]`, several index tensors meaning the outer product of their axes."""
    scattered = sum(isinstance(x, Tensor) for x in index)
    return tensor[index] if scattered < 2 else tensor[_outer(tensor, index)]


def give_back(total: Tensor, index: tuple[Selector, ...], part: Tensor) -> None:
    """The adjoint of `pick`: add `part` to `total` where `pick` took it from."""
    if any(isinstance(x, Tensor) for x in index):
        total.index_put_(_outer(total, index), part, accumulate=True)
    else:
        total[index].add_(part)


@dataclass(frozen=True)
class Block:
    """A block of rows against the keys they can see, for some of the `n_h` heads and some batch rows.

    `batch`, `heads`, `rows` cut the tensors of the problem; the `*_ids`, where a selection was made, say which
    original batch row, head and query row each of them is, because terms are written in original numbers. `q` is the
    query as the caller gave it, for biases that read it.
    """

    batch: slice
    heads: slice
    rows: slice
    cols: Selector
    n_h: int
    offset: int
    device: torch.device
    dtype: torch.dtype
    q: Tensor
    batch_ids: Tensor | None = None
    head_ids: Tensor | None = None
    row_ids: Tensor | None = None
    take: Callable[[Tensor, tuple[Selector, ...]], Tensor] = field(default=pick)

    @property
    def b(self) -> Tensor:
        return self._ids("b").view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return self._ids("h").view(-1, 1, 1)

    @property
    def row(self) -> Tensor:
        return self._ids("i").view(-1, 1)

    @property
    def i(self) -> Tensor:
        return self.row + self.offset

    @property
    def j(self) -> Tensor:
        return self._ids("j")

    def cut(self, tensor: Tensor, axes: str) -> Tensor:
        """The block's entries of a tensor laid out along `axes`, shaped to broadcast over b h i j."""
        axes = axes[len(axes) - tensor.ndim :]
        sizes = zip(axes, tensor.shape, strict=True)
        part = self.take(tensor, tuple(slice(None) if n == 1 else self.selector(a) for a, n in sizes))
        shape = [1, 1, 1, 1]
        for axis, n in zip(axes, part.shape, strict=True):
            shape[AXES.index(axis)] = n
        return part.reshape(shape)

    def leaf(self, tensor: Tensor) -> Tensor:
        """All of a tensor, as a leaf of this block."""
        return self.take(tensor, ())

    def shared(self, n: int) -> slice:
        """The block's heads of a tensor that has n heads for all `n_h`."""
        return slice(self.heads.start * n // self.n_h, -(-self.heads.stop * n // self.n_h))

    def queries(self) -> Tensor:
        """The block's rows of the query."""
        return self.take(self.q, (self.batch, self.heads, self.rows)).to(self.dtype)

    def selector(self, axis: str) -> Selector:
        """What the block takes of an axis, in original numbers."""
        match axis:
            case "b":
                return self.batch if self.batch_ids is None else self.batch_ids[self.batch]
            case "h":
                return self.heads if self.head_ids is None else self.head_ids[self.heads]
            case "i":
                return self.rows if self.row_ids is None else self.row_ids[self.rows]
            case _:
                return self.cols

    def _ids(self, axis: str) -> Tensor:
        selector = self.selector(axis)
        if isinstance(selector, Tensor):
            return selector
        return torch.arange(selector.start, selector.stop, device=self.device)


def _outer(tensor: Tensor, index: tuple[Selector, ...]) -> tuple[Tensor, ...]:
    ids = [
        x if isinstance(x, Tensor) else torch.arange(n, device=tensor.device)[x]
        for x, n in zip(index, tensor.shape, strict=False)
    ]
    return tuple(x.view([-1 if m == n else 1 for m in range(len(ids))]) for n, x in enumerate(ids))
