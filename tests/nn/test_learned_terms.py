"""Terms that learn, and the slots of a layer that hold them."""

from __future__ import annotations

import pytest
import torch

from regard import (
    Alibi,
    Causal,
    Cosine,
    Dense,
    Dot,
    SinkSoftmax,
)
from regard.nn import (
    Attention,
    LearnedCosine,
    LearnedDot,
    LearnedSink,
    ShawBias,
    T5Bias,
)
from regard.nn.learned_terms import fill, slot
from regard.ops.terms.normalizers import Normalizer

D = torch.float64


def close(x, y):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


SLOTS = {
    "temperature": {"score": LearnedDot(3, scale=0.7)},
    "cosine": {"score": LearnedCosine(3)},
    "t5": {"bias": T5Bias(3, buckets=8, max_distance=16)},
    "shaw": {"bias": ShawBias(4, reach=2)},
    "sink": {"normalize": LearnedSink(3)},
}


@pytest.mark.parametrize("name", SLOTS)
def test_learned_terms_are_saved_moved_and_trained(name):
    layer = Attention(12, 3, **SLOTS[name])
    ((slot, module),) = SLOTS[name].items()
    assert any(key.startswith(slot) for key in layer.state_dict())
    layer = layer.to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    layer(x, mask=Causal()).square().sum().backward()
    (parameter,) = module.parameters()
    assert parameter.dtype == D
    assert parameter.grad.abs().sum() > 0
    close(layer(x), layer(x, mask=Dense(torch.ones(7, 7, dtype=torch.bool))))


def test_learned_scores_begin_as_their_fixed_terms():
    x = torch.randn(2, 7, 12, dtype=D)
    for learned, fixed in (
        ({"score": LearnedDot(3, scale=0.7)}, {"score": Dot(0.7)}),
        ({"score": LearnedCosine(3, temperature=0.2)}, {"score": Cosine(0.2)}),
        ({"normalize": LearnedSink(3)}, {"normalize": SinkSoftmax(0.0)}),
    ):
        ours, other = Attention(12, 3, **learned).to(D), Attention(12, 3, **fixed).to(D)
        other.load_state_dict(ours.state_dict(), strict=False)
        torch.testing.assert_close(ours(x), other(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("slot", "value"), [("mask", Alibi(3)), ("bias", Causal()), ("score", "dot")])
def test_a_slot_takes_its_own_kind_of_term(slot, value):
    with pytest.raises(TypeError, match=f"{slot} must be a .* term or a module that returns one"):
        Attention(12, 3, **{slot: value})


@pytest.mark.parametrize("scale", [0.125, 1.0, 9.0])
def test_a_learned_scale_begins_at_its_number_and_stays_positive(scale):
    learned = LearnedDot(3, scale=scale)
    torch.testing.assert_close(learned().scale, torch.full((3,), scale))
    learned.log_scale.data.fill_(-50.0)
    assert (learned().scale > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearnedDot(0, scale=1.0), "heads must be 1 or more, got 0"),
        (lambda: LearnedDot(2, scale=0.0), "scale must be above 0, got 0.0"),
        (lambda: LearnedCosine(2, temperature=-1.0), "temperature must be above 0, got -1.0"),
        (lambda: LearnedSink(0), "heads must be 1 or more, got 0"),
    ],
)
def test_numbers_that_have_no_logarithm_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_slot_keeps_terms_of_numbers_and_modules_and_refuses_terms_of_tensors():
    module = LearnedSink(2)
    assert slot("normalize", module, Normalizer) is module
    assert slot("normalize", SinkSoftmax(0.0), Normalizer) == SinkSoftmax(0.0)
    assert slot("normalize", None, Normalizer) is None
    with pytest.raises(
        ValueError, match=r"normalize=SinkSoftmax\(float32\[2\]\) holds tensors, which a layer would neither"
    ):
        slot("normalize", SinkSoftmax(torch.zeros(2)), Normalizer)
    with pytest.raises(
        TypeError, match="normalize must be a Normalizer term or a module that returns one, got 'softmax'"
    ):
        slot("normalize", "softmax", Normalizer)


def test_a_slot_is_filled_with_its_term_or_the_result_of_its_module():
    module = LearnedSink(2)
    assert fill(module).sink is module.sink
    assert fill(SinkSoftmax(0.0)) == SinkSoftmax(0.0)
    assert fill(None) is None
