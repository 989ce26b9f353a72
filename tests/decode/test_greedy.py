"""What holds for every search: limits, prefixes, batches; and greedy itself against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.decode import beam, greedy, sample
from tests.decode.steppers import Cached, Recurrent, Table, flat

SEARCHES = {
    "greedy": lambda *data, **limits: [[one] for one in greedy(*data, **limits)],
    "sample": lambda *data, **limits: sample(*data, seed=3, **limits),
    "beam": lambda *data, **limits: beam(*data, width=4, n_best=3, **limits),
}
ROWS = 6
MODELS = {
    "table": (Table(9, 0), torch.arange(ROWS)),
    "recurrent": (Recurrent(vocabulary=9), torch.randint(1, 9, (ROWS, 5), generator=torch.Generator().manual_seed(0))),
    "cached": (Cached(vocabulary=9), ROWS),
}
END, MOST = 8, 12


@pytest.fixture(params=SEARCHES)
def search(request):
    return SEARCHES[request.param]


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def starts():
    return torch.arange(ROWS)[:, None]


def tokens(found):
    return [[one.tokens for one in best] for best in found]


def test_greedy_is_the_likeliest_token_at_every_step():
    model = Table(9, 1)
    for code, found in enumerate(greedy(model, torch.arange(30), [[0]] * 30, end=END, max_length=MOST)):
        at, token, expected = code, 0, []
        while len(expected) < MOST and token != END:
            at = model.follow(at, token)
            token = max(range(9), key=model.costs[at].__getitem__)
            expected.append(token)
        assert found.tokens == tuple(expected)
        assert found.finished == (token == END)
        assert found.log_probabilities == pytest.approx(model.log_probabilities(code, [0], expected))
        assert found.score == found.log_probability == pytest.approx(sum(found.log_probabilities))


def test_every_search_reports_the_log_probability_of_its_tokens(search):
    model, source = Table(9, 2), torch.arange(ROWS)
    for code, best in enumerate(search(model, source, starts(), end=END, max_length=MOST, min_length=3, no_repeat=2)):
        for one in best:
            expected = model.log_probabilities(code, [code], one.tokens)
            assert one.log_probabilities == pytest.approx(expected)
            assert one.log_probability == pytest.approx(sum(expected))


@pytest.mark.parametrize("least", [0, 1, 5, MOST])
def test_lengths_are_honoured(search, model, least):
    found = search(*model, starts(), end=END, max_length=MOST, min_length=least)
    for one in flat(found):
        assert len(one.tokens) <= MOST
        assert END not in one.tokens[:-1]
        assert one.finished == (one.tokens[-1] == END)
        assert len(one.tokens) - one.finished >= least
        assert one.finished or len(one.tokens) == MOST


@pytest.mark.parametrize("least", [0, 1, 5])
def test_an_end_may_come_as_soon_as_the_least_length_is_reached(search, least):
    model = Table(9, 0)
    model.logits[:, END] += 50
    for best in search(model, torch.arange(3), [[0], [END], [1, END, 2]], end=END, max_length=MOST, min_length=least):
        assert len(best[0].tokens) == least + 1


def test_every_token_may_be_an_end(search):
    found = search(Table(9, 0), torch.arange(3), [[0]] * 3, end=range(9), max_length=MOST)
    assert all(one.finished and len(one.tokens) == 1 for one in flat(found))


def test_an_end_in_the_prefix_is_no_reason_not_to_end(search):
    model = Table(9, 0)
    model.logits[:, END] += 50
    found = search(model, torch.arange(3), [[0], [END], [1, END, 2]], end=END, max_length=MOST, no_repeat=1)
    assert [best[0].tokens for best in found] == [(END,)] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_n_gram_comes_twice(search, model, n):
    given = torch.randint(8, (ROWS, n), generator=torch.Generator().manual_seed(n))
    found = search(*model, given, end=END, max_length=30, min_length=30, no_repeat=n)
    for row, best in enumerate(found):
        for one in best:
            text = (*given[row].tolist(), *one.tokens)
            grams = [text[at : at + n] for at in range(len(text) - n + 1)]
            assert len(grams) == len(set(grams))


def test_an_end_comes_early_where_nothing_else_may(search):
    found = search(Table(4, 0), torch.arange(3), [[0]] * 3, end=3, max_length=9, min_length=9, no_repeat=1)
    assert {one.tokens for one in flat(found)} <= {(1, 2, 3), (2, 1, 3)}


def test_nothing_left_to_say_and_no_end_is_an_error(search):
    with pytest.raises(
        ValueError, match="no_repeat=1 leaves no token to choose from after 4 of a vocabulary of 4; pass"
    ):
        search(Table(4, 0), torch.arange(3), [[0]] * 3, end=None, max_length=9, no_repeat=1)


@pytest.mark.parametrize("no_repeat", [None, 2])
def test_what_is_forbidden_is_never_chosen_and_the_rest_keeps_its_probability(search, no_repeat):
    model = Table(9, 3)
    model.logits[:, 4] += 3
    limits = {"end": END, "max_length": MOST, "min_length": 2, "no_repeat": no_repeat}
    assert any(4 in one.tokens for one in flat(search(model, torch.arange(ROWS), starts(), **limits)))
    found = search(model, torch.arange(ROWS), starts(), forbid=(4, 1), **limits)
    for code, best in enumerate(found):
        for one in best:
            assert not {1, 4} & set(one.tokens)
            assert one.log_probabilities == pytest.approx(model.log_probabilities(code, [code], one.tokens))


def test_a_forced_prefix_may_hold_what_is_forbidden(search):
    model, source = Table(9, 3), torch.arange(2)
    found = search(model, source, [[0, 1, 4], [2]], end=END, max_length=MOST, forbid=(4, 1))
    alone = search(model, source[:1], [[0, 1, 4]], end=END, max_length=MOST, forbid=(4, 1))
    assert tokens(found[:1]) == tokens(alone)


def test_without_an_end_every_hypothesis_is_as_long_as_it_may_be(search, model):
    for one in flat(search(*model, starts(), end=None, max_length=MOST)):
        assert len(one.tokens) == MOST
        assert not one.finished


def test_a_forced_prefix_is_read_and_not_repeated(search):
    model, source = Table(9, 0), torch.arange(ROWS)
    given = [[1], [1, 8, 3], [2, 2], [5, 4, 3, 2, 1], [0], [8]]
    found = search(model, source, given, end=END, max_length=MOST)
    for row, best in enumerate(found):
        for one in best:
            expected = model.log_probabilities(row, given[row], one.tokens)
            assert one.log_probabilities == pytest.approx(expected)
            assert one.score == pytest.approx(sum(expected))
            assert one.log_probability == pytest.approx(sum(expected))
            assert one.attention["code"].shape == (2, len(one.tokens), 1)
            assert one.attention["code"][0, :, 0].tolist() == model.codes(row, given[row], one.tokens)


def test_a_prefix_read_at_once_is_one_read_token_by_token(search):
    stepper = Cached(vocabulary=9)
    given = torch.randint(8, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    state = stepper.start(ROWS)
    for column in given[:, :-1].unbind(1):
        _, state = stepper.step(column, state)

    class Resumed:
        step = staticmethod(stepper.step)

        def start(self, source):
            return state

    whole = search(stepper, ROWS, given, end=END, max_length=MOST)
    assert tokens(whole) == tokens(search(Resumed(), None, given[:, -1:], end=END, max_length=MOST))


def test_long_prefixes_are_read_in_pieces(monkeypatch, search):
    given = torch.randint(8, (ROWS, 11), generator=torch.Generator().manual_seed(1))
    whole = search(Cached(vocabulary=9), ROWS, given, end=END, max_length=MOST)
    monkeypatch.setattr("regard.decode.prefix.POSITIONS_PER_PIECE", 4 * ROWS)
    assert tokens(search(Cached(vocabulary=9), ROWS, given, end=END, max_length=MOST)) == tokens(whole)


@pytest.mark.parametrize("name", ["greedy", "beam"])
@pytest.mark.parametrize("kind", ["table", "recurrent"])
def test_batch_equals_single_in_any_order(name, kind):
    model, source = MODELS[kind]
    given = [[1], [1, 8, 3], [2, 2], [5, 4, 3], [0], [8]]
    limits = {"end": END, "max_length": MOST, "min_length": 2, "no_repeat": 3}
    whole = tokens(SEARCHES[name](model, source, given, **limits))
    assert len(set(map(str, whole))) >= 5
    for row in range(ROWS):
        assert tokens(SEARCHES[name](model, source[[row]], [given[row]], **limits)) == [whole[row]]
    order = [3, 0, 5, 5, 1]
    shuffled = tokens(SEARCHES[name](model, source[order], [given[row] for row in order], **limits))
    assert shuffled == [whole[row] for row in order]


def test_padding_changes_nothing(search):
    model, short = Recurrent(), torch.randint(1, 11, (4, 3), generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(short, (0, 6))
    limits = {"end": 10, "max_length": MOST}
    one, two = (search(model, source, [[1]] * 4, **limits) for source in (short, padded))
    assert tokens(one) == tokens(two)
    for a, b in zip(flat(one), flat(two), strict=True):
        torch.testing.assert_close(a.attention["source"], b.attention["source"][..., :3])
        assert not b.attention["source"][..., 3:].any()


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6), st.integers(1, 6), st.integers(0, 3))
def test_greedy_beam_and_sampling_agree_where_one_token_is_certain(seed, rows, vocabulary, most, ragged):
    model = Table(vocabulary, seed, sharpness=1e3)
    given = [[0] * (1 + row % (ragged + 1)) for row in range(rows)]
    data, limits = (model, torch.arange(rows), given), {"end": vocabulary - 1, "max_length": most}
    best = [[one.tokens] for one in greedy(*data, **limits)]
    assert tokens(beam(*data, width=3, **limits)) == best
    assert tokens(sample(*data, seed=seed, **limits)) == best


def test_finished_rows_are_no_longer_computed():
    model = Table(4, 0)
    found = greedy(model, torch.arange(40), [[0]] * 40, end=3, max_length=30)
    assert model.rows == [sum(len(one.tokens) > step for one in found) for step in range(len(model.rows))]
    assert model.rows[0] == 40
    assert model.rows[-1] < 40


def test_no_rows_give_no_hypotheses(search):
    assert search(Table(4, 0), torch.arange(0), [], end=3, max_length=5) == []
    assert search(Table(4, 0), torch.arange(0), torch.empty(0, 2, dtype=torch.long), end=3, max_length=5) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_of_half_precision_logits_are_summed_in_full(search, dtype):
    model = Table(300, 0, dtype=dtype)
    for code, best in enumerate(search(model, torch.arange(3), [[0]] * 3, end=8, max_length=5)):
        expected = model.log_probabilities(code, [0], best[0].tokens)
        assert best[0].log_probabilities == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("no_repeat", [None, 2])
def test_the_steppers_own_tensors_are_left_alone(search, no_repeat):
    class Same(Table):
        def step(self, tokens, state):
            return self.logits[: len(tokens)], state

    model, source, given = Same(9, 0), torch.arange(ROWS), starts()
    before = model.logits.clone(), source.clone(), given.clone()
    search(model, source, given, end=END, max_length=MOST, min_length=4, no_repeat=no_repeat)
    assert all(torch.equal(x, y) for x, y in zip(before, (model.logits, source, given), strict=True))


def test_nothing_is_recorded_for_gradients(search):
    found = search(Recurrent(vocabulary=9), MODELS["recurrent"][1], starts(), end=END, max_length=4)
    assert not any(one.attention["source"].requires_grad for one in flat(found))


def test_a_hypothesis_aligns_each_token_with_a_source_position():
    one = greedy(Recurrent(vocabulary=9), torch.tensor([[3, 5, 2, 7]]), [[1]], end=END, max_length=6)[0]
    assert one.alignment("source") == tuple(one.attention["source"][0].argmax(-1).tolist())
    with pytest.raises(ValueError, match=r"name must be one of \['source'\], got 'cross'"):
        one.alignment("cross")


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"max_length": 0}, ValueError, "max_length must be 1 or more, got 0"),
        ({"max_length": 2.5}, TypeError, r"max_length must be a whole number, got 2.5 \(float\)"),
        ({"min_length": -1}, ValueError, "min_length must be 0 or more, got -1"),
        ({"min_length": 13}, ValueError, "min_length must be at most max_length, got min_length=13 and max_length=12"),
        ({"no_repeat": 0}, ValueError, "no_repeat must be 1 or more, got 0"),
        ({"end": -1}, ValueError, "end must be 0 or more, got -1"),
        ({"end": 9}, ValueError, "end must be within the vocabulary of 9, got 9"),
        ({"end": True}, TypeError, r"end must be a whole number, got True \(bool\)"),
        ({"forbid": (9,)}, ValueError, "forbid must be within the vocabulary of 9, got 9"),
        ({"forbid": (2.0,)}, TypeError, r"forbid must be a whole number, got 2.0 \(float\)"),
        ({"forbid": (1, END)}, ValueError, "forbid must not contain an end token, got 8 in both"),
        ({"forbid": range(8)}, ValueError, "forbid must leave a token to choose, but forbid and end hold all 9 tokens"),
        (
            {"end": range(9), "min_length": 1},
            ValueError,
            "end must leave a token to choose before min_length=1, got all 9 tokens of the vocabulary; pass",
        ),
    ],
    ids=str,
)
def test_limits_say_what_they_cannot_do(search, limits, error, message):
    with pytest.raises(error, match=message):
        search(*MODELS["table"], starts(), **({"end": END, "max_length": MOST} | limits))


@pytest.mark.parametrize(
    ("prefix", "error", "message"),
    [
        (
            [[0], []],
            ValueError,
            r"prefix must hold a token for each row, got none for row 1; write prefix=\[\[",
        ),
        (torch.arange(2), ValueError, r"prefix must have dims b n, got shape \(2,\); write prefix\[:, None\]"),
        (
            torch.zeros(1, 2, 3),
            ValueError,
            r"prefix must have dims b n, got shape \(1, 2, 3\); write prefix.view\(b, n\)",
        ),
        ([7, 8], TypeError, r"or b sequences of integers, got the row 7; write prefix=\[\[start\]\] \* b"),
        ([[0.5]], TypeError, r"or b sequences of integers, got the row \[0.5\]"),
        ([[0], [0], [0]], ValueError, r"step must return logits \(rows, vocabulary\) for 3 tokens, got shape \(2, 9\)"),
    ],
    ids=["empty", "1d", "3d", "flat", "float", "rows"],
)
def test_prefixes_say_what_they_cannot_be(prefix, error, message):
    class Fixed(Table):
        def step(self, tokens, state):
            return self.logits[:2], state

    with pytest.raises(error, match=message):
        greedy(Fixed(9, 0), torch.arange(2), prefix, end=END, max_length=MOST)


@pytest.mark.parametrize("token", [9, -1])
def test_a_longer_prefix_holds_tokens_of_the_vocabulary(search, token):
    with pytest.raises(ValueError, match=f"prefix must be within the vocabulary of 9, got {token}; pass tokens the"):
        search(Table(9, 0), torch.arange(2), [[0], [0, 3, token]], end=END, max_length=MOST)
