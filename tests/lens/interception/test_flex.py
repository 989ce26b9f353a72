"""flex_attention, as it is and compiled: recorded, ablated, or refused with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from regard.lens import ablate, capture
from tests.lens.flex_layers import CompiledFlex, FlexLayer, blocks, flex_inputs
from tests.lens.kernel_layers import HEADS, WIDTH, Held, capture_one

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def test_grouped_heads_other_lengths_and_texts_of_their_own_length():
    lengths = torch.tensor([4, 7])
    mask = blocks(lambda b, h, i, j: j < lengths[b], n=5, m=7, batch=2)
    q, k, v = flex_inputs(groups=2, n=5, m=7)
    A, out = capture_one(FlexLayer(block_mask=mask, enable_gqa=True), q, k, v)
    assert repr(A.call.mask) == "Padding((4, 7))"
    assert A.call.k.shape[1] == 2
    torch.testing.assert_close(A @ v, out)


def test_it_may_return_more_than_its_output():
    q, k, v = flex_inputs()
    A, out = capture_one(FlexLayer(return_aux=AuxRequest(lse=True)), q, k, v)
    torch.testing.assert_close(A @ v, out)


def test_layers_that_are_not_asked_for_are_passed_over():
    model = nn.ModuleDict({"one": FlexLayer(), "two": FlexLayer()})
    q, k, v = flex_inputs()
    with capture(model, layers="two") as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def test_its_heads_are_switched_off():
    layer = CompiledFlex(block_mask=blocks())
    q, k, v = flex_inputs()
    whole = layer(q, k, v)
    with ablate(layer, {"": [1, 3]}):
        without = layer(q, k, v)
    assert torch.equal(without[:, [0, 2]], whole[:, [0, 2]])
    assert not without[:, [1, 3]].any()
    assert torch.equal(layer(q, k, v), whole)


def test_values_and_projections_are_kept():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(HEADS * WIDTH, 6, bias=False)

        def forward(self, q, k, v):
            return self.out(flex_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Whole().requires_grad_(False)
    q, k, v = flex_inputs()
    with capture(model, values=True) as tape:
        model(q, k, v)
    extras = tape.extras("")
    assert torch.equal(extras.v, v)
    assert torch.equal(extras.projection, model.out.weight)


@torch.compile(backend="eager")
def whole(*args, **kwargs):
    return flex_attention(*args, **kwargs)


@pytest.mark.usefixtures("dynamo")
def test_one_within_a_compiled_function_is_refused_with_its_reason():
    layer, (q, k, v) = Held(whole), flex_inputs()
    told = pytest.raises(ValueError, match=r"calls flex_attention inside a torch\.compile'd function")
    with torch.no_grad(), told, capture(layer):
        layer(q, k, v)


def test_a_copy_within_a_capture_is_as_the_model_was(tmp_path):
    layer, (q, k, v) = Held(flex_attention), flex_inputs()
    with capture(layer):
        layer(q, k, v)
        copied = copy.deepcopy(layer)
        torch.save(layer.call, tmp_path / "call.pt")
    assert copied.call is flex_attention
    assert torch.load(tmp_path / "call.pt", weights_only=False) is flex_attention
