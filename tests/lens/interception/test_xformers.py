"""xformers: what its biases hide is read from their fields, or from the matrix that they materialize."""

from __future__ import annotations

import functools

import pytest
import torch

import tests.lens.fake_kernels as fake
from regard.lens import capture
from tests.lens.kernel_layers import HEADS, WIDTH, Held, assert_not_recorded, assert_shows, capture_one, inputs


def bias_of(shape):
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=torch.float64)


BIASES = {
    "nothing": (None, None),
    "causal": (fake.LowerTriangularMask(), "Causal()"),
    "causal at the end": (fake.LowerTriangularFromBottomRightMask(), "Causal()"),
    "causal in a window": (fake.LowerTriangularFromBottomRightLocalAttentionMask(3), "Causal() & Window(3)"),
    "a window": (fake.LocalAttentionFromBottomRightMask(2, 1), "Window(before=2, after=1)"),
    "causal and numbers": (fake.LowerTriangularMaskWithTensorBias(bias_of((2, HEADS, 5, 9))), "Causal()"),
    "a tensor": (bias_of((2, HEADS, 5, 9)), None),
    "another class": (fake.Checkered(), "Packed(uint8[1, 1, 5, 2], 9)"),
}


def softmaxed(q, k, bias, scale=None):
    """b h i j of b i h d, by the numbers that are added."""
    added = bias if torch.is_tensor(bias) else torch.zeros(1)
    if bias is not None and not torch.is_tensor(bias):
        added = bias.materialize((len(q), q.shape[2], q.shape[1], k.shape[1]))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (WIDTH**-0.5 if scale is None else scale) + added
    return s.softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("case", BIASES)
def test_biases_of_xformers_are_masks(xformers, case):
    bias, mask = BIASES[case]
    q, k, v = inputs(5, 9)
    A, out = capture_one(Held(xformers.memory_efficient_attention, attn_bias=bias, scale=0.6), q, k, v)
    assert_shows(A, softmaxed(q, k, bias, 0.6))
    made = A @ v[:, : A.shape[-1]].transpose(1, 2)
    torch.testing.assert_close(made.transpose(1, 2), out, rtol=1e-6, atol=1e-6)
    assert mask is None or repr(A.call.mask) == mask


BLOCKS = {
    "texts": fake.BlockDiagonalMask,
    "causal": fake.BlockDiagonalCausalMask,
    "causal at the end": fake.BlockDiagonalCausalFromBottomRightMask,
    "causal in a window": functools.partial(fake.BlockDiagonalCausalLocalAttentionMask.of, _window_size=2),
    "causal in a window at the end": functools.partial(
        fake.BlockDiagonalCausalLocalAttentionFromBottomRightMask.of, _window_size=2
    ),
}


@pytest.mark.parametrize("lengths", [((3, 1, 5), (3, 1, 5)), ((2, 1, 3), (4, 1, 6)), ((3,), (5,)), ((5,), (3,))])
@pytest.mark.parametrize("case", BLOCKS)
def test_block_diagonal_masks_of_xformers_are_packed_sequences(xformers, case, lengths):
    make = BLOCKS[case]
    bias = make(*lengths) if isinstance(make, functools.partial) else make.of(*lengths)
    q, k, v = inputs(sum(lengths[0]), sum(lengths[1]), batch=1)
    A, _ = capture_one(Held(xformers.memory_efficient_attention, attn_bias=bias), q, k, v)
    assert_shows(A, softmaxed(q, k, bias))
    tensors = A.call.mask.tensors() if A.call.mask is not None else ()
    assert sum(x.numel() for x in tensors) <= 2 * sum(map(sum, lengths))


def test_one_head_and_grouped_heads_of_xformers_are_recorded(xformers):
    q, k, v = inputs(5, 9)
    bias = bias_of((2, HEADS, 5, 9))
    one = [x[:, :, 0] for x in (q, k, v)]
    A, _ = capture_one(Held(xformers.memory_efficient_attention, attn_bias=bias[:, 0]), *one)
    assert_shows(A, softmaxed(q, k, bias)[:, :1])
    grouped = [x.unflatten(2, (2, 2)) for x in (q, k, v)]
    A, _ = capture_one(Held(xformers.memory_efficient_attention, attn_bias=bias.unflatten(1, (2, 2))), *grouped)
    assert_shows(A, softmaxed(q, k, bias))
    shared = [x[:, :, :2, None].expand(-1, -1, -1, 2, -1) for x in (k, v)]
    A, _ = capture_one(Held(xformers.memory_efficient_attention), grouped[0], *shared)
    assert_shows(A, softmaxed(q, shared[0].flatten(2, 3), None))
    assert A.call.k.shape[1] == 2


def test_with_dropout_of_xformers_the_weights_before_it_are_recorded(xformers):
    q, k, v = inputs()
    layer = Held(xformers.memory_efficient_attention, p=0.5)
    with capture(layer) as tape:
        layer(q, k, v)
    assert_shows(tape[0], softmaxed(q, k, None))


def test_a_partial_attention_is_not_recorded(xformers):
    layer = Held(xformers.memory_efficient_attention_partial)
    assert_not_recorded(
        layer, *inputs(), match="the output of memory_efficient_attention_partial is one part of an attention"
    )


class Mute(fake.LowerTriangularMask):
    """One that makes no matrix, and whose kernel knows it."""

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        if len(shape) == 2:
            raise NotImplementedError("nobody wrote it")
        return super().materialize(shape, dtype, device)


def test_a_bias_that_cannot_be_materialized_is_named(xformers, monkeypatch):
    layer = Held(xformers.memory_efficient_attention, attn_bias=Mute())
    assert_not_recorded(
        layer,
        *inputs(),
        match="recorded: its Mute bias could not be materialized as 7 x 7: nobody wrote it",
    )
    monkeypatch.setattr("regard.lens.interception.xformers.MAX_BIAS_ENTRIES", 48)
    assert_not_recorded(
        Held(xformers.memory_efficient_attention, attn_bias=fake.Checkered()),
        *inputs(),
        match="Checkered bias, 7 x 7, has more than 48 entries",
    )


class LowerTriangularMask(fake.LowerTriangularFromBottomRightMask):
    """One that means something else by a known name."""


def test_a_bias_class_with_another_meaning_is_not_recorded(xformers):
    layer = Held(xformers.memory_efficient_attention, attn_bias=LowerTriangularMask())
    assert_not_recorded(
        layer, *inputs(5, 9), match="memory_efficient_attention did not return what its documented arguments give"
    )
