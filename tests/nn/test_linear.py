"""Linear gives x W^T + b, by the product of an enclosing block and in its thread alone."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.decode import greedy
from regard.models import Gpt, GptConfig
from regard.nn import Attention, FeedForward, GatedFeedForward
from regard.nn.linear import current_product, linear, project, use_product


def doubled(x, weight, bias):
    return 2 * F.linear(x, weight, bias)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("lead", [(), (7,), (2, 0, 3), (3, 63)])
def test_layer_and_function_give_the_sum_of_products(lead, has_bias):
    layer, x = nn.Linear(5, 129, bias=has_bias, dtype=torch.float64), torch.randn(*lead, 5, dtype=torch.float64)
    want = (x[..., None, :] * layer.weight).sum(-1) + (layer.bias if has_bias else 0)
    for y in (project(layer, x), linear(x, layer.weight, layer.bias)):
        torch.testing.assert_close(y, want, rtol=0, atol=1e-14)


def test_every_layer_multiplies_by_the_product_of_the_innermost_block():
    layer, x = nn.Linear(5, 3), torch.randn(7, 5)
    plain = F.linear(x, layer.weight, layer.bias)
    with use_product(doubled):
        assert current_product() is doubled
        assert torch.equal(project(layer, x), 2 * plain)
        assert torch.equal(linear(x, layer.weight, layer.bias), 2 * plain)
        with use_product(None):
            assert torch.equal(project(layer, x), plain)
        assert torch.equal(project(layer, x), 2 * plain)
    assert torch.equal(project(layer, x), plain)
    assert current_product() is F.linear


def test_a_product_gets_no_bias_from_a_layer_without_one():
    given = []
    with use_product(lambda *args: given.append(args) or x):
        x, layer = torch.randn(7, 5), nn.Linear(5, 3, bias=False)
        project(layer, x)
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
    layer, x = nn.Linear(5, 3), torch.randn(7, 5)
    compiled = torch.compile(lambda x: project(layer, x), fullgraph=True, backend="eager")
    with use_product(doubled):
        assert torch.equal(compiled(x), F.linear(x, layer.weight, layer.bias))


def test_a_layer_that_is_watched_or_replaced_is_called():
    layer, x = nn.Linear(5, 3), torch.randn(7, 5)
    plain, seen = layer(x), []
    with use_product(doubled):
        handle = layer.register_forward_hook(lambda *_: seen.append("hook"))
        assert torch.equal(project(layer, x), plain)
        handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("global"))
        assert torch.equal(project(layer, x), plain)
        handle.remove()
        assert torch.equal(project(nn.Sequential(layer), x), plain)
        assert torch.equal(project(layer, x), 2 * plain)
    assert seen == ["hook", "global"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make", [lambda: Attention(16, 2), lambda: FeedForward(16, 32), lambda: GatedFeedForward(16, 32)]
)
def test_dynamic_quantization_finds_the_layers(make):
    from torch.ao.quantization import quantize_dynamic

    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(2, 5, 16)
    quantized = quantize_dynamic(module, {nn.Linear})
    replaced = [isinstance(part, torch.ao.nn.quantized.dynamic.Linear) for part in quantized.modules()]
    assert sum(replaced) == sum(isinstance(part, nn.Linear) for part in module.modules()) > 0
    assert 0 < (quantized(x) - module(x)).abs().max() < 0.05


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_a_quantized_model_decodes():
    from torch.ao.quantization import quantize_dynamic

    torch.manual_seed(0)
    model = Gpt(GptConfig.llama(vocabulary=50, dim=32, depth=2, heads=4, kv_heads=2)).eval()
    quantized, ids = quantize_dynamic(model, {nn.Linear}), torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        assert (quantized(ids) - model(ids)).abs().max() < 0.1
    tokens = greedy(quantized, None, ids, end=None, max_length=4)[0].tokens
    again = greedy(quantized, None, ids[:1], end=None, max_length=4)[0].tokens
    assert len(tokens) == 4
    assert tokens == again
