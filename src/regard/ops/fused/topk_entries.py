"""The k largest weights of each row, from the largest of each run of keys.

An entry among the k largest lies in one of the k runs with the largest maxima: were it in another, each of those k
would hold one as large. So one pass of the kernel finds the maxima, a strip of rows at a time, and then k runs a row
are scored entry by entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.torch_kernels import scaled_product_inputs, score_cap
from ..blocks.tile_weights import entry_weights
from ..call import Call
from ..terms.coordinates import Point
from .kernel_terms import Tiling, kernel_bias, mask_pattern


def saves_work(call: Call, k: int) -> bool:
    """True if k runs hold fewer keys than the matrix."""
    from ...kernels.summary.generic import tile_config

    return k * tile_config(call.k.shape[-1], call.q.dtype).run < call.shape[3]


def topk(call: Call, statistic: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest weights of each row and their keys, `b h i k` each, from the row statistic `b h i 1`."""
    from ...kernels.summary.generic import run_maxima, tile_config
    from ...kernels.topk_scores import score_key_runs

    q, keys, scale = scaled_product_inputs(call)
    b, h, i, j = call.shape
    config = tile_config(q.shape[-1], q.dtype)
    lse = statistic.to(torch.float32)
    size = 4 * -(-j // config.run) + BYTES_PER_ENTRY * k * config.run  # bytes a row
    values = torch.empty(b, h, i, k, device=q.device, dtype=torch.float32)
    indices = torch.empty(b, h, i, k, dtype=torch.long, device=q.device)
    maxima = run_maxima(
        q,
        keys,
        lse.squeeze(-1),
        scale=scale,
        offset=call.first_position,
        config=config,
        cap=score_cap(call),
        pattern=mask_pattern(call, Tiling(config.rows, config.cols)),
        bias=kernel_bias(call),
        rows_per_strip=STRIP_BYTES // max(1, b * h * size),
    )
    for rows, largest in maxima:
        runs = largest.topk(min(k, largest.shape[-1]), sorted=False).indices
        chosen = (runs[..., None] * config.run + torch.arange(config.run, device=q.device)).flatten(-2)
        s = score_key_runs(q[:, :, rows], keys, runs, config.run) * scale
        best = _candidate_weights(call, s, lse[:, :, rows], rows, chosen).topk(k)
        values[:, :, rows], indices[:, :, rows] = best.values, chosen.gather(-1, best.indices)
    return values, indices


STRIP_BYTES = 2**27  # memory for the rows handled at once
BYTES_PER_ENTRY = 32  # per candidate entry: its key twice, its score, its weight, its visibility


def _candidate_weights(call: Call, s: Tensor, lse: Tensor, rows: slice, j: Tensor) -> Tensor:
    """Return the weights of the candidate keys `j`, `b h rows chosen`; -1 for a candidate past the last key.

    `s` holds their scaled products with the queries, before cap, bias and mask.
    """
    b, h, _, n_j = call.shape
    device = s.device
    entries = (
        torch.arange(b, device=device)[:, None, None, None],
        torch.arange(h, device=device)[:, None, None],
        torch.arange(rows.start, rows.stop, device=device)[:, None],
        j.clamp(max=n_j - 1),
    )
    most = score_cap(call)
    s = s if most is None else torch.tanh(s / most) * most
    weights = entry_weights(call, Point(*entries, call.offset, call.dtype), s, lse)
    return torch.where(j < n_j, weights, -1.0)
