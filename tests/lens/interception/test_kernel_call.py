"""One attention call as a value, and one more mask on it."""

import dataclasses

import pytest
import torch

from regard import Causal, Window
from regard.lens import KernelCall


def call(**given):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    return KernelCall(q=q, k=k, v=v, **given)


def test_another_mask_leaves_the_call_as_it_was():
    first = call(mask=torch.ones(5, 5, dtype=torch.bool), scale=0.5)
    second = first.masked(Causal())
    assert (first.extra_mask, second.extra_mask) == (None, Causal())
    assert second.mask is first.mask
    assert second.scale == 0.5


def test_masks_that_are_added_are_joined():
    assert call().masked(Causal()).masked(Window(2)).extra_mask == Causal() & Window(2)


def test_the_alternative_reading_is_masked_too():
    masked = call(alternative=call(alternative=call())).masked(Causal())
    assert masked.alternative.extra_mask == masked.alternative.alternative.extra_mask == Causal()
    assert masked.alternative.alternative.alternative is None


def test_a_call_is_frozen_and_takes_names_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        call().scale = 1.0
    with pytest.raises(TypeError, match="positional"):
        KernelCall(*torch.randn(3, 1, 2, 5, 4))
