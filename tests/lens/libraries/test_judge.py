"""The judge of the libraries' cases finds each kind of error in a tape that is made wrong on purpose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.lens import EdgeWeights
from tests.lens.eager.deformable_layers import Deformable, texts
from tests.lens.libraries import judge as room
from tests.lens.libraries.aten_truth import aten_truth
from tests.lens.libraries.by_hand import SCALE, Attends, Mixed, sdpa_causal, softmax_of_matmul
from tests.lens.libraries.case import Case, change_first_row
from tests.lens.libraries.judge import (
    LISTED,
    POINTS,
    RAISED,
    REFUSED,
    RIGHT,
    SILENT,
    WRONG,
    compare,
    has_reported_weights,
    judge,
)


def case(attend, model=Attends, **more):
    return Case(name="case", build=lambda: model(attend), inputs=lambda: (torch.randn(3, 9, 16),), **more)


def truth_of(attend):
    model = Attends(attend)
    with aten_truth(model) as truth, torch.no_grad():
        model(torch.randn(3, 9, 16))
    return truth.calls


@pytest.fixture
def calls():
    torch.manual_seed(0)
    return truth_of(softmax_of_matmul)


def matrix(calls):
    return calls[0].finals[0].view(3, 2, 9, 9)


def test_the_truth_of_a_fused_call_is_its_softmax():
    torch.manual_seed(0)
    [fused] = truth_of(sdpa_causal)
    torch.manual_seed(0)

    def by_hand(q, k, v):
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
        return (q @ k.mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    [eager] = truth_of(by_hand)
    assert fused.fused
    assert fused.is_used
    assert torch.allclose(fused.rows, eager.finals[0], atol=1e-6)


def test_the_final_weights_are_followed_through_a_gate():
    torch.manual_seed(0)
    [call] = truth_of(lambda q, k, v: (q @ k.mT * SCALE).softmax(-1) * 0.5 @ v)
    assert torch.allclose(call.finals[0], call.rows / 2, atol=1e-6)


def test_a_softmax_that_multiplies_nothing_is_not_used():
    torch.manual_seed(0)
    [call] = truth_of(lambda q, k, v: v + (q @ k.mT * SCALE).softmax(-1).amax(-1, keepdim=True))
    assert not call.is_used


def test_weights_multiplied_elementwise_and_summed_are_used():
    torch.manual_seed(0)
    [call] = truth_of(lambda q, k, v: ((q @ k.mT * SCALE).softmax(-1)[..., None] * v.unsqueeze(2)).sum(3))
    assert call.summed


def test_a_right_entry_is_held(calls):
    assert compare({("layer", 0): matrix(calls)}, calls, None, 3) == ([], {0})


@pytest.mark.parametrize("change", ["values", "rows"])
def test_an_entry_with_other_weights_is_wrong(calls, change):
    A = matrix(calls).clone()
    if change == "values":
        A[1, 0, 4, 2] += 0.01
    else:
        A[1, 0, 4] = A[1, 0, 4].flip(0)
    [reason], held = compare({("layer", 0): A}, calls, None, 3)
    assert "1 of 54 rows are not the model's" in reason
    assert held == set()


def test_an_entry_without_some_rows_does_not_hold_its_softmax(calls):
    wrong, held = compare({("layer", 0): matrix(calls)[:, :, :5]}, calls, None, 3)
    assert (wrong, held) == ([], set())


def test_batch_rows_shown_as_heads_are_wrong(calls):
    depends = torch.zeros(3, 2, 9, dtype=torch.bool)
    depends[0] = True
    changed = [depends.flatten()]
    assert compare({("layer", 0): matrix(calls)}, calls, changed, 3)[0] == []
    [reason], _ = compare({("layer", 0): matrix(calls).transpose(0, 1)}, calls, changed, 3)
    assert "batch rows are shown as heads" in reason


def test_only_the_first_batch_row_of_tensors_with_a_batch_changes():
    x, other = torch.randn(3, 4), torch.randn(5, 4)
    changed = change_first_row({"x": x, "other": other}, 3)
    assert not torch.equal(changed["x"][0], x[0])
    assert torch.equal(changed["x"][1:], x[1:])
    assert torch.equal(changed["other"], other)


def test_a_plain_attention_is_right():
    row = judge("library", case(softmax_of_matmul))
    assert (row.outcome, row.matrices) == (RIGHT, 1)


def test_rows_of_a_graph_sum_to_1_or_are_empty():
    A = torch.tensor([[[[0.5, 0.5], [0.0, 0.0]]]])
    assert room.sums_to_1(A)
    assert not room.sums_to_1(A * 0.9)


def test_a_model_that_does_not_attend_is_refused():
    row = judge("library", case(lambda q, k, v: q + k + v))
    assert row.outcome == REFUSED
    assert "no attention" in row.note


def test_a_library_that_fails_without_capture_does_not_run_here():
    assert judge("library", case(lambda q, k, v: q @ k)).outcome == room.FAILED


class Tampered:
    """`capture` with an entry removed, changed or raised."""

    def __init__(self, how):
        self.how = how

    def __call__(self, model):
        tampered = self

        class Block:
            def __enter__(self):
                self.block = real_capture(model)
                self.tape = self.block.__enter__()
                if tampered.how.startswith("raise"):
                    model.register_forward_pre_hook(tampered.fail)
                return {"remove": Fewer, "change": Changed}.get(tampered.how, lambda tape: tape)(self.tape)

            def __exit__(self, *raised):
                return self.block.__exit__(*raised)

        return Block()

    def fail(self, *_):
        raise (TypeError if "TypeError" in self.how else RuntimeError)("inside the model")


real_capture = room.capture


class Fewer(dict):
    """A tape without its first entry."""

    def __init__(self, tape):
        self.tape, self.unseen = tape, []

    def __iter__(self):
        return iter(list(self.tape)[1:])

    def __getitem__(self, key):
        return self.tape[key]


class Changed(Fewer):
    """A tape whose entries have their keys in the other order."""

    def __iter__(self):
        return iter(list(self.tape))

    def __getitem__(self, key):
        A = self.tape[key].dense().flip(-1)
        return type("Entry", (), {"dense": lambda self: A})()


@pytest.mark.parametrize(
    ("how", "outcome"), [("remove", SILENT), ("change", WRONG), ("raise", RAISED), ("raise TypeError", RAISED)]
)
def test_a_tape_that_is_made_wrong_is_found(monkeypatch, how, outcome):
    monkeypatch.setattr(room, "capture", Tampered(how))
    row = judge("library", case(softmax_of_matmul, Mixed))
    assert row.outcome == outcome
    if how == "remove":
        assert row.note == "first"


def test_a_layer_that_is_named_is_listed_and_not_silent():
    class Mamba(Attends):
        """A module of the name of a known mixer, that has no weights."""

    class Both(Mixed):
        def __init__(self, attend):
            super().__init__(attend)
            self.first = Mamba(lambda q, k, v: v.cumsum(2))

    row = judge("library", case(softmax_of_matmul, Both))
    assert row.outcome == LISTED
    assert row.note.startswith("first")


def test_weights_of_edges_are_compared_with_those_that_the_library_reports():
    edges, weights = torch.tensor([[0, 1, 2], [1, 1, 0]]), torch.tensor([[0.5, 0.2], [0.5, 0.8], [1.0, 1.0]])
    tape = {"gat": EdgeWeights(edges, weights, 3)}

    def reported(edges, weights):
        given = Case(name="", build=nn.Identity, inputs=tuple, edge_weights=lambda model: (edges, weights))
        return has_reported_weights(given, nn.Identity(), tape)

    assert reported(edges, weights[..., None])
    assert not reported(edges, weights.flip(0))
    assert not reported(edges.flip(0), weights)


def test_a_layer_that_is_no_attention_must_not_be_on_the_tape():
    row = judge("library", case(softmax_of_matmul, no_entry=("",)))
    assert row.outcome == WRONG


def test_the_weights_of_sampled_points_are_compared(monkeypatch):
    points = Case(name="points", build=Deformable, inputs=lambda: texts(dtype=torch.float32))
    row = judge("library", points)
    assert (row.outcome, row.note, row.matrices) == (RIGHT, POINTS, 1)
    monkeypatch.setattr(room, "dense", lambda A: A.weights.flip(-1).double())
    assert judge("library", points).outcome == WRONG
