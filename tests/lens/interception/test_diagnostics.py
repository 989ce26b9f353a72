"""Errors and warnings of capture say why a layer was not recorded, and what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.decode import beam, greedy
from regard.lens import capture
from regard.models import Gpt, GptConfig
from regard.nn import Attention
from tests.lens.eager.written_out import DIM, N, watched
from tests.lens.sdpa_layers import D, H, Layer, tokens


class Plain(nn.Module):
    """Attention to itself."""

    def forward(self, x):
        return torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)


class PartlyCompiled(nn.Module):
    """Two layers, of which the second runs compiled."""

    def __init__(self):
        super().__init__()
        self.plain, self.compiled = Plain(), Plain()
        self.__dict__["run"] = torch.compile(self.compiled, backend="aot_eager")

    def forward(self, x):
        return self.run(self.plain(x))


def test_a_compiled_part_is_named():
    with pytest.warns(UserWarning, match="ran inside a torch.compile.d function"):
        tape, _ = watched(PartlyCompiled().eval(), torch.randn(1, N, DIM))
    assert tape.layers == ["plain"]


class Blind(nn.Module):
    """A model without attention weights: keys meet values first."""

    def forward(self, x):
        return x @ (x.mT @ x)


@pytest.mark.parametrize(
    ("model", "run", "asked", "message"),
    [
        (
            Blind(),
            lambda m: m(tokens()),
            {},
            r"Blind was recorded; recognized are regard.attend.*regard.weights",
        ),
        (Layer(), lambda m: None, {}, r"Layer was not called within the block; call model\(...\)"),
        (Layer(), lambda m: m.forward(tokens()), {}, "not model.forward"),
        (nn.Sequential(Layer()), lambda m: m(tokens()), {"layers": "x.*"}, r"matches layers=\['x.\*'\]; there were 0"),
        (Layer(), lambda m: m(tokens()), {"layers": "x"}, r"matches layers=\['x'\]; there were \(model\)"),
    ],
)
def test_a_capture_that_recorded_nothing_says_why(model, run, asked, message):
    with pytest.raises(ValueError, match=message), capture(model, **asked):
        run(model)


def test_only_modules_can_be_captured():
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got str"), capture("gpt2"):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_refused():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="runs outside Python"), capture(traced):
        pass


def test_batch_rows_that_ended_early_warn():
    model = Gpt(GptConfig.llama(vocabulary=6, dim=16, depth=1, heads=4)).eval()
    with (
        pytest.warns(UserWarning, match=r"the tape holds batch rows \[2\] of 3: the other sequences finished earlier"),
        capture(model) as tape,
    ):
        found = greedy(model, None, [[1, 2], [3, 3], [5, 1]], end=1, max_length=4)
    assert [len(one.tokens) for one in found] == [2, 1, 4]
    assert tape[0].shape == (1, 4, 5, 5)
    with warnings.catch_warnings(), capture(model) as tape:
        warnings.simplefilter("error")
        beam(model, None, [[1, 2], [3, 3]], width=3, end=None, max_length=3)
    assert tape[0].shape == (6, 4, 4, 4)


def test_scripted_parts_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would have us compile
        scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.ReLU()))
    model = nn.Sequential(Layer(), scripted)
    with (
        pytest.warns(UserWarning, match="submodule '1' is scripted and runs outside Python"),
        capture(model) as tape,
    ):
        model(tokens())
    assert len(tape) == 1


class Aside(nn.Module):
    """Attends in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(D, H)

    def encode(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_a_method_beside_forward_that_attends_warns():
    model, x = Aside(), torch.randn(1, 3, D)
    with pytest.warns(UserWarning, match="only submodules of Aside ran inside capture"), capture(model):
        model.encode(x)
    with capture(model) as tape:
        model(x)
    assert list(tape) == [("", 0), ("layer", 0)]
