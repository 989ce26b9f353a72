"""Scores as queries, keys and terms: what changes them between the product and the softmax."""

import pytest
import torch

from regard.ops.terms.masks import Causal, Padding, Window
from tests.lens.eager.written_out import DIM, B, D, H, Layer, N, attention, close, distances, hidden, watched

LENGTHS = torch.tensor([N, 4])


PAD = torch.arange(N) >= LENGTHS[:, None]


@pytest.mark.parametrize(
    ("change", "mask", "bias"),
    [
        (lambda s: s, None, None),
        (lambda s: s.masked_fill(PAD[:, None, None], -1e9), Padding((N, 4)), None),
        (lambda s: s + PAD[:, None, None] * -3e38, Padding((N, 4)), None),
        (lambda s: s.masked_fill(distances().abs() > 2, -torch.inf), Window(3), None),
        (lambda s: s - 0.5 * distances().abs(), None, "Relative"),
        (lambda s: s + torch.tensor([1.0, 2.0, 0.5]).view(-1, 1, 1) * -distances().abs(), None, "Relative"),
        (lambda s: s * torch.tensor([1.0, 2.0, 0.5]).view(-1, 1, 1), None, None),
        (lambda s: s / torch.tensor(0.7), None, None),
        (lambda s: s.float().clone(), None, None),
        (lambda s: torch.add(s, torch.arange(N) / 7.0, alpha=2), None, "Added"),
        (lambda s: (s + 1) * 2 - torch.arange(N) / 7.0, None, "Added"),
    ],
)
def test_masks_biases_and_temperatures_are_terms(change, mask, bias):
    layer = Layer(attention(change)).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert repr(told.call.mask) == repr(mask)
    assert type(told.call.bias).__name__ == (bias or "NoneType")
    assert bool(told.call.q.any())


@pytest.mark.parametrize(
    "change",
    [
        torch.tanh,
        lambda s: s.clamp(-0.2, 0.2),
        lambda s: s * (distances() > 0),
        lambda s: s.relu_(),
        lambda s: s.index_fill_(2, torch.tensor([1]), 0.0),
        lambda s: s.view(-1).mul_(3.0).view_as(s),
        lambda s: s.masked_fill(distances() > 2, 0.3),
        lambda s: torch.einsum("bhij,hg->bgij", s, torch.eye(H).roll(1, 0)),
    ],
)
def test_scores_that_are_more_than_a_product_are_stored(change):
    layer = Layer(attention(change)).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert "Added" in repr(told)


def added_to_one_text(q, k, v):
    """Scores of one text, and a bias for each of several."""
    weights = (q[:1] @ k[:1].mT + torch.arange(B).view(B, 1, 1, 1) * torch.eye(N)).softmax(-1)
    return weights @ v, weights


def hidden_in_one_text(q, k, v):
    weights = (q[:1] @ k[:1].mT).masked_fill(hidden(q, k).expand(B, 1, N, N), -torch.inf).softmax(-1)
    return weights @ v, weights


def scaled_in_one_text(q, k, v):
    weights = (q[:1] @ k[:1].mT * torch.arange(B).view(B, 1, 1, 1)).softmax(-1)
    return weights @ v, weights


def spread_over_keys(q, k, v):
    weights = (q @ k[:, :, :1].mT + torch.arange(N)).softmax(-1)
    return weights @ v, weights


def gated_by_halves(q, k, v):
    weights = (q @ k.mT * (~hidden(q, k) + 0.5)).softmax(-1)
    return weights @ v, weights


def gated_and_shown(q, k, v):
    """Scores of 0 get weights like any other."""
    weights = (q @ k.mT * ~hidden(q, k) + 0.25 * hidden(q, k)).softmax(-1)
    return weights @ v, weights


def bounded_within(q, k, v):
    weights = (q @ k.mT).clamp(-0.25, 0.25).softmax(-1)
    return weights @ v, weights


def bounded_above(q, k, v):
    weights = (q @ k.mT).clamp(max=0.0).softmax(-1)
    return weights @ v, weights


SPREAD = (added_to_one_text, hidden_in_one_text, scaled_in_one_text, spread_over_keys)


@pytest.mark.parametrize("attention", [*SPREAD, gated_by_halves, gated_and_shown, bounded_within, bounded_above])
def test_scores_that_are_not_terms_are_stored_as_a_bias(attention):
    layer = Layer(attention).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.bias.tensors()[0].shape[2:] == (N, N)


def test_integers_may_be_added_to_scores():
    def counted(q, k, v):
        weights = (q @ k.mT + torch.arange(N).view(1, N) % 3).softmax(-1)
        return weights @ v, weights

    layer = Layer(counted).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.bias.tensors()[0].shape == (1, 1, 1, N)


def test_a_bias_per_key_beside_a_mask_stays_a_bias_per_key():
    def alibi(q, k, v):
        slopes = torch.linspace(0.1, 0.5, H)[:, None, None]
        mask = torch.full((N, N), torch.finfo(q.dtype).min).triu(1)
        weights = (q @ k.mT + slopes * torch.arange(N) + mask).softmax(-1)
        return weights @ v, weights

    layer = Layer(alibi).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert told.call.bias.tensors()[0].shape == (1, H, 1, N)


def rewritten_bias(q, k, v):
    bias = torch.zeros(64, 64)
    scores = q @ k.mT / 4 + bias
    bias[3:6, :10] = -1e9
    return scores


def rewritten_mask(q, k, v):
    mask = torch.zeros(64, 64, dtype=torch.bool)
    scores = (q @ k.mT / 4).masked_fill(mask, -1e9)
    mask[3:6, :10] = True
    return scores


def rewritten_queries(q, k, v):
    scores = q @ k.mT / 4
    q[:, :, 3:6] = 0
    return scores


def added_to_a_buffer(q, k, v):
    scores = torch.zeros(1, H, 64, 64)
    scores += q @ k.mT
    return scores


def added_by_a_factor(q, k, v):
    return torch.add(torch.arange(64.0) / 64, q @ k.mT, alpha=4.0)


@pytest.mark.parametrize(
    "scores",
    [rewritten_bias, rewritten_mask, rewritten_queries, added_to_a_buffer, added_by_a_factor],
    ids=lambda f: f.__name__,
)
def test_later_writes_to_the_inputs_do_not_change_the_scores(scores):
    def attend(q, k, v):
        weights = scores(q.clone(), k, v).softmax(-1)
        return weights @ v, weights

    layer = Layer(attend).eval()
    _, told = watched(layer, torch.randn(1, 64, DIM))
    close(told, layer.found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_scores_are_still_queries_and_keys(dtype):
    def attend(q, k, v):
        scores = (q @ k.mT * D**-0.5).masked_fill(hidden(q, k), -torch.inf)
        weights = scores.float().softmax(-1)
        return weights.to(dtype) @ v, weights

    layer = Layer(attend).to(dtype).eval()
    _, told = watched(layer, 6 * torch.randn(B, 40, DIM, dtype=dtype))
    assert told.call.mask == Causal()
    assert told.call.bias is None
    assert layer.found.max(-1).values.mean() > 0.3
    torch.testing.assert_close(told[:].float(), layer.found, atol=0.1, rtol=0.1)
