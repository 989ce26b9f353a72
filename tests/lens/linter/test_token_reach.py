"""Patterns of which token reaches which output, and the bug that each shows."""

import pytest
import torch

from regard.lens.linter.call_adapter import CallAdapter
from regard.lens.linter.token_reach import (
    TokenReach,
    change_of,
    gaps,
    guess_causal,
    is_regular,
    measure_reach,
    prefix_of,
    read_causal,
    texts_that_change,
)

N = 7
ONES = torch.ones(N, N)


def reach(effects):
    return TokenReach(effects.double(), torch.float64)


def chunks(n, size):
    same = torch.arange(n) // size
    return same[:, None] == same[None]


def test_reach_is_measured_one_token_at_a_time():
    adapter = CallAdapter(lambda x: x.cumsum(1), dim=4)
    measured = measure_reach(adapter, N)
    assert torch.equal(measured.meets, ONES.tril().bool())
    assert torch.equal(measured.leaks, measured.meets)
    assert measured.is_square


def test_pooled_outputs_are_one_row():
    measured = measure_reach(CallAdapter(lambda x: x[:, 2:].mean(1), dim=4), N)
    assert measured.meets.tolist() == [[False] * 2 + [True] * 5]


def test_texts_of_a_batch_that_meet_are_found():
    assert texts_that_change(CallAdapter(lambda x: x - x.mean(0), dim=4), N)
    assert not texts_that_change(CallAdapter(lambda x: x - x.mean(1, keepdim=True), dim=4), N)


def test_a_change_is_a_share_of_the_largest_output():
    x = torch.tensor([[[4.0], [2.0]]])
    assert change_of(x, x + torch.tensor([[[0.0], [1.0]]])).tolist() == [0.0, 0.25]
    assert change_of(x * torch.nan, x * torch.nan).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("effects", "causal"),
    [(ONES, False), (ONES.tril(), True), (ONES.tril(1), True), (ONES.triu(), True), (chunks(N, 3), False)],
)
def test_whether_a_module_is_causal_is_guessed(effects, causal):
    assert guess_causal(reach(effects))[0] == causal


@pytest.mark.parametrize(
    ("effects", "bug"),
    [
        (ONES.tril(), None),
        (ONES.tril(1), "positions"),
        (ONES.triu(), "reversed-mask"),
        (ONES, "future-leak"),
        (ONES.tril().index_fill(0, torch.tensor([0]), 1), "empty-rows"),
        (ONES.tril().index_fill(0, torch.tensor([0, 1]), 1), "empty-rows"),
        (ONES.tril().index_fill(0, torch.tensor([3]), 1), "future-leak"),
    ],
)
def test_the_bug_of_a_causal_pattern_is_named(effects, bug):
    assert read_causal(reach(effects)).bug == bug


def test_a_prefix_that_all_see_is_recognized():
    assert prefix_of(reach(torch.maximum(ONES.tril(), (torch.arange(N) < 3).float()))) == 3
    assert prefix_of(reach(ONES.tril())) is None
    assert prefix_of(reach(ONES)) is None


def test_gaps_are_pairs_that_should_meet():
    assert gaps(reach(ONES.tril()), causal=True).sum() == 0
    assert gaps(reach(ONES.tril()), causal=False).sum() == 21


@pytest.mark.parametrize(
    ("short", "long", "causal", "reason"),
    [
        (ONES.tril().triu(-2), None, True, "a window: each token sees at most 3 tokens"),
        (ONES.tril(1).triu(-1), None, False, "a window: each token sees at most 3 tokens"),
        (chunks(N, 4), chunks(11, 4), False, "chunks of 4 tokens"),
        (chunks(N, 3), chunks(11, 4), False, None),
        (
            ONES.tril(1).triu(-1).index_fill(0, torch.tensor([0]), 1).index_fill(1, torch.tensor([0]), 1),
            None,
            False,
            "a window with",
        ),
        (torch.eye(N), torch.eye(11), False, None),
    ],
)
def test_gaps_of_windows_chunks_and_global_tokens_are_intended(short, long, causal, reason):
    found = is_regular(reach(short), None if long is None else reach(long), causal=causal)
    assert found == reason if reason is None else found.startswith(reason)
