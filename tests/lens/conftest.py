"""Stand-ins for flash_attn and xformers, which need a GPU, and interfaces of transformers to register functions in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import tests.lens.fake_kernels as fake


def module(name, **functions):
    made = ModuleType(name)
    vars(made).update(functions)
    return made


@pytest.fixture
def flash(monkeypatch):
    """flash_attn, as if it were installed and imported."""
    functions = {function.__name__: function for function in fake.FLASH}
    inner = module("flash_attn.flash_attn_interface", **functions)
    outer = module("flash_attn", **functions, flash_attn_interface=inner)
    monkeypatch.setitem(sys.modules, "flash_attn", outer)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", inner)
    return outer


@pytest.fixture
def third(monkeypatch):
    """The third version."""
    functions = {
        "flash_attn_func": fake.third_flash_attn_func,
        "flash_attn_varlen_func": fake.third_flash_attn_varlen_func,
    }
    made = module("flash_attn_interface", **functions)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made)
    return made


@pytest.fixture
def cute(monkeypatch):
    """flash_attn.cute, the fourth version."""
    functions = {
        "flash_attn_func": fake.cute_flash_attn_func,
        "flash_attn_varlen_func": fake.cute_flash_attn_varlen_func,
    }
    made = module("flash_attn.cute", **functions, interface=module("flash_attn.cute.interface", **functions))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", made)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", made.interface)
    return made


@pytest.fixture
def xformers(monkeypatch):
    """xformers.ops, as if it were installed and imported."""
    functions = {f.__name__: f for f in (fake.memory_efficient_attention, fake.memory_efficient_attention_partial)}
    fmha = module("xformers.ops.fmha", **functions)
    ops = module("xformers.ops", **functions, fmha=fmha)
    for name, made in (("xformers", module("xformers", ops=ops)), ("xformers.ops", ops), ("xformers.ops.fmha", fmha)):
        monkeypatch.setitem(sys.modules, name, made)
    return ops


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def registries(monkeypatch):
    """The interfaces of transformers, in which what a test registers lasts for that test."""
    transformers = pytest.importorskip("transformers")
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    return transformers
