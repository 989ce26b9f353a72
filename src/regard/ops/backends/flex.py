"""FlexAttention: any mask and any bias in one compiled kernel, on a GPU.

The terms serve as its `mask_mod` and `score_mod`. The empty tiles of a mask are found from its structure, never from an
N x N tensor, and cached; the first call with a new kind of term compiles for seconds. Lengths share a kernel, except
powers of two from 1,024 on: a kernel compiled for one length is faster.
PyTorch's module is imported when first needed: it brings the compiler with it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import torch_internals
from ..backend_plan import BackendPlan, Objections
from ..blocks.mask_layout import TILE, mask_layout, visible_first
from ..call import Call
from ..term_cache import cached_per_term, without_tensors
from ..terms.biases import ScoreMod
from ..terms.coordinates import Point
from ..terms.normalizers import SinkSoftmax, Softmax
from ..terms.scores import Bilinear, Cosine, Dot, FunctionScore, product_of
from ..torch_state import in_forward_mode, in_functorch, run_uncompiled
from . import tiled
from .torch_kernels import scaled_product_inputs, score_cap

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

name = "flex"
MAX_GRID_SIZE = 2**16 - 1  # batch rows x heads
MAX_WIDTH = 256  # features of a key or a value; beyond, tiles of its backward exceed shared memory
MAX_SINGLE_WIDTH = 128  # in float32; wider, PyTorch finds no valid configuration of its kernel
MAX_RECOMPILATIONS = 1024
MIN_CONTEXT_LENGTH = 1024
DEVICES = ("cuda",)  # on the CPU FlexAttention stores the matrix and has no backward: for tests alone


def plan(call: Call) -> BackendPlan | Objections:
    """How this backend runs the call, or why it cannot."""
    return _objections(call) or BackendPlan(name, partial(_run, call))


def _objections(call: Call) -> Objections:
    assert call.v is not None
    found = []
    if call.q.device.type not in DEVICES:
        found.append(f"it is compiled for GPUs, and q is on {call.q.device}")
    if call.q.device.type == "cpu" and any(x.requires_grad for x in (*call.tensors(), call.v)):
        found.append("it has no backward on the CPU")
    if call.q.device.type == "cuda" and call.q.dtype == torch.float64:
        found.append("it has no float64 on a GPU")
    if not isinstance(product_of(call.score), (Dot, Cosine, Bilinear)):
        found.append(f"{type(call.score).__name__} is no product of queries and keys")
    if not isinstance(call.normalize, (Softmax, SinkSoftmax)):
        found.append(f"the kernel is softmax, not {type(call.normalize).__name__}")
    if call.dropout:
        found.append("it has no dropout")
    if call.v.shape[1] != call.k.shape[1]:
        found.append("values must have the heads of keys")
    if call.q.device.type == "cuda" and min(call.k.shape[-1], call.v.shape[-1]) < 16:
        found.append("on a GPU it takes widths of 16 and more")
    widest = max(call.k.shape[-1], call.v.shape[-1])
    if call.q.device.type == "cuda" and widest > MAX_WIDTH:
        found.append(f"on a GPU it takes widths up to {MAX_WIDTH}, got {widest}")
    if call.q.device.type == "cuda" and call.q.dtype == torch.float32 and widest > MAX_SINGLE_WIDTH:
        found.append(
            f"in float32 its tiles fit a GPU's shared memory for widths up to {MAX_SINGLE_WIDTH}, got {widest}"
        )
    if 0 in call.shape:
        found.append("there is nothing to attend to")
    if call.shape[0] * call.shape[1] > MAX_GRID_SIZE:
        found.append(f"a GPU takes at most {MAX_GRID_SIZE} pairs of a batch row and a head at once")
    if call.is_selection:
        found.append("it takes whole problems, not selections of rows and heads")
    if in_functorch():
        found.append("torch.func cannot follow it")
    if in_forward_mode():
        found.append("its kernels have no derivative in forward mode")
    if not found and _FAILED and (reason := _FAILED.get(_failure_key(call))):
        found.append(f"PyTorch could not compile it for this kind of call ({reason})")
    return found


def _run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and, if `call.statistic`, the row statistic `b h i 1`."""
    assert call.v is not None
    q, k, scale = scaled_product_inputs(call)
    v = call.v
    # Offset 0, by far the most common, is compiled in; other offsets share a kernel that reads a tensor. (Filled on
    # the device: a copy from the host would synchronize.)
    offset = call.offset
    if not isinstance(offset, Tensor) and offset:
        offset = torch.full((), offset, device=q.device)
    block_mask = None
    if call.mask is not None:
        block_mask, seen = _tiles(call, offset)
        if seen is not None:
            k, v = torch.where(seen.mT, k, 0.0), torch.where(seen.mT, v, 0.0)
    captured = call.score.captured if isinstance(call.score, FunctionScore) else ()
    learned = any(x.requires_grad for x in (*captured, *(() if call.bias is None else call.bias.tensors())))
    # With a learned bias the kernel needs more shared memory: its default pipeline depth does not fit.
    options = {"num_stages": 2} if learned else None
    grouped = call.shape[1] != call.k.shape[1]
    with_statistic = call.statistic or isinstance(call.normalize, SinkSoftmax)
    arguments = q, k, v, _score_mod(call, offset), block_mask, scale, grouped, options, with_statistic
    try:
        out, lse = _attention(call, with_statistic)(*arguments)
    except torch_internals.compile_error() as error:
        return _run_tiled(call, error)
    if lse is None:
        return out, None
    if isinstance(call.normalize, SinkSoftmax):
        # The sink is one more logit in the denominator: it scales a row by exp(lse - total).
        sink = call.normalize.sink
        sink = sink.to(lse.dtype) if isinstance(sink, Tensor) else torch.full_like(lse[:1, :1, :1], sink)
        total = torch.logaddexp(lse, sink[:, None] if sink.ndim == 1 else sink)
        out, lse = (out * (lse - total).exp()[..., None]).to(out.dtype), total
    return out, lse.detach()[..., None]


_FAILED: dict[Hashable, str] = {}  # key of a kind of call that PyTorch could not compile -> its error


def _failure_key(call: Call) -> Hashable:
    """Calls with the same key get the same kernel; PyTorch has another one for fewer than 128 queries."""
    assert call.v is not None
    sizes = call.k.shape[-1], call.v.shape[-1], call.shape[1] // call.k.shape[1], call.shape[2] < 128
    return _kind(call), call.q.dtype, *sizes


def _run_tiled(call: Call, error: Exception) -> tuple[Tensor, Tensor | None]:
    """Run a call that PyTorch could not compile on another backend, and object to calls of its kind from now on."""
    reason = str(error).strip().splitlines()[0]
    if call.backend == name:
        raise ValueError(
            f"PyTorch could not compile FlexAttention for this call ({reason}); leave backend= out, and another runs it"
        ) from error
    _FAILED[_failure_key(call)] = reason
    warnings.warn(
        f"PyTorch could not compile FlexAttention for this kind of call ({reason}); slower backends run it, as "
        "regard.explain says",
        stacklevel=2,
    )
    found = tiled.plan(call)
    assert isinstance(found, BackendPlan), found
    return found.run()


def _score_mod(call: Call, offset: int | Tensor) -> Callable[..., Tensor] | None:
    most = score_cap(call)
    bias: ScoreMod | None = None
    if call.bias is not None:
        bias = call.bias.with_tensors(call.q.device, call.dtype).bind(call.q, call.k, offset)
    fn = call.score.fn.fn if isinstance(call.score, FunctionScore) else None
    if most is None and bias is None and fn is None:
        return None

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if most is None else torch.tanh(score / most) * most
        score = score if fn is None else fn(score, b, h, Point(b, h, i, j, offset).i, j)
        return score if bias is None else score + bias(b, h, i, j)

    return mod


@run_uncompiled
def _tiles(call: Call, offset: int | Tensor) -> tuple[BlockMask, Tensor | None]:
    """The block mask of a call, and its visible keys, `b|1 1 1 j`; None if every key is visible."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = call.mask
    assert mask is not None

    def make() -> tuple[BlockMask, Tensor | None]:
        layout = mask_layout(mask, call)
        partial, full = (visible_first(x) for x in (layout.some & ~layout.full, layout.full))
        tiles = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, seq_lengths=call.shape[2:])
        return tiles, layout.seen

    if isinstance(call.offset, Tensor):  # lengths of caches, different at each step
        tiles, seen = make()
    else:
        tiles, seen = cached_per_term(mask, (call.shape, call.offset, call.q.device), make)
    tiles = copy.copy(tiles)
    tiles.mask_mod = mask.with_tensors(call.q.device, call.dtype).bind(call.q, call.k, offset)
    return tiles, seen


def _attention(call: Call, with_statistic: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if call.q.device.type == "cpu" or torch.compiler.is_compiling():
        return _call_flex
    lengths = call.shape[2:] if all(map(_is_context_length, call.shape[2:])) else None
    return _compile_kind((_kind(call), with_statistic, lengths))


def _kind(call: Call) -> Hashable:
    """Calls that differ in their terms, tensors aside, are compiled apart."""
    function = call.score.fn.code if isinstance(call.score, FunctionScore) else None
    return without_tensors(call.mask), without_tensors(call.bias), score_cap(call), function, _offset_kind(call)


def _offset_kind(call: Call) -> Hashable:
    """Calls that differ in this are compiled apart: offset 0, another offset, or one for each batch row."""
    return "rows" if isinstance(call.offset, Tensor) else call.offset == 0


def _is_context_length(length: int) -> bool:
    """True for powers of two from 1,024 on: context lengths that recur, each worth a kernel of its own."""
    return length >= MIN_CONTEXT_LENGTH and length & (length - 1) == 0


def _call_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float,
    grouped: bool,
    options: Any,
    with_statistic: bool,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=grouped,
        kernel_options=options,
        return_aux=AuxRequest(lse=with_statistic),
    )
    return out, aux.lse


_kinds = count()


@lru_cache(maxsize=64)
def _compile_kind(kind: Hashable) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """FlexAttention for one kind of terms.

    A code object and a name of its own: kinds do not share a recompile limit, and constants of one kind are not taken
    for lengths that vary. With `fullgraph`, exceeding the limit is an error; else PyTorch would go on uncompiled and
    store the matrix.
    """

    def attention(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        return _call_flex(*arguments)

    attention.__code__ = attention.__code__.replace(co_name=f"attention_{next(_kinds)}")
    compiled = torch.compile(attention, fullgraph=True)

    def run(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        try:
            out, lse = compiled(*arguments)
        except torch_internals.recompile_limit_error():
            # Batches of many lengths compile more often than PyTorch allows by default.
            with torch_internals.recompile_limit(MAX_RECOMPILATIONS):
                out, lse = compiled(*arguments)
        return out, lse

    return run
