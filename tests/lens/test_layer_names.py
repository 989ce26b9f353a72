"""Names of layers: matched by patterns, and shown in messages."""

import pytest
import torch

from regard.lens import capture, spans
from regard.lens.layer_names import list_names, matches, own_name, shown_calls, shown_name, within
from regard.nn import Attention
from tests.lens.sdpa_layers import Layer, tokens


def test_a_model_that_is_one_layer_is_chosen_by_its_shown_name():
    model = Layer()
    with capture(model, layers="(model)") as tape:
        model(tokens())
    assert tape.layers == [""]


def test_messages_show_a_layer_without_a_name_as_model():
    model, x = Attention(16, heads=4), torch.randn(1, 7, 16)
    with capture(model) as tape:
        model(x)
        model(x)
    with pytest.raises(KeyError, match=r"write tape\['\(model\)', 0\], tape\['\(model\)', 1\]"):
        tape[""]
    with pytest.raises(KeyError, match=r"'\(model\)' has no groups 'words'"):
        tape.groups_of(0, "words")
    with pytest.warns(UserWarning, match="cover 3 queries"):
        tape.group("words", spans(3, {"first": (0, 2)}))
    with pytest.raises(ValueError, match=r"'\(model\)' has 7 queries"):
        tape.groups_of(0, "words")
    for keep, what in ((None, "q"), (["entropy"], "entropy")):
        with pytest.raises(MemoryError, match=rf"^\(model\): {what}"), capture(model, keep=keep, budget="1KB"):
            model(torch.randn(9, 50, 16))
    with pytest.raises(IndexError, match=r"from 0 to 3 in '\(model\)'"), capture(model, heads=[4]):
        model(x)
    with (
        pytest.raises(ValueError, match=r"the output of '\(model\)' does not"),
        torch.no_grad(),
        capture(model, gradients=True),
    ):
        model(x)


def test_the_model_itself_is_shown_as_model():
    assert (shown_name(""), shown_name("a.b")) == ("(model)", "a.b")
    assert (own_name("(model)"), own_name("a.*")) == ("", "a.*")
    assert list_names(["", "a", ""]) == "(model), a"
    assert list_names([]) == "none"


def test_calls_are_numbered_if_a_layer_has_several():
    assert shown_calls([("a", 0), ("b", 0), ("a", 1)]) == ["a, 0", "b", "a, 1"]
    assert shown_calls(iter([("", 0)])) == ["(model)"]


@pytest.mark.parametrize(
    ("layer", "pattern", "is_match"),
    [
        ("encoder.0", "encoder.*", True),
        ("encoder.0.self", "encoder.*", True),
        ("encoder.0", "encoder.[1-9]", False),
        ("encoder.0", "ENCODER.*", False),
        ("encoder.0", "encoder", False),
        ("", "(model)", True),
        ("", "*", True),
        ("a", "(model)", False),
    ],
)
def test_patterns_match_whole_names_like_file_names(layer, pattern, is_match):
    assert matches(layer, pattern) is is_match


@pytest.mark.parametrize(
    ("layer", "part", "inside"),
    [("a", "a", True), ("a", "a.b", True), ("", "a.b", True), ("a", "ab", False), ("a.b", "a", False)],
)
def test_a_part_is_the_layer_or_a_submodule(layer, part, inside):
    assert within(layer, part) is inside
