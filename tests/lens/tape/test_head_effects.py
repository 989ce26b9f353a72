"""Effects of heads: what ablation measured stays with the head, in files and parts of the tape."""

import math

import pytest
import torch

from regard.lens import CaptureWarning, Tape, ablate, ablation_importance, capture, importance
from regard.nn import Attention


@pytest.fixture
def measured():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention(16, heads=4), Attention(16, heads=2)).double().eval()
    x = torch.randn(1, 5, 16, dtype=torch.float64)

    def loss():
        return model(x).square().mean()

    with torch.no_grad(), capture(model) as tape:
        model(x)
    return model, loss, tape


def test_the_effect_of_a_head_is_the_loss_without_it_in_float64(measured, tmp_path):
    model, loss, tape = measured
    tape.effect("loss without it", ablation_importance(model, loss))
    tape.save(tmp_path / "tape.safetensors")
    for one in (tape, Tape.load(tmp_path / "tape.safetensors"), tape.without(0)):
        for layer, heads in (("0", 4), ("1", 2)):
            found = one.effects_of(layer)["loss without it"]
            for head in range(heads):
                with torch.no_grad(), ablate(model, {layer: [head]}):
                    without = float(loss())
                with torch.no_grad():
                    expected = without - float(loss())
                assert math.isclose(found[head], expected, abs_tol=1e-12)


def test_heads_of_a_part_keep_their_numbers(measured):
    model, loss, tape = measured
    with importance(model) as scores:
        loss().backward()
    tape.effect("gradient", scores)
    part = tape.select("0", heads=[3, 1])
    assert part.effects_of("0")["gradient"] == [float(scores["0"][head]) for head in (3, 1)]
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad(), capture(model, heads=[1]) as one:
        model(x)
    one.effect("gradient", scores)
    assert one.effects_of("1")["gradient"] == [float(scores["1"][1])]


def test_effects_that_do_not_fit_are_named(measured):
    _, _, tape = measured
    with pytest.warns(CaptureWarning, match="the effect 'x' is of other, which are not on the tape; it has 0, 1"):
        tape.effect("x", {"other": torch.ones(2)})
    with pytest.warns(CaptureWarning, match="the effect 'x' has 2 numbers for '0', which has head 3"):
        tape.effect("x", {"0": [0.5, 1.0]})
    assert str(tape.effects_of("0")["x"]) == "[0.5, 1.0, nan, nan]"
    with pytest.raises(ValueError, match="an effect needs a name that says what it is, got ''"):
        tape.effect("", {})
    with pytest.raises(TypeError, match="scores must be a map from layers to a number for each head, got list"):
        tape.effect("x", [1.0])
    with pytest.raises(ValueError, match=r"the scores of '0' must be one number a head, got shape \(2, 2\)"):
        tape.effect("x", {"0": torch.ones(2, 2)})
