"""PyTorch's fused kernels: one call if they can compute the whole attention, else block by block.

Dot products and softmax, in linear memory. A plain, causal or padded attention, and any that is small, is a single
call. On the CPU padded and packed texts are a call each, and every other mask, and any bias that is not learned, is
passed as a tile for each block of rows, empty tiles left out. On a GPU padded and packed texts, and short windows, are
one call of a kernel for sequences of different lengths, and other masks are dense up to a bound: nothing is compiled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_internals
from ..backend_plan import BackendPlan, Objections
from ..blocks.mask_layout import contains_rule
from ..blocks.prepared_call import FEW_ROWS, all_values_finite, is_finite, is_safe, keys_read
from ..blocks.tile_weights import additive_mask, additive_tile
from ..call import FLOATS, Call
from ..term_cache import cached_per_term
from ..terms.coordinates import Point
from ..terms.masks import Causal, Padding
from ..terms.masks.mask_algebra import And, Mask, conjuncts
from ..terms.normalizers import Softmax
from ..terms.scores import Bilinear, Cosine, Dot
from ..torch_state import can_read_values, in_forward_mode, is_traced
from .sdpa_blocks import run_blocks
from .sdpa_rectangles import hides_only_numbers, plan_rectangles, run_rectangles
from .sdpa_varlen import plan_varlen, run_call
from .torch_kernels import (
    SdpaKernel,
    choose_kernel,
    differentiable_once,
    is_surely_fused,
    prefers_efficient,
    run_fused,
    scaled_product_inputs,
    with_equal_widths,
)

name = "sdpa"
DEVICES = ("cpu", "cuda")
INF = float("inf")
MAX_TILE_ENTRIES = 2**15  # up to this size one dense tile is faster than planned blocks
# Entries of a dense mask on a GPU: 32 MB in half precision, and of one that is kept beside the mask: 8 MB.
MAX_GPU_TILE_ENTRIES, MAX_KEPT_ENTRIES = 2**24, 2**22
MAX_WIDENING = 2  # keys are padded to the width of values up to this factor: the kernel takes one width
MAX_TILE_KEYS = 2**9  # for few queries, up to this number of keys


def attend_directly(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, offset: object = None) -> Tensor | None:
    """Plain or causal attention of well-made tensors; None for any other call.

    A shortcut past `Call`: for short sequences, decoding above all, what surrounds the kernel costs more than the
    kernel. It must give what `Call.of` and `plan` would give, so it returns None unless all of this holds:

    - q, k and v are plain tensors: subclasses and `torch.func` wrappers have rules of their own.
    - PyTorch does not trace and there are no tangents: a compiler chooses the kernel itself, and PyTorch's kernels have
      no derivative in forward mode.
    - dtypes and devices agree and are supported; else `Call.of` raises and says what to write.
    - there are four dims, and v has the shape of k: other batch dims are flattened by `Call.of`, and with values of
      another width PyTorch stores the matrix.
    - no autocast: `Call.of` casts.
    - no size is 0, and h is a multiple of g: empty sums are defined by our code, not by the kernel's.
    - the mask is None or exactly `Causal()`, which for a single query shows every key. With more queries i = j, since
      PyTorch aligns causal to the first key and `Causal` to the last.
    - the offset is the usual one, j - i: any other moves the diagonal.
    - on a GPU, PyTorch has a fused kernel for these tensors: its math kernel stores the matrix.
    - on the CPU, the causal kernel multiplies hidden keys by 0, so what they hold may leak if it is NaN or Inf: the
      output is finite, or, if there will be a backward, k is, and v is not so large that its product with a gradient
      overflows, since 0 times Inf is NaN.
    """
    if mask is not None and type(mask) is not Causal:
        return None
    if not (type(q) is type(k) is type(v) is Tensor) or is_traced() or in_forward_mode():
        return None
    cuda, dtype, rows, keys = q.is_cuda, q.dtype, q.shape, k.shape
    if not (dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device) or dtype not in FLOATS:
        return None
    if not (len(rows) == len(keys) == 4) or keys != v.shape or not (cuda or q.is_cpu):
        return None
    if torch.is_autocast_enabled("cuda" if cuda else "cpu"):
        return None
    (b, h, i, d), (b_k, g, j, d_k) = rows, keys
    if b != b_k or d != d_k or not (b and h and i and d and g and j) or h % g:
        return None
    causal = mask is not None and i > 1
    if causal and i != j:
        return None
    if offset is not None and (type(offset) is not int or offset != j - i):
        return None
    # PyTorch's public function takes less time to call than its private kernels, but repeats grouped heads.
    is_direct = h == g and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if (
        cuda
        and not (is_direct and is_surely_fused(q))
        and not choose_kernel(q, k, v, added=None, causal=causal, dropout=0.0).is_fused
    ):
        return None
    if is_direct:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # the same kernel
        differentiable_once(out)
    else:
        out, _ = run_fused(q, k, v, scale=d**-0.5, added=None, causal=causal, dropout=0.0)
    if q.is_cuda or not causal:
        return out
    is_clean = is_finite(k) and is_safe(v) if out.requires_grad else is_finite(out)
    return out if is_clean else None


def plan(call: Call) -> BackendPlan | Objections:
    """How this backend runs the call, or why it cannot."""
    assert call.v is not None
    if (kernel := _plain_kernel(call)) is not None:
        return BackendPlan(name, partial(_run_plain, call, kernel))
    objections = _term_objections(call)
    if objections:
        return objections
    if call.q.is_cpu and can_read_values(call.q) and torch.backends.cuda.flash_sdp_enabled():
        rectangles = plan_rectangles(call)
        if rectangles is not None and hides_only_numbers(call, rectangles):
            return BackendPlan(name, partial(run_rectangles, call, rectangles))
    varlen = plan_varlen(call)
    if varlen is not None:
        return BackendPlan(name, partial(run_call, call, varlen))
    form = plan_single_call(call)
    if form is None and not can_read_values(call.q):
        return ["calls that are not plain, causal or padded run in blocks, on the CPU and uncompiled only"]
    if form is None and not torch.backends.cuda.flash_sdp_enabled():  # blocks are on the CPU, uncompiled
        return ["torch.nn.attention.sdpa_kernel forbids the kernel that its blocks take"]
    if call.q.device.type == "cuda" and not torch.compiler.is_compiling():
        assert form is not None
        added = None if form.keys is None and not form.tile else call.q.new_empty(1, 1, 1, call.shape[3])
        kernel = choose_kernel(call.q, call.k, call.v, added=added, causal=form.causal, dropout=call.dropout)
        if not kernel.is_fused:
            return [f"PyTorch has no fused kernel for {call.q.dtype} of width {call.q.shape[-1]}"]
        return BackendPlan(name, partial(_run_single, call, form))
    # A padding mask alone sets hidden keys to 0. Under any other mask hidden keys must be finite.
    is_harmless = call.mask is None or (form is not None and form.keys is not None and not form.causal)
    finite = None
    if not is_harmless and can_read_values(call.q):
        finite = all_values_finite(call, keys_read(call) if form is None else slice(None))
        if not finite:
            return ["hidden keys that hold NaN, Inf or huge numbers would leak through the kernel"]
    return BackendPlan(name, partial(run_blocks, call) if form is None else partial(_run_single, call, form, finite))


def _plain_kernel(call: Call) -> SdpaKernel | None:
    """The fused kernel of a plain or causal call of dot products on a GPU; None for any other call.

    A shortcut past the questions that other calls raise: they take the host longer than a short attention runs.
    """
    assert call.v is not None
    if not call.q.is_cuda or is_traced() or in_forward_mode():
        return None
    shape = call.shape
    if call.bias is not None or call.dropout or call.is_selection or 0 in shape:
        return None
    score, i, j = call.score, *shape[2:]
    if type(score) is not Dot or score.cap or not (score.scale is None or type(score.scale) is float):
        return None
    if type(call.normalize) is not Softmax or (score.scale is not None and score.scale <= 0):
        return None
    if call.mask is not None and (type(call.mask) is not Causal or i != j or type(call.offset) is not int):
        return None
    if call.k.shape[1:] != call.v.shape[1:] or (call.mask is not None and call.offset):
        return None
    kernel = choose_kernel(call.q, call.k, call.v, added=None, causal=call.mask is not None and i > 1, dropout=0.0)
    return kernel if kernel.is_fused else None


def _run_plain(call: Call, kernel: SdpaKernel) -> tuple[Tensor, Tensor | None]:
    """The output and the log-sum-exp of each row, `b h i 1`."""
    assert call.v is not None
    q, k, scale = scaled_product_inputs(call)
    causal = call.mask is not None and q.shape[2] > 1
    out, lse = run_fused(q, k, call.v, scale=scale, added=None, causal=causal, dropout=0.0, kernel=kernel)
    return out, None if lse is None else lse[..., None]


def _run_single(call: Call, form: SingleCall, finite: bool | None = None) -> tuple[Tensor, Tensor | None]:
    """The output and the log-sum-exp of each row, `b h i 1`. `finite` is None if values were not looked at yet."""
    assert call.v is not None
    q, k, scale = scaled_product_inputs(call)
    if call.bias is not None:  # half precision would round it, or overflow
        q, k = q.to(call.dtype), k.to(call.dtype)
    q, k, v = with_equal_widths(q, k, call.v.to(q.dtype))
    added: Tensor | None = None
    empty: Tensor | None = None
    if form.keys is not None:
        seen, empty, added = _hiding(call, form.keys, form.causal, q.dtype)
        q = q if empty is None else torch.where(empty, 0.0, q)
        finite = can_read_values(call.q) and all_values_finite(call) if finite is None else finite
        if not finite:
            k, v = torch.where(seen.mT, k, 0.0), torch.where(seen.mT, v, 0.0)
    if form.tile and q.is_cuda and not is_traced():
        visible, empty, added = _dense_mask(call, q.dtype)
        q = q if empty is None else torch.where(empty, 0.0, q)
        if visible is not None:
            k, v = torch.where(visible.mT, k, 0.0), torch.where(visible.mT, v, 0.0)
    elif form.tile:
        added = additive_tile(call, call.whole(), q.dtype) if can_read_values(q) else _traced_tile(call, q.dtype)
        assert added is not None
        empty = (added == -INF).all(-1, keepdim=True)
        q = q if can_read_values(q) else torch.where(empty, 0.0, q)
    kernel = SdpaKernel.EFFICIENT if q.is_cuda and added is not None and prefers_efficient(q, k) else None
    out, lse = run_fused(q, k, v, scale=scale, added=added, causal=form.causal, dropout=call.dropout, kernel=kernel)
    if empty is not None and lse is not None:
        lse = torch.where(empty[..., 0], -INF, lse)  # the kernel takes the sum of an empty row as 1
    return out[..., : call.v.shape[-1]].to(call.v.dtype), None if lse is None else lse[..., None]


class SingleCall(NamedTuple):
    """The arguments with which one kernel call computes the whole attention."""

    causal: bool = False  # True for the kernel's own causal mask
    keys: Mask | None = None  # a mask that hides keys from every query
    tile: bool = False  # True to pass the whole bias and mask as one tensor


def plan_single_call(call: Call) -> SingleCall | None:
    """The single kernel call that computes this attention, or None if it takes blocks."""
    b, h, i, j = call.shape
    if not (b and i and j):
        return None
    if call.bias is None:
        terms = list(conjuncts(call.mask))
        padding: list[Mask] = [term for term in terms if isinstance(term, Padding)]
        causal = any(isinstance(term, Causal) for term in terms)
        if all(isinstance(term, (Causal, Padding)) for term in terms) and not (causal and call.row_ids is not None):
            keys = reduce(And, padding) if padding else None
            offset = call.offset if isinstance(call.offset, int | torch.SymInt) else None
            if not causal or (i == 1 and offset is not None and offset >= j - 1):
                return SingleCall(keys=keys)
            is_square = torch_internals.is_always_true(i == j) if torch.compiler.is_exporting() else i == j
            if is_square and offset == 0:  # here PyTorch's alignment at the top left equals ours at the bottom right
                return SingleCall(causal=True, keys=keys)
            if call.q.is_cpu and not can_read_values(call.q) and offset is not None:
                # Blocks cannot be traced. The tile of a causal mask is the same for all batch rows and heads.
                return SingleCall(keys=keys, tile=True)
    if call.q.is_cuda and not is_traced():
        if call.bias is not None or call.mask is None or call.is_selection or isinstance(call.offset, Tensor):
            return None
        return SingleCall(tile=True) if i * j * _own_masks(call) <= MAX_GPU_TILE_ENTRIES else None
    # The blocks of few queries leave out the keys that none of them sees.
    is_small = b * h * i * j <= MAX_TILE_ENTRIES and (i > FEW_ROWS or j <= MAX_TILE_KEYS)
    return SingleCall(tile=True) if can_read_values(call.q) and is_small else None


def _term_objections(call: Call) -> Objections:
    assert call.v is not None
    found = []
    if call.q.device.type not in DEVICES:
        found.append(f"it runs on cpu and cuda, and q is on {call.q.device}")
    if not isinstance(call.score, (Dot, Cosine, Bilinear)) or (isinstance(call.score, Dot) and call.score.cap):
        what = "Dot with a cap" if isinstance(call.score, Dot) else type(call.score).__name__
        found.append(f"{what} is no plain product of queries and keys")
    if not isinstance(call.normalize, Softmax):
        found.append(f"the kernel is softmax, not {type(call.normalize).__name__}")
    if call.bias is not None and any(x.requires_grad for x in call.bias.tensors()):
        found.append("the kernel gives no gradient to a bias that learns")
    if call.bias is not None and call.q.requires_grad and call.bias.reads_queries:
        found.append("the bias reads the queries, and the kernel would give them no gradient for it")
    if call.dropout and call.q.device.type == "cpu":
        found.append("with dropout PyTorch stores the matrix")
    if call.v.shape[1] != call.k.shape[1]:
        found.append("with values of other heads than keys PyTorch stores the matrix")
    width, value_width = call.k.shape[-1], call.v.shape[-1]
    if width != value_width and call.q.device.type == "cuda":
        found.append("with values of another width than keys PyTorch stores the matrix")
    if value_width > MAX_WIDENING * width:
        found.append(f"keys would be padded to the {value_width} features of values, more than {MAX_WIDENING} times")
    if in_forward_mode():
        found.append("its kernels have no derivative in forward mode")
    return found


def _traced_tile(call: Call, dtype: torch.dtype) -> Tensor:
    """The additive mask of a call, `b|1 1 i j`, by index tensors: slices of open lengths would fix the lengths."""
    assert call.mask is not None
    b, _, i, j = call.shape
    batch, row, col = (torch.arange(n, device=call.q.device) for n in (b, i, j))
    zero = torch.zeros((), dtype=torch.long, device=call.q.device)
    at = Point(batch.view(-1, 1, 1, 1), zero, row.view(-1, 1), col, offset=call.offset)
    visible = call.mask.over(at)
    return additive_mask(visible[(None,) * (4 - visible.ndim)], dtype)


def _own_masks(call: Call) -> int:
    """The number of different masks of a call: 1, or one for each batch row, each head, or both."""
    mask = call.mask
    assert mask is not None

    def count() -> int:
        return mask.over(replace(call.whole(), rows=slice(0, 1), cols=slice(0, 1))).shape[:-2].numel()

    if contains_rule(mask):  # a rule has no fields to compare, and may be another function each time
        return count()
    return cached_per_term(mask, (_own_masks, call.shape[:2], call.q.device), count)


def _dense_mask(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Visible keys, `b|1 1 1 j`, and rows that see none, `b|1 h|1 i 1`, None if all are seen; the mask, added."""
    mask = call.mask
    assert mask is not None

    def make() -> tuple[Tensor | None, Tensor | None, Tensor]:
        added = additive_tile(replace(call, bias=None), call.whole(), dtype)
        assert added is not None
        visible = added == 0
        seen, empty = visible.any(2, keepdim=True).any(1, keepdim=True), ~visible.any(-1, keepdim=True)
        return None if bool(seen.all()) else seen, empty if bool(empty.any()) else None, added

    is_large = call.shape[2] * call.shape[3] * _own_masks(call) > MAX_KEPT_ENTRIES
    if is_large or contains_rule(mask):  # a rule may read state that changes between calls
        return make()
    return cached_per_term(mask, (_dense_mask, call.shape, call.offset, dtype, call.q.device), make)


def _hiding(call: Call, keys: Mask, causal: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Visible keys, `b|1 1 1 j`; rows that see none, `b|1 1 i|1 1`; and the additive mask of the keys.

    The second is None if every row sees a key.
    """

    def make() -> tuple[Tensor, Tensor | None, Tensor]:
        b, _, _, j = call.shape
        device = call.q.device
        batch = torch.arange(b, device=device) if call.batch_ids is None else call.batch_ids
        zero = torch.zeros((), dtype=torch.long, device=device)
        seen = keys.over(Point(batch.view(-1, 1, 1, 1), zero, zero, torch.arange(j, device=device)))
        empty = (seen.cumsum(-1) == 0).mT if causal else ~seen.any(-1, keepdim=True)
        some = not can_read_values(seen) or bool(empty.any())
        return seen, empty if some else None, additive_mask(seen, dtype)

    if is_traced() or call.batch_ids is not None:
        return make()
    return cached_per_term(keys, (call.shape, causal, dtype, call.q.device), make)
