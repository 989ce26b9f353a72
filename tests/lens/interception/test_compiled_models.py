"""Compiled models are captured, edited and monitored, and run afterwards what they ran before."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from regard import Causal, Window
from regard.lens import Cut, Monitor, Scale, ablate, capture, edit, importance
from regard.nn import Attention
from tests.lens.sdpa_layers import D, H, Layer

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("dynamo")]


class ByHand(nn.Module):
    """Writes its attention out, with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return (torch.softmax(q @ k.mT / 4, -1) @ v).transpose(1, 2).flatten(2)


class Windowed(nn.Module):
    """A layer of ours whose mask needs a plan, at which the compiler breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(D, H, mask=Causal() & Window(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "sdpa": lambda: nn.Sequential(Layer(), Layer()),
    "ours": lambda: nn.Sequential(Attention(D, H), Attention(D, H, mask=Causal())),
    "encoder": encoder,
    "by hand": lambda: nn.Sequential(Layer(), ByHand()),
    "a graph break": lambda: nn.Sequential(Layer(), Windowed()),
}


def inputs() -> Tensor:
    return torch.randn(2, 9, D)


def graphs() -> int:
    """The number of graphs that were compiled since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def whole(model: nn.Module) -> nn.Module:
    """Compile a model by the function."""
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    """Compile a model by its method."""
    model.compile(backend="aot_eager")
    return model


def each_block(model: nn.Module) -> nn.Module:
    """Compile each block of a model by itself, one by the function and the others by their method."""
    blocks = model.layers if isinstance(model, nn.TransformerEncoder) else model
    for block in blocks[1:]:
        block.compile(backend="aot_eager")
    blocks[0] = torch.compile(blocks[0], backend="aot_eager")
    return model


WAYS = [whole, in_place, each_block]


CASES = [(name, way) for name in MODELS for way in WAYS if name != "a graph break" or way is whole]


@torch.no_grad()
@pytest.mark.parametrize(("name", "compiles"), CASES)
def test_a_compiled_model_is_captured_as_the_model_it_was_made_of(name, compiles):
    model, x = MODELS[name]().eval(), inputs()
    written = copy.deepcopy(model)
    with capture(written) as expected:
        y = written(x)
    compiled = compiles(model)
    before = compiled(x)
    with capture(compiled) as tape:
        watched = compiled(x)
    assert list(tape) == list(expected)
    assert not tape.unseen
    for key in tape:
        torch.testing.assert_close(tape[key].dense(), expected[key].dense())
    torch.testing.assert_close(watched, y)
    count = graphs()
    assert torch.equal(compiled(x), before)
    assert graphs() == count  # the plain graph is still there


@torch.no_grad()
@pytest.mark.parametrize(("name", "compiles"), CASES)
def test_a_compiled_model_is_edited_as_the_model_it_was_made_of(name, compiles):
    model, x = MODELS[name]().eval(), inputs()
    written = copy.deepcopy(model)
    edits = {"*": [Cut(keys=0), Scale(1, 0.5)]}
    with edit(written, edits), capture(written) as expected:
        y = written(x)
    compiled = compiles(model)
    before = compiled(x)
    with edit(compiled, edits), capture(compiled) as tape:
        watched = compiled(x)
    torch.testing.assert_close(watched, y)
    assert not torch.allclose(watched, before, atol=1e-3)
    assert list(tape) == list(expected)
    assert all(torch.count_nonzero(tape[key].dense()[..., 0]) == 0 for key in tape)
    count = graphs()
    assert torch.equal(compiled(x), before)
    assert graphs() == count


@pytest.mark.parametrize("compiles", WAYS)
def test_gradients_are_those_of_the_model_as_written(compiles):
    model, x = MODELS["by hand"](), inputs()
    written = copy.deepcopy(model)
    with edit(written, {"*": Cut(keys=0)}), importance(written) as expected:
        written(x).square().sum().backward()
    compiled = compiles(model)
    with edit(compiled, {"*": Cut(keys=0)}), importance(compiled) as scores:
        compiled(x).square().sum().backward()
    assert list(scores) == list(expected)
    for layer, each in scores.items():
        torch.testing.assert_close(each, expected[layer])
    for ours, theirs in zip(model.parameters(), written.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_monitor_watches_a_compiled_model():
    model, x = MODELS["sdpa"](), inputs()
    compiled, histories = whole(model), []
    for watched in (model, compiled):
        monitor = Monitor(watched, every=1)
        with monitor:
            watched(x).sum().backward()
        histories.append(monitor.history)
    torch.testing.assert_close(histories[1]["entropy"], histories[0]["entropy"])


class Broken(nn.Module):
    """Fails after its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = Layer(), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.fails:
            raise OSError("no more")
        return x


@torch.no_grad()
@pytest.mark.parametrize("compiles", [whole, in_place])
def test_an_error_in_the_model_restores_it(compiles):
    model, x = Broken(), inputs()
    compiled = compiles(model)
    model.fails = False
    before, count = compiled(x), graphs()
    model.fails = True
    with pytest.raises(OSError, match="no more"), capture(compiled):
        compiled(x)
    model.fails = False
    assert torch.equal(compiled(x), before)
    assert graphs() == count


@torch.no_grad()
def test_blocks_nest_and_the_last_restores():
    compiled, x = in_place(MODELS["sdpa"]()), inputs()
    before, function = compiled(x), compiled._compiled_call_impl
    with capture(compiled) as outer:
        with edit(compiled, {"1": Scale(0, 0)}), capture(compiled) as inner:
            compiled(x)
        compiled(x)
    assert len(inner) == 2
    assert len(outer) == 4
    assert compiled._compiled_call_impl is function
    assert torch.equal(compiled(x), before)


@torch.no_grad()
def test_a_thread_that_captures_sees_its_own_calls_alone():
    compiled, x = whole(MODELS["sdpa"]()), inputs()
    before = compiled(x)
    tapes, outputs, barrier = {}, {}, threading.Barrier(2, timeout=60)

    def run(n: int) -> None:
        with torch.no_grad(), capture(compiled) as tapes[n]:
            barrier.wait()
            for _ in range(n):
                outputs[n] = compiled(x)
            barrier.wait()

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: len(tape) for n, tape in tapes.items()} == {1: 2, 2: 4}
    for out in outputs.values():
        torch.testing.assert_close(out, before)


@torch.no_grad()
def test_ablation_and_an_audit_see_compiled_blocks():
    compiled, x = each_block(nn.Sequential(Layer(), ByHand())), inputs()
    whole = compiled(x)
    with ablate(compiled, {"0": [0]}):
        assert not torch.equal(compiled(x), whole)
    with capture(compiled, audit=True) as tape:
        compiled(x)
    assert tape.layers == ["0", "1"]


@torch.no_grad()
def test_a_module_compiled_anew_within_the_block_stays_so():
    model, x = MODELS["sdpa"](), inputs()
    model.compile(backend="aot_eager")
    with capture(model):
        model(x)
        model.compile(backend="eager")
        function = model._compiled_call_impl
    assert model._compiled_call_impl is function


@torch.no_grad()
def test_a_copy_made_within_the_block_is_a_model_of_its_own():
    model, x = in_place(MODELS["sdpa"]()), inputs()
    with capture(model) as tape:
        model(x)
        copied = copy.deepcopy(model)
        copied(x)
    assert len(tape) == 2
    torch.testing.assert_close(copied(x), model(x))
