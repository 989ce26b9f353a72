"""The coordinates at which a term is evaluated: single points, or a block of rows and keys.

A term is written once, in `over(at)`, with coordinates (`at.b, at.h, at.row, at.i, at.j`: batch row, head, query row,
query position, key position) and `at.slice_of(tensor, "bhi")`, the entries of a tensor whose dims are those axes.
`Point` gathers the entries one by one (FlexAttention, scattered indices). `Block` slices them and makes each slice an
autograd leaf, so that the gradient of a block flows back to the slice it was computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Selector = slice | Tensor
AXES = "bhij"


class Coordinates(Protocol):
    """The coordinates of some entries of the matrix, as every `over(at)` receives them."""

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
    def slice_of(self, tensor: Tensor, axes: str) -> Tensor: ...


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
        if isinstance(self.offset, Tensor) and self.offset.ndim:
            return self.row + look_up(self.offset, self.b)
        return self.row + self.offset

    def slice_of(self, tensor: Tensor, axes: str) -> Tensor:
        """The entries of a tensor with dims `axes` at these points."""
        index = {"b": self.b, "h": self.h, "i": self.row, "j": self.j}
        return look_up(tensor, *(index[axis] for axis in axes))

    cut = slice_of  # the name of this method in terms that were written for earlier versions


def look_up(table: Tensor, *index: Tensor) -> Tensor:
    """`table[index]`, the dims of the table aligned right and broadcast where they are 1."""
    if not table.ndim:
        return table
    index = index[len(index) - table.ndim :]
    # `x * 0`, not 0: under vmap every index must stay a tensor.
    return table[tuple(x * 0 if n == 1 else x for x, n in zip(index, table.shape, strict=True))]


def take_entries(tensor: Tensor, index: tuple[Selector, ...]) -> Tensor:
    """`tensor[index]`, where several index tensors select the outer product of their axes, like `numpy.ix_`."""
    scattered = sum(isinstance(x, Tensor) for x in index)
    return tensor[index] if scattered < 2 else tensor[_outer(tensor, index)]


def add_entries(total: Tensor, index: tuple[Selector, ...], part: Tensor) -> None:
    """Add `part` to `total` at `index`: the adjoint of `take_entries`."""
    if any(isinstance(x, Tensor) for x in index):
        total.index_put_(_outer(total, index), part, accumulate=True)
    else:
        total[index].add_(part)


@dataclass(frozen=True)
class Block:
    """A block of query rows against the keys they can see, for some batch rows and some of the `n_h` heads.

    *Basics.* `batch`, `heads`, `rows` and `cols` slice the tensors of the call: the block has the scores of the queries
    `q[batch, heads, rows]` and the keys `k[batch, head_slice(g), cols]`.

    *Details.* After `Call.select` the tensors hold only the selected batch rows, heads and query rows, but terms are
    written in original numbers: `batch_ids[n]`, `head_ids[n]` and `row_ids[n]` are the original numbers of entry n,
    None if nothing was selected on that axis. `q` is the query as the user passed it, for biases that read it.
    `take` reads every slice of a tensor; a backward pass replaces it to make each slice an autograd leaf.
    """

    batch: slice
    heads: slice
    rows: slice
    cols: Selector
    n_h: int
    offset: int | Tensor  # the position of the first query, or one for each original batch row
    device: torch.device
    dtype: torch.dtype
    q: Tensor
    batch_ids: Tensor | None = None
    head_ids: Tensor | None = None
    row_ids: Tensor | None = None
    take: Callable[[Tensor, tuple[Selector, ...]], Tensor] = field(default=take_entries)

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
        return self.row + self.offsets

    @property
    def offsets(self) -> int | Tensor:
        """The position of the first query, or of each batch row's: `b 1 1 1`."""
        return self.offset[self.selector("b")].view(-1, 1, 1, 1) if isinstance(self.offset, Tensor) else self.offset

    @property
    def j(self) -> Tensor:
        return self._ids("j")

    def slice_of(self, tensor: Tensor, axes: str) -> Tensor:
        """The block's entries of a tensor with dims `axes`, shaped to broadcast over b h i j."""
        axes = axes[len(axes) - tensor.ndim :]
        sizes = zip(axes, tensor.shape, strict=True)
        part = self.take(tensor, tuple(slice(None) if n == 1 else self.selector(a) for a, n in sizes))
        shape = [1, 1, 1, 1]
        for axis, n in zip(axes, part.shape, strict=True):
            shape[AXES.index(axis)] = n
        return part.reshape(shape)

    cut = slice_of  # the name of this method in terms that were written for earlier versions

    def leaf(self, tensor: Tensor) -> Tensor:
        """The whole tensor, as an autograd leaf of this block."""
        return self.take(tensor, ())

    def head_slice(self, n: int) -> slice:
        """The slice of n heads that the block's heads share, for a tensor with n heads for all `n_h`."""
        return slice(self.heads.start * n // self.n_h, -(-self.heads.stop * n // self.n_h))

    def queries(self) -> Tensor:
        """The block's rows of the query."""
        return self.take(self.q, (self.batch, self.heads, self.rows)).to(self.dtype)

    def selector(self, axis: str) -> Selector:
        """The slice or index tensor of the block along an axis, in original numbers."""
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


def leaves_of(at: Coordinates, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that a term reads whole; in the backward pass of a block, its autograd leaves in their place."""
    if not isinstance(at, Block) or at.take is take_entries:
        return tensors
    return tuple(at.leaf(x) for x in tensors)


def _outer(tensor: Tensor, index: tuple[Selector, ...]) -> tuple[Tensor, ...]:
    ids = [
        x if isinstance(x, Tensor) else torch.arange(n, device=tensor.device)[x]
        for x, n in zip(index, tensor.shape, strict=False)
    ]
    return tuple(x.view([-1 if m == n else 1 for m in range(len(ids))]) for n, x in enumerate(ids))
