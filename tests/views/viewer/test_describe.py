"""The catalog: what is told of a capture, and which calls of its layers belong together."""

import pytest
import torch

from regard import Causal, weights
from regard.lens import EdgeWeights, SampledWeights, Tape
from regard.views import page, view
from regard.views.viewer.describe import Capture


def calls(*names, n=5):
    """A tape of layers called in this order."""
    torch.manual_seed(0)
    keys = [(name, names[:at].count(name)) for at, name in enumerate(names)]
    return Tape({key: weights(*torch.randn(2, 1, 2, n, 4), mask=Causal()) for key in keys})


def stacks(tape):
    return [layer["stack"] for layer in Capture(tape, "x").layers]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aaa", [[0], [0, 1], [0, 1, 2]]),
        ("abab", [[0], [0, 1], [2], [2, 3]]),
        ("aabb", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ("aba", [[0], [0, 1], [2]]),
    ],
)
def test_a_name_that_comes_again_after_another_begins_a_new_pass(names, expected):
    assert stacks(calls(*names)) == expected


def test_a_stack_is_over_the_same_tokens():
    q, k = torch.randn(2, 1, 2, 5, 4)
    tape = Tape({("a", 0): weights(q, k), ("cross", 0): weights(q[:, :, :3], k), ("b", 0): weights(k, q)})
    assert stacks(tape) == [[0], [], [0, 2]]
    tape.tokens = {"a": list("vwxyz"), "b": list("12345"), "cross": (list("abc"), list("vwxyz"))}
    assert stacks(tape) == [[0], [], [2]]


def decoder(*names, memory):
    """A tape of calls of a decoder in this order: those of "c" over a memory, the others over tokens of their own."""
    entries = {}
    for at, name in enumerate(names):
        q, k = torch.randn(2, 1, 2, 5, 4)
        entries[name, names[:at].count(name)] = weights(q, memory() if name == "c" else k)
    return Tape(entries)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("scscsc", [[0], [], [0, 2], [], [0, 2, 4], []]),
        ("scs", [[0], [], [2]]),
        ("cscs", [[], [1], [], [1, 3]]),
        ("acbcdc", [[0], [], [0, 2], [], [0, 2, 4], []]),
        ("eascsc", [[0], [0, 1], [0, 1, 2], [], [0, 1, 2, 4], []]),
        ("acbcacbc", [[0], [], [0, 2], [], [4], [], [4, 6], []]),
    ],
)
def test_layers_that_share_their_weights_ask_one_memory_in_one_pass(names, expected):
    torch.manual_seed(0)
    memory = torch.randn(1, 2, 3, 4)
    assert stacks(decoder(*names, memory=lambda: memory)) == expected


def test_another_memory_is_of_another_pass():
    assert stacks(decoder(*"scsc", memory=lambda: torch.randn(1, 2, 3, 4))) == [[0], [], [2], []]
    q, k, memory = torch.randn(3, 1, 2, 5, 4)
    once = {"s": weights(q, k), "c": weights(q, memory)}
    again = Tape({(name, call): once[name] for call in range(2) for name in "sc"})
    again.tokens = {"c": (list("abcde"), list("12345"))}
    assert stacks(again) == [[0], [], [2], []]


def test_other_lengths_over_one_memory_are_of_other_passes():
    torch.manual_seed(0)
    memory, entries = torch.randn(1, 2, 4, 4), {}
    for call, n in enumerate((5, 3, 5)):
        q, k = torch.randn(2, 1, 2, n, 4)
        entries |= {("s", call): weights(q, k), ("c", call): weights(q, memory)}
    assert stacks(Tape(entries)) == [[0], [], [2], [], [4], []]


def test_an_empty_tape_says_what_to_do_first():
    for show in (page, view):
        with pytest.raises(ValueError, match="the tape holds no layers: run the model inside `with capture"):
            show(Tape({}))


@pytest.mark.parametrize("show", [page, view])
def test_a_path_given_for_a_tape_is_told_how_files_are_shown(show, tmp_path):
    for path in ("p.safetensors", tmp_path / "p.safetensors"):
        with pytest.raises(TypeError, match=r"to view a file call serve\(path\), or view\(Tape\.load\(path\)\)"):
            show(path)


def test_facts_are_told_in_words(tmp_path):
    tape = Tape({("a", 0): weights(*torch.randn(2, 1, 1, 3, 4))}, facts={"folder": tmp_path})
    assert Capture(tape, "one").describe()["facts"] == {"folder": str(tmp_path)}
    tape.page().save(tmp_path / "page.html")


def test_a_model_that_is_one_layer_has_a_name_to_see():
    assert [layer["name"] for layer in Capture(calls("", "a"), "x").layers] == ["(model)", "a"]


def test_a_layer_over_sampled_points_is_described_by_its_measures():
    A = SampledWeights(torch.rand(2, 3, 5, 4, 2), torch.rand(2, 3, 5, 4), [0] * 4, [(2, 4)])
    described = Capture(Tape({("detr", 0): A}), "one").describe()["layers"][0]
    assert (described["kind"], described["n_i"], described["n_j"], described["batch"]) == ("measures", 5, 8, 2)


def test_a_layer_over_a_graph_is_described_by_its_measures():
    A = EdgeWeights(torch.tensor([[3, 0, 1], [1, 1, 0]]), torch.ones(3, 2), (2, 4))
    described = Capture(Tape({("gat", 0): A}), "one").describe()["layers"][0]
    assert (described["kind"], described["n_i"], described["n_j"], described["heads"]) == ("measures", 2, 4, [0, 1])
