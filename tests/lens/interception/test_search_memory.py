"""The second capture of a model does not search its code again, unless a reference has changed since."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from regard.lens import capture
from regard.lens.interception import patching
from regard.lens.interception.intercept import intercept
from regard.lens.recording.recorder import Recorder
from regard.lens.recording.store import Store
from tests.lens.flex_layers import flex_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def plain(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def enclosing(call):
    def enclosed(q, k, v):
        return call(q, k, v)

    def replace(other):
        nonlocal call
        call = other

    return enclosed, replace


class Kernels:
    def __init__(self):
        self.run = plain


HOME = ModuleType("a_home")
HOME.run = plain
GLOBAL, NAMED, LISTED = plain, {"one": plain}, [plain]
CLOSED, replace_closed = enclosing(plain)


def other_code(q, k, v):
    return flex_attention(q, k, v)


def with_default(q, k, v, *, call=plain):
    return call(q, k, v)


def recoded(q, k, v):
    return plain(q, k, v)


class Layer(nn.Module):
    of_class = staticmethod(plain)

    def __init__(self, way):
        super().__init__()
        self.way, self.held, self.kernels, self.steps = way, plain, Kernels(), 0
        self.nested = {"list": [plain]}

    def forward(self, q, k, v):
        self.steps += 1
        ways = {
            "global": lambda: GLOBAL,
            "dict": lambda: NAMED["one"],
            "list": lambda: LISTED[0],
            "closure": lambda: CLOSED,
            "class": lambda: self.of_class,
            "attribute": lambda: self.held,
            "object": lambda: self.kernels.run,
            "nested": lambda: self.nested["list"][0],
            "module": lambda: HOME.run,
            "code": lambda: recoded,
            "default": lambda: with_default,
            "absent": lambda: LATER,  # noqa: F821
            "instance": lambda: self.later,
        }
        return ways[self.way]()(q, k, v)


def replace(way, layer, monkeypatch):
    here = sys.modules[__name__]
    if way == "global":
        monkeypatch.setattr(here, "GLOBAL", flex_attention)
    elif way == "dict":
        monkeypatch.setitem(NAMED, "one", flex_attention)
    elif way == "list":
        LISTED[0] = flex_attention
    elif way == "closure":
        replace_closed(flex_attention)
    elif way == "class":
        monkeypatch.setattr(Layer, "of_class", staticmethod(flex_attention))
    elif way == "attribute":
        layer.held = flex_attention
    elif way == "object":
        layer.kernels.run = flex_attention
    elif way == "nested":
        layer.nested["list"][0] = flex_attention
    elif way == "module":
        monkeypatch.setattr(HOME, "run", flex_attention)
    elif way == "code":
        monkeypatch.setattr(recoded, "__code__", other_code.__code__)
    elif way == "default":
        monkeypatch.setitem(with_default.__kwdefaults__, "call", flex_attention)
    elif way == "absent":
        monkeypatch.setattr(here, "LATER", flex_attention, raising=False)
    else:
        layer.later = flex_attention


WAYS = ("global", "dict", "list", "closure", "class", "attribute", "object", "nested", "module", "code", "default")


@pytest.mark.parametrize("way", [*WAYS, "absent", "instance"])
def test_a_reference_that_was_replaced_is_found(way, monkeypatch):
    layer, (q, k, v) = Layer(way), flex_inputs()
    for _ in range(2):
        with intercept(layer, Recorder(store=Store(None, None))):
            pass
    replace(way, layer, monkeypatch)
    with capture(layer) as tape:
        out = layer(q, k, v)
    LISTED[0] = plain
    replace_closed(plain)
    ((_, A),) = tape.items()
    torch.testing.assert_close(A @ v, out)


@pytest.fixture
def searches(monkeypatch):
    """The number of searches."""
    count, search = [], patching.find_call_sites

    def counted(*args):
        count.append(1)
        return search(*args)

    monkeypatch.setattr(patching, "find_call_sites", counted)
    return count


def test_a_model_is_searched_once(searches):
    layer, (q, k, v) = Layer("global"), flex_inputs()
    for _ in range(4):
        with capture(layer) as tape:
            layer(q, k, v)
        assert len(tape) == 1
    assert len(searches) == 1


def test_call_sites_that_were_remembered_are_patched_again(searches, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", flex_attention)
    layer, (q, k, v) = Layer("global"), flex_inputs()
    for _ in range(3):
        with capture(layer) as tape:
            out = layer(q, k, v)
        torch.testing.assert_close(tape[0] @ v, out)
        assert GLOBAL is flex_attention
    assert len(searches) == 1


def test_a_search_within_another_block_is_not_remembered(searches, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", flex_attention)
    layer, other, (q, k, v) = Layer("global"), Layer("global"), flex_inputs()
    with capture(layer) as outer:
        with capture(other) as inner:
            other(q, k, v)
        layer(q, k, v)
    assert len(outer) == len(inner) == 1
    for _ in range(2):
        with capture(other) as again:
            other(q, k, v)
        assert len(again) == 1
    assert len(searches) == 3


def test_another_layer_is_searched(searches):
    model, (q, k, v) = nn.ModuleList([Layer("global")]), flex_inputs()
    model.forward = lambda: [layer(q, k, v) for layer in model]
    for added in (0, 1, 0):
        model.extend(Layer("global") for _ in range(added))
        with capture(model) as tape:
            model()
        assert len(tape) == len(model)
    assert len(searches) == 2


def test_the_memory_of_a_search_keeps_no_model_alive():
    layer, (q, k, v) = Layer("global"), flex_inputs()
    layer.itself, layer.bound, layer.parts = [layer], layer.forward, {"one": [nn.Linear(2, 2)]}
    with capture(layer) as tape:
        layer(q, k, v)
    dead = weakref.ref(layer), weakref.ref(layer.parts["one"][0])
    del layer, tape
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


def test_a_container_that_holds_itself_ends_the_search(searches):
    layer, (q, k, v) = Layer("global"), flex_inputs()
    layer.loop = []
    layer.loop.append(layer.loop)
    for _ in range(2):
        with capture(layer):
            layer(q, k, v)
    assert len(searches) == 1


def test_an_empty_cell_does_not_stop_the_capture(searches):
    def forward(q, k, v):
        return plain(q, k, v) if q.ndim == 4 else empty

    layer, (q, k, v) = Layer("global"), flex_inputs()
    layer.helper = forward
    for _ in range(2):
        with capture(layer):
            layer(q, k, v)
    assert len(searches) == 2
    empty = 1
    assert empty == 1
