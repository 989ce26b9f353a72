"""Run `F.scaled_dot_product_attention` so that the log-sum-exp (lse) of each row, which its kernels drop, is returned.

With the lse, a summary of a captured attention takes one pass over q and k instead of two. For short sequences it is
recomputed when the tape is read, because passing it on takes the host longer than the kernel runs.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.parameter import Parameter
from torch.overrides import has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from ... import torch_internals
from ...ops.backends.torch_kernels import SdpaKernel, run_kernel
from ...ops.terms.masks import Causal
from ...ops.torch_state import is_traced
from .graph_masks import GraphMask
from .kernel_call import KernelCall

CHEAP_ENTRIES, CHEAP_ENTRIES_ON_GPU = 2**17, 2**26  # matrix entries of an attention whose lse is recomputed on demand
SDPA = torch_internals.SDPA  # the original function, even while its name in `F` is patched


def sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of `F.scaled_dot_product_attention`, by the kernel that it selects, and the lse, `b h i`.

    Under autocast the kernel gets the tensors that autocast would pass to it. The lse is None with dropout, with a mask
    on the CPU, if PyTorch has no fused kernel, and if another function mode or a tensor subclass intercepts the
    function by its name.
    """
    out, lse, _, _ = _run_sdpa_with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out, lse


def _run_sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the output, the lse or None, and the queries and keys that the kernel got."""
    if not dropout_p and _is_plain(query, key, value):
        q, k, v, mask = _cast_for_autocast(query, key, value, attn_mask)
        if mask is None or _is_plain_mask(mask, q):
            result = _run_kernel(q, k, v, mask, is_causal, scale, enable_gqa)
            if result is not None:
                return *result, q, k
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return run_sdpa(query, key, value, attn_mask, **options), None, query, key


def is_causal_bias(mask: object) -> TypeGuard[Any]:
    """True for a mask class of `torch.nn.attention.bias`, without importing that module, which takes a second."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def lse_is_reliable(q: Tensor, k: Tensor) -> bool:
    """False if q or k contain NaN or Inf on the CPU: the CPU kernel then returns an lse that ignores them."""
    return not q.is_cpu or bool(torch.isfinite(q).all() and torch.isfinite(k).all())


def is_recompute_cheap(q: Tensor, k: Tensor) -> bool:
    """True if recomputing the lse on demand is cheaper than requesting it from the kernel."""
    b, h, i, _ = q.shape
    return b * h * i * k.shape[2] <= (CHEAP_ENTRIES_ON_GPU if q.is_cuda else CHEAP_ENTRIES)


def recompute_lse(q: Tensor, k: Tensor, *, is_causal: bool, scale: float | None) -> Tensor | None:
    """Return the lse, `b h i`, of an attention that has run; None if PyTorch has no fused kernel for it."""
    if not _is_plain(q, k, k):
        return None
    result = _run_kernel(q, k, k, None, is_causal, scale, q.shape[1] != k.shape[1])
    return None if result is None else result[1]


def install_hook() -> None:
    """Patch `F.scaled_dot_product_attention` so that `run_with_lse` can collect its lse.

    A function mode would see every other function too, which takes as long as a short attention. If the name is patched
    by other code already, it stays so, and no lse is collected.
    """
    if F.scaled_dot_product_attention is SDPA:
        F.scaled_dot_product_attention = _hooked_sdpa


def remove_hook() -> None:
    """Restore `F.scaled_dot_product_attention`."""
    if F.scaled_dot_product_attention is _hooked_sdpa:
        F.scaled_dot_product_attention = SDPA


def is_sdpa_original() -> bool:
    """True unless other code has replaced `F.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention is SDPA or F.scaled_dot_product_attention is _hooked_sdpa


class LseOfCall(NamedTuple):
    """The lse of a call, and its queries and keys, each with the tensor that the kernel got for it."""

    lse: Tensor
    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]

    def as_cast(self, x: Tensor) -> Tensor:
        """Return what the kernel got for a tensor that was cast by autocast, or the tensor itself."""
        return next((cast for given, cast in (self.queries, self.keys) if given is x), x)


def run_with_lse(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, LseOfCall | None]:
    """Return the result of a function and, after `install_hook()`, the lse of the attention that it calls.

    The lse is None unless the function makes exactly one attention call in this thread.
    """
    collected: list[LseOfCall | None] = []
    outer, _LSE_SINK.collected = _LSE_SINK.collected, collected
    try:
        result = function(*args, **kwargs)
    finally:
        _LSE_SINK.collected = outer
    return result, collected[0] if len(collected) == 1 else None


def run_with_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, KernelCall | None]:
    """Return the result of a function and, after `install_hook()`, the call of SDPA that it makes.

    The call is None unless the function makes exactly one in this thread.
    """
    calls: list[KernelCall] = []
    outer, _LSE_SINK.calls = _LSE_SINK.calls, calls
    try:
        result = function(*args, **kwargs)
    finally:
        _LSE_SINK.calls = outer
    return result, calls[0] if len(calls) == 1 else None


def sdpa_kernel_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | GraphMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    statistic: Tensor | None = None,
) -> KernelCall:
    """Return a call of `F.scaled_dot_product_attention`, which aligns causal masks top left, whatever the lengths."""
    place: dict[str, Any] = {"mask": Causal(), "offset": 0} if is_causal else {"mask": attn_mask}
    return KernelCall(q=query, k=key, v=value, scale=scale, statistic=statistic, dropout=dropout_p, **place)


class _LseSink(threading.local):
    collected: list[LseOfCall | None] | None = None
    calls: list[KernelCall] | None = None


_LSE_SINK = _LseSink()


def _hooked_sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    if not is_compiling() and _LSE_SINK.calls is not None:
        _LSE_SINK.calls.append(sdpa_kernel_call(query, key, value, attn_mask, *args, **kwargs))
    if is_compiling() or (collected := _LSE_SINK.collected) is None:
        # Function modes know the original function; CausalBias compares with the patched name.
        original = run_sdpa if is_causal_bias(attn_mask) and not _mode_is_active() else SDPA
        return original(query, key, value, attn_mask, *args, **kwargs)
    out, lse, q, k = _run_sdpa_with_lse(query, key, value, attn_mask, *args, **kwargs)
    collected.append(None if lse is None else LseOfCall(lse, (query, q), (key, k)))
    return out


def _mode_is_active() -> bool:
    return is_compiling() or torch_internals.is_function_mode_enabled()


def run_sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Run the original function; a CausalBias mask intercepts it by its current name, and does the work itself."""
    arguments = query, key, value, attn_mask, *args
    if is_causal_bias(attn_mask):
        kind = type(attn_mask)
        return kind.__torch_function__(F.scaled_dot_product_attention, (kind,), arguments, kwargs)
    return SDPA(*arguments, **kwargs)


def _run_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return output and lse, or None if PyTorch selects no fused kernel; autocast casts nothing in these kernels."""
    # The original function calls this too, so both select the same kernel.
    kernel = torch_internals.choose_sdp_kernel(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if kernel <= SdpaKernel.MATH:
        return None
    added, seen = (None, None) if mask is None else _added_mask(mask, q.dtype, _hidden_score(kernel))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = run_kernel(q, k, v, scale=scale, added=added, causal=causal, dropout=0.0, kernel=kernel)
    if lse is not None and seen is not None:  # kernels return any number for a row that sees no key
        lse = torch.where(seen, lse, -math.inf)
    return out, lse


def _hidden_score(kernel: int) -> float:
    """Return what PyTorch adds for False in a bool mask: for cuDNN a number, so a row without keys averages all."""
    return -65504.0 if kernel == SdpaKernel.CUDNN else -math.inf


_ADDED_MASKS = WeakTensorKeyDictionary()  # mask -> its state, its numbers to add, and the rows that see a key


def _added_mask(mask: Tensor, dtype: torch.dtype, hidden: float) -> tuple[Tensor, Tensor]:
    """Return a mask as numbers to add, and True for each row that sees a key, `b|1 h|1 i`; layers share masks."""
    known = _ADDED_MASKS.get(mask)
    version = None if mask.is_inference() else mask._version
    state = version, dtype, hidden
    if known is not None and version is not None and known[0] == state:
        return known[1], known[2]
    is_bool = mask.dtype == torch.bool
    added = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, hidden) if is_bool else mask
    seen = (mask if is_bool else mask > -math.inf).any(-1)
    if is_bool:  # a mask of numbers would hold itself
        _ADDED_MASKS[mask] = state, added, seen
    return added, seen


def _is_plain_mask(mask: Any, q: Tensor) -> bool:
    """True if a mask reaches a kernel of a GPU as it is, or as numbers to add."""
    if type(mask) is not Tensor or not mask.is_cuda or mask.ndim != 4 or q.ndim != 4 or mask.requires_grad:
        return False
    return mask.dtype in (torch.bool, q.dtype)


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if PyTorch passes these tensors to a kernel as they are, or as autocast casts them."""
    return not has_torch_function((q, k, v)) and (q.is_cuda or q.is_cpu) and not is_traced()


def _cast_for_autocast(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return the tensors as the kernel gets them: autocast casts all floating tensors of its device but float64."""
    if not torch_internals.is_any_autocast_enabled() or not torch.is_autocast_enabled(device := q.device.type):
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        is_plain = type(x) in (Tensor, Parameter) and x.device.type == device
        return x.to(dtype) if is_plain and x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v), cast(mask)
