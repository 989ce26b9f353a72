"""Compiled, scripted and vmapped attention is found in the code of a layer, before it runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens.interception.opaque_calls import COMPILED, SCRIPTED, VMAPPED, attached_values, opaque_attention
from tests.lens import unseen_layers as ways
from tests.lens.unseen_layers import DIM, Layer

compiled = torch.compile(ways.written_out, backend="eager")
harmless = torch.compile(lambda x: F.gelu(x) * 2, backend="eager")
scripted = ways.scripted_attention


def through_another(q, k, v):
    return compiled(q, k, v)


class ByName(nn.Module):
    def forward(self, x):
        return compiled(x, x, x)


class ByAnother(nn.Module):
    def forward(self, x):
        return through_another(x, x, x)


class ByScript(nn.Module):
    def forward(self, x):
        return scripted(x, x, x)


class Harmless(nn.Module):
    def forward(self, x):
        return harmless(x)


class Derived(ByName):
    pass


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (ByName(), COMPILED),
        (ByAnother(), COMPILED),
        (Derived(), COMPILED),
        (ways.Compiled(), COMPILED),
        (ByScript(), SCRIPTED),
        (Layer(compiled), COMPILED),
        (Layer(scripted), SCRIPTED),
        (Layer(ways.over_heads), VMAPPED),
        (Layer(ways.written_out), None),
        (Harmless(), None),
        (nn.Linear(DIM, DIM), None),
        (nn.TransformerEncoderLayer(DIM, 2), None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_code_of_a_layer_says_what_it_calls(module, expected):
    assert opaque_attention(type(module), attached_values(module)) == expected


def test_values_that_answer_every_name_are_left_alone():
    class Anything:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    module = Layer(ways.written_out)
    module.__dict__["anything"] = Anything()
    assert opaque_attention(type(module), attached_values(module)) is None
