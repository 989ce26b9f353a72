"""Operators of ATen that attend are found in each module, whatever code calls them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens.audit.attention_ops import attention_ops
from tests.lens import unseen_layers as ways
from tests.lens.unseen_layers import DIM, Beside, Layer, tokens


def operators(model, x=None):
    """The operators that attend, by the names of the modules."""
    names = {module: name for name, module in model.named_modules()}
    found = attention_ops(model, lambda: model(tokens() if x is None else x))
    return {names[module]: operator for module, operator in found.items()}


SOFTMAX = [
    ways.written_out,
    ways.special,
    ways.over_heads,
    ways.scripted_attention,
    lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1) @ v,
    lambda q, k, v: torch.einsum("bij,bje->bie", (q @ k.mT).softmax(-1), v),
    lambda q, k, v: ((q @ k.mT).softmax(-1)[..., None] * v[:, None]).sum(2),
    lambda q, k, v: (v.mT @ (k @ q.mT).softmax(1)).mT,
]


@pytest.mark.parametrize("attend", SOFTMAX)
def test_a_softmax_that_averages_is_found_in_its_layer(attend):
    assert operators(Beside(Layer(attend)))["other"] == "aten::_softmax"


def test_a_log_softmax_counts_once_it_is_an_average():
    assert operators(Layer(ways.log_softmax)) == {"": "aten::_log_softmax"}


def test_fused_kernels_are_found():
    def fused(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    assert operators(Layer(fused))[""].startswith("aten::_scaled_dot_product_")


def test_a_compiled_function_is_seen_into():
    try:
        assert operators(Layer(torch.compile(ways.written_out, backend="aot_eager"))) == {"": "aten::_softmax"}
    finally:
        torch._dynamo.reset()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.embedding = nn.Linear(DIM, 9), nn.Parameter(torch.randn(9, DIM))

    def forward(self, x):
        probabilities = self.classes(x).softmax(-1)
        best = probabilities.topk(2).values
        loss = F.cross_entropy(self.classes(x).flatten(0, 1), torch.zeros(len(x) * x.shape[1], dtype=torch.long))
        return (probabilities.flatten(0, 1) @ self.embedding).sum() * loss * best.sum() * torch.ones(1).softmax(0)


def test_classifiers_losses_and_choices_do_not_count():
    assert operators(Classifier()) == {}


@pytest.mark.parametrize("attend", [ways.exp_over_sum, ways.sigmoid, ways.relu], ids=lambda f: f.__name__)
def test_weights_without_a_softmax_are_not_found(attend):
    assert operators(Layer(attend)) == {}
