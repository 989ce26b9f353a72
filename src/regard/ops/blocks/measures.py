"""Measures of the weights that never store them: reductions over blocks of rows.

A `Reduction` run by `evaluate` is differentiable once; the functions from `summarize` on return detached numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..terms.coordinates import Block
from ..terms.normalizers import SinkSoftmax, Softmax
from .pool_bins import Mesh
from .prepared_call import PreparedCall, planned_blocks
from .reduction import Reduction, empty_row_statistic, normalize_block, scores, weigh
from .tile_weights import PlannedBlock


def entropy() -> Reduction:
    """-sum_j A log A, in nats: `b h i`; NaN for a row with a negative weight."""
    return Reduction(lambda prepared, block, A, x: _entropy(prepared, A), "rows", measure="entropy")


def key_sums() -> Reduction:
    """sum_i A: `b h j`."""
    return Reduction(lambda prepared, block, A, x: A.sum(-2), "keys", measure="received")


def largest() -> Reduction:
    """max_j A: `b h i`."""
    return Reduction(lambda prepared, block, A, x: A.amax(-1) if A.shape[-1] else A.sum(-1), "rows", measure="max")


def logit() -> Reduction:
    """max_j s, the largest score: `b h i`; -inf for a row that sees no key."""
    return Reduction(
        lambda prepared, block, s, x: _largest_score(s), "rows", measure="logit", reads_scores=True, empty=-math.inf
    )


def distance() -> Reduction:
    """sum_j A abs(i - j): `b h i`."""
    return Reduction(lambda prepared, block, A, x: (A * (block.i - block.j).abs()).sum(-1), "rows", measure="distance")


def statistic() -> Reduction:
    """The row statistic: `b h i`."""
    return Reduction(None, "rows")


def columns(ids: Tensor, n_j: int) -> Reduction:
    """Whole columns of A: `b h i ids`."""

    def value(prepared: PreparedCall, block: Block, A: Tensor, x: Tensor | None) -> Tensor:
        # Keys outside of the block have weight 0: they are read from an extra column of zeros.
        place = torch.full((n_j,), A.shape[-1], device=A.device)
        place[block.cols] = torch.arange(A.shape[-1], device=A.device)
        return F.pad(A, (0, 1))[..., place[ids]]

    return Reduction(value, "rows", (ids.numel(),))


def known_columns(prepared: PreparedCall, ids: Tensor) -> Tensor:
    """The same columns from the row statistic, without a gradient: only those keys are scored."""
    b, h, i, _ = prepared.shape
    parts = []
    step = max(1, 2**20 // max(1, b * h * ids.numel()))
    for start in range(0, i, step):
        block = prepared.block(slice(0, b), slice(0, h), slice(start, min(start + step, i)), ids)
        parts.append(weigh(prepared, PlannedBlock(block, slice(0, ids.numel())))[0])
    return torch.cat(parts, 2) if parts else prepared.q.new_zeros(b, h, 0, ids.numel())


def _entropy(prepared: PreparedCall, A: Tensor) -> Tensor:
    found = -(A * torch.where(A > 0, A, 1.0).log()).sum(-1)
    return torch.where((A < 0).any(-1), math.nan, found) if prepared.normalize.signed else found


def _largest_score(s: Tensor) -> Tensor:
    """The largest score of each row; a row that sees no key passes no gradient."""
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    return torch.where(top == -math.inf, -math.inf, top)


def summarize(
    prepared: PreparedCall, mesh: Mesh | None = None, peaks: bool = False, queries: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Entropy, received mass, maximum, distance and logit in one pass, and the row statistic.

    With a mesh also the map of bin sums, with `peaks` the largest entry of each pair of bins. With `queries`, `b i`,
    the rows of all others are zeros.
    """
    b, h, i, j = prepared.shape
    shapes: dict[str, tuple[int, ...]] = {"entropy": (i,), "received": (j,), "max": (i,), "distance": (i,)}
    if mesh is not None:
        shapes["map"] = mesh.shape
    found = {name: prepared.q.new_zeros(b, h, *shape) for name, shape in shapes.items()}
    found["logit"] = prepared.q.new_full((b, h, i), -math.inf if prepared.normalize.has_scores else math.nan)
    if mesh is not None:
        row_bins, col_bins = mesh.ids
        if peaks:
            found["peaks"] = _lowest(prepared, *mesh.shape)
    statistic = empty_row_statistic(prepared) if prepared.statistic is None else prepared.statistic.clone()
    for planned in planned_blocks(prepared):
        block = planned.block
        at = block.batch, block.heads, block.rows
        s = scores(prepared, planned)
        logits = s.amax(-1)
        if prepared.statistic is not None and isinstance(prepared.normalize, (Softmax, SinkSoftmax)):
            log = s.sub_(_finite(prepared.statistic[at]))
            A = log.exp()
            entropies = _entropy_by_logs(A, log, hidden=planned.masked is not None or prepared.bias is not None)
        else:
            A, rows_statistic = normalize_block(prepared, block, s)
            entropies = _entropy_of(prepared, A, s, rows_statistic)
            if statistic is not None and rows_statistic is not None:
                statistic[at] = rows_statistic
        if queries is not None:
            hidden = ~queries[block.batch, None, block.rows]
            A, entropies = A.masked_fill_(hidden[..., None], 0.0), entropies.masked_fill(hidden, 0.0)
            logits = logits.masked_fill_(hidden, -math.inf)
        if prepared.normalize.has_scores:
            found["logit"][at] = logits
        found["max"][at] = A.amax(-1)
        found["entropy"][at] = entropies
        found["distance"][at] = _mean_distance(A, block)
        by_bin, bins = (A, None) if mesh is None else _sum_rows(A, row_bins[:, block.rows])
        found["received"][block.batch, block.heads].index_add_(2, block.j, by_bin.sum(2))
        if bins is None:
            continue
        _add_columns(found["map"][block.batch, block.heads], by_bin, bins, col_bins[:, block.j])
        if peaks:
            _raise_cells(found["peaks"][block.batch, block.heads], A, row_bins[:, block.rows], col_bins[:, block.j])
    if "peaks" in found:
        found["peaks"].masked_fill_(found["peaks"] == -math.inf, 0.0)
    return found, statistic


def bin_sums(prepared: PreparedCall, row_bins: Tensor, col_bins: Tensor, rows: int, cols: int) -> Tensor:
    """The sum of A over each pair of a row bin and a column bin, bins given as ids `1 i` or `b i`: `b h rows cols`."""
    b, h, _, _ = prepared.shape
    sums = torch.zeros(b, h, rows, cols, dtype=prepared.q.dtype, device=prepared.q.device)
    for planned in planned_blocks(prepared):
        block = planned.block
        A, _ = weigh(prepared, planned)
        for one, row_ids, col_ids in _per_batch(row_bins, col_bins, block):
            by_bin, bins = _sum_rows(A[one], row_ids)
            _add_columns(sums[block.batch, block.heads][one], by_bin, bins, col_ids)
    return sums


def bin_maxima(prepared: PreparedCall, row_bins: Tensor, col_bins: Tensor, rows: int, cols: int) -> Tensor:
    """The largest entry of A in each pair of bins: `b h rows cols`."""
    maxima = _lowest(prepared, rows, cols)
    for planned in planned_blocks(prepared):
        block = planned.block
        A, _ = weigh(prepared, planned)
        _raise_cells(maxima[block.batch, block.heads], A, row_bins[:, block.rows], col_bins[:, block.j])
    return maxima.masked_fill_(maxima == -math.inf, 0.0)


def topk(prepared: PreparedCall, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row and their keys: `b h i k` twice."""
    b, h, i, j = prepared.shape
    values = torch.zeros(b, h, i, k, dtype=prepared.q.dtype, device=prepared.q.device)
    # Rows that see nothing: k keys of weight 0.
    indices = torch.arange(k, device=prepared.q.device).expand(b, h, i, k).clone()
    for planned in planned_blocks(prepared):
        block = planned.block
        A, _ = weigh(prepared, planned)
        ids = block.j
        if ids.numel() < k:
            unseen = torch.ones(j, dtype=torch.bool, device=A.device)
            unseen[block.cols] = False
            more = unseen.nonzero().squeeze(-1)[: k - ids.numel()]
            A, ids = F.pad(A, (0, more.numel())), torch.cat([ids, more])
        best = A.topk(k, -1)
        at = block.batch, block.heads, block.rows
        values[at], indices[at] = best.values, ids[best.indices]
    return values, indices


def _entropy_of(prepared: PreparedCall, A: Tensor, s: Tensor, statistic: Tensor | None) -> Tensor:
    """The entropy of each row; overwrites the scores, which are not used afterwards."""
    if not isinstance(prepared.normalize, (Softmax, SinkSoftmax)) or statistic is None:
        return _entropy(prepared, A)
    return _entropy_by_logs(A, s.sub_(_finite(statistic)), hidden=True)


def _entropy_by_logs(A: Tensor, log: Tensor, hidden: bool) -> Tensor:
    """-sum A log A from log A, which is overwritten; -inf of hidden entries is clamped, since 0 * -inf is NaN."""
    log = log.clamp_(min=torch.finfo(log.dtype).min / 2) if hidden else log
    return -log.mul_(A).sum(-1)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -math.inf, 0.0, lse)


def _mean_distance(A: Tensor, block: Block) -> Tensor:
    """sum_j A abs(i - j): linear in j on either side of the block's rows, entry by entry only among them."""
    i, j = block.i.view(-1), block.j
    if isinstance(block.cols, Tensor) or isinstance(block.offset, Tensor) or block.row_ids is not None:
        return (A * (block.i - j).abs()).sum(-1)
    n, first = j.numel(), block.rows.start + block.offset
    left = min(max(first - block.cols.start, 0), n)
    right = min(max(first + i.numel() - block.cols.start, left), n)
    total = (A[..., left:right] * (block.i - j[left:right]).abs()).sum(-1)
    for part, sign in ((slice(0, left), 1), (slice(right, None), -1)):
        # Counted from the block's first row, so that the difference of large positions loses nothing.
        offset = (j[part] - i[0]).to(A.dtype)
        line = torch.stack([torch.ones_like(offset), offset], -1)
        mass, moment = (A[..., part] @ line).unbind(-1)
        total = total + sign * (mass * (i - i[0]) - moment)
    return total


def _sum_rows(A: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the rows of each bin: `b h i j, 1 i -> b h bins j`, and which bins they are."""
    bins, place, counts = ids[0].unique(return_inverse=True, return_counts=True)
    size = A.shape[2] // bins.numel()
    if bool((counts == size).all()) and bool((place[1:] >= place[:-1]).all()):
        return A.unflatten(2, (-1, size)).sum(3), bins
    return A.new_zeros(*A.shape[:2], bins.numel(), A.shape[3]).index_add_(2, place, A), bins


def _add_columns(sums: Tensor, by_bin: Tensor, bins: Tensor, col_ids: Tensor) -> None:
    """sums[:, :, bins, col_ids] += by_bin."""
    b, h, n, _ = by_bin.shape
    part = by_bin.new_zeros(b, h, n, sums.shape[-1])
    part.scatter_add_(3, col_ids[0].expand_as(by_bin), by_bin)
    sums.index_add_(2, bins, part)


def _lowest(prepared: PreparedCall, rows: int, cols: int) -> Tensor:
    """Cells `b h rows cols` that any entry raises: 0, or -inf if weights may be negative."""
    lowest = -math.inf if prepared.normalize.signed else 0.0
    return prepared.q.new_full((*prepared.shape[:2], rows, cols), lowest)


def _raise_cells(maxima: Tensor, A: Tensor, row_ids: Tensor, col_ids: Tensor) -> None:
    """maxima[:, :, row, col] = max(maxima[:, :, row, col], A) for the entries A of each pair of bins, ids `1 n`."""
    bins, place, counts = row_ids[0].unique(return_inverse=True, return_counts=True)
    size = A.shape[2] // bins.numel()
    if bool((counts == size).all()) and bool((place[1:] >= place[:-1]).all()):
        tallest = A.unflatten(2, (-1, size)).amax(3)
    else:
        tallest = torch.stack([A[:, :, place == n].amax(2) for n in range(bins.numel())], 2)
    part = maxima[:, :, bins]
    part.scatter_reduce_(3, col_ids[0].expand_as(tallest), tallest, "amax")
    maxima[:, :, bins] = part


def _per_batch(row_bins: Tensor, col_bins: Tensor, block: Block) -> list[tuple[slice, Tensor, Tensor]]:
    """The ids of a block's rows and keys, once for all its batch rows or once for each."""
    rows, cols = row_bins[:, block.rows], col_bins[:, block.j]
    if rows.shape[0] == cols.shape[0] == 1:
        return [(slice(None), rows, cols)]
    n = block.batch.stop - block.batch.start
    rows, cols = (x[block.batch] if x.shape[0] > 1 else x.expand(n, -1) for x in (rows, cols))
    return [(slice(m, m + 1), rows[m : m + 1], cols[m : m + 1]) for m in range(n)]
