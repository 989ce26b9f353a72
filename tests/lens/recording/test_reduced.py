"""Measures that are kept instead of queries and keys are those of the weights."""

import pytest
import torch
from torch import nn

from regard import Padding, weights
from regard.lens import capture
from regard.lens.real_tokens import RealTokens, real_tokens
from regard.lens.recording.reduced import reduce
from regard.lens.recording.store import Store
from tests.lens.sdpa_layers import B, H, Layer, by_hand, tokens


def test_measures_alone_can_be_kept():
    model, x = nn.Sequential(Layer(), Layer()), tokens(70)
    keep = ["entropy", "received", "pool:512", "pool:8"]
    with torch.no_grad(), capture(model, keep=keep) as tape:
        model(x)
    truth = by_hand(model[0], x)
    reduced = tape["0"]
    assert (reduced.entropy() + (truth * truth.log()).sum(-1)).abs().max() < 1e-5
    assert (reduced.received() - truth.sum(-2)).abs().max() < 1e-5
    assert reduced.pool(70, 70).shape == (B, H, 70, 70)
    assert reduced.pool(8, 8).shape == (B, H, 8, 8)
    assert repr(reduced) == f"Reduced(2 x 4 x 70 x 70, {', '.join(keep)})"
    with pytest.raises(KeyError, match="'distance' was not kept, only entropy"):
        reduced.distance()
    with pytest.raises(
        AttributeError, match=r"topk needs the full weights, but .* kept only entropy, .*; capture without"
    ):
        reduced.topk(2)
    with pytest.raises(TypeError, match=r"A\[\(0, 0\)\] needs the full weights"):
        reduced[0, 0]
    assert not hasattr(reduced, "anything")


@pytest.mark.parametrize("keep", [["max"], ["distance", "max"], ["pool:4"]])
def test_kept_measures_are_those_of_the_weights(keep):
    layer, x = Layer(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    with torch.no_grad(), capture(layer, keep=keep) as reduced:
        layer(x)
    A = tape[0]
    for name in keep:
        truth = A.pool(4, 4) if name == "pool:4" else getattr(A, name)()
        assert (reduced[0][name] - truth).abs().max() < 1e-6


@pytest.mark.parametrize("others", [[], ["max"], ["pool:512", "entropy"]])
def test_a_map_is_kept_with_the_largest_weight_of_each_cell(others):
    layer, x = Layer(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    with torch.no_grad(), capture(layer, keep=["pool:4", *others]) as reduced:
        layer(x)
    n = tape[0].shape[-1]
    for cells in (4, n) if "pool:512" in others else (4,):
        assert (reduced[0].pool(cells, cells, "max") - tape[0].pool(cells, cells, "max")).abs().max() < 1e-6
    with pytest.raises(ValueError, match="how must be 'mean' or 'max', got 'sum'"):
        reduced[0].pool(4, 4, "sum")


def test_keep_refuses_a_string():
    with pytest.raises(TypeError, match=r"write keep=\['entropy'\]"), capture(Layer(), keep="entropy"):
        pass


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep": ["mean"]}, r"keep takes entropy, .*pool:N.*'mean'"),
        ({"keep": ["pool:0"]}, "keep takes entropy"),
        ({"keep": []}, "at least one measure"),
        ({"keep": ["max"], "values": True}, "reduces to measures at once"),
    ],
)
def test_measures_that_cannot_be_kept_are_refused(asked, message):
    with pytest.raises(ValueError, match=message), capture(Layer(), **asked):
        pass


def test_logits_are_kept_and_their_largest_is_in_the_table(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    layer, x = Layer(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    with torch.no_grad(), capture(layer, keep=["logit"]) as alone, capture(layer, keep=["max", "logit"]) as both:
        layer(x)
    scores = tape[0].scores.dense().double()
    for reduced in (alone, both):
        assert (reduced[0].logit() - scores.amax(-1)).abs().max() < 1e-5
        assert reduced.table()["logit"] == pytest.approx(scores.amax((-2, -1)).flatten().tolist(), abs=1e-5)


def test_numbers_of_each_query_are_kept_without_a_look_at_the_padding(monkeypatch):
    monkeypatch.setattr(RealTokens, "are_all_queries", property(lambda self: pytest.fail("read")))
    A = weights(*torch.randn(2, 1, 2, 3, 4), mask=Padding((2,)))
    reduce(A, ["entropy", "max", "logit"], Store(), "layer", real_tokens(A))
