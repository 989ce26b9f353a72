"""Layers that a capture knows of and could not record are listed on the tape, and one warning names them."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from regard import weights
from regard.lens import (
    CaptureWarning,
    Tape,
    Unseen,
    attention_flow,
    capture,
    relevance,
    rollout,
    rollout_matrix,
)
from regard.lens.recording.recorder import Recorder
from regard.lens.recording.store import Store
from regard.lens.recording.unseen import EXPERT_GATE, describe
from regard.nn import Attention
from regard.views.viewer.describe import Capture

DIM = 8


class Halved(nn.Module):
    """Attention whose weights are halved after the softmax."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) * 0.5 @ x


class Model(nn.Module):
    """Named so that neither the order of the calls nor that of the alphabet is the order of the modules."""

    def __init__(self):
        super().__init__()
        self.z, self.first, self.a = Halved(), Attention(DIM, heads=2), Halved()

    def forward(self, x):
        return self.first(self.z(self.a(x)))


def recorder(**options):
    return Recorder(store=Store(), **options)


@pytest.fixture
def tape():
    recording = recorder()
    recording.note_unseen("b", "softmax", "it is halved")
    recording.note_unseen("a", "state space", "it has no weights")
    recording.note_unseen("b", "softmax", "another reason")
    return Tape.live(recording, None, Model())


def test_the_first_reason_per_layer_and_kind_is_kept(tape):
    assert tape.unseen == [("b", "softmax", "it is halved"), ("a", "state space", "it has no weights")]
    assert tape.unseen[0].kind == "softmax"


def test_layers_that_are_not_wanted_are_not_noted():
    recording = recorder(layers=["x.*"])
    recording.note_unseen("x.0", "softmax", "r")
    recording.note_unseen("y", "softmax", "r")
    assert [each.layer for each in recording.unseen] == ["x.0"]


def test_one_warning_names_all_layers_in_the_order_of_the_model(monkeypatch):
    monkeypatch.setattr("regard.lens.eager.tracker.TOLERANCE", -1.0)  # no reading is ever believed
    with warnings.catch_warnings(record=True) as raised, torch.no_grad():
        warnings.simplefilter("always")
        model = Model().eval()
        with capture(model) as tape:
            model(torch.randn(1, 5, DIM))
    assert [each.layer for each in tape.unseen] == ["z", "a"]
    assert {each.kind for each in tape.unseen} == {"attention"}
    (message,) = [str(x.message) for x in raised if x.category is CaptureWarning]
    assert message.startswith("z, a were not recorded: ")
    assert repr(tape).startswith("Tape(1 layer, 1 of 3 mixing layers: see tape.unseen)")


def test_a_model_without_such_layers_has_an_empty_list():
    model = Attention(DIM, heads=2)
    with capture(model) as tape:
        model(torch.randn(1, 5, DIM))
    assert tape.unseen == []
    assert repr(tape).startswith("Tape(1 layer)\n")


def test_the_list_is_saved_and_selected_with_the_tape(tape, tmp_path):
    tape.save(tmp_path / "tape.safetensors")
    assert Tape.load(tmp_path / "tape.safetensors").unseen == tape.unseen
    assert isinstance(Tape.open(tmp_path / "tape.safetensors").unseen[0], Unseen)


def test_selected_layers_keep_their_own_notes():
    tape = Tape({("a", 0): None}, unseen=[Unseen("a", "softmax", "r"), Unseen("b", "softmax", "r")])
    assert tape.select("a").unseen == [("a", "softmax", "r")]


def test_a_message_groups_layers_by_reason():
    notes = [Unseen(f"layers.{n}", "state space", "no weights") for n in range(5)]
    assert describe(notes) == "layers.0, layers.1, layers.2 and 2 more layers were not recorded: no weights"
    assert describe([Unseen("", "softmax", "r"), notes[0]]) == (
        "(model) was not recorded: r; layers.0 was not recorded: no weights"
    )
    assert str(notes[0]) == "layers.0 (state space): no weights"


@pytest.fixture
def partial():
    """A tape with two layers of three."""
    q, k = torch.randn(2, 2, 1, 2, 5, 4)
    entries = {("a", 0): weights(q[0], k[0]), ("b", 0): weights(q[1], k[1])}
    return Tape(entries, unseen=[Unseen("b", "softmax", "r"), Unseen("c", "state space", "r")])


def test_the_share_of_the_mixing_layers_counts_each_layer_once(partial):
    assert partial.coverage == "2 of 3 mixing layers"
    assert Tape({}).coverage == "0 of 0 mixing layers"


def test_gates_of_experts_are_no_mixing_layers(partial):
    gate = Unseen("d", EXPERT_GATE, "r")
    tape = Tape(dict(partial), unseen=[*partial.unseen, gate])
    assert tape.coverage == "2 of 3 mixing layers"
    assert tape.unseen[-1] == gate
    whole = Tape(dict(partial), unseen=[gate])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.table()
        rollout(whole)
    assert whole.coverage == "2 of 2 mixing layers"
    assert repr(whole).startswith("Tape(2 layers, see tape.unseen)")
    described = Capture(whole, "mine").describe()
    assert described["name"] == "mine"
    assert described["facts"] == {"not recorded: d": EXPERT_GATE}


FLOWS = {
    "rollout": rollout,
    "matrix": rollout_matrix,
    "flow": attention_flow,
    "relevance": lambda stack: relevance(stack, *torch.randn(2, 2, 1, 2, 5, 4)),
}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
@pytest.mark.parametrize("of", [lambda tape: tape, lambda tape: tape.values()], ids=["tape", "values"])
def test_a_flow_through_a_tape_warns_of_layers_that_are_not_on_it(flow, of, partial):
    message = "the flow of attention speaks of 2 of 3 mixing layers; tape.unseen lists those"
    torch.manual_seed(0)
    with pytest.warns(CaptureWarning, match=message):
        found = flow(of(partial))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        expected = flow(list(partial.values()))
        torch.manual_seed(0)
        whole = flow(Tape(dict(partial)))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, whole)


def test_a_table_says_what_share_of_the_layers_it_holds(partial):
    with pytest.warns(CaptureWarning, match="the table speaks of 2 of 3 mixing layers"):
        found = partial.table()
    if find_spec("pandas") is not None:
        assert found.attrs == {"coverage": "2 of 3 mixing layers"}


def test_the_viewer_shows_what_share_of_the_layers_it_holds(partial):
    described = Capture(partial, "mine").describe()
    assert described["name"] == "mine (2 of 3 mixing layers)"
    assert described["facts"] == {"not recorded: b": "softmax", "not recorded: c": "state space"}
