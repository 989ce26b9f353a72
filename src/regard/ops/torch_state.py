"""What may be done while a compiler, or a transform of torch.func, follows along."""

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
    """True inside vmap, grad and their kin, where tensors stand for more than they hold."""
    return not torch.compiler.is_compiling() and torch_internals.in_functorch_transform()


def in_forward_mode() -> bool:
    """True inside a `dual_level`, which jvp, jacfwd and their kin open too: tensors may carry tangents."""
    return torch_internals.in_dual_level() and not torch.compiler.is_compiling()


def refuse_jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    """The `jvp` of a function that has none, with the next step."""
    raise NotImplementedError(
        "blocks have no derivative in forward mode beside gradients, nor for additive scores; "
        "pass backend='reference' to store the matrix"
    )


def check_single_gradient(grad: Tensor) -> None:
    """Refuse many gradients that autograd hands to a backward as one, with the next step."""
    if torch_internals.is_batched_gradient(grad):
        raise RuntimeError(
            "blocks take one gradient at a time, got a batch of them by is_grads_batched=True; "
            "call torch.autograd.grad for each, or pass backend='reference' to store the matrix"
        )


def is_traced() -> bool:
    """True where a compiler or a transform follows along, and no number can be looked at."""
    return torch.compiler.is_compiling() or torch_internals.in_functorch_transform()


def can_read_values(x: Tensor) -> bool:
    """True where numbers can be read, and without stopping a device."""
    return x.device.type == "cpu" and not is_traced()


def run_uncompiled(fn: F) -> F:
    """Under torch.compile, run eagerly: the work depends on which tiles a mask leaves empty.

    PyTorch's compiler, and Triton with it, are imported by `disable`: not before somebody compiles.
    """

    @functools.wraps(fn)
    def run(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        if torch.compiler.is_exporting():
            raise ValueError(
                f"this attention cannot be exported: {REASON}, and others can by backend='reference', of a layer by "
                "layer.core.backend = 'reference'"
            )
        torch_internals.break_graph(REASON)
        return torch.compiler.disable(fn)(*args, **kwargs)

    return cast(F, run)
