"""Masks, biases and caps from the functions of a `flex_attention` call, by evaluating them.

A `mask_mod` is a mask. A `score_mod` that adds numbers to the scores, -inf among them, is a mask and a bias; one that
bounds the scores by a tanh is a cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .block_mask import by_blocks, read_tiles
from .flex_mod_probe import Mod, rows_of
from .infer_mask import Rows

LARGE_SCORE = 1e3  # any cap bounds such a score
PROBE_SCORES = (1.7, -2.9, LARGE_SCORE, -LARGE_SCORE)  # a score_mod is evaluated at these scores
TANH_TOLERANCE = 1e-3  # kernels approximate tanh
UNSUPPORTED_MODS = (
    "its score_mod or block mask does more than hide pairs, add numbers to their scores, or bound scores by a tanh, "
    "which regard cannot express"
)


class FlexReading(NamedTuple):
    """The mask, with the numbers that are added to scores, and the cap of a `flex_attention` call."""

    mask: Rows | None
    cap: float | None = None


@torch.no_grad()
def readings_of_mods(
    blocks: BlockMask | None,
    score_mod: Callable[..., Tensor] | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    fused: bool,
) -> list[FlexReading]:
    """Return every reading of the functions, or an empty list if they cannot be expressed.

    Fused kernels skip the blocks that a block mask leaves out, while the eager implementation evaluates `mask_mod` for
    every pair. If these differ there are two readings, and the output of the call decides. `fused`: compare a few pairs
    of each block; otherwise compare all pairs.
    """
    rows = None if blocks is None else _visible_pairs(blocks, shape, device, fused)
    if score_mod is None and (blocks is None or rows is not None):
        return [FlexReading(rows)]
    visible: list[Mod | None] = [None]
    if blocks is not None:
        visible = [blocks.mask_mod] if rows is not None else [by_blocks(blocks), blocks.mask_mod]
    score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    readings = [_reading(score_mod, mod, shape, score_dtype, device) for mod in visible]
    return [reading for reading in readings if reading is not None]


def _visible_pairs(
    blocks: BlockMask, shape: tuple[int, int, int, int], device: torch.device, fused: bool
) -> Rows | None:
    """Return the pairs that a block mask shows; None if its blocks and its `mask_mod` disagree."""
    by_tiles = read_tiles(blocks, shape, device)
    if by_tiles is not None and fused:
        return by_tiles
    one, other = (rows_of(mod, shape, device) for mod in (by_blocks(blocks), blocks.mask_mod))
    same = all(bool((part == other.block(start, start + part.shape[2])).all()) for start, part in one.blocks())
    return (by_tiles or other) if same else None


def _reading(
    score_mod: Callable[..., Tensor] | None,
    shown: Mod | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> FlexReading | None:
    """Return the reading of a score_mod if the pairs of `shown` are visible; None if it cannot be expressed."""

    def pairs_for(score: float) -> Mod:
        def pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            full = torch.full_like(j, score, dtype=dtype)
            value = full if score_mod is None else score_mod(full, b, h, i, j)
            return value if shown is None else torch.where(shown(b, h, i, j), value, -torch.inf)

        return pair

    rows = {score: rows_of(pairs_for(score), shape, device) for score in (0.0, *PROBE_SCORES)}

    def is_sum_with(change: Callable[[float], float], close: float) -> bool:
        """True if the score_mod turns every score s into score_mod(0) + change(s)."""
        return all(
            torch.allclose(
                rows[score].block(start, start + zero.shape[2]), zero + change(score), rtol=close, atol=close
            )
            for start, zero in rows[0.0].blocks()
            for score in PROBE_SCORES
        )

    reading = FlexReading(rows[0.0])
    if is_sum_with(lambda score: score, 1e-5):
        return reading
    bounds = (rows[LARGE_SCORE].block(start, start + zero.shape[2]) - zero for start, zero in rows[0.0].blocks())
    cap = max((float(x.nan_to_num(nan=0.0).max()) for x in bounds), default=0.0)
    return (
        reading._replace(cap=cap)
        if cap > 0 and is_sum_with(lambda score: cap * math.tanh(score / cap), TANH_TOLERANCE)
        else None
    )
