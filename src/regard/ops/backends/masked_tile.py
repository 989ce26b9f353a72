"""Masked attention of few tokens on the CPU: PyTorch's kernel, once, over the keys that the mask leaves visible.

For short sequences and single queries, what surrounds the kernel costs more than the kernel. So the tile of a mask is
made once and cached, keys before and after the visible ones are not read, and whether hidden garbage leaked is read
off the output, not off all keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks.prepared_call import FEW_ROWS, is_finite, is_safe, visible_key_range
from ..blocks.tile_weights import additive_tile
from ..call import FLOATS, Call
from ..term_cache import cached_per_term
from ..terms import masks
from ..terms.masks.mask_algebra import And, Mask, Not, Or
from ..torch_state import in_forward_mode, is_traced
from . import sdpa
from .torch_kernels import differentiable_once, run_fused

MAX_CACHED_ENTRIES = 2**18  # entries of a tile, a MB in float32
CACHEABLE = {  # their fields hash, and they read nothing but their fields; not so a `Rule`, or a mask of the user
    masks.Blocks,
    masks.Causal,
    masks.Chunked,
    masks.Dense,
    masks.Diagonal,
    masks.Dilated,
    masks.Documents,
    masks.Global,
    masks.Near,
    masks.Neighborhood,
    masks.Padding,
    masks.Prefix,
    masks.Window,
}


class MaskTile(NamedTuple):
    """The keys that some query may see, and the numbers added to their scores; None if every query sees all keys."""

    keys: slice
    added: Tensor | None  # b|1 h|1 i keys


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: object = None) -> Tensor | None:
    """Masked attention of few tokens; None for any other call, and if hidden garbage may have leaked.

    A shortcut past `Call`, as `sdpa.attend_directly` is, under the same conditions on q, k and v. A mask that hides
    NaN or Inf adds -inf to a score that is NaN or Inf, and 0 times such a value is NaN: the output then is not
    finite. A backward multiplies 0 by hidden keys, and hidden values by the gradient, so if there will be one, keys
    must be finite and values not so large that the product overflows.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or is_traced() or in_forward_mode():
        return None
    dtype, rows, keys = q.dtype, q.shape, k.shape
    if not (q.is_cpu and k.is_cpu and v.is_cpu and dtype == k.dtype == v.dtype) or dtype not in FLOATS:
        return None
    if not (len(rows) == len(keys) == 4) or keys != v.shape or torch.is_autocast_enabled("cpu"):
        return None
    (b, h, i, _), (b_k, g, j, _) = rows, keys
    if b != b_k or not q.numel() or not k.numel() or (i > FEW_ROWS and b * h * i * j > sdpa.MAX_TILE_ENTRIES):
        return None
    if not (offset is None or type(offset) is int) or not _is_cacheable(mask):
        return None
    tile = cached_per_term(mask, (MaskTile, rows, keys, offset, dtype), lambda: _mask_tile(q, k, v, mask, offset))
    if tile is None:
        return None
    if tile.keys.stop - tile.keys.start < j:
        k, v = k[:, :, tile.keys], v[:, :, tile.keys]
    if h == g and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=tile.added)
        differentiable_once(out)
    else:
        out, _ = run_fused(q, k, v, scale=q.shape[-1] ** -0.5, added=tile.added, causal=False, dropout=0.0)
    if tile.added is None:
        return out
    is_clean = is_finite(out) and (not out.requires_grad or (is_finite(k) and is_safe(v)))
    return out if is_clean else None


def _mask_tile(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int | None) -> MaskTile | None:
    """The tile of a call, which is validated; None if it is too large, or if it would be mostly empty."""
    call = Call.of(q.detach(), k.detach(), v.detach(), mask=mask, offset=offset)
    keys, seen, is_full = visible_key_range(call)
    if not seen or keys.stop - keys.start > 2 * seen:
        return None
    if is_full:
        return MaskTile(keys, None)
    added = additive_tile(call, replace(call.whole(), cols=keys), q.dtype)
    assert added is not None
    return MaskTile(keys, added) if added.numel() <= MAX_CACHED_ENTRIES else None


def _is_cacheable(mask: Mask) -> bool:
    kind = type(mask)
    if kind is And or kind is Or:
        assert isinstance(mask, (And, Or))
        return _is_cacheable(mask.left) and _is_cacheable(mask.right)
    if kind is Not:
        assert isinstance(mask, Not)
        return _is_cacheable(mask.mask)
    return kind in CACHEABLE
