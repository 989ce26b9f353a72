"""Watch the operators of ATen that attentions consist of, and no others.

A function mode costs a few microseconds for every function of PyTorch. The dispatcher reports the operators listed here
alone, from whatever code they are called, and all others run as fast as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ... import torch_internals

Watcher = Callable[[Any, Any, Any, Any], None]  # takes an operator that has run, its arguments, and its result

SDPA_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
# The names of operators, with their overloads.
SOFTMAXES = "softmax.int softmax.int_out _softmax _safe_softmax log_softmax.int _log_softmax exp exp_ exp.out"
PRODUCTS = "matmul matmul.out bmm bmm.out mm mm.out baddbmm baddbmm.out baddbmm_ addbmm einsum tensordot"
KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math "
    "_native_multi_head_attention _transformer_encoder_layer_fwd grid_sampler"
)


class _Here(threading.local):
    """The watcher of one thread."""

    watcher: Watcher | None = None


_HERE = _Here()
# The same operators by the functions of Python, which take half the time to call.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    SDPA_OPERATOR: torch_internals.SDPA,
    torch.ops.aten.matmul.default: torch.matmul,
    torch.ops.aten.softmax.int: torch.softmax,
}
_LOCK = threading.Lock()
_SWITCH: list[Callable[[bool], object] | None] = []  # once operators are registered, which takes a few milliseconds


def operators_of(names: str) -> frozenset[Any]:
    """Return the operators with the given names that this version of PyTorch has."""
    pairs = (name.split(".") if "." in name else (name, "default") for name in names.split())
    found = (getattr(getattr(torch.ops.aten, name, None), overload, None) for name, overload in pairs)
    return frozenset(each for each in found if each is not None)


def set_watcher(watcher: Watcher | None) -> Watcher | None:
    """Report the operators of this thread to a watcher, or to none; return the one before."""
    before, _HERE.watcher = _HERE.watcher, watcher
    if before is not watcher:
        switch = _SWITCH[0]
        assert switch is not None
        switch(watcher is not None)
    return before


def can_watch() -> bool:
    """Whether this version of PyTorch lets operators be watched."""
    if not _SWITCH:
        with _LOCK:
            if not _SWITCH:
                watched = operators_of(f"{SOFTMAXES} {PRODUCTS} {KERNELS}") | {SDPA_OPERATOR}
                _SWITCH.append(torch_internals.operator_switch({each: _kernel(each) for each in watched}))
    return _SWITCH[0] is not None


def _kernel(operator: Any) -> Callable[..., Any]:
    """Return a function that runs an operator, and reports it; operators that it calls by itself are not reported."""
    function = _FUNCTIONS.get(operator, operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        switch, watcher = _SWITCH[0], _HERE.watcher
        assert switch is not None
        switch(False)
        try:
            out = function(*args, **kwargs)
            if watcher is not None:
                watcher(operator, args, kwargs, out)
        finally:
            switch(_HERE.watcher is not None)
        return out

    return run
