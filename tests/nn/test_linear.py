"""Linear: prepared weights give the plain product, only where they may, and never an old one."""

import threading

import pytest
import torch
import torch.nn.functional as F

from regard.nn import linear as module
from regard.nn.linear import Linear, Prepared, linear

WIDTHS = [(512, 512), (513, 515), (2048, 129)]  # at least as large as pays


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def layer_of(out=513, width=515, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return Linear(width, out, bias=bias, dtype=dtype)


def roundings(x, weight):
    """Eight of the sum of what is added up, whatever its signs: libraries add in different orders."""
    return 8 * torch.finfo(torch.float32).eps * (x.abs() @ weight.abs().mT + 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 63, 128, 129])
def test_prepared_weights_give_the_product(rows, shape, bias):
    layer, prepared = layer_of(*shape, bias), Prepared()
    for lead in [(rows,), (rows, 1)]:
        x = torch.randn(*lead, shape[1])
        with prepared.for_rows(x):
            y = layer(x)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert y.shape == exact.shape
        assert ((y - exact).abs() <= roundings(x, layer.weight)).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_strides_and_leading_dims_do_not_matter(rows):
    layer, prepared = layer_of(), Prepared()
    wide = torch.randn(3 * rows, 2 * 515)
    for x in [wide[::3, ::2], wide[:rows, 515:], wide[:rows, :515].expand(2, rows, 515)]:
        with prepared.for_rows(wide[:rows]):
            y = layer(x)
        torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "is_arranged"),
    [
        (5, (513, 515), torch.float32, True),
        (1, (513, 515), torch.float32, False),
        (129, (513, 515), torch.float32, False),
        (5, (63, 65), torch.float32, False),
        (5, (513, 515), torch.float64, False),
        (0, (513, 515), torch.float32, False),
    ],
)
def test_weights_are_arranged_where_it_pays(rows, size, dtype, is_arranged):
    layer, prepared = layer_of(*size, dtype=dtype), Prepared()
    x = torch.randn(rows, size[1], dtype=dtype)
    with prepared.for_rows(x):
        y = layer(x)
    assert bool(prepared._arranged) == (is_arranged and module.ARRANGES)
    torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("on_arm", [False, True])
def test_one_row_is_multiplied_to_the_bit_as_ever(monkeypatch, on_arm):
    monkeypatch.setattr(module, "ON_ARM", on_arm)
    monkeypatch.setattr(module, "LARGE", 0)
    layer, prepared = layer_of(), Prepared()
    rows = torch.randn(2, 1, 1, 515)
    before = rows.clone()
    with prepared.for_rows(rows[0]):
        both = [layer(x) for x in rows]
    assert torch.equal(rows, before)
    assert all(torch.equal(y, F.linear(x, layer.weight, layer.bias)) for x, y in zip(rows, both, strict=True))


def test_weights_that_change_are_arranged_anew():
    layer, prepared, x = layer_of(), Prepared(), torch.randn(5, 515)

    def product():
        with prepared.for_rows(x):
            y = layer(x)
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


def test_gradients_flow_as_ever():
    layer, prepared, x = layer_of(), Prepared(), torch.randn(5, 515, requires_grad=True)
    with torch.enable_grad(), prepared.for_rows(x):
        layer(x).sum().backward()
    assert not prepared._arranged
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, -1))


@pytest.mark.parametrize("rows", [1, 5])
def test_autocast_has_its_say(rows):
    layer, prepared, x = layer_of(), Prepared(), torch.randn(rows, 515)
    with torch.autocast("cpu", dtype=torch.bfloat16), prepared.for_rows(x):
        assert layer(x).dtype == torch.bfloat16
    assert not prepared._arranged


def test_inference_mode_may_come_first(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 0)
    layer, x = layer_of(), torch.randn(1, 515)
    module._rooms.of.clear()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), Prepared().for_rows(x):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_made_in_inference_mode_are_multiplied_as_they_are(rows):
    x, prepared = torch.randn(rows, 515), Prepared()
    with torch.inference_mode():
        layer = layer_of()
    with torch.inference_mode(), prepared.for_rows(x):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not prepared._arranged


def test_weights_of_another_kind_are_multiplied_as_they_are():
    class Quantized(torch.Tensor):
        """A weight that may only be multiplied by."""

    layer, x, prepared = layer_of(), torch.randn(5, 515), Prepared()
    layer.weight = torch.nn.Parameter(layer.weight.as_subclass(Quantized))
    with prepared.for_rows(x):
        assert type(layer(x)) is Quantized
    assert not prepared._arranged


def test_no_place_is_kept_for_more_than_a_row(monkeypatch):
    monkeypatch.setattr(module, "ON_ARM", True)
    monkeypatch.setattr(module, "LARGE", 0)
    layer, x = layer_of(), torch.randn(1, 7, 515)
    module._rooms.of.clear()
    with Prepared().for_rows(x):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not module._rooms.of


def test_they_are_in_force_within_the_block_and_in_its_thread_alone():
    x, seen = torch.randn(5, 515), []
    with Prepared().for_rows(x):
        inside = module._in_force.get()
        thread = threading.Thread(target=lambda: seen.append(module._in_force.get()))
        thread.start()
        thread.join()
        with Prepared().for_rows(torch.randn(300, 515)):
            assert module._in_force.get() is None
        assert module._in_force.get() == inside
    assert seen == [None]
    assert (inside is not None) == module.ARRANGES
    assert module._in_force.get() is None


def test_they_are_not_in_force_after_an_error():
    layer, x = layer_of(), torch.randn(5, 515)
    with pytest.raises(RuntimeError), Prepared().for_rows(x):
        layer(x[:, :3])
    assert module._in_force.get() is None


def test_the_function_serves_weights_that_are_no_layer():
    table, prepared, x = torch.randn(700, 515), Prepared(), torch.randn(5, 515)
    with prepared.for_rows(x):
        assert ((linear(x, table) - x.double() @ table.double().mT).abs() <= roundings(x, table)).all()
