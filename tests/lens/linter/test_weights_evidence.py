"""What weights show: an axis, heads in place of tokens, a scale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens.linter.call_adapter import CallAdapter
from regard.lens.linter.weights_evidence import observe, wrong_scale


def of_scale(make):
    """A function of q, k and v b h n d, 6 wide, and what is found of its scale."""
    adapter = CallAdapter(make)
    return wrong_scale(adapter, observe(adapter, adapter.tokens(7)), 7)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (6**-0.5, None),
        (0.3, None),
        (1.0, None),
        (24**-0.5, "the width of all heads"),
        (1 / 6, "without its square root"),
        (6**0.5, "multiplied where it should divide"),
        (7**-0.5, "the number of tokens"),
        (4**-0.5, "the number of heads"),
    ],
)
def test_scales_of_known_mistakes_are_named(scale, words):
    found = of_scale(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale))
    assert found is None if words is None else words in found.result


def test_a_scale_of_the_queries_and_of_the_keys_counts():
    right = of_scale(lambda q, k, v: ((q * 6**-0.25) @ (k * 6**-0.25).mT).softmax(-1) @ v)
    wrong = of_scale(lambda q, k, v: ((q / 24**0.25) @ (k * 24**-0.25).mT).softmax(-1) @ v)
    assert right is None
    assert "the width of all heads" in wrong.result


def test_normalized_queries_may_be_divided_by_their_width():
    assert of_scale(lambda q, k, v: (F.rms_norm(q, (6,)) @ F.rms_norm(k, (6,)).mT / 6).softmax(-1) @ v) is None
    assert of_scale(lambda q, k, v: (q @ k.mT / 6).softmax(-1) @ v) is not None


def test_a_scale_that_the_config_names_is_intended():
    layer = nn.Module()
    layer.linear = nn.Linear(12, 12)
    layer.config = type("Config", (), {})()
    layer.config.query_pre_attn_scalar = 144
    layer.forward = lambda x: F.scaled_dot_product_attention(x, layer.linear(x), x, scale=1 / 12)
    adapter = CallAdapter(layer)
    assert wrong_scale(adapter, observe(adapter, adapter.tokens(7)), 7) is None
    layer.config.query_pre_attn_scalar = 5
    assert wrong_scale(adapter, observe(adapter, adapter.tokens(7)), 7) is not None


def test_dropouts_that_drop_are_recorded():
    def drops(x, training=True):
        return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), 0.2, training)

    adapter = CallAdapter(drops, dim=6)
    names = observe(adapter, adapter.tokens(7)).dropouts
    assert "dropout" in names
    assert "scaled_dot_product_attention with dropout_p" in names
    quiet = CallAdapter(lambda x: F.dropout(x, 0.5, training=False).softmax(-1), dim=6)
    seen = observe(quiet, quiet.tokens(7))
    assert seen.dropouts == []
    assert seen.softmaxes == [((3, 7, 6), 2)]
    assert torch.is_tensor(quiet.tokens(7))
    assert seen.reason is not None
