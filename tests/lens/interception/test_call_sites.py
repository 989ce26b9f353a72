"""References to a kernel are found wherever the code of a layer has them."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flexible
from torch.nn.attention.flex_attention import flex_attention

import regard as R
import tests.lens.fake_kernels as fake
import tests.lens.flex_layers as flex_layers
from regard import weights
from regard.lens import capture
from tests.lens.flex_layers import CompiledFlex, FlexLayer, blocks, compiled, flex_inputs
from tests.lens.kernel_layers import Held, OfModule, assert_shows, capture_one, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def decorated(function):
    @functools.wraps(function)
    def call(q, k, v, **given):
        return function(q, k, v, **given)

    return call


def flash_helper(q, k, v, **given):
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, **given)


class Importing(nn.Module):
    def forward(self, q, k, v):
        from flash_attn.flash_attn_interface import flash_attn_func as own

        return own(q, k, v, causal=True)


class ByName(nn.Module):
    def forward(self, q, k, v):
        return sys.modules["flash_attn"].flash_attn_func(q, k, v, causal=True)


def layer_of_a_file():
    """A layer whose file imports the function."""
    file = ModuleType("a_model")
    exec(
        "from flash_attn import flash_attn_func\n"
        "from torch import nn\n"
        "class Layer(nn.Module):\n"
        "    def forward(self, q, k, v): return flash_attn_func(q, k, v, causal=True)",
        vars(file),
    )
    return file.Layer()


FLASH_WAYS = {
    "an attribute": lambda f: Held(f.flash_attn_func, causal=True),
    "arguments fixed": lambda f: Held(functools.partial(f.flash_attn_func, causal=True)),
    "decorated": lambda f: Held(decorated(f.flash_attn_func), causal=True),
    "not to be compiled": lambda f: Held(torch.compiler.disable(f.flash_attn_func), causal=True),
    "imported by a function": lambda f: Held(flash_helper, causal=True),
    "imported within": lambda f: Importing(),
    "of its module": lambda f: OfModule(),
    "of a module that is asked for by its name": lambda f: ByName(),
    "of its file": lambda f: layer_of_a_file(),
}


@pytest.mark.parametrize("way", FLASH_WAYS)
def test_flash_attn_is_recorded_however_a_layer_calls_it(flash, way):
    layer, (q, k, v) = FLASH_WAYS[way](flash), inputs(5, 9)
    before = dict(vars(flash)), dict(vars(flash.flash_attn_interface)), dict(vars(layer))
    A, _ = capture_one(layer, q, k, v)
    assert_shows(A, fake.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])
    assert (dict(vars(flash)), dict(vars(flash.flash_attn_interface)), dict(vars(layer))) == before


fixed = functools.partial(flex_attention, scale=0.5)


def flex_helper(*args, **kwargs):
    return flex_attention(*args, **kwargs)


class FlexOfModule(FlexLayer):
    def forward(self, q, k, v):
        return flexible.flex_attention(q, k, v, **self.given)


class Helped(FlexLayer):
    def forward(self, q, k, v):
        return flex_helper(q, k, v, **self.given)


class Fixed(FlexLayer):
    def forward(self, q, k, v):
        return fixed(q, k, v, **self.given)


def enclosing(call):
    class Enclosed(FlexLayer):
        def forward(self, q, k, v):
            return call(q, k, v, **self.given)

    return Enclosed


FLEX_WAYS = {
    "as it is": (FlexLayer(), None),
    "compiled": (CompiledFlex(), None),
    "an attribute": (Held(compiled), None),
    "arguments fixed": (Fixed(), 0.5),
    "compiled with arguments fixed": (Held(torch.compile(fixed, backend="eager")), 0.5),
    "of its module": (FlexOfModule(), None),
    "by a function": (Helped(), None),
    "in a closure": (enclosing(compiled)(), None),
}


@pytest.mark.parametrize("way", FLEX_WAYS)
def test_flex_attention_is_recorded_however_a_layer_calls_it(way):
    layer, scale = FLEX_WAYS[way]
    layer.given = {"block_mask": blocks()}
    q, k, v = flex_inputs()
    A, out = capture_one(layer, q, k, v)
    assert repr(A.call.mask) == "Causal()"
    want = weights(q, k, mask=R.Causal(), score=None if scale is None else R.Dot(scale=scale))
    torch.testing.assert_close(A[:], want[:])
    torch.testing.assert_close(A @ v, out)


def fails_after(model, *given):
    model(*given)
    raise KeyError


def test_references_are_restored_after_an_error():
    layer, here = FLEX_WAYS["compiled"][0], flex_layers
    held = FLEX_WAYS["an attribute"][0]
    layer.given = held.given = {}
    q, k, v = flex_inputs()
    for model in (layer, held, FLEX_WAYS["in a closure"][0], FLEX_WAYS["of its module"][0]):
        before = here.compiled, here.flex_attention, held.call, flexible.flex_attention
        with pytest.raises(KeyError), capture(model):
            fails_after(model, q, k, v)
        assert (here.compiled, here.flex_attention, held.call, flexible.flex_attention) == before


class OfClass(FlexLayer):
    flex = torch.compile(flex_attention, backend="eager")
    still = staticmethod(flex)

    def forward(self, q, k, v):
        return OfClass.flex(q, k, v, **self.given)


class Still(OfClass):
    def forward(self, q, k, v):
        return self.still(q, k, v, **self.given)


class Kernel:
    """One of several a model may choose from, and no layer."""

    def __init__(self, call):
        self.call = call

    def run(self, *args, **kwargs):
        return self.call(*args, **kwargs)


KERNELS = {"flex": compiled}


class Chosen(FlexLayer):
    def forward(self, q, k, v):
        return KERNELS["flex"](q, k, v, **self.given)


ELSEWHERE = ModuleType("elsewhere")  # as a file beside that of the model
exec(
    "from torch.nn.attention.flex_attention import flex_attention as own\n"
    "def help(*args, **kwargs): return own(*args, **kwargs)",
    vars(ELSEWHERE),
)


class Elsewhere(FlexLayer):
    def forward(self, q, k, v):
        return ELSEWHERE.help(q, k, v, **self.given)


class Run(FlexLayer):
    def forward(self, q, k, v):
        return self.call.run(q, k, v, **self.given)


ROUNDABOUT = {
    "of the class": OfClass(),
    "a static method": Still(),
    "in a dict": Chosen(),
    "of another file": Elsewhere(),
    "a flex_helper of another file": Held(ELSEWHERE.help),
    "a flex_helper with arguments fixed": Held(functools.partial(flex_helper, scale=None)),
    "of an object": Run(Kernel(compiled)),
    "a method of an object": Held(Kernel(compiled).run),
}


@pytest.mark.parametrize("way", ROUNDABOUT)
def test_flex_attention_is_recorded_through_classes_dicts_files_and_objects(way):
    layer = ROUNDABOUT[way]
    before = [dict(vars(OfClass)), dict(KERNELS), dict(vars(ELSEWHERE)), dict(vars(layer))]
    q, k, v = flex_inputs()
    A, out = capture_one(layer, q, k, v)
    torch.testing.assert_close(A @ v, out)
    assert [dict(vars(OfClass)), dict(KERNELS), dict(vars(ELSEWHERE)), dict(vars(layer))] == before


class Answering:
    """Has an answer to every attribute, as wrappers of C libraries do."""

    __slots__ = ()

    def __getattr__(self, name):
        return Answering()

    def __call__(self, *args, **kwargs):
        raise AssertionError("the lens called an object of the model")


class WithProperty:
    """Has a property in the place of its attributes."""

    @property
    def __dict__(self):
        raise RuntimeError("not now")


LIBRARY, ODD = Answering(), WithProperty()


class Mentioning(FlexLayer):
    """Refers to such objects everywhere, and calls none of them."""

    of_class = Answering()

    def __init__(self):
        super().__init__()
        self.held, self.several, self.odd = Answering(), [Answering(), {"one": Answering()}], WithProperty()

    def forward(self, q, k, v):
        return flex_attention(q, k, v)

    def never(self):
        return LIBRARY.feature.melspectrogram(ODD)


def test_objects_that_answer_every_attribute_are_passed_over():
    q, k, v = flex_inputs()
    A, out = capture_one(Mentioning(), q, k, v)
    torch.testing.assert_close(A @ v, out)
