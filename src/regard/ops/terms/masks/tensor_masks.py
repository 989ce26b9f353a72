"""Masks that read a tensor: lengths, document ids, centres, block layouts, or a bool for every entry."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .... import torch_internals
from ....checks import check_bool_mask, check_broadcast, check_int, check_integer_tensor, check_number, check_tensor
from ...shape import Sizes
from ..coordinates import Coordinates, look_up
from ..mask_tiles import Grid, Span, Tiles
from ..term import term
from .mask_algebra import Mask


@term
class Near(Mask):
    """abs(j - center[b, h, row]) <= radius: keys around a centre per query; `center` broadcasts to b h i."""

    center: Tensor
    radius: float

    def __post_init__(self) -> None:
        check_tensor("Near center", self.center)
        check_number("Near radius", self.radius)
        if self.radius < 0:
            raise ValueError(f"Near radius must be 0 or more, got {self.radius}")

    def check(self, sizes: Sizes) -> None:
        check_broadcast("Near center", self.center, {"b": sizes.b, "h": sizes.h, "i": sizes.i})

    def with_tensors(self, device: torch.device, dtype: torch.dtype) -> Near:
        return Near(self.center.detach(), self.radius)

    def over(self, at: Coordinates) -> Tensor:
        return (at.j - _at_least_float32(at.slice_of(self.center, "bhi"))).abs() <= self.radius

    def tiles(self, grid: Grid) -> Tiles:
        center = grid.span(_at_least_float32(self.center), "bhi")
        return Span(grid.j.low - center.high, grid.j.high - center.low).between(-self.radius, self.radius)

    def _drawing_size(self) -> tuple[int, int]:
        n = self.center.shape[-1] if self.center.ndim else 12
        return _clamped_size(n if n > 1 else 12, n if n > 1 else 12)


@lru_cache(maxsize=16)
def _lengths_on(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Lengths on a GPU, copied once: the host waits for everything before such a copy."""
    with torch.inference_mode(False):
        return torch.tensor(lengths, device=device)


@term
class Padding(Mask):
    """j < lengths[b], or keep[b, j]: hides padding keys, but no queries.

    `Padding(lengths)` takes a tuple or a tensor of integers, `Padding(keep)` a bool tensor, True = a real key.
    """

    keys: tuple[int, ...] | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.keys, (tuple, list)):
            for length in self.keys:
                check_int("Padding lengths", length)
            object.__setattr__(self, "keys", tuple(int(length) for length in self.keys))
        else:
            check_tensor("Padding", self.keys, hint="Padding(torch.tensor([3, 5]))")
            if self.keys.ndim == 2 and self.keys.dtype != torch.bool:
                raise TypeError(
                    f"Padding keep must be bool, True = a real key, got {self.keys.dtype} of shape "
                    f"{tuple(self.keys.shape)}; write Padding(keep.bool()), or, if these are lengths of several batch "
                    "dims, Padding(lengths.flatten())"
                )
            if self.keys.ndim != 2 and self.keys.dtype == torch.bool:
                raise ValueError(
                    f"Padding keep must have dims (b, j), got shape {tuple(self.keys.shape)}; if these are several "
                    "batch dims, write Padding(keep.flatten(0, -2))"
                )
            if self.keys.dtype != torch.bool:
                check_integer_tensor("Padding lengths", self.keys, 1)

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.keys, Tensor) and self.keys.dtype == torch.bool:
            check_broadcast("Padding keep", self.keys, {"b": sizes.b, "j": sizes.j})
            return
        n = self.keys.shape[0] if isinstance(self.keys, Tensor) else len(self.keys)
        if n not in (1, sizes.b):
            raise ValueError(f"Padding lengths must hold one length per batch row, got {n} for b={sizes.b}")
        if n and sizes.readable:
            least, most = (int(x) for x in torch.as_tensor(self.keys).aminmax())
            if most > sizes.j or least < 0:
                wrong = most if most > sizes.j else least
                raise ValueError(f"Padding lengths must be from 0 to the number of keys j={sizes.j}, got {wrong}")

    def with_tensors(self, device: torch.device, dtype: torch.dtype) -> Padding:
        return Padding(self.keys_on(device))

    def over(self, at: Coordinates) -> Tensor:
        keys = self.keys_on(at.device)
        return at.slice_of(keys, "bj") if keys.dtype == torch.bool else at.j < at.slice_of(keys, "b")

    def tiles(self, grid: Grid) -> Tiles:
        keys = self.keys_on(grid.device)
        if keys.dtype == torch.bool:
            return _tiles_of_keep(grid.span(keys, "bj"))
        length = grid.span(keys, "b").low
        return Tiles(grid.j.low < length, grid.j.high < length)

    def keys_on(self, device: torch.device) -> Tensor:
        """The lengths or the bools as a tensor; do not write to it."""
        if isinstance(self.keys, Tensor):
            return self.keys
        if device.type != "cuda" or torch.compiler.is_compiling() or torch_internals.in_tracing_mode():
            return torch.tensor(self.keys, device=device)
        return _lengths_on(self.keys, device)

    def _drawing_size(self) -> tuple[int, int]:
        keys = self.keys_on(torch.device("cpu"))
        n = keys.shape[-1] if keys.dtype == torch.bool else int(keys.max()) + 2 if keys.numel() else 1
        return _clamped_size(n, n)


@term
class Documents(Mask):
    """query_ids[row] == key_ids[j]: tokens packed into one sequence see their own document only.

    Ids have dims (i,) or (b, i). One argument is enough if queries and keys are the same tokens.

    >>> print(Documents(torch.tensor([0, 0, 1, 1])).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    · · ■ ■
    · · ■ ■
    """

    query_ids: Tensor
    key_ids: Tensor | None = None

    @classmethod
    def from_cu_seqlens(cls, query: Tensor, key: Tensor | None = None) -> Documents:
        """Return the mask of sequences packed as for variable-length kernels: `[0, 3, 5]` are two, of 3 and 2 tokens.

        `Causal()` beside it compares positions in the pack, so it takes queries and keys that are packed alike.

        >>> Documents.from_cu_seqlens(torch.tensor([0, 3, 5])).query_ids
        tensor([0, 0, 0, 1, 1])
        """
        return cls(_ids_of("query", query), None if key is None else _ids_of("key", key))

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            if ids is not None:
                check_tensor(f"Documents {name}", ids)
                check_integer_tensor(f"Documents {name}", ids, 1, 2)

    def check(self, sizes: Sizes) -> None:
        if self.key_ids is None and sizes.i != sizes.j:
            raise ValueError(
                f"Documents needs key_ids if queries and keys differ in number, got i={sizes.i} and j={sizes.j}; "
                "write Documents(query_ids, key_ids)"
            )
        check_broadcast("Documents query_ids", self.query_ids, {"b": sizes.b, "i": sizes.i})
        check_broadcast("Documents key_ids", self._keys, {"b": sizes.b, "j": sizes.j})

    def over(self, at: Coordinates) -> Tensor:
        return at.slice_of(self.query_ids, "bi") == at.slice_of(self._keys, "bj")

    def tiles(self, grid: Grid) -> Tiles:
        query, key = grid.span(self.query_ids, "bi"), grid.span(self._keys, "bj")
        some = (query.low <= key.high) & (key.low <= query.high)
        one_document = (query.low == query.high) & (key.low == key.high)
        return Tiles(some, one_document & (query.low == key.low))

    def ids(self) -> tuple[Tensor, Tensor]:
        """The document of each query, `i` or `b i`, and of each key."""
        return self.query_ids, self._keys

    @property
    def _keys(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    def _drawing_size(self) -> tuple[int, int]:
        return _clamped_size(self.query_ids.shape[-1], self._keys.shape[-1])


@term
class Blocks(Mask):
    """layout[..., row // size, j // size]: a block-sparse pattern; `layout` is bool and broadcasts over b h.

    `size` is a number, or the rows and the columns of a block.

    >>> print(Blocks(torch.eye(2, dtype=torch.bool), 2).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    · · ■ ■
    · · ■ ■
    """

    layout: Tensor
    size: int | tuple[int, int]

    @classmethod
    def choose(
        cls, scores: Tensor, k: int, *, rows: int = 1, cols: int = 64, causal: bool = True, offset: int = 0
    ) -> Blocks:
        """Return the mask of the k key blocks with the highest scores, for each block of queries (MoBA, NSA).

        `scores` are `b h query-blocks key-blocks`, or broadcast to it: for blocks of `rows` queries and `cols` keys,
        say products of queries with the mean key of each block. A score of -inf or NaN is never chosen, and the choice
        has no gradient.

        With `causal`, blocks that hold a key after the first of their queries are not ranked: those that the queries
        reach are kept, and count among the k, and later ones are left out. So a choice depends on earlier keys alone,
        and with rows=1 on earlier queries alone. `Causal()` beside it hides the rest of a reached block. `offset` is
        the position of the first query, 0 if queries and keys are the same tokens. Pass causal=False for encoders.

        >>> from regard import Causal
        >>> scores = torch.tensor([[0.0, 0, 0, 0], [9, 0, 0, 0], [1, 2, 0, 9], [1, 3, 2, 0]])
        >>> print((Causal() & Blocks.choose(scores, 2, rows=2, cols=2)).draw(8))
        ■ · · · · · · ·
        ■ ■ · · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ ■ · · · ·
        · · ■ ■ ■ · · ·
        · · ■ ■ ■ ■ · ·
        · · ■ ■ · · ■ ·
        · · ■ ■ · · ■ ■
        """
        check_tensor("Blocks.choose scores", scores, hint="q @ keys.mT")
        if scores.ndim not in (2, 3, 4) or not scores.is_floating_point():
            raise ValueError(
                "Blocks.choose takes scores b h query-blocks key-blocks in floating point, got "
                f"{scores.dtype} {tuple(scores.shape)}"
            )
        for name, value in (("k", k), ("rows", rows), ("cols", cols)):
            check_int(f"Blocks.choose {name}", value, least=1)
        check_int("Blocks.choose offset", offset, least=-(2**62))
        ranked, count = scores.detach(), torch.full((), k, device=scores.device)
        reached = torch.zeros((), dtype=torch.bool, device=scores.device)
        if causal:
            first = torch.arange(scores.shape[-2], device=scores.device)[:, None] * rows + offset
            start = torch.arange(scores.shape[-1], device=scores.device) * cols
            is_past = start + cols - 1 <= first
            reached = ~is_past & (start <= first + rows - 1)
            ranked = torch.where(is_past, ranked, -torch.inf)
            count = (k - reached.sum(-1, keepdim=True)).clamp(min=0)
        best = torch.where(ranked.isnan(), -torch.inf, ranked).topk(min(k, scores.shape[-1]), -1)
        rank = torch.arange(best.values.shape[-1], device=scores.device)
        chosen = (best.values > -torch.inf) & (rank < count)
        layout = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, chosen)
        return cls(layout | reached, (rows, cols))

    def __post_init__(self) -> None:
        check_bool_mask("Blocks layout", self.layout)
        if isinstance(self.size, (tuple, list)):
            if len(self.size) != 2:
                raise ValueError(f"Blocks size must be a number, or (rows, columns), got {self.size}")
            object.__setattr__(self, "size", tuple(self.size))
        for size in self.sizes:
            check_int("Blocks size", size, least=1)

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and the columns of a block."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def check(self, sizes: Sizes) -> None:
        rows, cols = (-(-n // size) for n, size in zip((sizes.i, sizes.j), self.sizes, strict=True))
        check_broadcast("Blocks layout", self.layout, {"b": sizes.b, "h": sizes.h, "i/size": rows, "j/size": cols})

    def over(self, at: Coordinates) -> Tensor:
        rows, cols = self.sizes
        return look_up(self.layout, at.b, at.h, at.row // rows, at.j // cols)

    def tiles(self, grid: Grid) -> Tiles:
        count, area = grid.count(self.layout, self.sizes)
        return Tiles(count > 0, count == area)

    def _drawing_size(self) -> tuple[int, int]:
        rows, cols = self.sizes
        return _clamped_size(self.layout.shape[-2] * rows, self.layout.shape[-1] * cols)


@term
class Dense(Mask):
    """keep[..., row, j]: any pattern as a bool tensor, True = may attend. It broadcasts to b h i j."""

    keep: Tensor

    def __post_init__(self) -> None:
        check_bool_mask("Dense keep", self.keep)

    def check(self, sizes: Sizes) -> None:
        check_broadcast("Dense keep", self.keep, {"b": sizes.b, "h": sizes.h, "i": sizes.i, "j": sizes.j})

    def over(self, at: Coordinates) -> Tensor:
        return at.slice_of(self.keep, "bhij")

    def tiles(self, grid: Grid) -> Tiles:
        return _tiles_of_keep(grid.span(self.keep, "bhij"))

    def _drawing_size(self) -> tuple[int, int]:
        return _clamped_size(*self.keep.shape[-2:])


def _at_least_float32(center: Tensor) -> Tensor:
    # Half precision rounds large positions to the same number.
    return center.to(torch.promote_types(center.dtype, torch.float32))


def _ids_of(name: str, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence number of each token, from the cumulative lengths of the sequences."""
    check_tensor(f"{name} cu_seqlens", cu_seqlens)
    check_integer_tensor(f"{name} cu_seqlens", cu_seqlens, 1)
    lengths = cu_seqlens.diff()
    if not cu_seqlens.numel() or bool((cu_seqlens[0] != 0) | (lengths < 0).any()):
        raise ValueError(
            f"{name} cu_seqlens must begin with 0 and not decrease, got {cu_seqlens.tolist()[:8]}; "
            "write F.pad(lengths.cumsum(0), (1, 0))"
        )
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)


def _tiles_of_keep(keep: Span) -> Tiles:
    return Tiles(keep.high.bool(), keep.low.bool())


def _clamped_size(rows: int, cols: int) -> tuple[int, int]:
    return min(max(rows, 1), 24), min(max(cols, 1), 24)
