"""Decide from the bytecode and source of a module class whether it can attend, before it runs.

An active function mode slows every function of PyTorch, so it is active only in classes that may attend.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...nn.core import Core
from ...ops.operator import attend
from .sdpa import SDPA

ATTENTIONS = frozenset((attend, SDPA, F.multi_head_attention_forward))
ATTENTIVE = frozenset((Core, nn.MultiheadAttention, nn.TransformerEncoderLayer))
KERNELS = ("scaled_dot_product_attention", "multi_head_attention_forward")  # names of PyTorch's attention functions
MATMUL_WORDS = ("matmul", "bmm", "einsum")  # parts of the names of product functions
ATTENTION_WORDS = ("attention", "attn")  # parts of the names of layers that attend
INTERFACE = "all_attention_functions"  # ALL_ATTENTION_FUNCTIONS of transformers, in lower case
HOLDERS = frozenset((nn.ModuleList, nn.ModuleDict))  # never called themselves


@cache
def may_attend(kind: type) -> bool:
    """True if layers of this class may attend by themselves; most of transformers call its interface instead."""
    file = kind.__module__
    if kind in HOLDERS:
        return False
    if not file.startswith("transformers.") or multiplies(kind) or samples(kind):
        return True
    try:
        source = inspect.getsource(sys.modules[file])
    except (OSError, KeyError):  # no source is available
        return True
    return _calls_one(source, KERNELS)


@cache
def attends(kind: type) -> bool:
    """True if the code of a class names an attention function."""
    if kind in ATTENTIVE:
        return True
    return any(map(_names_one, functions(kind)))


@cache
def attends_aside(kind: type) -> bool:
    """True if a method other than `forward` calls an attention function; False if its source is not available."""
    try:
        others = [fn for name, fn in vars(kind).items() if inspect.isfunction(fn) and name != "forward"]
        return any(_calls_one(inspect.getsource(fn), (*KERNELS, attend.__name__)) for fn in others)
    except OSError:
        return False


@cache
def multiplies(kind: type) -> bool:
    """True if the code of a class names a softmax and a product, and not the interface of transformers."""
    code = [fn.__code__ for fn in functions(kind)]
    names = {name.lower() for each in code for name in each.co_names}
    if INTERFACE in names or not any(name.endswith("softmax") for name in names):
        return False
    return any(word in name for name in names for word in MATMUL_WORDS) or any(map(has_matmul_sign, code))


@cache
def samples(kind: type) -> bool:
    """True if a class may weigh points that `grid_sample` reads: its code names it, or a softmax in the same file."""
    names = {name for fn in functions(kind) for name in fn.__code__.co_names}
    if "grid_sample" in names or not any(name.endswith("softmax") for name in names):
        return "grid_sample" in names
    try:
        return _calls_one(inspect.getsource(sys.modules[kind.__module__]), ("grid_sample",))
    except (OSError, KeyError):
        return True


@cache
def is_an_attention(kind: type) -> bool:
    """True if the name of a class says attention, and its code has a softmax and a product or a sum."""
    return any(word in kind.__name__.lower() for word in ATTENTION_WORDS) and (multiplies(kind) or _sums(kind))


def _sums(kind: type) -> bool:
    """True if the code of a class names a softmax and a sum."""
    names = {name.lower() for fn in functions(kind) for name in fn.__code__.co_names}
    return "sum" in names and any(name.endswith("softmax") for name in names)


def functions(kind: type) -> Iterator[Any]:
    """Return the functions of a module class and of its bases, up to `nn.Module`."""
    own = (fn for base in kind.__mro__ if base not in nn.Module.__mro__ for fn in vars(base).values())
    # Other objects may have an answer to every attribute, `__wrapped__` too.
    known = (fn for fn in own if type(fn).__module__ in ("builtins", "functools"))
    return filter(inspect.isfunction, map(inspect.unwrap, known))


def has_matmul_sign(code: CodeType) -> bool:
    """Whether code has a product by the sign @."""
    return any(each.opname == "BINARY_OP" and each.argrepr in ("@", "@=") for each in dis.get_instructions(code))


def _names_one(fn: Any) -> bool:
    known = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    return not set(KERNELS).isdisjoint(fn.__code__.co_names) or any(x is one for x in known for one in ATTENTIONS)


def _calls_one(source: str, names: tuple[str, ...]) -> bool:
    return any(f"{name}(" in source for name in names)
