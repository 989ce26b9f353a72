"""One attention by every function that the interception sees: b i (q k v) h d -> b i h e."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import tests.lens.fake_kernels as fake
from regard import attend
from regard.lens import KernelCall, register_kernel
from tests.lens.fake_kernels import own_kernel
from tests.lens.kernel_layers import HEADS, WIDTH, QkvLayer


def by_heads(function):
    """A function of b h i d as one of b i h d."""
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def by_hand(q, k, v):
    return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


def to_kernel_call(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return KernelCall(q=q, k=k, v=v)


ENTRANCES = {
    "attend": by_heads(attend),
    "sdpa": by_heads(F.scaled_dot_product_attention),
    "sdpa with heads in the batch": lambda q, k, v: (
        F.scaled_dot_product_attention(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
        .unflatten(0, (-1, HEADS))
        .transpose(1, 2)
    ),
    "flex_attention": by_heads(lambda q, k, v: flex_attention(q, k, v)),
    "written out": by_heads(by_hand),
    "written out with einsum": lambda q, k, v: torch.einsum(
        "bhij,bjhe->bihe", (torch.einsum("bihd,bjhd->bhij", q, k) * WIDTH**-0.5).softmax(-1), v
    ),
    "flash_attn": lambda q, k, v: sys.modules["flash_attn"].flash_attn_func(q, k, v),
    "xformers": lambda q, k, v: sys.modules["xformers.ops"].memory_efficient_attention(q, k, v),
    "registered": lambda q, k, v: own_kernel(q, k, v).unflatten(2, (HEADS, WIDTH)),
}
NO_BACKWARD = {"flex_attention", "registered"}  # on the CPU


@pytest.fixture
def libraries(monkeypatch):
    """flash_attn and xformers, as if they were imported, and a kernel that the user has registered."""
    for name, function in (("flash_attn", fake.flash_attn_func), ("xformers.ops", fake.memory_efficient_attention)):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    with register_kernel(own_kernel, to_kernel_call, output="b i (h e)"):
        yield


def build(entrance):
    """A model of one layer, "0", that attends by this entrance."""
    return nn.Sequential(QkvLayer(ENTRANCES[entrance]))
