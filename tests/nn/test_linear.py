"""Linear gives x W^T + b, by the product of an enclosing block and in its thread alone."""

import threading

import pytest
import torch
import torch.nn.functional as F

from regard.nn.linear import Linear, current_product, linear, use_product


def doubled(x, weight, bias):
    return 2 * F.linear(x, weight, bias)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("lead", [(), (7,), (2, 0, 3), (3, 63)])
def test_layer_and_function_give_the_sum_of_products(lead, has_bias):
    layer, x = Linear(5, 129, bias=has_bias, dtype=torch.float64), torch.randn(*lead, 5, dtype=torch.float64)
    want = (x[..., None, :] * layer.weight).sum(-1) + (layer.bias if has_bias else 0)
    for y in (layer(x), linear(x, layer.weight, layer.bias)):
        torch.testing.assert_close(y, want, rtol=0, atol=1e-14)


def test_weights_of_a_pytorch_layer_load_under_their_names():
    ours, theirs, x = Linear(5, 3), torch.nn.Linear(5, 3), torch.randn(7, 5)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))


def test_every_layer_multiplies_by_the_product_of_the_innermost_block():
    layer, x = Linear(5, 3), torch.randn(7, 5)
    plain = F.linear(x, layer.weight, layer.bias)
    with use_product(doubled):
        assert current_product() is doubled
        assert torch.equal(layer(x), 2 * plain)
        assert torch.equal(linear(x, layer.weight, layer.bias), 2 * plain)
        with use_product(None):
            assert torch.equal(layer(x), plain)
        assert torch.equal(layer(x), 2 * plain)
    assert torch.equal(layer(x), plain)
    assert current_product() is F.linear


def test_a_product_gets_no_bias_from_a_layer_without_one():
    given = []
    with use_product(lambda *args: given.append(args) or x):
        x, layer = torch.randn(7, 5), Linear(5, 3, bias=False)
        layer(x)
    assert given == [(x, layer.weight, None)]


def test_a_product_is_not_used_after_an_error_in_its_block():
    with pytest.raises(RuntimeError, match="stop"), use_product(doubled):
        raise RuntimeError("stop")
    assert current_product() is F.linear


def test_a_product_is_used_in_the_thread_of_its_block_alone():
    seen = []
    with use_product(doubled):
        thread = threading.Thread(target=lambda: seen.append(current_product()))
        thread.start()
        thread.join()
    assert seen == [F.linear]


def test_a_compiled_function_multiplies_by_the_plain_product():
    layer, x = Linear(5, 3), torch.randn(7, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with use_product(doubled):
        assert torch.equal(compiled(x), F.linear(x, layer.weight, layer.bias))
