"""Argument names of PyTorch are refused with ours."""

from __future__ import annotations

import re

import pytest

from regard.nn import (
    Attention,
    AttentionPool,
    SelfAttention2d,
)
from regard.nn.argument_hints import HINTS, with_argument_hints


@pytest.mark.parametrize("make", [Attention, AttentionPool, SelfAttention2d])
def test_names_of_pytorch_are_told_in_ours(make):
    with pytest.raises(TypeError, match=f"^{make.__name__} has no num_heads=; write heads=$"):
        make(16, num_heads=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'anything'"):
        make(16, anything=2)


@pytest.mark.parametrize(("theirs", "ours"), HINTS.items())
def test_each_argument_of_pytorch_raises_with_what_to_write(theirs, ours):
    with pytest.raises(TypeError, match=f"^Attention has no {theirs}=; write {re.escape(ours)}$"):
        Attention(16, 2, **{theirs: 1})


def test_the_first_of_several_is_named_in_the_order_of_the_alphabet():
    with pytest.raises(TypeError, match="has no embed_dim="):
        Attention(num_heads=2, vdim=3, embed_dim=4)


def test_a_checked_init_keeps_its_name_and_takes_our_arguments():
    class Layer:
        @with_argument_hints
        def __init__(self, width, *, heads):
            """Keep both."""
            self.given = width, heads

    assert Layer(16, heads=2).given == (16, 2)
    assert Layer.__init__.__doc__ == "Keep both."
    with pytest.raises(TypeError, match="has no kdim=; write key_width="):
        Layer(16, heads=2, kdim=3)
