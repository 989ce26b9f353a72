"""The row statistic of a model's own attention: PyTorch's kernels find it on their way and drop it; here it is kept.

With it a summary of what was captured takes one pass over q and k, not two. A short pass, which takes no longer than
its Python, is not kept waiting for it: there it is found again once somebody looks.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ...ops.backends.torch_kernels import SdpaKernel, run_fused
from ...ops.torch_state import is_traced

SHORT, SHORT_ON_GPU = 2**13, 2**26  # entries of all matrices of an attention
SDPA = torch._C._nn.scaled_dot_product_attention  # PyTorch's own, whatever its name in `F` stands for


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.scaled_dot_product_attention`, by the kernel it takes, and the log-sum-exp of each row, `b h i`.

    The second is None where there is a mask or dropout, where PyTorch has no fused kernel, and where somebody else
    waits for a call of the function by its name.
    """
    if attn_mask is None and not dropout_p:
        found = _by_kernel(query, key, value, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _own(query, key, value, attn_mask, **given), None


def is_causal_bias(mask: object) -> TypeGuard[Any]:
    """Is it a mask of `torch.nn.attention.bias`? Who has one has imported that, which takes a second."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def holds(q: Tensor, k: Tensor) -> bool:
    """May a statistic of these be believed? Of a row that sees NaN the kernel for CPUs tells what the others sum to."""
    return not q.is_cpu or bool(torch.isfinite(q).all() and torch.isfinite(k).all())


def is_short(q: Tensor, k: Tensor) -> bool:
    """Is the statistic found again, if somebody looks, in the time that asking the kernel for it takes the host?"""
    b, h, i, _ = q.shape
    return b * h * i * k.shape[2] <= (SHORT_ON_GPU if q.is_cuda else SHORT)


def found_again(q: Tensor, k: Tensor, *, is_causal: bool, scale: float | None) -> Tensor | None:
    """The log-sum-exp of each row, `b h i`, of an attention that has run; None where PyTorch has no fused kernel."""
    found = _by_kernel(q, k, k, is_causal, scale, q.shape[1] != k.shape[1])
    return None if found is None else found[1]


def tell() -> None:
    """From now on `F.scaled_dot_product_attention`, called by its name, tells its statistic to whoever wants to `hear`.

    A function mode would see it too, and every other function with it: that takes as long as a short attention. Where
    the name stands for something else already, it stays so, and nothing is told.
    """
    if F.scaled_dot_product_attention is SDPA:
        F.scaled_dot_product_attention = _telling


def tell_no_more() -> None:
    """Let the name stand for PyTorch's own function again."""
    if F.scaled_dot_product_attention is _telling:
        F.scaled_dot_product_attention = SDPA


def hear(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
    """What a function returns and, after `tell()`, the statistic of the one attention it calls for in this thread.

    The second is None where there was none, and where several calls make the whole.
    """
    found: list[Tensor | None] = []
    outer, _EAR.found = _EAR.found, found
    try:
        result = function(*args, **kwargs)
    finally:
        _EAR.found = outer
    return result, found[0] if len(found) == 1 else None


class _Ear(threading.local):
    found: list[Tensor | None] | None = None


_EAR = _Ear()


def _telling(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    if is_compiling() or (found := _EAR.found) is None:
        # A mode knows the function as PyTorch's own; a mask does not, while it has another name.
        own = _own if is_causal_bias(attn_mask) and not _watched() else SDPA
        return own(query, key, value, attn_mask, *args, **kwargs)
    out, statistic = attended(query, key, value, attn_mask, *args, **kwargs)
    found.append(statistic)
    return out


def _watched() -> bool:
    return is_compiling() or torch._C._is_torch_function_mode_enabled()


def _own(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's own function, under the name it has now for a mask that goes by that, and does the work itself."""
    given = query, key, value, attn_mask, *args
    if is_causal_bias(attn_mask):
        kind = type(attn_mask)
        return kind.__torch_function__(F.scaled_dot_product_attention, (kind,), given, kwargs)
    return SDPA(*given, **kwargs)


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Output and statistic, if PyTorch takes a fused kernel."""
    if not _plain(q, k, v):
        return None
    # The question the function itself asks, so that the answer is the kernel it takes.
    kernel = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    if kernel <= SdpaKernel.MATH:
        return None
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return run_fused(q, k, v, scale=scale, added=None, causal=causal, dropout=0.0, kernel=kernel)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Would PyTorch hand these tensors as they are to a kernel it chooses?"""
    return (
        not has_torch_function((q, k, v))
        and not torch._C._is_any_autocast_enabled()
        and (q.is_cuda or q.is_cpu)
        and not is_traced()
    )
