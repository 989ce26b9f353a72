"""The catalog: what is told of a capture, and which calls of its layers belong together."""

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import page, view
from regard.views.catalog import Capture


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


def test_an_empty_tape_says_what_to_do_first():
    for show in (page, view):
        with pytest.raises(ValueError, match="the tape holds no layers: run the model inside `with capture"):
            show(Tape({}))


@pytest.mark.parametrize("show", [page, view])
def test_a_path_given_for_a_tape_is_told_how_files_are_shown(show, tmp_path):
    for path in ("p.safetensors", tmp_path / "p.safetensors"):
        with pytest.raises(TypeError, match=r"of a file write Tape\.load\(path\) or serve\(path\)"):
            show(path)


def test_facts_are_told_in_words(tmp_path):
    tape = Tape({("a", 0): weights(*torch.randn(2, 1, 1, 3, 4))}, facts={"folder": tmp_path})
    assert Capture(tape, "one").describe()["facts"] == {"folder": str(tmp_path)}
    tape.page().save(tmp_path / "page.html")
