"""Memory slots: every query sees them, whatever mask, bias or taper says of the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard import (
    Added,
    Alibi,
    Blocks,
    Causal,
    Dense,
    Documents,
    Padding,
    Rule,
    Softmax,
    Tapered,
    Window,
)
from regard.nn import (
    Attention,
    MemorySlots,
)

D = torch.float64


def close(x, y):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


SPOTS = torch.tensor([0, 1, 0, 2, 1])


MASKED = {
    "none": None,
    "causal": Causal(),
    "window": Window(2),
    "padding": Padding(torch.tensor([5, 0])),
    "keep": Padding(torch.rand(2, 5, generator=torch.Generator().manual_seed(0)) < 0.5),
    "dense": Causal() & Dense(torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5),
    "broadcast": Dense(torch.tensor([[True], [False], [True], [False], [True]])),
    "documents": Documents(torch.tensor([0, 0, 1, 1, 2])) | ~Dense(torch.ones(5, 5, dtype=torch.bool)),
    "rule": Rule(lambda b, h, i, j: SPOTS[i] == SPOTS[j]),
    "blocks": ~Blocks(torch.eye(3, dtype=torch.bool), 2),
    "wide blocks": Blocks(torch.tensor([[True, False]] * 5), (1, 4)),
    "larger blocks": Blocks(torch.tensor([[True, False], [True, True]]), 3),
}


@pytest.mark.parametrize("name", MASKED)
def test_every_query_sees_every_slot_and_tokens_as_the_mask_says(name):
    layer = Attention(16, 4, kv_heads=2, slots=3, bias=Alibi(4)).to(D)
    x, mask = torch.randn(2, 5, 16, dtype=D), MASKED[name]
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    k = torch.cat((k, layer.slots.keys.expand(2, -1, -1, -1)), 2).repeat_interleave(2, 1)
    v = torch.cat((v, layer.slots.values.expand(2, -1, -1, -1)), 2).repeat_interleave(2, 1)
    s = q @ k.mT / 2
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, 5, 5)), indexing="ij")
    s[..., :5] += Alibi(4)(b, h, i, j)
    if mask is not None:
        s[..., :5] = s[..., :5].masked_fill(~mask(b, h, i, j), -torch.inf)
    expected = s.softmax(-1)
    close(layer.weights(x, mask=mask).dense(), expected)
    close(layer(x, mask=mask), layer.out((expected @ v).transpose(1, 2).flatten(2)))


def test_a_bias_of_a_number_for_each_pair_knows_nothing_of_slots():
    class Numbers(nn.Module):
        def forward(self):
            return Added(numbers) + Alibi(4)

    numbers, x = torch.randn(4, 5, 5), torch.randn(2, 5, 16)
    layer = Attention(16, 4, slots=2, bias=Numbers(), mask=Causal())
    weights = layer.weights(x).dense()
    plain = Attention(16, 4, bias=Numbers(), mask=Causal())
    plain.load_state_dict(layer.state_dict(), strict=False)
    tokens = weights[..., :5] / weights[..., :5].sum(-1, keepdim=True)
    torch.testing.assert_close(tokens, plain.weights(x).dense())


def test_a_taper_knows_nothing_of_slots():
    x = torch.randn(2, 5, 16)
    layer = Attention(16, 4, slots=2, normalize=Tapered(Softmax(), Alibi(4)))
    tapered = layer.weights(x).dense()
    layer.normalize = None
    plain = layer.weights(x).dense()
    torch.testing.assert_close(tapered[..., 5:], plain[..., 5:])
    assert (tapered[..., :5] < plain[..., :5]).any()


def test_slots_learn():
    layer = Attention(16, 4, slots=2, mask=Causal())
    layer(torch.randn(1, 5, 16)).square().sum().backward()
    assert isinstance(layer.slots, MemorySlots)
    assert all(p.grad.abs().sum() > 0 for p in layer.slots.parameters())
    with pytest.raises(ValueError, match="slots must be 1 or more, got 0"):
        MemorySlots(0, 4, 4)
