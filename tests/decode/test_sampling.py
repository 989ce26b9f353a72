"""Sampling draws from the distribution asked for, reproducibly, each row for itself."""

from __future__ import annotations

import math

import pytest
import torch

from regard.decode import greedy, sample
from regard.decode.sampling import draw_tokens, uniform_streams
from tests.decode.steppers import D, Table

LIMITS = {"end": 8, "max_length": 10}


def shares(**options):
    """How often each token comes first in 6,000 samples, and the probabilities they are drawn from."""
    model = Table(9, 0, sharpness=1.0)
    found = sample(model, torch.tensor([5]), [[2]], end=None, max_length=1, seed=1, samples=6000, **options)[0]
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in found]), minlength=9)
    return counts / 6000, model.logits[model.follow(5, 2)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_come_as_often_as_they_are_likely(temperature):
    found, logits = shares(temperature=temperature)
    torch.testing.assert_close(found.to(D), (logits / temperature).softmax(-1), atol=0.02, rtol=0)


@pytest.mark.parametrize("k", [1, 3, 9, 50])
def test_top_k_keeps_the_k_likeliest(k):
    found, logits = shares(top_k=k)
    kept = logits.argsort(descending=True)[:k]
    expected = torch.zeros(9, dtype=D).index_copy(0, kept, logits[kept].softmax(-1))
    torch.testing.assert_close(found.to(D), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.8, 1.0])
def test_top_p_keeps_the_fewest_that_reach_p(p):
    found, logits = shares(top_p=p)
    values, order = logits.softmax(-1).sort(descending=True)
    n = next(n for n in range(1, 10) if values[:n].sum() >= p - 1e-12)
    expected = torch.zeros(9, dtype=D).index_copy(0, order[:n], values[:n] / values[:n].sum())
    torch.testing.assert_close(found.to(D), expected, atol=0.02, rtol=0)


def test_top_p_counts_within_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=D).log()
    drawn = {int(draw_tokens(logits, torch.tensor([u], dtype=D), top_k=2, top_p=0.5)) for u in (0.0, 0.5, 0.99)}
    assert drawn == {0}  # 0.4 of 0.7 is more than half


def test_the_largest_seed_draws_as_any_other():
    data = Table(9, 1), torch.arange(2), [[0]] * 2
    [last], [first] = sample(*data, seed=2**64 - 1, **LIMITS)
    assert [first] == sample(data[0], torch.arange(1, 2), [[0]], seed=0, **LIMITS)[0]
    assert last != first


def test_the_same_seed_gives_the_same_and_another_another():
    data = Table(9, 0), torch.arange(5), [[0]] * 5
    one, two, three = (sample(*data, seed=seed, samples=3, **LIMITS) for seed in (7, 7, 8))
    assert one == two
    assert one != three
    assert len({h.tokens for h in one[0]}) > 1


def test_the_global_random_state_is_neither_read_nor_changed():
    data = Table(9, 0), torch.arange(5), [[0]] * 5
    before = torch.get_rng_state()
    one = sample(*data, seed=7, **LIMITS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert sample(*data, seed=7, **LIMITS) == one


def test_a_row_draws_the_same_alone_as_in_a_batch():
    model, given = Table(9, 0), [[0], [1, 2, 3], [4], [5, 6]]
    whole = sample(model, torch.arange(4), given, seed=10, samples=2, **LIMITS)
    for row in range(4):
        alone = sample(model, torch.tensor([row]), [given[row]], seed=10 + 2 * row, samples=2, **LIMITS)
        assert [one.tokens for one in alone[0]] == [one.tokens for one in whole[row]]


def test_the_first_tokens_do_not_depend_on_how_many_may_follow():
    data = Table(9, 0), torch.arange(5), [[0]] * 5
    short, long = (sample(*data, seed=7, end=None, max_length=n) for n in (4, 40))
    assert [one[0].tokens for one in short] == [one[0].tokens[:4] for one in long]


def test_scores_are_of_the_model_not_of_what_was_left_of_it():
    model = Table(9, 0)
    for row in sample(model, torch.arange(5), [[0]] * 5, seed=0, temperature=0.5, top_k=3, top_p=0.9, **LIMITS):
        code = int(row[0].attention["code"][0, 0, 0])
        assert row[0].log_probabilities[0] == pytest.approx(model.costs[code][row[0].tokens[0]])
        assert row[0].score == row[0].log_probability


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.95}, {"top_k": 4, "top_p": 0.95}], ids=str)
def test_what_is_forbidden_is_never_drawn(u, options):
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5, -math.inf]])
    token = draw_tokens(logits, torch.tensor([u], dtype=D), **({"top_k": None, "top_p": None} | options))
    assert token.item() in (1, 3)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.95}], ids=str)
@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300, 5e-324])
def test_at_any_small_temperature_the_likeliest_is_drawn(temperature, options):
    model, given = Table(9, 0, dtype=torch.float32), (torch.arange(5), [[0]] * 5)
    found = sample(model, *given, seed=0, temperature=temperature, **options, **LIMITS)
    assert [one.tokens for [one] in found] == [one.tokens for one in greedy(model, *given, **LIMITS)]


def test_rows_with_seeds_of_their_own_do_not_depend_on_their_place():
    model = Table(9, 0, sharpness=1.0)
    sources, seeds = torch.tensor([5, 3, 1]), [40, 7, 7]
    found = sample(model, sources, [[2]] * 3, seed=seeds, samples=2, **LIMITS)
    for row, seed in enumerate(seeds):
        [alone] = sample(model, sources[row : row + 1], [[2]], seed=seed, samples=2, **LIMITS)
        assert [one.tokens for one in alone] == [one.tokens for one in found[row]]
    with pytest.raises(ValueError, match="seed must be one number or a list of 3, one for each row, got 2"):
        sample(model, sources, [[2]] * 3, seed=[1, 2], **LIMITS)


def test_streams_stay_clear_of_one_and_of_each_other():
    streams = uniform_streams([0, 1, 2], 1000)
    assert streams.min() >= 0
    assert streams.max() < 1
    assert torch.equal(streams[1:], uniform_streams([1, 2], 1000))
    assert not torch.equal(streams[0], streams[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, r"temperature must be above 0, got 0.0; .* use greedy\(...\)"),
        ({"temperature": math.inf}, ValueError, "temperature must be finite, got inf"),
        ({"temperature": "hot"}, TypeError, r"temperature must be a number, got 'hot' \(str\)"),
        ({"top_k": 0}, ValueError, "top_k must be 1 or more, got 0"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, got 1.5"),
        ({"samples": 0}, ValueError, "samples must be 1 or more, got 0"),
        ({"seed": 2**64}, ValueError, r"seed must be below 2\^64, got 2\^64 or more"),
        ({"seed": 0.5}, TypeError, r"seed must be a whole number, got 0.5 \(float\)"),
    ],
    ids=str,
)
def test_sampling_says_what_it_cannot_do(options, error, message):
    with pytest.raises(error, match=message):
        sample(Table(9, 0), torch.arange(1), [[0]], **({"seed": 0} | LIMITS | options))
