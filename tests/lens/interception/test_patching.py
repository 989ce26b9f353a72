"""Patched kernels: each call is reported once, and every reference is restored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import tests.lens.fake_kernels as fake
from regard.lens import capture
from tests.lens.flex_layers import CompiledFlex, FlexLayer, blocks, compiled, flex_inputs
from tests.lens.kernel_layers import MISMATCH, Held, OfModule, assert_not_recorded, assert_shows, capture_one, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


class Choosing(nn.Module):
    def forward(self, qkv, packed=True):
        import flash_attn

        if packed:
            return flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
        return flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)


def test_a_kernel_that_calls_another_is_recorded_once(flash):
    def through(qkv, causal=False):
        return flash.flash_attn_func(*qkv.unbind(2), causal=causal)

    flash.flash_attn_qkvpacked_func = through
    q, k, v = inputs()
    A, _ = capture_one(Choosing(), torch.stack((q, k, v), 2))
    assert_shows(A, fake.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


def test_it_may_return_more_than_its_output(flash):
    q, k, v = inputs()
    layer = Held(flash.flash_attn_func, return_attn_probs=True)
    with capture(layer) as tape:
        got = layer(q, k, v)
    assert len(got) == 3
    assert_shows(tape[0], got[2])


def test_a_copy_within_a_capture_calls_the_original_kernel(flash):
    layer = Held(flash.flash_attn_func)
    with capture(layer):
        layer(*inputs())
        copied = copy.deepcopy(layer)
    assert copied.call is fake.flash_attn_func


def test_captures_of_two_models_nest(flash):
    one, other, args = OfModule(), Held(fake.flash_attn_func), inputs()
    with capture(one) as outer:
        one(*args)
        with capture(other) as inner:
            other(*args)
        other(*args)
    assert len(outer) == len(inner) == 1
    assert flash.flash_attn_func is other.call is fake.flash_attn_func


def test_a_kernel_with_dropout_is_compared_without_it(flash):
    flash.flash_attn_func = fake.from_the_top
    assert_not_recorded(Held(fake.from_the_top, causal=True, dropout_p=0.5), *inputs(5, 9), match=MISMATCH)


def test_nested_captures_record_a_patched_kernel():
    layer = CompiledFlex(block_mask=blocks())
    q, k, v = flex_inputs()
    with capture(layer) as outer:
        with capture(layer) as inner:
            layer(q, k, v)
        layer(k, q, v)
    assert len(inner) == 1
    assert len(outer) == 2


def test_a_function_that_was_compiled_is_not_compiled_anew():
    seen = []

    def backend(graph, examples):
        seen.append(graph)
        return graph.forward

    layer = Held(torch.compile(flex_attention, backend=backend), block_mask=blocks())
    q, k, v = flex_inputs()
    layer(q, k, v)
    before = len(seen)
    for _ in range(2):
        with capture(layer):
            layer(q, k, v)
    assert len(seen) == before


def test_a_reference_that_the_model_has_replaced_stays():
    layer, (q, k, v) = Held(compiled), flex_inputs()
    with capture(layer):
        layer(q, k, v)
        layer.call = flex_attention
    assert layer.call is flex_attention


@pytest.mark.usefixtures("dynamo")
def test_a_kernel_compiled_within_a_capture_is_the_original():
    class Late(FlexLayer):
        def forward(self, q, k, v):
            self.call = self.call or torch.compile(flex_attention, backend="eager")
            return self.call(q, k, v)

    layer, (q, k, v) = Late(), flex_inputs()
    with pytest.raises(ValueError, match="calls flex_attention inside a torch"), capture(layer):
        layer(q, k, v)
    A, out = capture_one(layer, q, k, v)
    torch.testing.assert_close(A @ v, out)
