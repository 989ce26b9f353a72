"""Prepacked weights give the product of F.linear, are used only where allowed, and are never out of date."""

import pytest
import torch
import torch.nn.functional as F

from regard.nn import prepacked as module
from regard.nn.linear import current_product, linear, project
from regard.nn.prepacked import PrepackedWeights

SHAPES = [(512, 512), (513, 515), (2048, 129)]  # each of at least MIN_PREPACKED_ENTRIES


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def layer_of(out=513, width=515, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(width, out, bias=bias, dtype=dtype)


def roundings(x, weight):
    """Eight of the sum of what is added up, whatever its signs: libraries add in different orders."""
    return 8 * torch.finfo(torch.float32).eps * (x.abs() @ weight.abs().mT + 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 63, 128, 129])
def test_prepacked_weights_give_the_product(rows, shape, bias):
    layer, prepacked = layer_of(*shape, bias), PrepackedWeights()
    for lead in [(rows,), (rows, 1)]:
        x = torch.randn(*lead, shape[1])
        with prepacked.for_rows(x):
            y = project(layer, x)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert y.shape == exact.shape
        assert ((y - exact).abs() <= roundings(x, layer.weight)).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_strides_and_leading_dims_do_not_matter(rows):
    layer, prepacked = layer_of(), PrepackedWeights()
    wide = torch.randn(3 * rows, 2 * 515)
    for x in [wide[::3, ::2], wide[:rows, 515:], wide[:rows, :515].expand(2, rows, 515)]:
        with prepacked.for_rows(wide[:rows]):
            y = project(layer, x)
        torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "is_packed"),
    [
        (5, (513, 515), torch.float32, True),
        (1, (513, 515), torch.float32, False),
        (129, (513, 515), torch.float32, False),
        (5, (63, 65), torch.float32, False),
        (5, (513, 515), torch.float64, False),
        (0, (513, 515), torch.float32, False),
    ],
)
def test_weights_are_packed_where_it_pays(rows, size, dtype, is_packed):
    layer, prepacked = layer_of(*size, dtype=dtype), PrepackedWeights()
    x = torch.randn(rows, size[1], dtype=dtype)
    with prepacked.for_rows(x):
        y = project(layer, x)
    assert bool(prepacked._packed) == (is_packed and module.CAN_PREPACK)
    torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("is_padded", [False, True])
def test_one_row_is_multiplied_to_the_bit_as_by_linear(monkeypatch, is_padded):
    monkeypatch.setattr(module, "PAD_SINGLE_ROWS", is_padded)
    monkeypatch.setattr(module, "MIN_PADDED_ENTRIES", 0)
    layer, prepacked = layer_of(), PrepackedWeights()
    rows = torch.randn(2, 1, 1, 515)
    before = rows.clone()
    with prepacked.for_rows(rows[0]):
        both = [project(layer, x) for x in rows]
    assert torch.equal(rows, before)
    assert all(torch.equal(y, F.linear(x, layer.weight, layer.bias)) for x, y in zip(rows, both, strict=True))


def test_weights_that_change_are_packed_anew():
    layer, prepacked, x = layer_of(), PrepackedWeights(), torch.randn(5, 515)

    def product():
        with prepacked.for_rows(x):
            y = project(layer, x)
        torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))
        return y

    def others():
        return {"weight": torch.randn(513, 515) / 20, "bias": torch.randn(513)}

    first = product()
    layer.weight.mul_(2)
    assert not torch.allclose(product(), first)
    layer.load_state_dict(others())
    product()
    layer.load_state_dict(others(), assign=True)
    product()
    layer.weight.data = others()["weight"]
    product()
    layer.weight = torch.nn.Parameter(others()["weight"])
    product()


def test_gradients_flow():
    layer, prepacked, x = layer_of(), PrepackedWeights(), torch.randn(5, 515, requires_grad=True)
    with torch.enable_grad(), prepacked.for_rows(x):
        project(layer, x).sum().backward()
    assert not prepacked._packed
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, -1))


@pytest.mark.parametrize("rows", [1, 5])
def test_autocast_sets_the_dtype(rows):
    layer, prepacked, x = layer_of(), PrepackedWeights(), torch.randn(rows, 515)
    with torch.autocast("cpu", dtype=torch.bfloat16), prepacked.for_rows(x):
        assert project(layer, x).dtype == torch.bfloat16
    assert not prepacked._packed


def test_inference_mode_may_come_first(monkeypatch):
    monkeypatch.setattr(module, "MIN_PADDED_ENTRIES", 0)
    layer, x = layer_of(), torch.randn(1, 515)
    module._row_buffers.by_shape.clear()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), PrepackedWeights().for_rows(x):
            assert torch.equal(project(layer, x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_made_in_inference_mode_are_multiplied_as_they_are(rows):
    x, prepacked = torch.randn(rows, 515), PrepackedWeights()
    with torch.inference_mode():
        layer = layer_of()
    with torch.inference_mode(), prepacked.for_rows(x):
        assert torch.equal(project(layer, x), F.linear(x, layer.weight, layer.bias))
    assert not prepacked._packed


def test_weights_of_another_kind_are_multiplied_as_they_are():
    class Quantized(torch.Tensor):
        """A weight that may only be multiplied by."""

    layer, x, prepacked = layer_of(), torch.randn(5, 515), PrepackedWeights()
    layer.weight = torch.nn.Parameter(layer.weight.as_subclass(Quantized))
    with prepacked.for_rows(x):
        assert type(project(layer, x)) is Quantized
    assert not prepacked._packed


def test_no_buffer_is_kept_for_more_than_a_row(monkeypatch):
    monkeypatch.setattr(module, "PAD_SINGLE_ROWS", True)
    monkeypatch.setattr(module, "MIN_PADDED_ENTRIES", 0)
    layer, x = layer_of(), torch.randn(1, 7, 515)
    module._row_buffers.by_shape.clear()
    with PrepackedWeights().for_rows(x):
        assert torch.equal(project(layer, x), F.linear(x, layer.weight, layer.bias))
    assert not module._row_buffers.by_shape


def test_prepacked_weights_are_used_within_the_block_alone():
    x = torch.randn(5, 515)
    with PrepackedWeights().for_rows(x):
        inside = current_product()
        with PrepackedWeights().for_rows(torch.randn(300, 515)):
            assert current_product() is F.linear
        assert current_product() == inside
    assert (inside != F.linear) == module.CAN_PREPACK
    assert current_product() is F.linear


def test_prepacked_weights_are_not_used_after_an_error():
    layer, x = layer_of(), torch.randn(5, 515)
    with pytest.raises(RuntimeError), PrepackedWeights().for_rows(x):
        project(layer, x[:, :3])
    assert current_product() is F.linear


def test_the_function_multiplies_weights_that_belong_to_no_layer():
    table, prepacked, x = torch.randn(700, 515), PrepackedWeights(), torch.randn(5, 515)
    with prepacked.for_rows(x):
        assert ((linear(x, table) - x.double() @ table.double().mT).abs() <= roundings(x, table)).all()


def test_no_weight_is_packed_where_packed_products_ignore_the_number_of_threads(monkeypatch):
    x = torch.randn(5, 512)
    monkeypatch.setattr(module, "IGNORES_THREADS", True)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with torch.no_grad(), PrepackedWeights().for_rows(x):
        assert current_product() is not F.linear
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads() + 1))  # as after torch.set_num_threads
    with torch.no_grad(), PrepackedWeights().for_rows(x):
        assert current_product() is F.linear
    monkeypatch.setattr(module, "IGNORES_THREADS", False)
    with torch.no_grad(), PrepackedWeights().for_rows(x):
        assert current_product() is not F.linear
