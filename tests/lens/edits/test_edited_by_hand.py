"""Attention written out in a dozen ways, edited, beside the definition over the same queries, keys and values."""

import pytest
import torch
from torch import nn

from regard.lens import Boost, Cut, Scale, Temperature, capture, edit
from tests.lens.eager.written_out import CAUSAL, DIM, B, Layer, N
from tests.lens.edits.dense_edits import dense_edited

EDITS = [Boost(2, 1.5, heads=0), Cut(queries=-1, keys=[0, 3]), Temperature([1], 0.5), Scale([2], -0.5), Cut(keys=1)]


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda function: function.__name__)
def test_attention_written_out_is_edited(attention):
    torch.manual_seed(0)
    layer = Layer(attention)
    model, x = nn.Sequential(layer), torch.randn(B, N, DIM)
    q, k, v = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    want, weights = dense_edited(q, k, v, EDITS, keep=torch.ones(N, N, dtype=torch.bool).tril())
    with torch.no_grad(), edit(model, {"0": EDITS}), capture(model) as tape:
        out = model(x)
        torch.testing.assert_close(out, layer.out(want.float().transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tape[0].dense(), weights.float(), atol=1e-5, rtol=1e-5)
