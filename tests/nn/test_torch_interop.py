"""nn.MultiheadAttention and Attention: the same numbers, there and back, and what cannot be said there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from regard import (
    Alibi,
    Causal,
    Dense,
    Dot,
    Entmax,
)
from regard.nn import (
    Attention,
    RMSNorm,
    Rotary,
)

D = torch.float64


TOLERANCE = {torch.float32: 1e-5, D: 1e-10}


LENGTHS = torch.tensor([7, 3])


KEEP = torch.arange(7) < LENGTHS[:, None]


CONFIGURATIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"kdim": 9, "vdim": 5},
    "widths without bias": {"kdim": 9, "vdim": 5, "bias": False},
    "learned key and value": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "everything": {"kdim": 9, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True},
    "batch second": {"batch_first": False},
}


def peer(dtype=D, **configuration):
    module = nn.MultiheadAttention(12, 3, **{"batch_first": True, **configuration}).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def close(x, y, dtype=D):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def inputs(module, dtype=D, queries=5):
    x = torch.randn(2, queries, 12, dtype=dtype, requires_grad=True)
    keys = torch.randn(2, 7, module.kdim, dtype=dtype, requires_grad=True)
    values = torch.randn(2, 7, module.vdim, dtype=dtype, requires_grad=True)
    return x, keys, values


def theirs(module, x, keys, values, **masks):
    given = [t if module.batch_first else t.transpose(0, 1) for t in (x, keys, values)]
    out, A = module(*given, **masks, average_attn_weights=False)
    return out if module.batch_first else out.transpose(0, 1), A


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_multihead_attention_forward_and_backward(name, dtype):
    module = peer(dtype, **CONFIGURATIONS[name])
    layer = Attention.from_torch(module)
    x, keys, values = inputs(module, dtype)
    hidden = torch.rand(5, 7) < 0.3
    hidden[:, 0] = False
    expected, A = theirs(module, x, keys, values, key_padding_mask=~KEEP, attn_mask=hidden)
    out = layer(x, keys, values, keep=KEEP, mask=Dense(~hidden))
    close(out, expected, dtype)
    if not module.add_zero_attn:
        close(layer.weights(x, keys, keep=KEEP, mask=Dense(~hidden))[...], A, dtype)
    direction = torch.randn_like(out)
    tensors = (x, keys, values)
    for ours, other in zip(*(torch.autograd.grad(y, tensors, direction) for y in (out, expected)), strict=True):
        close(ours, other, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_equals_multihead_attention_in_causal_self_attention(dtype):
    module = peer(dtype)
    x = torch.randn(2, 7, 12, dtype=dtype, requires_grad=True)
    layer = Attention.from_torch(module)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = module(x, x, x, attn_mask=hidden, key_padding_mask=~KEEP)
    out = layer(x, mask=Causal(), keep=LENGTHS)
    close(out, expected, dtype)
    direction = torch.randn_like(out)
    ours, other = (
        [*torch.autograd.grad(y, [x, *p], direction)]
        for y, p in ((out, [layer.out.weight]), (expected, [module.out_proj.weight]))
    )
    for mine, peers in zip(ours, other, strict=True):
        close(mine, peers, dtype)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_conversion_there_and_back_keeps_every_bit(name, batch_first):
    module = peer(torch.float32, **CONFIGURATIONS[name]).eval()
    back = Attention.from_torch(module).to_torch(batch_first=batch_first)
    assert back.batch_first == batch_first
    assert not back.training
    state = module.state_dict()
    assert back.state_dict().keys() == state.keys()
    assert all(torch.equal(state[name], x) for name, x in back.state_dict().items())
    assert back.add_zero_attn == module.add_zero_attn
    assert back.dropout == module.dropout


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"kv_heads": 1}, "kv_heads below heads"),
        ({"head_dim": 5}, "head_dim other than dim / heads"),
        ({"value_dim": 5}, "value_dim other than head_dim"),
        ({"biased": "qkv"}, "bias on some projections only"),
        ({"rotary": Rotary(4)}, "rotary positions"),
        ({"qk_norm": RMSNorm}, "norms of queries and keys"),
        ({"slots": 2}, "more than one slot"),
        ({"score": Dot(1.0)}, "score=Dot(scale=1.0)"),
        ({"mask": Causal()}, "mask=Causal()"),
        ({"bias": Alibi(3)}, "bias=Alibi(heads=3)"),
        ({"normalize": Entmax()}, "normalize=Entmax()"),
    ],
)
def test_what_torch_cannot_express_is_refused_by_name(made, named):
    with pytest.raises(ValueError, match=re.escape(f"nn.MultiheadAttention has no {named}")):
        Attention(12, 3, **made).to_torch()


def test_other_modules_than_pytorch_s_are_refused():
    with pytest.raises(TypeError, match=r"module must be an nn.MultiheadAttention, got Linear"):
        Attention.from_torch(torch.nn.Linear(2, 2))


def test_what_does_not_learn_does_not_learn_after_conversion():
    module = peer(torch.float32)
    module.out_proj.requires_grad_(False)
    layer = Attention.from_torch(module)
    assert layer.query.weight.requires_grad
    assert not any(x.requires_grad for x in layer.out.parameters())
    with torch.no_grad():
        frozen = Attention.from_torch(module.requires_grad_(False))
    assert not any(x.requires_grad for x in frozen.parameters())
    assert not any(x.requires_grad for x in frozen.to_torch().parameters())
