"""Weights of edges are followed to the product with the values; sums of messages are compared within rounding."""

from __future__ import annotations

import pytest
import torch

from regard.lens.eager.edge_messages import EdgeMessages, sums_messages

TARGETS = torch.tensor([0, 2, 2, 1, 0])


def test_the_tensor_that_multiplies_the_values_is_found():
    A, values = torch.rand(5, 2), torch.rand(5, 2, 3)
    followed = EdgeMessages(A)
    scaled = A * 2
    followed.follow(torch.mul, (A, 2), {}, scaled)
    wide = scaled.unsqueeze(-1)
    followed.follow(torch.unsqueeze, (scaled, -1), {}, wide)
    messages = values * wide
    followed.follow(torch.mul, (values, wide), {}, messages)
    final = followed.final_weights(messages)
    assert torch.equal(final.weights, wide)
    assert final.changes == ("scaled",)
    assert followed.final_weights(values) is None
    assert followed.final_weights(messages * 1) is None


@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_agree_within_the_rounding_of_their_dtype(dim, dtype):
    shape = (5, 2, 4) if dim == 0 else (3, 5, 4)
    messages = torch.randn(shape, dtype=torch.float64)
    sizes = (3, 2, 4) if dim == 0 else (3, 3, 4)
    sums = torch.zeros(sizes, dtype=torch.float64).index_add(dim, TARGETS, messages)
    messages, sums = messages.to(dtype), sums.to(dtype)
    assert sums_messages(messages, TARGETS, dim, sums)
    assert not sums_messages(messages, TARGETS, dim, sums * 1.1)
    assert not sums_messages(messages, TARGETS.flip(0), dim, sums)


def test_other_shapes_are_no_sums():
    messages = torch.ones(5, 2)
    assert not sums_messages(messages, TARGETS, 0, torch.ones(3))
    assert not sums_messages(messages, TARGETS, 0, torch.ones(3, 4))
    assert not sums_messages(messages, TARGETS, 0, torch.ones(2, 2))
    assert not sums_messages(messages, TARGETS[:3], 0, torch.ones(3, 2))
