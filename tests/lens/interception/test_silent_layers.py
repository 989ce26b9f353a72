"""Layers whose class says that nothing of them can be recorded are noted if they ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.lens import CaptureWarning, capture
from tests.lens import unseen_layers as ways
from tests.lens.unseen_layers import Beside, Layer, tokens


@pytest.fixture(autouse=True)
def dynamo():
    yield
    torch._dynamo.reset()


class SelfAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Twice(nn.Module):
    """Two layers, of which one runs compiled by an attribute that is no submodule."""

    def __init__(self):
        super().__init__()
        self.plain, self.fast = SelfAttention(), SelfAttention()
        self.__dict__["run"] = torch.compile(self.fast, backend="aot_eager")

    def forward(self, x):
        return self.run(self.plain(x))


def test_a_layer_with_compiled_attention_is_noted_even_if_a_part_of_it_is_recorded():
    class Block(Layer):
        def __init__(self):
            super().__init__(torch.compile(ways.written_out, backend="aot_eager"))
            self.inner = Layer(ways.written_out)

        def forward(self, x):
            return super().forward(self.inner(x))

    model = Beside(Block())
    with pytest.warns(CaptureWarning, match="other was not recorded: its attention"), capture(model) as tape:
        model(tokens())
    assert tape.layers == ["seen", "other.inner"]
    assert [each.layer for each in tape.unseen] == ["other"]


def test_a_layer_that_runs_as_a_compiled_copy_is_noted_by_its_own_name():
    model = Beside(Twice())
    with torch.no_grad(), pytest.warns(CaptureWarning, match="other.fast was not recorded"), capture(model) as tape:
        model(tokens())
    assert [each.layer for each in tape.unseen] == ["other.fast"]


def test_a_function_that_runs_as_written_is_recorded_and_not_noted():
    model = Beside(Layer(torch.compile(ways.written_out, backend="aot_eager")))
    with torch.compiler.set_stance("force_eager"), capture(model) as tape:
        model(tokens())
    assert (tape.layers, tape.unseen) == (["seen", "other"], [])


def test_a_layer_that_did_not_run_is_not_noted():
    model = Beside(Layer(torch.compile(ways.written_out, backend="aot_eager")))
    with capture(model) as tape:
        model.seen(tokens())
    assert tape.unseen == []
