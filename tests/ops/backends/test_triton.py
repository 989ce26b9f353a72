"""Additive attention by our kernels: what they object to, and what is stored whole."""

from __future__ import annotations

import torch

import regard as R
from regard.ops.backends import triton
from regard.ops.call import Call
from tests.ops.inputs import qkv


def test_a_missing_triton_is_an_objection_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(triton, "DEVICES", ("cpu",))
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    call = Call.of(*qkv(), score=R.Additive(torch.ones(8)))
    assert triton.plan(call) == ["Triton is not installed; pip install triton"]


def test_float64_is_an_objection_of_the_kernels():
    call = Call.of(*(x.double() for x in qkv()), score=R.Additive(torch.ones(8).double()))
    assert "its arithmetic is float32" in triton.plan(call)
