"""One intercepted attention call: read, or replaced by another."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Causal
from regard.lens import NotUnderstood
from regard.lens.interception.intercept import intercept
from tests.lens.kernel_layers import QkvLayer, qkv


class Replacing:
    """Consumer that computes another call instead."""

    def __init__(self, change):
        self.change = change

    def observe(self, attention):
        return attention.computed_from(self.change(attention.kernel_call))


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Weighted(nn.Module):
    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in x.chunk(3, -1))
        return ((q @ k.mT).softmax(-1) * torch.linspace(0, 1, 7, dtype=q.dtype) @ v).transpose(1, 2)


def test_a_call_that_is_not_understood_cannot_be_replaced():
    model = nn.Sequential(Weighted())
    message = "the attention of 0 cannot be replaced: the weights that"
    with pytest.raises(NotUnderstood, match=message), intercept(model, Replacing(lambda call: call.masked(Causal()))):
        model(qkv())


def test_arguments_of_a_call_can_be_replaced():
    model, x = nn.Sequential(QkvLayer(sdpa)), qkv()
    with intercept(model, Replacing(lambda call: replace(call, scale=0.0))):
        out = model(x)
    torch.testing.assert_close(out, x.chunk(3, -1)[2].mean(1, keepdim=True).expand_as(out))
