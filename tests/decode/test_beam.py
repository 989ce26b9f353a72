"""Beam search against exhaustive search, a plain-Python beam, and what must hold whatever the model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from regard.decode import Coverage, Gnmt, beam, greedy
from regard.decode.beam import FinishedHypotheses
from tests.decode.searches import LENGTHS
from tests.decode.steppers import D, Recurrent, Table


def leaves(vocabulary, end, most):
    """Every sequence that ends, or is cut off at `most` tokens."""
    for n in range(1, most + 1):
        for body in itertools.product([v for v in range(vocabulary) if v != end], repeat=n - 1):
            yield (*body, end)
    yield from itertools.product([v for v in range(vocabulary) if v != end], repeat=most)


def plain_beam(model, source, prefix, *, width, end, most, length):
    """Beam search as a loop over lists: all hypotheses that are over, best first, and every prefix ever in the beam."""
    live, over, seen = [((), 0.0)], [], set()
    for n in range(1, most + 1):
        grown = []
        for tokens, total in live:
            code = source
            for token in (*prefix, *tokens):
                code = model.follow(code, token)
            grown += [((*tokens, y), total + cost) for y, cost in enumerate(model.costs[code])]
        grown.sort(key=lambda one: -one[1])
        best = grown[:width]
        over += [(tokens, total / length(n)) for tokens, total in best if tokens[-1] == end or n == most]
        seen |= {tokens for tokens, _ in best}
        live = [one for one in grown[: 2 * width] if one[0][-1] != end][:width]
        seen |= {tokens for tokens, _ in live}
    return sorted(over, key=lambda one: -one[1]), seen


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_a_wide_beam_is_exhaustive_search(length):
    every, divide = list(leaves(3, 2, 4)), length or (lambda n: 1.0)
    for seed in range(200):
        model = Table(3, seed)
        scored = [(sum(model.log_probabilities(seed, [0], y)) / divide(len(y)), y) for y in every]
        best = sorted(scored, reverse=True)[:7]
        found = beam(model, torch.tensor([seed]), [[0]], width=48, n_best=7, end=2, max_length=4, length=length)[0]
        assert [one.tokens for one in found] == [y for _, y in best]
        assert [one.score for one in found] == pytest.approx([s for s, _ in best])


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_narrow_beam_is_a_loop_over_lists_that_never_stops_early(length, width):
    for seed in range(4):
        model, source = Table(7, seed, sharpness=1.5), torch.arange(9)
        prefix = [[1], [2, 6, 3], [3, 3]] * 3
        limits = {"end": 6, "max_length": 9}
        found = beam(model, source, prefix, width=width, n_best=width, length=length, **limits)
        for row, code in enumerate(source.tolist()):
            divide = length or (lambda n: 1.0)
            expected, _ = plain_beam(model, code, prefix[row], width=width, end=6, most=9, length=divide)
            assert [one.tokens for one in found[row]] == [tokens for tokens, _ in expected[:width]]
            assert [one.score for one in found[row]] == pytest.approx([score for _, score in expected[:width]])


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_a_beam_of_one_is_greedy(length):
    for seed in range(30):
        model, source, prefix = Table(5, seed), torch.arange(4), [[0]] * 4
        one = beam(model, source, prefix, width=1, end=4, max_length=9, length=length)
        assert [best[0].tokens for best in one] == [
            h.tokens for h in greedy(model, source, prefix, end=4, max_length=9)
        ]


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_beam_never_scores_below_greedy_unless_greedy_left_the_beam(length):
    model, source, prefix = Table(6, 0), torch.arange(120), [[0]] * 120
    divide, left = length or (lambda n: 1.0), 0
    paths = greedy(model, source, prefix, end=5, max_length=8)
    found = beam(model, source, prefix, width=3, end=5, max_length=8, length=length)
    for code, (path, best) in enumerate(zip(paths, found, strict=True)):
        _, seen = plain_beam(model, code, [0], width=3, end=5, most=8, length=divide)
        stayed = all(path.tokens[: n + 1] in seen for n in range(len(path.tokens)))
        left += not stayed
        assert not stayed or best[0].score >= path.log_probability / divide(len(path.tokens)) - 1e-9
    assert left < 60


def test_a_beam_as_wide_as_the_vocabulary_never_scores_below_greedy():
    model, source, prefix = Table(5, 0), torch.arange(500), [[0]] * 500
    paths = greedy(model, source, prefix, end=4, max_length=10)
    found = beam(model, source, prefix, width=5, end=4, max_length=10)
    gains = [best[0].score - path.score for path, best in zip(paths, found, strict=True)]
    assert min(gains) > -1e-9
    assert max(gains) > 1


def test_the_search_does_not_stop_because_the_best_hypothesis_ended():
    # Ending at once is likelier than not; the other way is unlikely only in its first step, and long.
    model = Table(3, 0)
    code = model.follow(0, 0)
    model.logits[code] = torch.tensor([0.3, 1e-9, 0.7], dtype=D).log()
    for certain in (0, 0, 0, 2):
        code = model.follow(code, 0)
        model.logits[code] = torch.eye(3, dtype=D)[certain] * 30
    plain = beam(model, torch.tensor([0]), [[0]], width=2, end=2, max_length=8)[0][0]
    assert plain.tokens == (2,)
    mean = beam(model, torch.tensor([0]), [[0]], width=2, end=2, max_length=8, length=float)[0][0]
    assert mean.tokens == (0, 0, 0, 0, 2)


def test_asking_for_fewer_never_changes_the_best():
    for seed in range(20):
        model, source, prefix = Table(6, seed), torch.arange(5), [[0]] * 5
        limits = {"width": 4, "end": 5, "max_length": 9, "length": Gnmt(1.0)}
        whole = beam(model, source, prefix, n_best=4, **limits)
        for n in (1, 2, 3):
            assert beam(model, source, prefix, n_best=n, **limits) == [best[:n] for best in whole]


def test_n_best_are_different_and_in_order():
    found = beam(Table(9, 3), torch.arange(6), [[0]] * 6, width=5, n_best=5, end=8, max_length=7, length=Gnmt(0.8))
    for best in found:
        assert len({one.tokens for one in best}) == 5
        assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)


def test_fewer_hypotheses_than_asked_for_come_when_fewer_exist():
    found = beam(Table(2, 0), torch.arange(3), [[0]] * 3, width=9, n_best=9, end=1, max_length=3)
    for best in found:
        assert {one.tokens for one in best} == {(1,), (0, 1), (0, 0, 1), (0, 0, 0)}


@pytest.mark.parametrize("length", [None, Gnmt(1.0)], ids=repr)
def test_a_sentence_that_is_over_is_no_longer_computed(length):
    model = Table(5, 1)
    beam(model, torch.arange(7), [[0]] * 7, width=3, end=4, max_length=40, length=length)
    first, *rest = model.rows
    assert first == 7
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] < rest[0] <= 21
    assert all(rows % 3 == 0 for rows in rest)


def coverage_by_hand(attention, beta, n):
    return beta * sum(math.log(min(1.0, attention[:, :, j].mean(0).sum().item())) for j in range(n))


def test_the_score_is_equation_14():
    model, lengths = Recurrent(), [7, 3, 5]
    source = torch.zeros(3, 7, dtype=torch.long)
    for row, n in enumerate(lengths):
        source[row, :n] = torch.randint(1, 11, (n,))
    coverage = Coverage(0.4, "source", source != 0)
    limits = {"width": 6, "n_best": 6, "end": 10, "max_length": 8}
    found = beam(model, source, [[1]] * 3, length=Gnmt(0.7), coverage=coverage, **limits)
    for n, best in zip(lengths, found, strict=True):
        for one in best:
            expected = one.log_probability / Gnmt(0.7)(len(one.tokens))
            expected += coverage_by_hand(one.attention["source"], 0.4, n)
            assert one.score == pytest.approx(expected)
    without = beam(model, source, [[1]] * 3, length=Gnmt(0.7), **limits)
    assert [[one.tokens for one in best] for best in found] != [[one.tokens for one in best] for best in without]


def test_coverage_is_exhaustive_too_when_the_beam_is_wide():
    every, tried = list(leaves(3, 2, 4)), 0
    for seed in range(20):
        model = Recurrent(vocabulary=3, seed=seed)
        source = torch.randint(1, 3, (1, 4))
        coverage = Coverage(1.0, "source")
        found = beam(model, source, [[0]], width=48, n_best=5, end=2, max_length=4, coverage=coverage)[0]
        everything = beam(model, source, [[0]], width=48, n_best=48, end=2, max_length=4)[0]
        assert {one.tokens for one in everything} == set(every)
        ranked = sorted(
            everything, key=lambda one: -one.log_probability - coverage_by_hand(one.attention["source"], 1.0, 4)
        )
        assert [one.tokens for one in found] == [one.tokens for one in ranked[:5]]
        tried += [one.tokens for one in found] != [one.tokens for one in everything[:5]]
    assert tried > 5


def test_coverage_does_not_depend_on_the_prefixes_beside():
    source = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
    for seed in range(9):
        model, long = Recurrent(seed=seed), [1, 5, 4]
        options = {"width": 6, "n_best": 3, "end": 10, "max_length": 3, "coverage": Coverage(0.5, "source")}
        alone = beam(model, source[:1], [long], **options)[0]
        beside = beam(model, source, [long, [1]], **options)[0]
        assert [one.tokens for one in beside] == [one.tokens for one in alone]
        assert [one.score for one in beside] == pytest.approx([one.score for one in alone])


def test_the_pool_keeps_the_best_of_all_steps():
    pool = FinishedHypotheses(1, 2, torch.device("cpu"))
    for step, scores in enumerate([[-3.0, -math.inf], [-1.0, -5.0], [-2.0, -4.0]]):
        assert pool.worst.item() == [-math.inf, -math.inf, -3.0][step]
        pool.add(torch.tensor([scores], dtype=D), torch.arange(2)[None], step)
    assert pool.worst.item() == -2.0


def test_two_ends_are_both_ends():
    for seed in range(20):
        model = Table(5, seed)
        found = beam(model, torch.tensor([seed]), [[0]], width=300, n_best=200, end=(3, 4), max_length=4)[0]
        assert len(found) == sum(2 * 3**n for n in range(4)) + 3**4
        assert all(one.finished == (one.tokens[-1] in (3, 4)) for one in found)
        assert not any({3, 4} & set(one.tokens[:-1]) for one in found)
        assert sum(math.exp(one.log_probability) for one in found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be 1 or more, got 0"),
        ({"n_best": 4}, "n_best must be at most width, got n_best=4 and width=3"),
        ({"n_best": 0}, "n_best must be 1 or more, got 0"),
        ({"length": lambda n: 2.0 - n}, r"length must give positive numbers, got length\(2\) = 0.0"),
        ({"coverage": Coverage(0.2, "x")}, r"Coverage name must be an attention of the stepper, \['code'\], got 'x'"),
    ],
    ids=["width", "n_best", "none", "length", "coverage"],
)
def test_beam_says_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        beam(Table(5, 0), torch.arange(2), [[0]] * 2, **({"width": 3, "end": 4, "max_length": 5} | options))


def test_the_penalty_is_asked_for_as_far_as_the_search_goes(monkeypatch):
    asked, penalty = [], Gnmt.__call__
    monkeypatch.setattr(Gnmt, "__call__", lambda self, n: asked.append(n) or penalty(self, n))
    [short], [long] = (
        beam(Table(5, 0), torch.arange(1), [[0]], width=3, end=4, max_length=most, length=Gnmt(0.6))
        for most in (1000, 10**7)
    )
    assert long[0].tokens == short[0].tokens
    assert len(asked) < 2000


@pytest.mark.parametrize("vocabulary", [3, 40, 257, 1000])
def test_a_beam_of_one_is_greedy_search_on_equal_logits_too(vocabulary):
    class Flat:
        def start(self, source):
            return self

        def step(self, tokens, state):
            logits = torch.zeros(len(tokens), vocabulary)
            logits[:, vocabulary // 2 :] = 1
            return logits, self

        def select(self, rows):
            return self

    limits = {"end": None, "max_length": 4}
    (one,), (path,) = beam(Flat(), None, [[0]], width=1, **limits)[0], greedy(Flat(), None, [[0]], **limits)
    assert one.tokens == path.tokens == (vocabulary // 2,) * 4
