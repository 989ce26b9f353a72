"""Names of layers: matched by patterns, and shown in messages."""

import pytest
import torch

from regard.lens import capture, spans
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
