"""Find code that attends where PyTorch's function modes see nothing: in compiled, scripted and vmapped functions.

A function mode sees the calls of Python code alone. The code of a layer names the functions that it calls, so a
compiled or scripted function that may attend is found before it runs, at no cost while the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import torch_internals
from .module_scan import KERNELS, MATMUL_WORDS, functions, has_matmul_sign
from .patching import original_function

WEIGHT_WORDS = ("softmax", "exp", "sigmoid", "relu")  # parts of the names of functions that make weights of scores

CALLED_DEPTH = 2  # functions that a method calls, and those that they call
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
PLAIN_TYPES = frozenset((bool, int, float, str, list, tuple, dict, type(None), torch.dtype, torch.device, torch.Tensor))
HELD_TYPES = PLAIN_TYPES | set(map(type, vars(nn.Module()).values()))
LIBRARIES = ("torch.", "transformers.", "regard.")  # packages whose functions are not read


class OpaqueCall(NamedTuple):
    """The kind of function that a layer calls, and why capture cannot see into it."""

    kind: str
    reason: str


COMPILED = OpaqueCall(
    "compiled function",
    "its attention ran inside a torch.compile'd function, where it cannot be recorded. If that was a compiled module, "
    "capture that module; else disable compilation: with torch.compiler.set_stance('force_eager'), capture(model)",
)
SCRIPTED = OpaqueCall(
    "scripted function",
    "it calls a function of torch.jit.script, which runs outside Python. Call the original function while capturing",
)
VMAPPED = OpaqueCall(
    "vmapped function",
    "it calls torch.vmap, within which tensors hold no values. Write the heads as a dimension while capturing",
)


def opaque_attention(kind: type, values: Iterable[Any]) -> OpaqueCall | None:
    """Return how a module calls attention that capture cannot see into; None if it does not.

    `kind` is the class of the module, and `values` are its `attached_values`.
    """
    if (call := _opaque_in_class(kind)) is not None:
        return call
    for value in values:
        is_function = callable(value) and not isinstance(value, nn.Module)
        if is_function and (call := _opaque_value(value, CALLED_DEPTH)) is not None:
            return call
    return None


def attached_values(module: nn.Module) -> list[Any]:
    """Return what a module holds beside parameters, buffers, submodules and plain numbers, such as functions.

    This runs for every module of a model when a capture begins, so it calls nothing that it can avoid.
    """
    if HELD_TYPES.issuperset(map(type, module.__dict__.values())):
        return []
    held = module.__dict__.items()
    return [value for name, value in held if name not in MODULE_ATTRIBUTES and type(value) not in PLAIN_TYPES]


@cache
def _opaque_in_class(kind: type) -> OpaqueCall | None:
    """Return how the methods of a class call attention that capture cannot see into."""
    own = [value for base in kind.__mro__ if base not in nn.Module.__mro__ for value in vars(base).values()]
    found = (
        *(_opaque_function(value) for value in own),
        *(_opaque_code(fn, CALLED_DEPTH) for fn in functions(kind)),
    )
    return next((call for call in found if call is not None), None)


def _opaque_code(fn: Any, depth: int) -> OpaqueCall | None:
    """Return what the code of a function calls, down to `depth` functions that it names."""
    codes = list(_nested(fn.__code__))
    if any("vmap" in code.co_names for code in codes) and _may_average(codes):
        return VMAPPED
    found = (_opaque_value(value, depth - 1) for value in _named_values(fn))
    return next((call for call in found if call is not None), None)


def _opaque_value(value: Any, depth: int) -> OpaqueCall | None:
    """Return the kind of a function that a layer names, or of the functions that it names itself."""
    if (call := _opaque_function(value)) is not None or not depth or not inspect.isfunction(value):
        return call
    return None if str(value.__module__).startswith(LIBRARIES) else _opaque_code(value, depth)


def _nested(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _nested(constant)


def _named_values(fn: Any) -> Iterator[Any]:
    """Return the global and enclosed values that a function names."""
    names = {name for code in _nested(fn.__code__) for name in code.co_names}
    for value in [fn.__globals__[name] for name in names if name in fn.__globals__]:
        if not inspect.ismodule(value):
            yield value
        elif not f"{value.__name__}.".startswith(LIBRARIES):
            yield from (vars(value)[name] for name in names if name in vars(value))
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue


def _opaque_function(value: Any) -> OpaqueCall | None:
    """Return the kind of a compiled or scripted function that may attend; None for others."""
    value = original_function(value)
    if isinstance(value, torch.jit.ScriptFunction):
        graph = str(value.inlined_graph)
        return SCRIPTED if "softmax" in graph or "scaled_dot_product" in graph else None
    value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
    if not inspect.isfunction(value):
        return None
    original = vars(value).get(torch_internals.COMPILED_FUNCTION)
    if inspect.ismethod(original):
        original = original.__func__
    if not inspect.isfunction(original):
        return None
    return COMPILED if _may_average(list(_nested(original.__code__))) else None


def _may_average(codes: list[Any]) -> bool:
    """Whether code calls an attention function, or has a product and a function that makes weights of scores."""
    names = {name.lower() for code in codes for name in code.co_names}
    if not names.isdisjoint(KERNELS):
        return True
    if not any(word in name for name in names for word in WEIGHT_WORDS):
        return False
    return any(word in name for name in names for word in MATMUL_WORDS) or any(map(has_matmul_sign, codes))
