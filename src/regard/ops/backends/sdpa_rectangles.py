"""Masks made of rectangles: PyTorch's fused kernel once for each, on the CPU, without a mask.

`Padding`, `Documents` and `Causal()` beside them leave visible, in each text, a range of keys for a range of queries,
or a causal square. The kernel is called on the queries, keys and values of each rectangle alone. Hidden keys are not
read: if half of a batch is padding, it takes about half the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ... import torch_internals
from ..blocks.prepared_call import is_safe
from ..blocks.reduction import DifferentiableOnce
from ..call import Call
from ..term_cache import cached_per_term
from ..terms.coordinates import Point
from ..terms.masks import Causal, Documents, Padding
from ..terms.masks.mask_algebra import Mask, conjuncts
from ..torch_state import check_single_gradient, run_uncompiled
from .torch_kernels import scaled_product_inputs, with_equal_widths

INF = float("inf")
Ids = npt.NDArray[Any]
Part = tuple[slice, slice, bool]  # rows, keys, causal
# What a rectangle costs beside its entries, measured in matrix entries: its rows are copied, and the kernel is called.
ENTRIES_PER_ROW, ENTRIES_PER_CALL = 64, 2**14


class Rectangle(NamedTuple):
    """Entries that a mask leaves visible: all of them, or, of a square, those up to its diagonal."""

    batch: slice
    rows: slice
    keys: slice
    causal: bool = False


def plan_rectangles(call: Call) -> tuple[Rectangle, ...] | None:
    """The rectangles of a call; None if its mask is not made of them, or if one masked call takes less time."""
    b, h, i, j = call.shape
    offset = call.offset
    if call.bias is not None or call.mask is None or not (b and i and j) or not isinstance(offset, int):
        return None
    if call.batch_ids is not None or call.row_ids is not None:
        return None
    terms = list(conjuncts(call.mask))
    if not all(isinstance(term, (Causal, Documents, Padding)) for term in terms) or all(
        isinstance(term, Causal) for term in terms
    ):
        return None
    shape = b, i, j
    found = cached_per_term(call.mask, (Rectangle, shape, offset), lambda: cut_into_rectangles(terms, shape, offset))
    if found is None:
        return None
    cost = ENTRIES_PER_CALL * len(found)
    cost += h * sum(_length(each.batch) * _length(each.rows) * (_length(each.keys) + ENTRIES_PER_ROW) for each in found)
    return found if cost < b * h * i * j else None


def hides_only_numbers(call: Call, rectangles: tuple[Rectangle, ...]) -> bool:
    """False if a causal square holds NaN, Inf or huge numbers: the kernel multiplies what it hides by 0."""
    assert call.v is not None
    squares = [rectangle for rectangle in rectangles if rectangle.causal]
    return all(
        is_safe(x[batch, :, tokens])
        for batch, rows, keys, _ in squares
        for x, tokens in ((call.q, rows), (call.k, keys), (call.v, keys))
    )


@run_uncompiled
def run_rectangles(call: Call, rectangles: tuple[Rectangle, ...]) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row, `b h i 1`; causal squares must hold safe numbers."""
    assert call.v is not None
    q, k, scale = scaled_product_inputs(call)
    q, k, v = with_equal_widths(q, k, call.v.to(q.dtype))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = RectangleSdpa.apply(rectangles, scale, q, k, v)
    return out[..., : call.v.shape[-1]].to(call.v.dtype), lse


class RectangleSdpa(torch.autograd.Function):
    """softmax(scale q k^T) v over rectangles; b h i d, b g j d, b g j d -> b h i d and b h i 1."""

    @staticmethod
    def forward(
        ctx: Any, rectangles: tuple[Rectangle, ...], scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:3], 1), -INF, dtype=torch.promote_types(q.dtype, torch.float32))
        for batch, rows, keys, causal in rectangles:
            part, total = torch_internals.cpu_flash_attention(
                q[batch, :, rows], k[batch, :, keys], v[batch, :, keys], scale=scale, causal=causal
            )
            out[batch, :, rows] = part
            lse[batch, :, rows] = total[..., None]
        ctx.rectangles, ctx.scale = rectangles, scale
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        check_single_gradient(grad)
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        with torch.no_grad():
            for batch, rows, keys, causal in ctx.rectangles:
                parts = torch_internals.cpu_flash_attention_backward(
                    grad[batch, :, rows],
                    q[batch, :, rows],
                    k[batch, :, keys],
                    v[batch, :, keys],
                    out[batch, :, rows],
                    lse[batch, :, rows].squeeze(-1),
                    scale=ctx.scale,
                    causal=causal,
                )
                for total, tokens, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    total[batch, :, tokens] += part
        if torch.is_grad_enabled():
            grads = [DifferentiableOnce.apply(g, grad, q, k, v) for g in grads]
        return None, None, *grads


def cut_into_rectangles(terms: list[Mask], shape: tuple[int, int, int], offset: int) -> tuple[Rectangle, ...] | None:
    """The rectangles of a mask, neighbouring texts of one form together; None if a text has entries of other forms."""
    b, i, j = shape
    causal = any(isinstance(term, Causal) for term in terms)
    documents = [term for term in terms if isinstance(term, Documents)]
    if len(documents) > 1:
        return None
    query_ids, key_ids = documents[0].ids() if documents else (torch.zeros(i), torch.zeros(j))
    tables = [x.numpy(force=True) for x in (query_ids.reshape(-1, i), key_ids.reshape(-1, j), _keep(terms, b, j))]
    texts = max(map(len, tables))
    parts = []
    tables = [np.broadcast_to(x, (texts, x.shape[1])) for x in tables]
    for queries, keys, keep in zip(*tables, strict=True):
        found = _rectangles_of_text(queries, keys, keep, offset if causal else None)
        if found is None:
            return None
        parts.append(found)
    if texts == 1:
        parts *= b
    start, rectangles = 0, []
    for form, same in groupby(parts):
        batch = slice(start, start := start + len(list(same)))
        rectangles += [Rectangle(batch, *part) for part in form]
    return tuple(rectangles)


def _keep(terms: list[Mask], b: int, j: int) -> Tensor:
    """The keys that no padding hides, `b|1 j`."""
    zero = torch.zeros((), dtype=torch.long)
    at = Point(torch.arange(b).view(-1, 1, 1, 1), zero, zero, torch.arange(j))
    keep = torch.ones(1, j, dtype=torch.bool)
    for term in terms:
        if isinstance(term, Padding):
            keep = keep & term.over(at)[:, 0, 0]
    return keep


def _rectangles_of_text(query_ids: Ids, key_ids: Ids, keep: Ids, offset: int | None) -> list[Part] | None:
    """Rows, keys and whether causal, of each rectangle; None if a document is scattered or a part is none.

    Row r sees keys up to r + offset; all if it is None.
    """
    (visible,) = keep.nonzero()
    keys_of: dict[Any, tuple[int, int]] = {}
    for first, last in _runs(key_ids[visible], visible):
        start, stop = int(visible[first]), int(visible[last - 1]) + 1
        if keys_of.setdefault(key_ids[start], (start, stop)) != (start, stop):
            return None
    parts: list[Part] = []
    for start, stop in _runs(query_ids):
        low, high = keys_of.get(query_ids[start], (0, 0))
        if offset is None:
            parts += [(slice(start, stop), slice(low, high), False)] if low < high else []
            continue
        high = min(high, stop + offset)  # later keys are hidden from all these rows
        first, last = max(start, low - offset), min(stop, high - offset)
        if low >= high:
            continue
        if first + offset > low and first < last - 1:  # the first rows see several keys, the last more
            return None
        if first + offset == low:
            parts.append((slice(first, last), slice(low, high), True))
            first = last
        if first < stop:
            parts.append((slice(first, stop), slice(low, high), False))
    return parts


def _runs(ids: Ids, positions: Ids | None = None) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each stretch of equal ids, at positions that follow one another."""
    changes = ids[1:] != ids[:-1]
    if positions is not None:
        changes |= positions[1:] != positions[:-1] + 1
    bounds = [0, *(changes.nonzero()[0] + 1).tolist(), len(ids)]
    return pairwise(bounds) if len(ids) else iter(())


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
