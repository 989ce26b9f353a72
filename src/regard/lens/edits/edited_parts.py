"""Run an edited attention as the plain one and the part that an edit changes, each by a kernel without a mask.

    few queries       the model's kernel for all, then the weights of the edited queries as a matrix
    some heads        the model's kernel for all, then the attention of the edited heads
    many queries      each run of queries with the same edits for itself; under a causal mask the keys before the run
                      and the keys of the run are two calls, joined by the log-sum-exp of each query
    keys are cut      the plain kernel over the other keys, which are moved together; under a causal mask it runs the
                      queries at these places, and the queries at the places between them a run at a time
    keys get a bias   a strip of weights over these keys, joined with the other keys in the same way; long stretches of
                      keys with the same bias are a call of the kernel each

All other edits run as terms of `attend`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ops import dispatch
from ...ops.backend_plan import BackendPlan
from ...ops.backends import triton
from ...ops.backends.reference import weigh
from ...ops.blocks.prepared_call import prepare
from ...ops.call import SLOTS, Call
from ...ops.merge import merge
from ...ops.operator import attend
from ...ops.terms.masks import Causal, Chunked, Documents, Padding, Window
from ...ops.terms.masks.mask_algebra import conjuncts
from ...ops.terms.normalizers import Softmax
from ...ops.terms.scores import Dot, grouped_product
from ..recording.observed import ObservedAttention
from .call_tokens import CallTokens
from .edit_values import Boost, Cut, Edit, EditedCall, constant

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]
MIN_ENTRIES = 2**18  # entries of a matrix below which one call with a mask takes less time
MAX_ROW_ENTRIES = 2**26  # weights of few queries, which are stored
FEW_QUERIES = 16, 64  # a number, and the largest part of all queries, 1 / 64
MAX_STRIP = 64  # keys with a bias
MAX_RUNS = 8  # stretches of cut keys, or of queries with the same edits
KEYS_PER_PIECE = 256  # keys that a GPU sums one after the other for few queries
FEW_HEADS = 4  # the largest part of all heads is 1 / 4


class QueryRun(NamedTuple):
    """Queries with the same edits."""

    rows: slice
    cut: list[tuple[int, int]]  # first and last + 1 of each stretch of hidden keys
    amounts: dict[int, float]  # from visible keys to the numbers added to their scores
    raised: list[tuple[int, int, float]]  # stretches of visible keys, and the number added to their scores

    @property
    def is_edited(self) -> bool:
        """False if these queries attend as in the model."""
        return bool(self.cut or self.amounts or self.raised)

    def of_keys(self, keys: slice) -> QueryRun:
        """Return the edits of some keys, which count from 0."""
        first, size = keys.start, keys.stop - keys.start
        cut = [(max(low - first, 0), min(high - first, size)) for low, high in self.cut]
        raised = [(max(low - first, 0), min(high - first, size), amount) for low, high, amount in self.raised]
        return QueryRun(
            self.rows,
            [(low, high) for low, high in cut if low < high],
            {key - first: amount for key, amount in self.amounts.items() if 0 <= key - first < size},
            [(low, high, amount) for low, high, amount in raised if low < high],
        )


class Selected(NamedTuple):
    """The queries, heads and keys that some edits name in one call."""

    rows: Numbers | None  # the numbers of the queries, or None for all
    heads: tuple[int, ...] | None
    runs: list[QueryRun] | None  # None if the texts of the batch differ, or if there are too many runs


def run_parts(
    plain: Callable[[], Tensor],
    before: ObservedAttention,
    after: ObservedAttention,
    edits: Sequence[Edit],
    at: EditedCall,
) -> Tensor | None:
    """Return the edited heads, `b h i e`; None if the edits need another way, as terms of `attend`.

    `plain` returns the heads of the model's kernel, and `after` is the edited attention in terms.
    """
    b, h, i, _ = before.q.shape
    j, tokens = before.k.shape[2], at.tokens
    if tokens is None or b * h * i * j < MIN_ENTRIES or not all(type(each) in (Cut, Boost) for each in edits):
        return None
    pairs: Sequence[Any] = edits
    found = tokens.once((Selected, *map(id, edits)), lambda: _select(pairs, tokens))
    few, share = FEW_QUERIES
    n = i if found.rows is None else len(found.rows)
    if found.rows is not None and n <= max(few, i // share) and b * h * n * j <= MAX_ROW_ENTRIES:
        out = plain()
        rows = constant(tuple(found.rows.tolist()), torch.long, out.device)
        return out.index_copy(2, rows, _rows_of(after, rows).to(out.dtype)) if n else out
    if found.heads is not None and len(found.heads) * FEW_HEADS <= h and _is_alike_in_all_heads(before):
        out = plain().clone()
        for queries, part in _heads_of(before, pairs, found, at):
            for n, head in enumerate(found.heads):
                out[:, head, queries] = part[:, n]
        return out
    parts = None if found.heads is not None else _run_by_keys(before, found.runs)
    return None if parts is None else _join_rows([part for _, part in parts])


def _select(edits: Sequence[Cut | Boost], tokens: CallTokens) -> Selected:
    i, j = tokens.queries.real.shape[1], tokens.keys.real.shape[1]
    axes = [(tokens.queries, each.queries) for each in edits] + [(tokens.keys, each.keys) for each in edits]
    chosen = [None if selection is None else axis.select(selection) for axis, selection in axes]
    found = _on_host([x for x in chosen if x is not None])
    on_host = [None if x is None else next(found) for x in chosen]
    queries, keys = on_host[: len(edits)], on_host[len(edits) :]
    rows = heads = None
    if all(x is not None for x in queries):
        rows = np.flatnonzero(np.any([x.any(0) for x in queries if x is not None], 0))
    if all(each.heads is not None for each in edits):
        heads = tuple(sorted({head for each in edits for head in each.heads}))  # type: ignore[union-attr]
    if not all(x is None or (x == x[:1]).all() for x in on_host):
        return Selected(rows, heads, None)
    of_rows, of_keys = (
        np.stack([np.ones(n, dtype=bool) if x is None else x[0] for x in xs]) for xs, n in ((queries, i), (keys, j))
    )
    return Selected(rows, heads, _query_runs(edits, of_rows, of_keys))


def _on_host(tensors: Sequence[Tensor]) -> Iterator[Flags]:
    """Yield the numbers of bool tensors, which are copied from a GPU at once."""
    if tensors:
        flat = torch.cat([x.flatten() for x in tensors]).numpy(force=True)
        ends = np.cumsum([x.numel() for x in tensors])[:-1]
        yield from (part.reshape(x.shape) for part, x in zip(np.split(flat, ends), tensors, strict=True))


def _query_runs(edits: Sequence[Cut | Boost], of_rows: Flags, of_keys: Flags) -> list[QueryRun] | None:
    """Return the runs of queries with the same edits; None if there are too many.

    `of_rows` and `of_keys` are True for the queries and keys of each edit, `edits i` and `edits j`.
    """
    i, j = of_rows.shape[1], of_keys.shape[1]
    bounds = [0, *(np.flatnonzero((of_rows[:, 1:] != of_rows[:, :-1]).any(0)) + 1).tolist(), i]
    if len(bounds) - 1 > MAX_RUNS:
        return None
    runs = []
    for start, stop in pairwise(bounds):
        cut, amounts = np.zeros(j, dtype=bool), np.zeros(j)
        for each, is_meant, chosen in zip(edits, of_rows[:, start], of_keys, strict=True):
            if is_meant and isinstance(each, Cut):
                cut |= chosen
            elif is_meant and isinstance(each, Boost):
                amounts[chosen] += each.amount
        amounts[cut] = 0
        ends = np.flatnonzero(np.diff(cut, prepend=False, append=False)).tolist()
        added = np.flatnonzero(amounts)
        stretches, raised = list(zip(ends[::2], ends[1::2], strict=True)), []
        if len(added) > MAX_STRIP:
            steps = [0, *(np.flatnonzero(np.diff(amounts)) + 1).tolist(), j]
            raised = [(*pair, float(amounts[pair[0]])) for pair in pairwise(steps) if amounts[pair[0]]]
            added = added[:0]
        if len(stretches) > MAX_RUNS or len(raised) > MAX_RUNS:
            return None
        strip = dict(zip(added.tolist(), amounts[added].tolist(), strict=True))
        # Under a causal mask, either all or none of the keys among the queries of a run are raised.
        inner = {n for low, high, _ in raised for n in (low, high) if start < n < stop}
        runs += [QueryRun(slice(*pair), stretches, strip, raised) for pair in pairwise(sorted({start, stop, *inner}))]
    return runs


def _rows_of(after: ObservedAttention, rows: Tensor) -> Tensor:
    """Return the outputs of some queries by their whole weights."""
    call = _call_of(after).select(rows=rows)
    if call.q.is_cuda and not (call.records_gradients or after.v.requires_grad):
        return _rows_without_waiting(after, rows)
    plan = dispatch.find_backend("reference").plan(call.with_values(after.v))
    assert isinstance(plan, BackendPlan)
    return plan.run()[0]


def _rows_without_waiting(after: ObservedAttention, rows: Tensor) -> Tensor:
    """Return the same, and do not let the host wait for a GPU to look for NaN.

    A hidden key must change nothing, and 0 times NaN is NaN: values that are not finite are left out of the product,
    and the queries that see them get NaN.
    """
    A, _ = weigh(prepare(_call_of(after).select(rows=rows), finite=True))
    v = after.v.to(A.dtype)
    is_finite = v.isfinite()
    # b h n 1 of the queries, and b g 1 e of the features
    sees_any = ((A != 0) & _per_head(~is_finite.all(-1), A.shape[1])[:, :, None]).any(-1, keepdim=True)
    is_nan = sees_any & _per_head(~is_finite.all(2), A.shape[1])[:, :, None]
    return _multiply_in_pieces(A, torch.where(is_finite, v, 0.0)).masked_fill(is_nan, torch.nan)


def _per_head(x: Tensor, h: int) -> Tensor:
    """Return `b g n` for each of the h heads that share the key heads."""
    return x.repeat_interleave(h // x.shape[1], 1)


def _multiply_in_pieces(A: Tensor, v: Tensor) -> Tensor:
    """Return A v, b h n j, b g j e -> b h n e: a GPU sums few rows over many keys in parallel only if they are cut."""
    pieces = v.shape[2] // KEYS_PER_PIECE
    whole = pieces * KEYS_PER_PIECE
    rest = grouped_product(A[..., whole:], v[:, :, whole:])
    if not pieces:
        return rest
    b, h, n, _ = A.shape
    g, e = v.shape[1], v.shape[3]
    of_rows = A[..., :whole].reshape(b, g, h // g * n, pieces, KEYS_PER_PIECE).transpose(2, 3)
    of_keys = v[:, :, :whole].unflatten(2, (pieces, KEYS_PER_PIECE))
    return (of_rows @ of_keys).sum(2).view(b, h, n, e) + rest


def _call_of(seen: ObservedAttention) -> Call:
    slots: Any = {slot: getattr(seen, slot) for slot in SLOTS}
    return Call.of(seen.q, seen.k, **slots, offset=seen.offset)


def _is_alike_in_all_heads(seen: ObservedAttention) -> bool:
    """Whether no term has numbers of its own for each head."""
    alike = (Causal, Chunked, Documents, Padding)
    return _is_plain_softmax(seen) and all(
        isinstance(mask, alike)
        or (
            isinstance(mask, Window)
            and all(x is None or isinstance(x, int) for x in (mask.width, mask.before, mask.after))
        )
        for mask in conjuncts(seen.mask)
    )


def _is_plain_softmax(seen: ObservedAttention) -> bool:
    score = seen.score
    is_dot = score is None or (isinstance(score, Dot) and score.cap is None and not isinstance(score.scale, Tensor))
    return is_dot and seen.bias is None and (seen.normalize is None or isinstance(seen.normalize, Softmax))


def _heads_of(
    seen: ObservedAttention, edits: Sequence[Cut | Boost], found: Selected, at: EditedCall
) -> list[tuple[slice, Tensor]]:
    """Return the edited outputs of some heads, with the queries that they belong to."""
    _, heads, runs = found
    assert heads is not None
    h = seen.q.shape[1]
    q, k, v = (_take_heads(x, [head * x.shape[1] // h for head in heads]) for x in (seen.q, seen.k, seen.v))
    part = seen._replace(q=q, k=k, v=v, statistic=None)
    if runs is not None and all(each.heads == heads for each in edits):
        parts = _run_by_keys(part, [each for each in runs if each.is_edited])
        if parts is not None:
            return parts
    tokens = at.tokens
    assert tokens is not None

    def renumber() -> list[Cut | Boost]:
        found = []
        for each in edits:
            own = tuple(n for n, head in enumerate(heads) if head in each.heads)  # type: ignore[operator]
            found.append(dataclasses.replace(each, heads=None if len(own) == len(heads) else own))
        return found

    run = part
    for each in tokens.once(("heads", *map(id, edits)), renumber):
        run = each.change_for_speed(run, at) or each.change(run, at)
    terms: Any = {slot: getattr(run, slot) for slot in SLOTS}
    return [(slice(None), attend(run.q, run.k, run.v.to(run.q.dtype), **terms, offset=run.offset))]


def _take_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Return some heads: a view where they are evenly spaced; the host waits for a GPU to copy a list of indices."""
    first, last = heads[0], heads[-1]
    step = max(1, heads[1] - first) if len(heads) > 1 else 1
    if list(heads) == list(range(first, last + 1, step)):
        return x[:, first : last + 1 : step]
    return torch.cat([x[:, head : head + 1] for head in heads], 1)


def _run_by_keys(seen: ObservedAttention, runs: Sequence[QueryRun] | None) -> list[tuple[slice, Tensor]] | None:
    """Return an attention of runs of queries to fewer keys, and to keys with a bias, and the queries of each run.

    None if it is not of that form.
    """
    q, k, v = seen.q, seen.k, seen.v.to(seen.q.dtype)
    i, j = q.shape[2], k.shape[2]
    is_causal = type(seen.mask) is Causal
    if runs is None or not (is_causal or seen.mask is None) or not _is_plain_softmax(seen):
        return None
    if is_causal and (i != j or seen.offset not in (None, 0)):
        return None
    has_bias = any(run.amounts or run.raised for run in runs)
    may_differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if may_differentiate and (has_bias or (is_causal and any(run.rows.start for run in runs))):
        return None  # a log-sum-exp of the kernel has no gradient
    outs = []
    for run in runs:
        found = []
        for keys, is_square in (
            [(slice(0, run.rows.start), False), (run.rows, True)] if is_causal else [(slice(0, j), False)]
        ):
            part = _run_raised(
                q[:, :, run.rows], k[:, :, keys], v[:, :, keys], run.of_keys(keys), seen.score, is_square
            )
            if part is None:
                return None
            found += part
        if not found:  # these queries see no key
            found.append((q.new_zeros(*q[:, :, run.rows].shape[:3], v.shape[-1]), q.new_zeros(())))
        outs.append((run.rows, _merge(found)))
    return outs


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the output over the keys of all parts, from their outputs and log-sum-exps."""
    (out, lse), *others = parts
    dtype = out.dtype
    if not others:
        return out
    if not out.is_cuda or dtype == torch.float64 or not triton.is_installed():
        return merge([x for x, _ in parts], [x for _, x in parts])[0]
    from ...kernels.merged_parts import merge_two

    for n, (other, other_lse) in enumerate(others, 1):
        out, lse = merge_two(out, other, lse, other_lse, dtype if n == len(others) else torch.float32)
    return out


def _gaps(cut: Sequence[tuple[int, int]], n: int) -> list[slice]:
    """Return the stretches between those that are cut from n keys."""
    bounds = [0, *(x for pair in cut for x in pair), n]
    return [slice(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True) if pair[0] < pair[1]]


def _stretches(left: Sequence[slice], cut: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Return all stretches in order, True for those that are cut."""
    return sorted([*((keys.start, keys.stop, False) for keys in left), *((*pair, True) for pair in cut)])


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return parts of `b h i d` with their rows one behind the other, in memory as `b i h d`, as models have them."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def _run_raised(
    q: Tensor, k: Tensor, v: Tensor, run: QueryRun, score: Any, is_causal: bool
) -> list[tuple[Tensor, Tensor]] | None:
    """Return the outputs and the log-sum-exps, `b h i`, of the raised keys and of the others; None as `_run_keys`."""
    found = []
    rest, j = run._replace(raised=[]), k.shape[2]
    if run.raised and not is_causal:
        rest = rest._replace(cut=_join_stretches(sorted([*run.cut, *((low, high) for low, high, _ in run.raised)])))
    if j and rest.cut != [(0, j)]:
        part = _run_keys(q, k, v, rest, score, is_causal)
        if part is None:
            return None
        out, lse = part
        found.append((out, lse + run.raised[0][2] if run.raised and is_causal else lse))
    for low, high, amount in run.raised if not is_causal else ():
        out, lse = _attend(q, k[:, :, low:high], v[:, :, low:high], score, False)
        found.append((out, lse + amount))
    return found


def _run_keys(
    q: Tensor, k: Tensor, v: Tensor, run: QueryRun, score: Any, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the log-sum-exp, `b h i`, of queries with the same edits; None if in too many parts."""
    strip, cut = dict(run.amounts), run.cut
    if strip and min(strip.values()) > 0:
        # The kernel runs these keys too, and the strip adds their weights exp(amount) - 1 times.
        strip = {key: amount + math.log1p(-math.exp(-amount)) for key, amount in strip.items()}
    elif strip:
        cut = _join_stretches(sorted([*cut, *((key, key + 1) for key in strip)]))
    rest = _without_keys(q, k, v, cut, score, is_causal)
    if rest is None or not strip:
        return rest
    return _join_strip(q, k, v, strip, score, is_causal, *rest)


def _join_stretches(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return stretches in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in stretches:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return joined


def _without_keys(
    q: Tensor, k: Tensor, v: Tensor, cut: Sequence[tuple[int, int]], score: Any, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the log-sum-exp, `b h i`, over the keys that are not cut; None if in too many parts."""
    if not cut:
        return _attend(q, k, v, score, is_causal)
    if len(cut) > 2 * MAX_RUNS:
        return None
    left = _gaps(cut, k.shape[2])
    if not left:
        return None
    k, v = (_join_rows([x[:, :, keys] for keys in left]) for x in (k, v))
    if not is_causal:
        return _attend(q, k, v, score, False)
    out, lse = _attend(_join_rows([q[:, :, keys] for keys in left]), k, v, score, True)
    parts, done = [], 0
    for start, stop, is_cut in _stretches(left, cut):
        n = stop - start
        if not is_cut:
            parts.append((out[:, :, done : done + n], lse[:, :, done : done + n]))
            done += n
        elif done:
            parts.append(_attend(q[:, :, start:stop], k[:, :, :done], v[:, :, :done], score, False))
        else:  # these queries see no key
            shape = *q.shape[:2], n
            parts.append((out.new_zeros(*shape, v.shape[-1]), lse.new_full(shape, -torch.inf)))
    return _join_rows([x for x, _ in parts]), torch.cat([x for _, x in parts], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, score: Any, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each query, `b h i`."""
    call = Call.of(q, k, v, score=score, mask=Causal() if is_causal else None, offset=0 if is_causal else None)
    out, lse = dispatch.choose(dataclasses.replace(call, statistic=True)).run()
    assert lse is not None
    return out, lse[..., 0]


def _join_strip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strip: Mapping[int, float],
    score: Any,
    is_causal: bool,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return attention to the keys behind `out` and `lse`, and to those of `strip`, with their additions to scores."""
    _, h, i, d = q.shape
    g, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    places, added = constant(tuple(strip), torch.long, q.device), constant(tuple(strip.values()), wide, q.device)
    scale = d**-0.5 if score is None or score.scale is None else score.scale
    k, v = (x[:, :, places].to(wide)[:, :, None] for x in (k, v))  # b g 1 n d
    scores = (q.to(wide).unflatten(1, (g, h // g)) @ k.mT * scale + added).flatten(1, 2)  # b h i n
    if is_causal:
        is_later = places > torch.arange(i, device=q.device)[:, None]
        scores = scores.masked_fill(is_later, -torch.inf)
    total = torch.logaddexp(lse.to(wide), scores.logsumexp(-1))
    finite = torch.where(total == -torch.inf, 0.0, total)
    weights = (scores - finite[..., None]).exp().unflatten(1, (g, h // g))
    joined = (weights @ v).flatten(1, 2).addcmul(out.to(wide), (lse - finite).exp()[..., None])
    return joined.to(out.dtype), total
