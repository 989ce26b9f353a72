"""What the functions of a call of flex_attention mean, as terms.

A `mask_mod` is a mask. A `score_mod` that adds numbers to the scores, -inf among them, is a mask and a bias; one that
bounds them by a tanh is a cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .block_mask import by_blocks, tiled
from .flex_mod_probe import Mod, rows_of
from .infer_mask import Rows

LARGE = 1e3  # a score that any cap has bounded
SCORES = (1.7, -2.9, LARGE, -LARGE)  # those a score_mod is tried on
CLOSE = 1e-3  # how far a tanh may be off, as kernels approximate it


def meanings(
    blocks: BlockMask | None,
    score_mod: Callable[..., Tensor] | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    fused: bool,
) -> list[dict[str, Any]]:
    """What `Reader.read` is to be told of them, each way that may be meant; nothing if there are no such terms.

    Fused kernels skip the tiles that a block mask leaves out, others ask its function about every pair: where that
    makes a difference there are two ways, and the output of the call tells which is true. If it is `fused`, a few pairs
    of each tile are looked at for it, or else all.
    """
    rows = None if blocks is None else _shown(blocks, shape, device, fused)
    if score_mod is None and (blocks is None or rows is not None):
        return [{"mask": rows}]
    ways: list[Mod | None] = [None]
    if blocks is not None:
        ways = [blocks.mask_mod] if rows is not None else [by_blocks(blocks), blocks.mask_mod]
    scored = torch.float64 if dtype == torch.float64 else torch.float32  # whatever is added
    found = [_meaning(score_mod, shown, shape, scored, device) for shown in ways]
    return [meaning for meaning in found if meaning is not None]


def _shown(blocks: BlockMask, shape: tuple[int, int, int, int], device: torch.device, fused: bool) -> Rows | None:
    """The pairs that a block mask shows; None where that depends on how it is read."""
    by_tiles = tiled(blocks, shape, device)
    if by_tiles is not None and fused:
        return by_tiles
    one, other = (rows_of(mod, shape, device) for mod in (by_blocks(blocks), blocks.mask_mod))
    same = all(bool((part == other.block(start, start + part.shape[2])).all()) for start, part in one.blocks())
    return (by_tiles or other) if same else None


def _meaning(
    score_mod: Callable[..., Tensor] | None,
    shown: Mod | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any] | None:
    """As `meanings`, where the pairs that are not hidden are these."""

    def made_of(score: float) -> Mod:
        def pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            full = torch.full_like(j, score, dtype=dtype)
            value = full if score_mod is None else score_mod(full, b, h, i, j)
            return value if shown is None else torch.where(shown(b, h, i, j), value, -torch.inf)

        return pair

    rows = {score: rows_of(made_of(score), shape, device) for score in (0.0, *SCORES)}

    def become(change: Callable[[float], float], close: float) -> bool:
        """Is every score s made what is added to a score of 0, and change(s)?"""
        return all(
            torch.allclose(
                rows[score].block(start, start + zero.shape[2]), zero + change(score), rtol=close, atol=close
            )
            for start, zero in rows[0.0].blocks()
            for score in SCORES
        )

    meaning: dict[str, Any] = {"mask": rows[0.0]}
    if become(lambda score: score, 1e-5):
        return meaning
    most = (rows[LARGE].block(start, start + zero.shape[2]) - zero for start, zero in rows[0.0].blocks())
    cap = max((float(x.nan_to_num(nan=0.0).max()) for x in most), default=0.0)
    return {**meaning, "cap": cap} if cap > 0 and become(lambda score: cap * math.tanh(score / cap), CLOSE) else None
