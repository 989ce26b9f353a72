"""The state of PyTorch: compiling, inside torch.func, inside forward-mode AD; and errors for calls that fail there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from .. import torch_internals

F = TypeVar("F", bound=Callable[..., object])
REASON = "regard plans this attention by the tiles its mask leaves empty; plain, causal and padded calls need no plan"


def in_functorch() -> bool:
    """True inside vmap, grad and other torch.func transforms, where tensors are wrappers."""
    return not torch.compiler.is_compiling() and torch_internals.functorch_transform() is not None


def in_forward_mode() -> bool:
    """True inside a `dual_level`, which jvp and jacfwd open too: tensors may carry tangents."""
    return torch_internals.in_dual_level() and not torch.compiler.is_compiling()


def refuse_jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    """Raise from the `jvp` of an autograd function that has none, and say what to write."""
    raise NotImplementedError(
        "this backend has no derivative in forward mode beside gradients, nor for additive scores; "
        "pass backend='reference', which stores the matrix"
    )


def check_single_gradient(grad: Tensor) -> None:
    """Raise if autograd passes a batch of gradients (is_grads_batched=True) to a backward, and say what to write."""
    if torch_internals.is_batched_gradient(grad):
        raise RuntimeError(
            "this backend takes one gradient at a time, got a batch of them (is_grads_batched=True); "
            "call torch.autograd.grad for each, or pass backend='reference' to store the matrix"
        )


def is_traced() -> bool:
    """True while PyTorch traces or transforms, so that what is read from a tensor is not there, or would be kept."""
    return (
        torch.compiler.is_compiling()
        or torch_internals.functorch_transform() is not None
        or torch_internals.in_tracing_mode()
    )


def has_no_values(x: Tensor) -> bool:
    """True if x is fake or on the device meta, or if PyTorch records what is done to it: numbers must not be read."""
    return torch_internals.in_tracing_mode() or torch_internals.holds_no_numbers(x)


def untraced_shape(x: Tensor) -> torch.Size:
    """The shape, as whole numbers under `torch.jit.trace` too, where sizes are tensors."""
    if torch.compiler.is_compiling() or not torch_internals.is_jit_tracing():
        return x.shape
    with torch_internals.untraced_sizes():
        return x.shape


def can_read_values(x: Tensor) -> bool:
    """True if tensor values can be read, and without synchronizing a device."""
    return x.device.type == "cpu" and not is_traced() and not torch_internals.holds_no_numbers(x)


def run_uncompiled(fn: F) -> F:
    """Under torch.compile, run eagerly: the work depends on which tiles a mask leaves empty.

    PyTorch's compiler, and Triton with it, are imported by `disable`: so not before the user compiles.
    """

    @functools.wraps(fn)
    def run(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            if torch_internals.is_jit_tracing():
                raise ValueError(
                    f"torch.jit.trace cannot record this attention: {REASON}; pass backend='reference', which stores "
                    "the matrix, or write torch.compile(model)"
                )
            return fn(*args, **kwargs)
        if torch.compiler.is_exporting():
            raise ValueError(
                f"this attention cannot be exported: {REASON}; others can by backend='reference', of a layer by "
                "layer.core.backend = 'reference'"
            )
        torch_internals.break_graph(REASON)
        return torch.compiler.disable(fn)(*args, **kwargs)

    return cast(F, run)
