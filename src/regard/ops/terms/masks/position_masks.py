"""Masks that depend on the positions of the query and the key alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....checks import check_broadcast, check_int, check_integer_tensor
from ...shape import Sizes
from ..coordinates import Coordinates
from ..mask_tiles import Grid, Tiles
from ..term import term
from ..user_function import call_user_function
from .mask_algebra import Mask

PerHead = int | tuple[int, ...] | Tensor


@term
class Causal(Mask):
    """j <= i: no query sees a later key. With fewer queries than keys the last query still sees the last key.

    >>> print(Causal().draw(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    def over(self, at: Coordinates) -> Tensor:
        return at.j <= at.i

    def tiles(self, grid: Grid) -> Tiles:
        return Tiles(grid.j.low <= grid.i.high, grid.j.high <= grid.i.low)


@term
class Window(Mask):
    """abs(i - j) < width; or, with `before` and `after`, i - before <= j <= i + after.

    Each is a number, or one for each head: a tuple, or a tensor of integers.

    >>> print(Window(2).draw(4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    >>> print(Window(before=2, after=0).draw(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    """

    width: PerHead | None = None
    before: PerHead | None = None
    after: PerHead | None = None

    def __post_init__(self) -> None:
        sides = (self.before, self.after)
        if (self.width is None) == (sides == (None, None)) or (None in sides and sides != (None, None)):
            raise ValueError(
                f"Window takes a width, or both before and after, got width={self.width}, "
                f"before={self.before}, after={self.after}; write Window(4) or Window(before=3, after=0)"
            )
        for name, least in (("width", 1), ("before", 0), ("after", 0)):
            value = getattr(self, name)
            if isinstance(value, (tuple, list)):
                for number in value:
                    check_int(f"Window {name}", number, least=least)
                object.__setattr__(self, name, tuple(int(number) for number in value))
            elif isinstance(value, Tensor):
                check_integer_tensor(f"Window {name}", value, 1)
            elif value is not None:
                check_int(f"Window {name}", value, least=least)

    def check(self, sizes: Sizes) -> None:
        for name in ("width", "before", "after"):
            value = getattr(self, name)
            n = len(value) if isinstance(value, (tuple, Tensor)) else 1
            if n not in (1, sizes.h):
                raise ValueError(f"Window {name} must be a number, or one for each of h={sizes.h} heads, got {n}")

    def __repr__(self) -> str:
        one = self.width is not None and not isinstance(self.width, Tensor)
        return f"Window({self.width})" if one else super().__repr__()

    @property
    def has_one_reach(self) -> bool:
        """Whether all heads see equally far."""
        return not any(isinstance(x, (tuple, Tensor)) for x in (self.width, self.before, self.after))

    @property
    def reach(self) -> tuple[int, int]:
        """The number of keys that a query sees before and after its own position; the largest of all heads."""
        if self.width is not None:
            return _largest(self.width) - 1, _largest(self.width) - 1
        return _largest(self.before), _largest(self.after)

    def with_tensors(self, device: torch.device, dtype: torch.dtype) -> Window:
        def on_device(value: PerHead | None) -> PerHead | None:
            return torch.tensor(value, device=device) if isinstance(value, tuple) else value

        return Window(on_device(self.width), on_device(self.before), on_device(self.after))

    def over(self, at: Coordinates) -> Tensor:
        before, after = self._reach(lambda values: at.slice_of(values, "h"), at.device)
        distance = at.i - at.j
        return (distance <= before) & (distance >= -after)

    def tiles(self, grid: Grid) -> Tiles:
        before, after = self._reach(lambda values: grid.span(values, "h").low, grid.device)
        return grid.distance.between(-after, before)

    def _reach(self, per_head: Callable[[Tensor], Tensor], device: torch.device) -> tuple[int | Tensor, int | Tensor]:
        """The number of keys before and after a query, tensors where heads differ."""

        def number(value: PerHead | None) -> int | Tensor:
            if isinstance(value, (tuple, Tensor)):
                return per_head(torch.as_tensor(value, device=device))
            return value or 0

        if self.width is not None:
            width = number(self.width)
            return width - 1, width - 1
        return number(self.before), number(self.after)


@term
class Dilated(Mask):
    """abs(i - j) < width * step and (i - j) % step == 0: a window that sees every step-th key.

    >>> print(Dilated(2, 2).draw(5))
    ■ · ■ · ·
    · ■ · ■ ·
    ■ · ■ · ■
    · ■ · ■ ·
    · · ■ · ■
    """

    width: int
    step: int

    def __post_init__(self) -> None:
        check_int("Dilated width", self.width, least=1)
        check_int("Dilated step", self.step, least=1)
        check_int("Dilated width * step", self.width * self.step)

    def over(self, at: Coordinates) -> Tensor:
        distance = at.i - at.j
        return (distance.abs() < self.width * self.step) & (distance % self.step == 0)

    def tiles(self, grid: Grid) -> Tiles:
        reach = self.width * self.step - 1
        some, full = grid.distance.between(-reach, reach)
        return Tiles(some, full if self.step == 1 else torch.zeros_like(full))


@term
class Chunked(Mask):
    """i // size == j // size: each query sees its own chunk of `size` tokens. Llama 4: `Causal() & Chunked(8192)`.

    >>> print((Causal() & Chunked(2)).draw(5))
    ■ · · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · ■ ■ ·
    · · · · ■
    """

    size: int

    def __post_init__(self) -> None:
        check_int("Chunked size", self.size, least=1)

    def over(self, at: Coordinates) -> Tensor:
        return at.i // self.size == at.j // self.size

    def tiles(self, grid: Grid) -> Tiles:
        (i_low, i_high), (j_low, j_high) = ((x.low // self.size, x.high // self.size) for x in (grid.i, grid.j))
        return Tiles((i_low <= j_high) & (j_low <= i_high), (i_low == j_high) & (j_low == i_high))


@term
class Neighborhood(Mask):
    """The keys around each cell of a grid: NATTEN's neighbourhood attention (Hassani et al. 2023), in two dimensions.

    `shape` are the rows and columns of the grid, `window` those of a neighbourhood, or one number for both. At an edge
    the window is shifted inward, so every query sees equally many keys. Query row r is cell r of the grid, row by row,
    and so are the keys; no query sees a key past the grid.

    >>> print(Neighborhood((1, 6), (1, 3)).draw(6))
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    · ■ ■ ■ · ·
    · · ■ ■ ■ ·
    · · · ■ ■ ■
    · · · ■ ■ ■
    """

    shape: tuple[int, int]
    window: int | tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("shape", "window"):
            value = getattr(self, name)
            if name == "window" and not isinstance(value, (tuple, list)):
                value = (value, value)
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise TypeError(f"Neighborhood {name} must be (rows, columns), got {value!r}; write {name}=(14, 14)")
            for number in value:
                check_int(f"Neighborhood {name}", number, least=1)
            object.__setattr__(self, name, tuple(int(number) for number in value))
        if any(window > n for n, window in zip(self.shape, self._windows, strict=True)):
            raise ValueError(f"Neighborhood window must fit in the grid {self.shape}, got {self.window}")

    @property
    def _windows(self) -> tuple[int, int]:
        assert isinstance(self.window, tuple)
        return self.window

    def check(self, sizes: Sizes) -> None:
        cells = self.shape[0] * self.shape[1]
        if sizes.i != cells or sizes.j < cells:
            raise ValueError(
                f"Neighborhood{self.shape} takes a query and a key for each of its {cells} cells, "
                f"got i={sizes.i} and j={sizes.j}; write Neighborhood((rows, columns), window)"
            )

    def over(self, at: Coordinates) -> Tensor:
        width = self.shape[1]
        seen = None
        for axis, (query, key) in enumerate(((at.row // width, at.j // width), (at.row % width, at.j % width))):
            start, window = self._start(query, axis), self._windows[axis]
            here = (key >= start) & (key < start + window)
            seen = here if seen is None else seen & here
        assert seen is not None
        return seen

    def tiles(self, grid: Grid) -> Tiles:
        width, wide = self.shape[1], self._windows[1]
        rows = self._compare(
            grid.row.low // width, grid.row.high // width, grid.j.low // width, grid.j.high // width, 0
        )
        # Columns are bounds only for a tile whose queries lie in one row of the grid, and its keys in one too.
        in_line = (grid.row.low // width == grid.row.high // width) & (grid.j.low // width == grid.j.high // width)
        cols = self._compare(grid.row.low % width, grid.row.high % width, grid.j.low % width, grid.j.high % width, 1)
        return Tiles(rows.some & (cols.some | ~in_line), rows.full & ((cols.full & in_line) | (wide == width)))

    def _compare(self, query_low: Tensor, query_high: Tensor, low: Tensor, high: Tensor, axis: int) -> Tiles:
        """Compare ranges of queries and keys along one axis of the grid."""
        first, last = self._start(query_low, axis), self._start(query_high, axis) + self._windows[axis] - 1
        some = (high >= first) & (low <= last)
        return Tiles(some, (low >= self._start(query_high, axis)) & (high <= first + self._windows[axis] - 1))

    def _start(self, query: Tensor, axis: int) -> Tensor:
        """The first key that a query sees along one axis of the grid."""
        window = self._windows[axis]
        return (query - window // 2).clamp(0, self.shape[axis] - window)

    def _drawing_size(self) -> tuple[int, int]:
        return self.shape[0] * self.shape[1], self.shape[0] * self.shape[1]


@term
class Diagonal(Mask):
    """i == j: each query sees itself; `~Diagonal()` hides just that."""

    def over(self, at: Coordinates) -> Tensor:
        return at.i == at.j

    def tiles(self, grid: Grid) -> Tiles:
        return grid.distance.between(0, 0)


@term
class Prefix(Mask):
    """j < n, where n is a number or a tensor with one per batch row. `Causal() | Prefix(n)` is a prefix LM.

    >>> print((Causal() | Prefix(2)).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, Tensor):
            check_integer_tensor("Prefix n", self.n, 0, 1)
        else:
            check_int("Prefix n", self.n)

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.n, Tensor):
            check_broadcast("Prefix n", self.n, {"b": sizes.b})

    def over(self, at: Coordinates) -> Tensor:
        return at.j < (at.slice_of(self.n, "b") if isinstance(self.n, Tensor) else self.n)

    def tiles(self, grid: Grid) -> Tiles:
        n = grid.span(self.n, "b").low if isinstance(self.n, Tensor) else self.n
        return Tiles(grid.j.low < n, grid.j.high < n)


@term
class Global(Mask):
    """i or j is a global token: whole rows and whole columns. `tokens` is their number, from the start, or positions.

    Positions are a tuple, or a tensor with dims (n,) or (b, n). Longformer's pattern is `Window(w) | Global(tokens)`.

    >>> print((Window(1) | Global((1,))).draw(4))
    ■ ■ · ·
    ■ ■ ■ ■
    · ■ ■ ·
    · ■ · ■
    """

    tokens: int | tuple[int, ...] | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Tensor):
            check_integer_tensor("Global tokens", self.tokens, 1, 2)
        elif isinstance(self.tokens, (tuple, list, range)):
            for token in self.tokens:
                check_int("Global tokens", token)
            object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        else:
            check_int("Global tokens", self.tokens)
            object.__setattr__(self, "tokens", int(self.tokens))

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.tokens, Tensor):
            check_broadcast("Global tokens", self.tokens, {"b": sizes.b, "tokens": None})

    def over(self, at: Coordinates) -> Tensor:
        if isinstance(self.tokens, int):
            return ((at.i >= 0) & (at.i < self.tokens)) | (at.j < self.tokens)
        chosen = torch.zeros_like(at.i + at.j, dtype=torch.bool)
        for token in self._each_token(lambda column: at.slice_of(column, "b")):
            chosen = chosen | (at.i == token) | (at.j == token)
        return chosen

    def tiles(self, grid: Grid) -> Tiles:
        if isinstance(self.tokens, int):
            rows, cols = grid.i.between(0, self.tokens - 1), grid.j.between(0, self.tokens - 1)
            return Tiles(rows.some | cols.some, rows.full | cols.full)
        some = torch.zeros_like(grid.i.low + grid.j.low, dtype=torch.bool)
        for token in self._each_token(lambda column: grid.span(column, "b").low):
            for low, high in (grid.i, grid.j):
                some = some | ((low <= token) & (token <= high))
        return Tiles(some, torch.zeros_like(some))

    def _each_token(self, per_batch_row: Callable[[Tensor], Tensor]) -> list[int] | list[Tensor]:
        if isinstance(self.tokens, Tensor):
            return [per_batch_row(column) for column in self.tokens.unbind(-1)]
        assert isinstance(self.tokens, tuple)
        return list(self.tokens)


@term
class Rule(Mask):
    """fn(b, h, i, j): any function written for FlexAttention. The caller moves tensors in its closure to the device.

    >>> print(Rule(lambda b, h, i, j: (j <= i) & (i - j != 2)).draw(4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    ■ · ■ ■
    """

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Rule takes a function of (b, h, i, j), got {type(self.fn).__name__}")

    def over(self, at: Coordinates) -> Tensor:
        seen = call_user_function("Rule", self.fn, "b, h, i, j", at.b, at.h, at.i, at.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise TypeError(f"Rule: the function must return a bool tensor, got {kind}; return a comparison")
        return seen


def _largest(value: PerHead | None) -> int:
    if isinstance(value, Tensor):
        return int(value.max())
    return max(value, default=0) if isinstance(value, tuple) else value or 0
