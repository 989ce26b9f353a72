"""Padding, packed texts and windows on a GPU: PyTorch's kernels for sequences of different lengths.

A batch is one long row of queries and one of keys, cut into sequences: a text and its real keys, then a sequence of
hidden keys without queries. Each query sees the keys of its own sequence, so hidden keys are not read, and half of
padding takes about half the time. The cuts are computed on the GPU: lengths are not copied to the host. A window needs
no cuts, since the flash kernel takes how far a query sees.

    queries  q q q q q q | | q q q q q q | |        | is a cut; the text of the first row has four keys,
    keys     k k k k | - - | k k k | - - - |        that of the second three, and hidden keys (-) have no queries

`Causal() & Padding` takes two calls. In the first, a text is its real queries and keys, a square. In the second, the
queries after the last real key see all real keys; padding on the left has no such queries. Short texts that would take
two calls take one with the mask as numbers, whose hidden keys and values are zeros.

Nothing is compiled. It is for half precision, on the flash kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_internals
from ..blocks.reduction import DifferentiableOnce
from ..blocks.tile_weights import additive_tile
from ..call import Call
from ..term_cache import cached_per_term
from ..terms.coordinates import Point
from ..terms.masks import Causal, Documents, Padding, Window
from ..terms.masks.mask_algebra import Mask, conjuncts
from ..torch_state import check_single_gradient, in_forward_mode, is_traced
from .sdpa_rectangles import Rectangle, cut_into_rectangles
from .torch_kernels import (
    SdpaKernel,
    choose_kernel,
    differentiable_once,
    has_flash,
    prefers_efficient,
    run_fused,
    scaled_product_inputs,
)

INF = float("inf")
HALVES = (torch.float16, torch.bfloat16)
MAX_WIDTH, MAX_COMMON_WIDTH = 256, 192  # features of a head that the flash kernel takes, on some GPUs and on all
WIDE_GPUS = ((8, 0), (9, 0))  # compute capabilities whose shared memory holds its widest backward
# Queries times keys up to which the kernel is as fast as FlexAttention under a window; wider heads are faster always.
MAX_WINDOW_ENTRIES = 2**27
MAX_FLEX_WIDTH = 128  # features up to which FlexAttention is faster under long windows
# Batch rows times queries times keys up to which one call with a dense mask is faster than two calls of sequences. Half
# padding, forward and backward on an H200: 0.75 and 1.09 ms at 32 x 12 x 512, 1.7 and 1.2 ms at 8 x 12 x 2048.
MAX_DENSE_ENTRIES, MAX_DENSE_FORWARD = 2**24, 256  # the second: queries of a call without a backward
MAX_SEQUENCES = 2**16 - 1  # the grid of a launch has no more


@dataclass(frozen=True, eq=False)
class SequenceCuts:
    """The ends of the sequences: queries and keys of each batch row, `b s`; the last end is the length of the row."""

    queries: Tensor
    keys: Tensor
    max_queries: int  # the longest sequence has no more
    max_keys: int
    is_causal: bool = False  # in every sequence with both, the last query stands at the last key
    later: SequenceCuts | None = None  # queries after the last real key: they see all keys of their sequences


class DenseMask(NamedTuple):
    """A mask as numbers for one call; every query sees a key."""

    added: Tensor  # b 1 i j, 0 or -inf, rows aligned for the kernels
    seen: Tensor | None  # b 1 j 1, keys that some query sees; None for all
    zero: Tensor  # a 0 beside the keys: a Python number takes the host twice as long


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """Arguments of one call of the kernel; `starts` are those of the sequences in the flattened rows."""

    scale: float
    causal: bool = False
    before: int | None = None  # keys that a query sees before its own, under a window
    after: int | None = None
    first_key: int = 0  # earlier keys are hidden from all queries
    flat: bool = False  # True if each head of each batch row is a row of its own: its tensors are not transposed
    query_starts: Tensor | None = None  # s + 1, int32; None without cuts
    key_starts: Tensor | None = None
    max_queries: int = 0
    max_keys: int = 0
    later: VarlenPlan | None = None  # a second call, for queries that have no keys in the first
    dense: DenseMask | None = None  # one call with a mask in place of two calls

    @property
    def cuts(self) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int]]:
        """The starts of the sequences, and the longest of them, queries and keys each."""
        return (self.query_starts, self.key_starts), (self.max_queries, self.max_keys)


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: object = None) -> Tensor | None:
    """Attention under such a mask on a GPU; None for any other call.

    A shortcut past `Call`, as `sdpa.attend_directly` is, under the same conditions on q, k and v.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or not q.is_cuda or is_traced() or in_forward_mode():
        return None
    dtype, rows, keys = q.dtype, q.shape, k.shape
    if not (dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        return None
    if not (len(rows) == len(keys) == 4) or keys != v.shape or torch.is_autocast_enabled("cuda"):
        return None
    if rows[0] != keys[0] or rows[3] != keys[3] or not (offset is None or isinstance(offset, int)):
        return None
    if not q.numel() or not k.numel() or rows[1] % keys[1] or not _is_supported(mask):
        return None

    def call() -> Call:
        return Call.of(q.detach(), k.detach(), v.detach(), mask=mask, offset=offset)

    plan = _cached_plan(mask, q, k, v, offset, rows[3] ** -0.5, call)
    return None if plan is None else run_varlen(plan, q, k, v, dropout=0.0, statistic=False)[0]


def plan_varlen(call: Call) -> VarlenPlan | None:
    """How such a kernel runs the call on a GPU; None if it cannot, or is slower than others."""
    if call.v is None or call.mask is None or not call.q.is_cuda or is_traced() or not _is_supported(call.mask):
        return None
    if call.bias is not None or call.is_selection or not isinstance(call.offset, int) or 0 in call.shape:
        return None
    q, k, scale = scaled_product_inputs(call)
    if q.shape[-1] != call.v.shape[-1] or k.shape[1] != call.v.shape[1]:
        return None
    plan = _cached_plan(call.mask, q, k, call.v, call.offset, scale, lambda: call)
    return None if plan is not None and plan.later is not None and call.dropout else plan


def run_call(call: Call, plan: VarlenPlan) -> tuple[Tensor, Tensor | None]:
    """The output and the log-sum-exp of each row, `b h i 1`, if the call asks for it."""
    assert call.v is not None
    q, k, _ = scaled_product_inputs(call)
    return run_varlen(plan, q, k, call.v, dropout=call.dropout, statistic=call.statistic)


def run_varlen(
    plan: VarlenPlan, q: Tensor, k: Tensor, v: Tensor, *, dropout: float, statistic: bool
) -> tuple[Tensor, Tensor | None]:
    """The output of the plan's kernel, `b h i d`, and, if `statistic`, the log-sum-exp of each row, `b h i 1`."""
    if plan.dense is not None and _is_faster_dense(q, k, v):
        return run_dense(plan.dense, plan.scale, q, k, v, dropout=dropout, statistic=statistic)
    b, h, i, d = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if plan.first_key:
        k, v = k[:, :, plan.first_key :], v[:, :, plan.first_key :]
    if plan.query_starts is None or plan.key_starts is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # b i h d
    elif plan.flat:
        q, k, v = (x.reshape(-1, 1, d) for x in (q, k, v))
    else:
        q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], d) for x in (q, k, v))
    if plan.later is not None:
        out, lse = TwoCalls.apply(plan, q, k, v)
    else:
        window = plan.before, plan.after
        out, lse = torch_internals.flash_varlen(
            q, k, v, *plan.cuts, dropout=dropout, causal=plan.causal, scale=plan.scale, window=window
        )
        differentiable_once(out)
    out = out.view(b, h, i, d) if plan.flat else out.view(b, i, h, d).transpose(1, 2)
    return out, _row_statistic(plan, lse, b, h, i) if statistic else None


def run_dense(
    dense: DenseMask, scale: float, q: Tensor, k: Tensor, v: Tensor, *, dropout: float, statistic: bool
) -> tuple[Tensor, Tensor | None]:
    """The output of one call with a mask, and, if `statistic`, the log-sum-exp of each row, `b h i 1`."""
    if dense.seen is not None:
        k, v = torch.where(dense.seen, k, dense.zero), torch.where(dense.seen, v, dense.zero)
    is_short = q.is_cuda and prefers_efficient(q, k)
    if not (statistic or is_short) and q.shape[1] == k.shape[1]:  # PyTorch's public function is the faster one to call
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense.added, dropout_p=dropout, scale=scale)
        differentiable_once(out)
        return out, None
    kernel = SdpaKernel.EFFICIENT if is_short else None
    out, lse = run_fused(q, k, v, scale=scale, added=dense.added, causal=False, dropout=dropout, kernel=kernel)
    return out, None if lse is None else lse[..., None]


def _is_faster_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if one call with a mask is faster than two calls: if there will be a backward, or the text is very short.

    Forward on an H200: 0.08 and 0.12 ms at 32 x 12 x 128, 0.25 and 0.24 at 512, 0.20 and 0.19 at 8 x 12 x 1024.
    """
    is_recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return is_recorded or q.shape[2] <= MAX_DENSE_FORWARD


class TwoCalls(torch.autograd.Function):
    """Sequences under a causal mask, and the queries after them: one output, and a backward without masks."""

    @staticmethod
    def forward(ctx: Any, plan: VarlenPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert plan.later is not None
        first, second = (
            torch_internals.flash_varlen(
                q, k, v, *call.cuts, dropout=0.0, causal=call.causal, scale=call.scale, window=(None, None)
            )
            for call in (plan, plan.later)
        )
        # A query has keys in one of the calls; in the other its output is 0, and its log-sum-exp inf.
        out, lse = first[0].add_(second[0]), torch.minimum(first[1], second[1])
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        with torch.no_grad():
            first, second = (
                torch_internals.flash_varlen_backward(
                    grad, q, k, v, out, lse, *call.cuts, causal=call.causal, scale=call.scale
                )
                for call in (ctx.plan, ctx.plan.later)
            )
            # A query has keys in one of the calls, and its gradient in the other is 0.
            grads = [a.add_(b) for a, b in zip(first, second, strict=True)]
        if torch.is_grad_enabled():
            grads = [DifferentiableOnce.apply(x, grad, q, k, v) for x in grads]
        return None, *grads


def _row_statistic(plan: VarlenPlan, lse: Tensor, b: int, h: int, i: int) -> Tensor:
    """The log-sum-exp as `b h i 1`, -inf for a row that sees nothing."""
    lse = lse.detach()
    rows = lse if plan.flat or plan.query_starts is None else lse.view(h, b, i).transpose(0, 1)
    rows = rows.reshape(b, h, i)
    return torch.where(rows == INF, -INF, rows)[..., None]  # the kernel returns inf for a row without keys


def _is_supported(mask: Mask) -> bool:
    return all(type(term) in (Causal, Documents, Padding, Window) for term in conjuncts(mask))


def _cached_plan(
    mask: Mask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: int | None,
    scale: float,
    make_call: Callable[[], Call],
) -> VarlenPlan | None:
    if not _has_kernel(q):
        return None
    flat = q.shape[1] == k.shape[1] and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    key = q.shape, k.shape[1:], offset, q.dtype, flat, scale, q.device
    latest = _latest.get(q.get_device())
    if latest is not None and latest.mask is mask and latest.key == key and latest.is_current():
        return latest.plan
    make = partial(_plan, make_call, flat=flat, scale=scale)
    tensors = mask.tensors()
    if tensors and torch.cuda.is_current_stream_capturing():
        # A replay reads lengths that were changed in place, so their cuts are computed in the graph.
        return None if _reads_back(mask) else make()
    is_inference = any(x.is_inference() for x in tensors)  # writes to them are not counted, so nothing is kept
    latest = _latest_of_two.get(q.get_device())
    if latest is not None and latest.mask is mask and latest.key == key and latest.is_current():
        plan = latest.plan
    else:
        plan = cached_per_term(mask, (VarlenPlan, *key), make)
        if plan is not None and plan.later is not None and not is_inference:
            plan = replace(plan, dense=dense_mask(make_call()))
    if not is_inference:
        latest = LatestPlan(mask, key, [(x, x._version) for x in tensors], plan)
        _latest[q.get_device()] = latest
        if plan is not None and plan.later is not None:
            _latest_of_two[q.get_device()] = latest
    return plan


class LatestPlan(NamedTuple):
    """The plan of the latest call on a device: the layers of a model share a mask, and looking it up takes long."""

    mask: Mask
    key: tuple[object, ...]
    versions: list[tuple[Tensor, int]]
    plan: VarlenPlan | None

    def is_current(self) -> bool:
        """False if a tensor of the mask was changed since, or if a graph is captured that must read it."""
        if not self.versions:
            return True
        return all(x._version == version for x, version in self.versions) and (
            not torch.cuda.is_current_stream_capturing()
        )


_latest: dict[int, LatestPlan] = {}
_latest_of_two: dict[int, LatestPlan] = {}  # a dense mask is too large to be kept for more than one plan of two calls


def _has_kernel(q: Tensor) -> bool:
    """True if the flash kernel takes these tensors on their GPU, forward and backward."""
    d, device = q.shape[-1], q.get_device()
    if q.dtype not in HALVES or d % 8 or d > MAX_WIDTH or not torch.backends.cuda.flash_sdp_enabled():
        return False
    return has_flash(device) and (d <= MAX_COMMON_WIDTH or torch.cuda.get_device_capability(device) in WIDE_GPUS)


def _reads_back(mask: Mask) -> bool:
    """True if the cuts of the mask depend on values that are read on the host."""
    return any(
        isinstance(term, Documents) or (isinstance(term, Padding) and not _has_lengths(term))
        for term in conjuncts(mask)
    )


def _plan(make_call: Callable[[], Call], *, flat: bool, scale: float) -> VarlenPlan | None:
    call = make_call()
    terms = list(conjuncts(call.mask))
    if all(isinstance(term, (Causal, Window)) for term in terms):
        return plan_window(call, terms, scale=scale)
    reach = _reach(terms)
    cuts = None if reach is None else cut_sequences(call)
    if reach is None or cuts is None or cuts.queries.numel() > MAX_SEQUENCES:
        return None
    (before, after), causal = reach, any(isinstance(term, Causal) for term in terms)
    # The kernel counts positions from the last query and key of a sequence. Only causal windows were tried in packs.
    if (causal and not cuts.is_causal) or (before is not None and (not causal or cuts.later is not None)):
        return None
    flat = flat and cuts.queries.numel() * call.shape[1] <= MAX_SEQUENCES
    heads = call.shape[1] if flat else 1

    def plan_cuts(cuts: SequenceCuts, causal: bool) -> VarlenPlan:
        query_starts, key_starts = (row_starts(ends, heads) for ends in (cuts.queries, cuts.keys))
        return VarlenPlan(
            scale=scale,
            causal=causal,
            before=before,
            after=0 if causal and before is not None else after,
            flat=flat,
            query_starts=query_starts,
            key_starts=key_starts,
            max_queries=cuts.max_queries,
            max_keys=cuts.max_keys,
        )

    plan = plan_cuts(cuts, causal)
    return plan if cuts.later is None else replace(plan, later=plan_cuts(cuts.later, False))


def dense_mask(call: Call) -> DenseMask | None:
    """The mask of a short call as numbers; None for a long one, for a text without keys, and while a graph is captured.

    Whether a text has keys is read on the host.
    """
    assert call.v is not None
    b, _, i, j = call.shape
    if b * i * j > MAX_DENSE_ENTRIES or (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    added = additive_tile(call, call.whole(), call.q.dtype)
    assert added is not None
    visible = added == 0
    seen = visible.any(2, keepdim=True).mT
    has_keys, has_all = torch.stack((visible.any(-1).all(), seen.all())).tolist()
    if not has_keys:
        return None
    added = F.pad(added, (0, -j % 16))[..., :j]
    if call.q.is_cuda and not choose_kernel(call.q, call.k, call.v, added=added, causal=False, dropout=0.0).is_fused:
        return None
    return DenseMask(added, None if has_all else seen, added.new_zeros(()))


def plan_window(call: Call, terms: Sequence[Mask], *, scale: float) -> VarlenPlan | None:
    """A window, or a causal mask of fewer queries than keys; the last query stands at the last key."""
    _, _, i, j = call.shape
    reach = _reach(terms)
    if reach is None or call.offset != j - i or i > j:
        return None
    (before, after), width = reach, call.q.shape[-1]
    causal = any(isinstance(term, Causal) for term in terms)
    if i == 1 or (before is None and not (causal and i < j)):  # other kernels are as fast
        return None
    if not causal and i != j:
        return None
    if before is not None and i * j > MAX_WINDOW_ENTRIES and width <= MAX_FLEX_WIDTH:
        return None
    first = 0 if before is None else max(0, j - i - before)
    return VarlenPlan(
        scale=scale,
        causal=causal,
        before=before,
        after=0 if causal and before is not None else after,
        first_key=first,
        max_queries=i,
        max_keys=j - first,
    )


def _reach(terms: Sequence[Mask]) -> tuple[int | None, int | None] | None:
    """The keys that a query sees before and after its own, None for all; None if that differs between heads."""
    before: int | None = None
    after: int | None = None
    for term in terms:
        if isinstance(term, Window):
            if not term.has_one_reach:
                return None
            left, right = term.reach
            before = left if before is None else min(before, left)
            after = right if after is None else min(after, right)
    return before, after


def row_starts(ends: Tensor, repeats: int) -> Tensor:
    """The starts of all sequences, and the end of the last, of rows one after the other: `b s -> b * repeats * s + 1`.

    >>> row_starts(torch.tensor([[2, 5], [4, 5]]), 1)
    tensor([ 0,  2,  5,  9, 10], dtype=torch.int32)
    """
    ends = ends.repeat_interleave(repeats, 0)
    ends = ends + torch.arange(len(ends), device=ends.device)[:, None] * ends[:, -1:]
    return F.pad(ends.flatten(), (1, 0)).to(torch.int32)


def cut_sequences(call: Call) -> SequenceCuts | None:
    """The cuts of `Padding`, of `Causal() & Padding`, or of `Documents` beside one of the two; None for all others."""
    assert call.mask is not None
    b, _, i, j = call.shape
    terms = [term for term in conjuncts(call.mask) if not isinstance(term, Window)]
    paddings = [term for term in terms if isinstance(term, Padding)]
    causal = any(isinstance(term, Causal) for term in terms)
    if any(isinstance(term, Documents) for term in terms):
        return None if causal and paddings else _cut_rectangles(call, terms)
    if causal and (call.offset != j - i or i > j):
        return None
    if not all(map(_has_lengths, paddings)):
        return _cut_ranges(call, paddings, causal=causal)
    length = torch.stack([_lengths(term, b, j, call.q.device) for term in paddings]).amin(0)
    if causal:
        return _cut_squares(call, None, length)
    # Queries of the text and its keys, then hidden keys without queries.
    queries, keys = torch.full_like(length, i), torch.full_like(length, j)
    return SequenceCuts(torch.stack((queries, queries), 1), torch.stack((length, keys), 1), i, j)


def _has_lengths(padding: Padding) -> bool:
    return not (isinstance(padding.keys, Tensor) and padding.keys.dtype == torch.bool)


def _lengths(padding: Padding, b: int, j: int, device: torch.device) -> Tensor:
    """The number of keys of each batch row, not read on the host, and so bounded here."""
    keys = padding.keys
    length = keys.to(torch.long) if isinstance(keys, Tensor) else torch.tensor(keys, device=device)
    return length.clamp(0, j).expand(b)


def _cut_squares(call: Call, first: Tensor | None, end: Tensor, *, has_later: bool = True) -> SequenceCuts:
    """The cuts of causal texts whose real keys are `first` to `end`, on the device; from 0 if `first` is None.

    Without padding on the right no queries are later, `has_later` is False.
    """
    i, j = call.shape[2:]
    none, rows, cols = torch.zeros_like(end), torch.full_like(end, i), torch.full_like(end, j)
    stop = (end - (j - i)).clamp(0, i)
    # Queries and keys before the text, each without the others; the text; queries and keys after it.
    queries, keys = [stop, rows, rows], [end, end, cols]
    later_queries, later_keys = [stop, rows, rows], [none, end, cols]
    if first is not None:
        start = (first - (j - i)).clamp(0, i)
        queries, keys = [start, start, *queries], [none, first, *keys]
        later_queries, later_keys = [stop, *later_queries], [none, first, *later_keys[1:]]
    later = None
    if has_later:
        later = SequenceCuts(torch.stack(later_queries, 1), torch.stack(later_keys, 1), i, j)
    return SequenceCuts(torch.stack(queries, 1), torch.stack(keys, 1), i, j, is_causal=True, later=later)


def _cut_ranges(call: Call, paddings: Sequence[Padding], *, causal: bool) -> SequenceCuts | None:
    """Cuts around one range of real keys in each batch row, as of padding on the left; None if there are gaps."""
    b, _, i, j = call.shape
    device = call.q.device
    zero, col = torch.zeros((), dtype=torch.long, device=device), torch.arange(j, device=device)
    at = Point(torch.arange(b, device=device).view(-1, 1, 1, 1), zero, zero, col)
    keep = torch.ones(b, j, dtype=torch.bool, device=device)
    for term in paddings:
        keep = keep & term.over(at)[:, 0, 0]
    first, end = keep.int().argmax(1), torch.where(keep, col + 1, 0).amax(1)
    # The one wait for the device.
    whole, has_later = torch.stack(((end - first == keep.sum(1)).all(), ((end > 0) & (end < j)).any())).tolist()
    if not whole:
        return None
    if causal:
        return _cut_squares(call, first, end, has_later=has_later)
    # Hidden keys without queries, all queries and the real keys, hidden keys without queries.
    none, rows, cols = torch.zeros_like(first), torch.full_like(first, i), torch.full_like(first, j)
    return SequenceCuts(torch.stack((none, rows, rows), 1), torch.stack((first, end, cols), 1), i, j)


def _cut_rectangles(call: Call, terms: list[Mask]) -> SequenceCuts | None:
    """Cuts of packed texts, found on the host."""
    b, _, i, j = call.shape
    assert isinstance(call.offset, int)
    rectangles = cut_into_rectangles([term.map_tensors(Tensor.cpu) for term in terms], (b, i, j), call.offset)
    if rectangles is None:
        return None
    causal = any(isinstance(term, Causal) for term in terms)
    texts = [sequences_of_text(found, i, j, causal=causal) for found in _by_text(rectangles, b)]
    found = [text for text in texts if text is not None]
    if len(found) < len(texts):
        return None
    most = max(map(len, found))
    ends = torch.tensor([[*text, *[(i, j)] * (most - len(text))] for text in found])
    queries, keys = ends.diff(dim=1, prepend=ends.new_zeros(b, 1, 2)).unbind(-1)
    both = (queries > 0) & (keys > 0)
    is_causal = bool((queries == keys)[both].all())
    ends = ends.to(call.q.device)
    return SequenceCuts(ends[..., 0], ends[..., 1], int(queries.max()), int(keys.max()), is_causal=is_causal)


def _by_text(rectangles: Sequence[Rectangle], b: int) -> list[list[Rectangle]]:
    """The rectangles of each batch row, by their first query."""
    texts: list[list[Rectangle]] = [[] for _ in range(b)]
    for each in rectangles:
        for text in range(each.batch.start, each.batch.stop):
            texts[text].append(each)
    return [sorted(text, key=lambda each: each.rows.start) for text in texts]


def sequences_of_text(rectangles: Sequence[Rectangle], i: int, j: int, *, causal: bool) -> list[tuple[int, int]] | None:
    """The ends of sequences, queries and keys, that cover the rectangles in order; None if they cannot."""
    sequences: list[tuple[int, int]] = []
    row = key = 0
    for each in rectangles:
        if each.rows.start < row or each.keys.start < key or each.causal != causal:
            return None
        if each.rows.start > row:
            sequences.append((each.rows.start, key))
        if each.keys.start > key:
            sequences.append((each.rows.start, each.keys.start))
        row, key = each.rows.stop, each.keys.stop
        sequences.append((row, key))
    if row < i:
        sequences.append((i, key))
    if key < j:
        sequences.append((i, j))
    return sequences
