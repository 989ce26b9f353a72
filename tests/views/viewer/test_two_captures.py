"""Two captures beside each other: the ranked heads and the aligned tokens that the viewer gets, live and in a page."""

from __future__ import annotations

import base64
import json
import math
import zlib
from contextlib import closing

import pytest
import torch

import regard.views.viewer.api as api
import regard.views.viewer.two_captures as two_captures
from regard import Causal, weights
from regard.lens import Tape
from regard.views.export import PageBuilder
from regard.views.viewer.api import ViewerApi
from regard.views.viewer.captures import ApiError, Pending
from regard.views.viewer.describe import Capture
from regard.views.viewer.worker import Worker

OURS = ["so", "the", "trophy", "is", "too", "big", "."]
THEIRS = ["the", "trophy", "is", "now", "just", "too", "small", "."]
RUNS = [[1, 0, 3], [4, 5, 3]]  # the first of ours, the first of theirs, how many


def tape_of(tokens, seed, layers=("a", "b"), heads=3):
    torch.manual_seed(seed)
    tape = Tape({(name, 0): weights(*torch.randn(2, 1, heads, len(tokens), 8), mask=Causal()) for name in layers})
    tape.tokens = tokens
    return tape


@pytest.fixture
def pair():
    return tape_of(OURS, 0), tape_of(THEIRS, 1)


@pytest.fixture
def asked(pair):
    with closing(Worker()) as worker:
        yield ViewerApi([Capture(tape, "x") for tape in pair], worker)


def test_heads_are_ranked_as_the_tape_ranks_them(asked, pair):
    found = json.loads(asked.comparison())["rows"]
    expected = pair[0].compare(pair[1])
    for name in ("head", "difference", "largest", "query", "key", "other_query", "other_key", "unaligned"):
        assert [row[name] for row in found] == list(expected[name])
    assert [pair[0].layers[row["layer"]] for row in found] == list(expected["layer"])
    for by in two_captures.MEASURES:
        places = {(pair[0].layers[row["layer"]], row["head"]): row for row in found}
        table = pair[0].compare(pair[1], by=by)
        for layer, head, value in zip(table["layer"], table["head"], table[by], strict=True):
            assert places[layer, head][by] == (None if math.isinf(value) else value)
    assert asked.comparison() is asked.comparison()  # computed once


def test_an_infinite_divergence_is_null():
    ours, theirs = Tape({("a", 0): weights(*torch.randn(2, 1, 1, 2, 8))}), tape_of(["a", "b"], 1, ("a",), 1)
    ours.tokens = ["a", "b"]  # the first query looks at "b", which the other tape hides from it
    with closing(Worker()) as worker:
        [row] = json.loads(ViewerApi([Capture(ours, "x"), Capture(theirs, "y")], worker).comparison())["rows"]
    assert row["kl"] is None
    assert row["js"] > 0


def test_layers_of_texts_of_different_lengths_are_counterparts_and_their_tokens_aligned(asked):
    assert [layer["counterpart"] for layer in json.loads(asked.session())["captures"][0]["layers"]] == [0, 1]
    assert json.loads(asked.same_tokens(0, 1, 0)) == {"queries": RUNS, "keys": RUNS}
    turned = [[b, a, n] for a, b, n in RUNS]
    assert json.loads(asked.same_tokens(1, 1, 0)) == {"queries": turned, "keys": turned}


def test_what_takes_long_is_pending_with_its_share(asked, monkeypatch):
    monkeypatch.setattr(api, "MAX_IMMEDIATE_WEIGHTS", 1)
    with pytest.raises(Pending):
        asked.comparison()
    for _ in range(1000):
        try:
            assert len(json.loads(asked.comparison())["rows"]) == 6
            return
        except Pending:
            asked._worker.do(lambda: None).result()
    raise AssertionError("it was never done")


def test_what_takes_too_long_is_refused(asked, monkeypatch):
    monkeypatch.setattr(two_captures, "MAX_BACKGROUND_WEIGHTS", 1)
    with pytest.raises(ApiError, match="this takes too long"):
        asked.comparison()


def test_captures_of_different_models_say_why_they_cannot_be_compared():
    others = tape_of(THEIRS, 1, layers=("a", "c"))
    with closing(Worker()) as worker:
        asked = ViewerApi([Capture(tape_of(OURS, 0), "x"), Capture(others, "y")], worker)
        with pytest.raises(ApiError, match="tapes must have the same layers to compare them, got b on this tape alone"):
            asked.comparison()
        with pytest.raises(ApiError, match="layer 1 has no counterpart"):
            asked.same_tokens(0, 1, 0)


def test_one_capture_has_nothing_to_be_compared_with():
    with closing(Worker()) as worker, pytest.raises(ApiError, match="needs two captures") as caught:
        ViewerApi([Capture(tape_of(OURS, 0), "x")], worker).comparison()
    assert "regard view a b" in caught.value.hint


def test_texts_without_a_common_token_have_rows_without_numbers():
    ours, theirs = tape_of(["a"], 0), tape_of(["b", "c"], 1)
    with closing(Worker()) as worker:
        rows = json.loads(ViewerApi([Capture(ours, "x"), Capture(theirs, "y")], worker).comparison())["rows"]
    assert all(not isinstance(value, float) or math.isfinite(value) for row in rows for value in row.values())


def unpacked(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_a_page_holds_the_ranking_and_the_alignment(pair, asked):
    with closing(Worker()) as worker:
        packed = PageBuilder([Capture(tape, "x") for tape in pair], worker, pair, 4.7).build()
    assert unpacked(packed["comparison?"]) == json.loads(asked.comparison())
    assert unpacked(packed["same_tokens?capture=0&layer=1&batch=0"]) == {"queries": RUNS, "keys": RUNS}
    assert not any(name.startswith("difference?") for name in packed)  # maps of different sizes have none


def test_a_page_of_captures_that_cannot_be_compared_says_why(pair):
    tapes = pair[0], tape_of(THEIRS, 1, layers=("a", "c"))
    with closing(Worker()) as worker:
        packed = PageBuilder([Capture(tape, "x") for tape in tapes], worker, tapes, 4.7).build()
    assert "same layers" in unpacked(packed["comparison?"])["error"]
