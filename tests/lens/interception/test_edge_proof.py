"""The weights of a graph layer are those that multiply its values, or the layer is unseen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.lens.graph_layers as fake
from regard.lens import CaptureWarning, capture
from regard.nn import Attention
from tests.lens.graph_layers import EDGES, HEADS, NODES, WIDTH, GATConv

GATE = torch.linspace(0.1, 1.0, 9)[:, None]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    torch.manual_seed(0)
    fake.install(monkeypatch)


class Pair(nn.Module):
    """A graph layer after a layer that is recorded in any case."""

    def __init__(self, graph):
        super().__init__()
        self.seen, self.graph = Attention(WIDTH, heads=2), graph

    def forward(self, x, edges):
        return self.graph(self.seen(x[None])[0], edges)


def watched(model, **options):
    """The tape of a model, whose output is that without capture, to the bit."""
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    want = model(x, EDGES)
    torch.manual_seed(1)
    with capture(model, **options) as tape:
        assert torch.equal(model(x, EDGES), want)
    return tape


def in_place(A):
    A.view(-1)[:4] *= 0.5
    return A


CHANGES = [
    (lambda A: A * GATE, "scaled"),
    (lambda A: A.clone().mul_(GATE), "scaled"),
    (lambda A: (A + 0.1).detach().unsqueeze(-1).squeeze(-1), "added to"),
    (lambda A: A / A.sum(), "scaled"),
    (lambda A: torch.where(A > 0.5, A, torch.zeros_like(A)), "masked"),
    (lambda A: A.relu() * 2, "relu, scaled"),
]


GATES = [change for change, told in CHANGES[:2]]


@pytest.mark.parametrize("where", ["edge_update", "propagate"])
@pytest.mark.parametrize("width", [WIDTH, 1])
@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_changed_weights_of_edges_are_the_final_ones(where, width, change, told):
    layer = GATConv(where, change=change, width=width)
    if width == 1 and (told == "relu, scaled" or change in GATES):
        with pytest.raises(ValueError, match="its messages are not its values times the weights of its softmax"):
            watched(layer)  # with one feature, a gate and a value are of the same form
        return
    tape = watched(layer)
    assert torch.equal(tape[0].weights, layer.weights)
    assert tape.changed == {"": told}
    assert tape.unseen == []


def test_weights_that_were_written_to_are_the_final_ones():
    layer = GATConv(change=in_place)
    with torch.no_grad():
        tape = watched(layer)
    assert torch.equal(tape[0].weights, layer.weights)
    assert tape.changed == {"": "written to"}


@pytest.mark.parametrize("change", [lambda A: A, lambda A: A.clone().view(9, HEADS, 1).squeeze(-1), lambda A: A * 1.0])
def test_steps_that_change_no_weight_are_no_change(change):
    layer = GATConv(change=change)
    tape = watched(layer)
    assert torch.equal(tape[0].weights, layer.weights)
    assert (tape.changed, tape.unseen) == ({}, [])


def test_dropout_is_left_out_of_the_weights_of_edges():
    layer = GATConv(change=lambda A: F.dropout(A, 0.5))
    tape = watched(layer)
    assert not torch.equal(tape[0].weights, layer.weights)
    assert torch.allclose(tape[0].dense().sum(-1)[:, :5], torch.ones(HEADS, 5))
    assert tape.changed == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"message": lambda A, v: A[..., None] * v + v}, "its messages are not its values times the weights"),
        ({"message": lambda A, v: A[..., None] * v * GATE[..., None]}, "its messages are not its values times"),
        ({"message": lambda A, v: v * A.exp()[..., None].neg().exp() + A[..., None]}, "its messages are not its"),
        ({"message": lambda A, v: v}, "its messages are not its values times"),
        ({"reduce": "mean"}, "its messages are not summed into their targets"),
        ({"reduce": "amax"}, "its messages are not summed into their targets"),
    ],
)
@pytest.mark.parametrize("where", ["edge_update", "propagate"])
def test_messages_that_are_no_weighted_values_are_unseen(where, given, message):
    model = Pair(GATConv(where, **given))
    with pytest.warns(CaptureWarning, match=f"graph was not recorded: {message}"):
        tape = watched(model)
    assert tape.layers == ["seen"]
    assert [(each.layer, each.kind) for each in tape.unseen] == [("graph", "graph attention")]


class Twice(GATConv):
    """Passes its messages along other edges than those of its softmax, or passes none."""

    def run(self, step, given, compute):
        if step == "propagate":
            if self.passes is None:
                return torch.zeros(NODES, HEADS, WIDTH)
            given = (self.passes, *given[1:])
        return super().run(step, given, compute)


@pytest.mark.parametrize(
    ("passes", "message"),
    [(None, "it passed no messages after its softmax"), (EDGES.flip(1), "it passes messages along other edges")],
)
def test_a_softmax_without_messages_along_its_edges_is_unseen(passes, message):
    model = Pair(Twice(passes=passes))
    with pytest.warns(CaptureWarning, match=f"graph was not recorded: {message}"):
        tape = watched(model)
    assert tape.layers == ["seen"]


@pytest.mark.parametrize("options", [{"heads": [1]}, {"keep": ["entropy"]}, {"to": "cpu"}])
def test_the_options_of_capture_hold_for_changed_weights(options):
    layer = GATConv(change=lambda A: A * GATE)
    tape = watched(layer, **options)
    assert torch.equal(tape[0].weights, layer.weights[:, options.get("heads", [0, 1])])
    assert list(tape) == [("", 0)]
