"""The base class of masks, and their algebra: `&`, `|`, `^`, `-` and `~`."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...map_image import image_of_maps
from ...shape import Sizes
from ..coordinates import Coordinates, Point
from ..mask_tiles import Grid, Tiles
from ..term import Term, term


class Mask(Term):
    """A predicate over `(b, h, i, j)`: True where the query at i may attend to the key at j."""

    def over(self, at: Coordinates) -> Tensor:
        """Return the mask at these coordinates, a bool tensor."""
        raise NotImplementedError

    def tiles(self, grid: Grid) -> Tiles:
        """Return which tiles are empty and which are full; by default, any tile may be partly visible."""
        some = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=grid.device)
        return Tiles(some, ~some)

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.over(Point(b, h, i, j))

    def bind(self, q: Tensor, k: Tensor, offset: int | Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the mask as a function of `(b, h, row, j)`, for rows at positions `row + offset`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return lambda b, h, i, j: self.over(Point(b, h, i, j, offset, dtype))

    def draw(self, rows: int | None = None, cols: int | None = None) -> str:
        """Draw the mask of the first batch row and head as text, one line per query.

        >>> from regard import Causal
        >>> print(Causal().draw(3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
        """
        n_i, n_j = self._drawing_size()
        seen = self._pattern(rows or n_i, cols or rows or n_j)
        return "\n".join(" ".join("■" if x else "·" for x in row) for row in seen.tolist())

    def _repr_html_(self) -> str:
        """Return the mask as text and as a small picture, for notebooks: a row for each query, dark where it sees."""
        image = image_of_maps(self._pattern(*self._drawing_size())[None, None], cell_pixels=10, alt=repr(self))
        return f"<pre>{html.escape(repr(self))}</pre>{image}"

    def _pattern(self, n_i: int, n_j: int) -> Tensor:
        """Return the mask of the first batch row and head for this many queries and keys."""
        zero = torch.zeros((), dtype=torch.long)
        at = Point(zero, zero, torch.arange(n_i)[:, None], torch.arange(n_j), offset=n_j - n_i)
        return self.map_tensors(Tensor.cpu).over(at).expand(n_i, n_j)

    def _drawing_size(self) -> tuple[int, int]:
        return 12, 12

    def __and__(self, other: Mask | Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else And(self, mask)

    def __rand__(self, other: Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else And(mask, self)

    def __or__(self, other: Mask | Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else Or(self, mask)

    def __ror__(self, other: Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else Or(mask, self)

    def __xor__(self, other: Mask | Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else (self | mask) & ~(self & mask)

    def __rxor__(self, other: Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else mask ^ self

    def __sub__(self, other: Mask | Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else self & ~mask

    def __rsub__(self, other: Tensor) -> Mask:
        mask = _as_mask(other)
        return NotImplemented if mask is None else mask - self

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false; combine masks with & | ~, not with and, or, not")

    def __str__(self) -> str:
        return f"{self!r}\n{self.draw()}"


@term
class And(Mask):
    """left & right: visible in both masks."""

    left: Mask
    right: Mask

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return self.left.over(at) & self.right.over(at)

    def tiles(self, grid: Grid) -> Tiles:
        left, right = self.left.tiles(grid), self.right.tiles(grid)
        return Tiles(left.some & right.some, left.full & right.full)

    def __repr__(self) -> str:
        return f"{_in_parentheses(self.left, Or)} & {_in_parentheses(self.right, Or, And)}"

    def _drawing_size(self) -> tuple[int, int]:
        return _common_size(self.left, self.right)


@term
class Or(Mask):
    """left | right: visible in either mask."""

    left: Mask
    right: Mask

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return self.left.over(at) | self.right.over(at)

    def tiles(self, grid: Grid) -> Tiles:
        left, right = self.left.tiles(grid), self.right.tiles(grid)
        return Tiles(left.some | right.some, left.full | right.full)

    def __repr__(self) -> str:
        return f"{self.left!r} | {_in_parentheses(self.right, Or)}"

    def _drawing_size(self) -> tuple[int, int]:
        return _common_size(self.left, self.right)


@term
class Not(Mask):
    """~mask: visible where `mask` hides."""

    mask: Mask

    def check(self, sizes: Sizes) -> None:
        self.mask.check(sizes)

    def over(self, at: Coordinates) -> Tensor:
        return ~self.mask.over(at)

    def tiles(self, grid: Grid) -> Tiles:
        some, full = self.mask.tiles(grid)
        return Tiles(~full, ~some)

    def __repr__(self) -> str:
        return f"~{_in_parentheses(self.mask, And, Or)}"

    def _drawing_size(self) -> tuple[int, int]:
        return self.mask._drawing_size()


def _as_mask(value: object) -> Mask | None:
    from .tensor_masks import Dense  # imports this file

    return value if isinstance(value, Mask) else Dense(value) if isinstance(value, Tensor) else None


def conjuncts(mask: Mask | None) -> Iterator[Mask]:
    """Yield the masks that are combined by `&` at the top level."""
    if isinstance(mask, And):
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    elif mask is not None:
        yield mask


def _in_parentheses(mask: Mask, *looser: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, looser) else repr(mask)


def _common_size(left: Mask, right: Mask) -> tuple[int, int]:
    # A mask that holds tensors has a size of its own; other masks fit any size.
    sized = [mask._drawing_size() for mask in (left, right) if mask.tensors()] or [left._drawing_size()]
    return min(n for n, _ in sized), min(n for _, n in sized)
