"""FlexAttention's functions of one pair, (b, h, i, j), over whole rows of pairs.

Most of them can be called with all indices at once, which leaves out dims they do not look at. One such as
`table[b][i, j]` means something else then, so each is asked about some pairs in both ways first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .recognize import Rows

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ASKED = 4  # of each dim
ONE_BY_ONE = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def rows_of(mod: Mod, shape: tuple[int, int, int, int], device: torch.device) -> Rows:
    """What it says of each pair, `b|1 h|1 i j`, as rows."""
    b, h, i, j = (torch.arange(n, device=device) for n in shape)
    at_once = _takes_all_at_once(mod, shape, device)

    def block(start: int, stop: int) -> Tensor:
        if not at_once:
            return _one_by_one(mod)(b, h, i[start:stop], j)
        value = mod(*_spread(b, h, i[start:stop], j))
        return value[(None,) * (4 - value.ndim)].expand(-1, -1, stop - start, len(j))

    first = block(0, min(1, len(i)))
    return Rows((first.shape[0], first.shape[1], len(i), len(j)), block, device)


def by_blocks(blocks: BlockMask) -> Mod:
    """The pairs a fused kernel shows: all of the full blocks, of the others those its function shows."""
    partial = _listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = None
    if blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None:
        full = _listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    high, wide = blocks.BLOCK_SIZE

    def at(which: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return which[b.clamp(max=which.shape[0] - 1), h.clamp(max=which.shape[1] - 1), i // high, j // wide]

    def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        some = at(partial, b, h, i, j) & blocks.mask_mod(b, h, i, j)
        return some if full is None else some | at(full, b, h, i, j)

    return shown


def _listed(count: Tensor, places: Tensor) -> Tensor:
    """Which columns of blocks each row of blocks lists, of as many as it counts."""
    columns = places.shape[-1]
    listed = torch.where(torch.arange(columns, device=count.device) < count[..., None], places, columns).long()
    return torch.zeros(*count.shape, columns + 1, dtype=torch.bool, device=count.device).scatter(-1, listed, True)


def _takes_all_at_once(mod: Mod, shape: tuple[int, int, int, int], device: torch.device) -> bool:
    some = [torch.linspace(0, max(0, n - 1), min(ASKED, n), device=device).round().long() for n in shape]
    if not all(map(len, some)):
        return True
    truth = _one_by_one(mod)(*some)
    try:
        return torch.equal(mod(*_spread(*some)).expand_as(truth), truth)
    except (IndexError, RuntimeError):  # shapes that do not go together
        return False


def _spread(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def _one_by_one(mod: Mod) -> Mod:
    """The function of four lists of indices, `b, h, i, j -> b h i j`."""
    for dims in ONE_BY_ONE:
        mod = torch.vmap(mod, in_dims=dims)
    return mod
