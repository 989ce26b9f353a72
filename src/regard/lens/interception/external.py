"""Adapters for third-party kernels. A reading of their arguments is accepted only if it reproduces their output.

regard never imports these libraries: it looks for functions that are imported already. What their arguments mean is
taken from their documentation, so 64 rows of each matrix are compared with the output of the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .intercepted import OutputLayout
from .kernel_call import KernelCall, NotUnderstood
from .patching import Kernel, KernelRun, original_function

ToKernelCall = Callable[[str, dict[str, Any]], KernelCall]


def imported_kernels(
    modules: Sequence[str],
    functions: Sequence[str],
    to_kernel_call: ToKernelCall,
    layout: Callable[[Tensor], OutputLayout],
    dropout: str,
) -> list[Kernel]:
    """Return functions of modules that are imported already; `to_kernel_call` takes the function name first."""
    homes = tuple(module for name in modules if (module := sys.modules.get(name)) is not None)
    found = [
        (original_function(vars(home)[name]), name)
        for home in homes
        for name in functions
        if callable(vars(home).get(name))
    ]
    return [
        Kernel(
            function=function,
            homes=homes,
            to_kernel_call=partial(_read_kernel_call, to_kernel_call, name),
            layout=lambda run, out: layout(out),
            mismatch=f"{name} did not return what its documented arguments give",
            dropout=dropout,
        )
        for function, name in {id(function): (function, name) for function, name in found}.values()
    ]


def check_float_dtypes(name: str, *tensors: Tensor) -> None:
    """Raise `NotUnderstood` for 8-bit tensors and integers, whose scales are stored elsewhere."""
    if dtypes := {x.dtype for x in tensors if not x.is_floating_point() or x.dtype.itemsize == 1}:
        raise NotUnderstood(f"{name} got tensors of {', '.join(map(str, dtypes))}, which are not supported")


def _read_kernel_call(to_kernel_call: ToKernelCall, name: str, run: KernelRun) -> KernelCall:
    """Return the call; another version of a library may have other arguments, which must not stop the model."""
    try:
        return to_kernel_call(name, run.arguments)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NotUnderstood(f"the arguments of {name} differ from the documented version: {error}") from error
