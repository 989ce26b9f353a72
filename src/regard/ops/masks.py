"""Masks: who may look at whom, as an algebra of small terms.

A mask is a callable over `(b, h, i, j)` that is True where the query at i may attend to the key at j, so it is a
FlexAttention `mask_mod` as it stands. Masks combine by `&`, `|` and `~`, print as a picture, and know without
looking at single entries which tiles of the matrix are empty and which are full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .demands import must_be_bool, must_be_integers, must_be_number, must_be_tensor, must_broadcast, must_count
from .mask import Mask, Span, Tiles
from .place import Place, look_up
from .term import term

if TYPE_CHECKING:
    from .call import Sizes
    from .grid import Grid


@term
class Causal(Mask):
    """j <= i: nobody looks ahead. With fewer queries than keys the last query still sees the last key.

    >>> print(Causal().draw(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    def over(self, at: Place) -> Tensor:
        return at.j <= at.i

    def tiles(self, grid: Grid) -> Tiles:
        return Tiles(grid.j.low <= grid.i.high, grid.j.high <= grid.i.low)


@term
class Window(Mask):
    """abs(i - j) < width; or, with `before` and `after`, i - before <= j <= i + after.

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

    width: int | None = None
    before: int | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        sides = (self.before, self.after)
        if (self.width is None) == (sides == (None, None)) or (None in sides and sides != (None, None)):
            raise ValueError(
                f"Window takes a width, or both before and after, got width={self.width}, "
                f"before={self.before}, after={self.after}; write Window(4) or Window(before=3, after=0)"
            )
        if self.width is not None:
            must_count("Window width", self.width, least=1)
        else:
            must_count("Window before", self.before)
            must_count("Window after", self.after)

    def __repr__(self) -> str:
        return f"Window({self.width})" if self.width is not None else super().__repr__()

    @property
    def reach(self) -> tuple[int, int]:
        """How many keys before and after its own position a query sees."""
        if self.width is not None:
            return self.width - 1, self.width - 1
        return self.before or 0, self.after or 0

    def over(self, at: Place) -> Tensor:
        before, after = self.reach
        distance = at.i - at.j
        return (distance <= before) & (distance >= -after)

    def tiles(self, grid: Grid) -> Tiles:
        before, after = self.reach
        return _between(grid.distance, -after, before)


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
        must_count("Dilated width", self.width, least=1)
        must_count("Dilated step", self.step, least=1)
        must_count("Dilated width * step", self.width * self.step)

    def over(self, at: Place) -> Tensor:
        distance = at.i - at.j
        return (distance.abs() < self.width * self.step) & (distance % self.step == 0)

    def tiles(self, grid: Grid) -> Tiles:
        reach = self.width * self.step - 1
        some, full = _between(grid.distance, -reach, reach)
        return Tiles(some, full if self.step == 1 else torch.zeros_like(full))


@term
class Diagonal(Mask):
    """i == j: each query sees itself; `~Diagonal()` forbids just that."""

    def over(self, at: Place) -> Tensor:
        return at.i == at.j

    def tiles(self, grid: Grid) -> Tiles:
        return _between(grid.distance, 0, 0)


@term
class Prefix(Mask):
    """j < n, with n a number or one per batch row. A prefix language model is `Causal() | Prefix(n)`.

    >>> print((Causal() | Prefix(2)).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, Tensor):
            must_be_integers("Prefix n", self.n, 0, 1)
        else:
            must_count("Prefix n", self.n)

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.n, Tensor):
            must_broadcast("Prefix n", self.n, {"b": sizes.b})

    def over(self, at: Place) -> Tensor:
        return at.j < (at.cut(self.n, "b") if isinstance(self.n, Tensor) else self.n)

    def tiles(self, grid: Grid) -> Tiles:
        n = grid.span(self.n, "b").low if isinstance(self.n, Tensor) else self.n
        return Tiles(grid.j.low < n, grid.j.high < n)


@term
class Global(Mask):
    """i or j is among the tokens (how many from the start, or their positions): whole rows and whole columns.

    A tensor of positions may have one row per batch row. Longformer's pattern is `Window(w) | Global(tokens)`.

    >>> print((Window(1) | Global((1,))).draw(4))
    ■ ■ · ·
    ■ ■ ■ ■
    · ■ ■ ·
    · ■ · ■
    """

    tokens: int | tuple[int, ...] | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Tensor):
            must_be_integers("Global tokens", self.tokens, 1, 2)
        elif isinstance(self.tokens, (tuple, list, range)):
            for token in self.tokens:
                must_count("Global tokens", token)
            object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        else:
            must_count("Global tokens", self.tokens)
            object.__setattr__(self, "tokens", int(self.tokens))

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.tokens, Tensor):
            must_broadcast("Global tokens", self.tokens, {"b": sizes.b, "tokens": None})

    def over(self, at: Place) -> Tensor:
        if isinstance(self.tokens, int):
            return ((at.i >= 0) & (at.i < self.tokens)) | (at.j < self.tokens)
        chosen = torch.zeros_like(at.i + at.j, dtype=torch.bool)
        for token in self._each(lambda column: at.cut(column, "b")):
            chosen = chosen | (at.i == token) | (at.j == token)
        return chosen

    def tiles(self, grid: Grid) -> Tiles:
        if isinstance(self.tokens, int):
            rows, cols = _between(grid.i, 0, self.tokens - 1), _between(grid.j, 0, self.tokens - 1)
            return Tiles(rows.some | cols.some, rows.full | cols.full)
        some = torch.zeros_like(grid.i.low + grid.j.low, dtype=torch.bool)
        for token in self._each(lambda column: grid.span(column, "b").low):
            for low, high in (grid.i, grid.j):
                some = some | ((low <= token) & (token <= high))
        return Tiles(some, torch.zeros_like(some))

    def _each(self, cut: Callable[[Tensor], Tensor]) -> list[int] | list[Tensor]:
        if isinstance(self.tokens, Tensor):
            return [cut(column) for column in self.tokens.unbind(-1)]
        assert isinstance(self.tokens, tuple)
        return list(self.tokens)


@term
class Near(Mask):
    """abs(j - center[b, h, row]) <= radius: keys around a centre of each query's own, broadcastable to b h i."""

    center: Tensor
    radius: float

    def __post_init__(self) -> None:
        must_be_tensor("Near center", self.center)
        must_be_number("Near radius", self.radius)
        if self.radius < 0:
            raise ValueError(f"Near radius must be 0 or more, got {self.radius}")

    def check(self, sizes: Sizes) -> None:
        must_broadcast("Near center", self.center, {"b": sizes.b, "h": sizes.h, "i": sizes.i})

    def lifted(self, device: torch.device, dtype: torch.dtype) -> Near:
        return Near(self.center.detach(), self.radius)

    def over(self, at: Place) -> Tensor:
        return (at.j - _exact(at.cut(self.center, "bhi"))).abs() <= self.radius

    def tiles(self, grid: Grid) -> Tiles:
        center = grid.span(_exact(self.center), "bhi")
        return _between(Span(grid.j.low - center.high, grid.j.high - center.low), -self.radius, self.radius)

    def _drawn(self) -> tuple[int, int]:
        n = self.center.shape[-1] if self.center.ndim else 12
        return _small(n if n > 1 else 12, n if n > 1 else 12)


@term
class Padding(Mask):
    """j < lengths[b], or keep[b, j]: hides padding keys, and keys only.

    `Padding(lengths)` takes a tuple or a tensor of whole numbers, `Padding(keep)` a bool tensor, True = a real key.
    """

    keys: tuple[int, ...] | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.keys, (tuple, list)):
            for length in self.keys:
                must_count("Padding lengths", length)
            object.__setattr__(self, "keys", tuple(int(length) for length in self.keys))
        else:
            must_be_tensor("Padding", self.keys, hint="Padding(torch.tensor([3, 5]))")
            if self.keys.ndim == 2 and self.keys.dtype != torch.bool:
                raise TypeError(
                    f"Padding keep must be bool, True = a real key, got {self.keys.dtype} of shape "
                    f"{tuple(self.keys.shape)}; write Padding(keep.bool())"
                )
            if self.keys.ndim != 2 and self.keys.dtype == torch.bool:
                raise ValueError(f"Padding keep must have dims (b, j), got shape {tuple(self.keys.shape)}")
            if self.keys.dtype != torch.bool:
                must_be_integers("Padding lengths", self.keys, 1)

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.keys, Tensor) and self.keys.dtype == torch.bool:
            must_broadcast("Padding keep", self.keys, {"b": sizes.b, "j": sizes.j})
            return
        n = len(self.keys)
        if n not in (1, sizes.b):
            raise ValueError(f"Padding lengths must hold one length per batch row, got {n} for b={sizes.b}")
        if n and sizes.readable:
            least, most = (int(x) for x in torch.as_tensor(self.keys).aminmax())
            if most > sizes.j or least < 0:
                wrong = most if most > sizes.j else least
                raise ValueError(f"Padding lengths must be from 0 to the number of keys j={sizes.j}, got {wrong}")

    def lifted(self, device: torch.device, dtype: torch.dtype) -> Padding:
        return Padding(self._tensor(device))

    def over(self, at: Place) -> Tensor:
        keys = self._tensor(at.device)
        return at.cut(keys, "bj") if keys.dtype == torch.bool else at.j < at.cut(keys, "b")

    def tiles(self, grid: Grid) -> Tiles:
        keys = self._tensor(grid.device)
        if keys.dtype == torch.bool:
            return _all_or_any(grid.span(keys, "bj"))
        length = grid.span(keys, "b").low
        return Tiles(grid.j.low < length, grid.j.high < length)

    def _tensor(self, device: torch.device) -> Tensor:
        return self.keys if isinstance(self.keys, Tensor) else torch.tensor(self.keys, device=device)

    def _drawn(self) -> tuple[int, int]:
        keys = self._tensor(torch.device("cpu"))
        n = keys.shape[-1] if keys.dtype == torch.bool else int(keys.max()) + 2 if keys.numel() else 1
        return _small(n, n)


@term
class Documents(Mask):
    """query_ids[row] == key_ids[j]: tokens packed into one sequence see their own document only.

    Ids have dims (i,) or (b, i); one argument serves where queries and keys are the same tokens.

    >>> print(Documents(torch.tensor([0, 0, 1, 1])).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    · · ■ ■
    · · ■ ■
    """

    query_ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            if ids is not None:
                must_be_tensor(f"Documents {name}", ids)
                must_be_integers(f"Documents {name}", ids, 1, 2)

    def check(self, sizes: Sizes) -> None:
        if self.key_ids is None and sizes.i != sizes.j:
            raise ValueError(
                f"Documents needs key_ids where queries and keys differ, got i={sizes.i} and j={sizes.j}; "
                "write Documents(query_ids, key_ids)"
            )
        must_broadcast("Documents query_ids", self.query_ids, {"b": sizes.b, "i": sizes.i})
        must_broadcast("Documents key_ids", self._keys, {"b": sizes.b, "j": sizes.j})

    def over(self, at: Place) -> Tensor:
        return at.cut(self.query_ids, "bi") == at.cut(self._keys, "bj")

    def tiles(self, grid: Grid) -> Tiles:
        query, key = grid.span(self.query_ids, "bi"), grid.span(self._keys, "bj")
        some = (query.low <= key.high) & (key.low <= query.high)
        one = (query.low == query.high) & (key.low == key.high)
        return Tiles(some, one & (query.low == key.low))

    @property
    def _keys(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    def _drawn(self) -> tuple[int, int]:
        return _small(self.query_ids.shape[-1], self._keys.shape[-1])


@term
class Blocks(Mask):
    """layout[..., row // size, j // size]: a block-sparse pattern, layout a bool tensor broadcastable over b h.

    >>> print(Blocks(torch.eye(2, dtype=torch.bool), 2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    · · ■ ■
    · · ■ ■
    """

    layout: Tensor
    size: int

    def __post_init__(self) -> None:
        must_be_bool("Blocks layout", self.layout)
        must_count("Blocks size", self.size, least=1)

    def check(self, sizes: Sizes) -> None:
        rows, cols = -(-sizes.i // self.size), -(-sizes.j // self.size)
        must_broadcast("Blocks layout", self.layout, {"b": sizes.b, "h": sizes.h, "i/size": rows, "j/size": cols})

    def over(self, at: Place) -> Tensor:
        return look_up(self.layout, at.b, at.h, at.row // self.size, at.j // self.size)

    def tiles(self, grid: Grid) -> Tiles:
        count, area = grid.count(self.layout, self.size)
        return Tiles(count > 0, count == area)

    def _drawn(self) -> tuple[int, int]:
        return _small(self.layout.shape[-2] * self.size, self.layout.shape[-1] * self.size)


@term
class Dense(Mask):
    """keep[..., row, j]: any pattern, spelled out in a bool tensor, True = may attend; as large as you make it."""

    keep: Tensor

    def __post_init__(self) -> None:
        must_be_bool("Dense keep", self.keep)

    def check(self, sizes: Sizes) -> None:
        must_broadcast("Dense keep", self.keep, {"b": sizes.b, "h": sizes.h, "i": sizes.i, "j": sizes.j})

    def over(self, at: Place) -> Tensor:
        return at.cut(self.keep, "bhij")

    def tiles(self, grid: Grid) -> Tiles:
        return _all_or_any(grid.span(self.keep, "bhij"))

    def _drawn(self) -> tuple[int, int]:
        return _small(*self.keep.shape[-2:])


@term
class Rule(Mask):
    """fn(b, h, i, j): any function written for FlexAttention. Tensors it closes over are its own affair."""

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Rule takes a function of (b, h, i, j), got {type(self.fn).__name__}")

    def over(self, at: Place) -> Tensor:
        seen = self.fn(at.b, at.h, at.i, at.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise TypeError(f"Rule: the function must return a bool tensor, got {kind}; return a comparison")
        return seen


def _exact(center: Tensor) -> Tensor:
    # Half precision cannot tell one position from the next.
    return center.to(torch.promote_types(center.dtype, torch.float32))


def _between(values: Span, low: float, high: float) -> Tiles:
    # Written so that NaN counts as "may be visible": what cannot be compared must be looked at.
    some = ~((values.high < low) | (values.low > high))
    full = (values.low >= low) & (values.high <= high)
    return Tiles(some, full)


def _all_or_any(keep: Span) -> Tiles:
    return Tiles(keep.high.bool(), keep.low.bool())


def _small(rows: int, cols: int) -> tuple[int, int]:
    return min(max(rows, 1), 24), min(max(cols, 1), 24)
