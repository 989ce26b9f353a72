"""What the code of a class says about attention, before any of it has run.

Whoever watches everything slows all of it down; so classes that cannot attend are passed over.
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
KERNELS = ("scaled_dot_product_attention", "multi_head_attention_forward")  # PyTorch's own, by name
WORDS = ("matmul", "bmm", "einsum")  # what the names of products have in them
NAMED = ("attention", "attn")  # what the names of layers that attend have in them
INTERFACE = "all_attention_functions"  # of transformers, in small letters
HOLDERS = frozenset((nn.ModuleList, nn.ModuleDict))  # are never called


@cache
def may_attend(kind: type) -> bool:
    """May layers of this kind attend by themselves? Few of transformers do: most ask its interface."""
    file = kind.__module__
    if kind in HOLDERS:
        return False
    if not file.startswith("transformers.") or multiplies(kind):
        return True
    try:
        source = inspect.getsource(sys.modules[file])
    except (OSError, KeyError):  # there is no source to look at
        return True
    return _calls_one(source, KERNELS)


@cache
def attends(kind: type) -> bool:
    """Does a layer of this kind call an attention by itself, as far as the names in its code tell?"""
    if kind in ATTENTIVE:
        return True
    return any(map(_names_one, functions(kind)))


@cache
def attends_aside(kind: type) -> bool:
    """Does a class call an attention in a method other than `forward`, as far as its code can be read?"""
    try:
        others = [fn for name, fn in vars(kind).items() if inspect.isfunction(fn) and name != "forward"]
        return any(_calls_one(inspect.getsource(fn), (*KERNELS, attend.__name__)) for fn in others)
    except OSError:
        return False


@cache
def multiplies(kind: type) -> bool:
    """Does the code of a class name a softmax and a product, and not the interface that does both?"""
    code = [fn.__code__ for fn in functions(kind)]
    names = {name.lower() for each in code for name in each.co_names}
    if INTERFACE in names or not any(name.endswith("softmax") for name in names):
        return False
    return any(word in name for name in names for word in WORDS) or any(map(_has_sign, code))


@cache
def is_an_attention(kind: type) -> bool:
    """Is a class an attention by its name, and by what its code multiplies?"""
    return any(word in kind.__name__.lower() for word in NAMED) and multiplies(kind)


def functions(kind: type) -> Iterator[Any]:
    """The functions in the code of a class of modules, and of those it is made of."""
    own = (fn for base in kind.__mro__ if base not in nn.Module.__mro__ for fn in vars(base).values())
    return filter(inspect.isfunction, map(inspect.unwrap, own))


def _has_sign(code: CodeType) -> bool:
    return any(each.opname == "BINARY_OP" and each.argrepr in ("@", "@=") for each in dis.get_instructions(code))


def _names_one(fn: Any) -> bool:
    known = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    return not set(KERNELS).isdisjoint(fn.__code__.co_names) or any(x is one for x in known for one in ATTENTIONS)


def _calls_one(source: str, names: tuple[str, ...]) -> bool:
    return any(f"{name}(" in source for name in names)
