"""Scores divided by a temperature, whatever the score is."""

import pytest
import torch
from torch import nn

from regard import Additive, Bilinear, Cosine, Dot, Location, Score, SinkSoftmax, attend
from regard.lens import Temperature, capture, edit
from regard.lens.edits.temperature import with_temperature
from tests.lens.edits.test_edit import split
from tests.lens.kernel_layers import HEADS, WIDTH, QkvLayer, qkv

close = torch.testing.assert_close
tanh = Score.of(lambda score, b, h, i, j: torch.tanh(score) + h)
numbers = torch.Generator().manual_seed(0)
W = torch.randn(HEADS, WIDTH, WIDTH, generator=numbers, dtype=torch.float64)
SCORES = {
    "capped": Dot(cap=2.0),
    "scaled": Dot(scale=0.3),
    "cosine": Cosine(0.1),
    "bilinear": Bilinear(W),
    "bilinear, one for all heads": Bilinear(W[0]),
    "location": Location(W[0]),
    "additive": Additive(W[0, 0]),
    "function": tanh,
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("heads", [None, [1]])
def test_the_temperature_of_other_scores_divides_them(score, heads):
    model, x = nn.Sequential(QkvLayer(lambda q, k, v: scored(q, k, v, score))), qkv()
    q, k, _ = split(x)
    scores = score.tile(*score.prepare(q, k, None))
    if score is tanh:
        scores = torch.tanh(scores) + torch.arange(HEADS)[:, None, None]
    chosen = slice(None) if heads is None else heads
    scores[:, chosen] = scores[:, chosen] / 0.5
    with edit(model, {"0": Temperature(heads, 0.5)}), capture(model) as tape:
        model(x)
    close(tape[0].dense(), scores.softmax(-1))


def scored(q, k, v, score):
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), score=score).transpose(1, 2)


def test_a_sink_keeps_its_logit():
    model, x = nn.Sequential(QkvLayer(sinking)), qkv()
    q, k, _ = split(x)
    scores = q @ k.mT * WIDTH**-0.5 / 2
    with edit(model, {"0": Temperature(None, 2.0)}), capture(model) as tape:
        model(x)
    close(tape[0].dense(), scores.exp() / (1 + scores.exp().sum(-1, keepdim=True)))


def sinking(q, k, v):
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), normalize=SinkSoftmax(0.0)).transpose(1, 2)


def test_a_plain_score_stays_a_plain_score():
    assert with_temperature(None, 0.5, 64) == Dot(scale=0.0625)
    assert with_temperature(Dot(scale=2.0), 0.5, 64) == Dot(scale=1.0)
    assert with_temperature(Dot(cap=4.0), 0.5, 64) == Dot(0.0625, 2.0)
