"""Batches: every example once, in an order that seed and epoch alone decide, resumed wherever it was left."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import Batches, DataError, Report, pairs_tsv
from tests.data.numbered_examples import Stream, examples, flat, indices

SOURCES = st.sampled_from([list, Stream])
SIZES = st.sampled_from([{"tokens": 12}, {"tokens": 40}, {"rows": 1}, {"rows": 4}, {"rows": 4, "pool": 9}])


@st.composite
def plans(draw):
    """Settings of batches over a few examples."""
    chosen = dict(draw(SIZES))
    if "tokens" in chosen:
        chosen["pool"] = draw(st.integers(1, 40))
    return chosen | {"seed": draw(st.sampled_from([None, 0, 7]))}


@given(count=st.integers(1, 40), kind=SOURCES, plan=plans())
def test_an_epoch_has_every_example_once(count, kind, plan):
    items = examples(count)
    batches = Batches(kind(items), **plan)
    for epoch in range(2):
        assert batches.epoch == epoch
        assert sorted(flat(indices(batches))) == list(range(count))
        assert batches.report().examples == count


@given(count=st.integers(1, 40), kind=SOURCES, plan=plans())
def test_batches_hold_what_the_examples_hold_and_padding(count, kind, plan):
    items = examples(count)
    for batch in Batches(kind(items), pad={"a": -1, "b": -2}, **plan):
        for row, index in enumerate(batch["index"].tolist()):
            for name, padding in (("a", -1), ("b", -2)):
                length = int(batch[f"{name}_lengths"][row])
                assert batch[name][row, :length].tolist() == items[index][name]
                assert (batch[name][row, length:] == padding).all()
            assert batch["label"][row] == items[index]["label"]
        assert batch["a"].shape[1] == batch["a_lengths"].max()
        assert batch["a"].dtype == batch["label"].dtype == torch.int64


@given(count=st.integers(1, 60), tokens=st.integers(9, 60))
def test_no_batch_costs_more_than_its_tokens(count, tokens):
    for batch in Batches(examples(count), tokens=tokens):
        rows = len(batch["index"])
        assert rows * max(batch["a"].shape[1], batch["b"].shape[1]) <= tokens


@given(count=st.integers(1, 60), rows=st.integers(1, 9), pool=st.none() | st.integers(1, 30))
def test_no_batch_has_more_than_its_rows(count, rows, pool):
    assert all(len(one) <= rows for one in indices(Batches(examples(count), rows=rows, pool=pool)))


@given(count=st.integers(1, 40), ranks=st.integers(1, 5), kind=SOURCES, plan=plans())
def test_shards_are_disjoint_equally_many_and_miss_only_what_they_report(count, ranks, kind, plan):
    if count < ranks:
        count = ranks
    items, dealt, reports = examples(count), [], []
    for rank in range(ranks):
        batches = Batches(kind(items), shard=(rank, ranks), **plan)
        try:
            dealt.append(indices(batches))
        except DataError:
            return  # pools smaller than the ranks: nothing to deal, and it says so
        reports.append(batches.report())
    assert len({len(one) for one in dealt}) == 1
    seen = flat(flat(dealt))
    assert len(seen) == len(set(seen))
    assert len(seen) + reports[0].uneven == count
    assert len({report.uneven for report in reports}) == 1
    pools = -(-count // (plan.get("pool") or plan["rows"] * (ranks if kind is list else count)))
    assert reports[0].uneven <= (ranks - 1) * pools


def test_a_step_of_all_ranks_is_what_one_process_accumulates():
    items = [{"a": [n] * 3} for n in range(40)]
    alone = indices(Batches(items, tokens=15))
    assert len(alone) == 8
    for ranks in (2, 4):
        shards = [indices(Batches(items, tokens=15, shard=(rank, ranks))) for rank in range(ranks)]
        steps = [flat(step) for step in zip(*shards, strict=True)]
        assert steps == [flat(alone[n : n + ranks]) for n in range(0, 8, ranks)]


@given(count=st.integers(2, 40), kind=SOURCES, plan=plans(), ranks=st.integers(1, 3), data=st.data())
def test_the_rest_after_a_resume_is_the_rest(count, kind, plan, ranks, data):
    items = examples(count)
    plan = plan | {"shard": (data.draw(st.integers(0, ranks - 1)), ranks), "limit": 8, "long": "drop"}
    if count < ranks or (plan.get("pool") or 99) < 3 * ranks:
        return
    whole = Batches(kind(items), **plan)
    try:
        first, second = indices(whole), indices(whole)
    except DataError:
        return
    left = Batches(kind(items), **plan)
    for epoch, expected in enumerate((first, second)):
        stop = data.draw(st.integers(0, len(expected)))
        got, rest = [], iter(left)
        while len(got) < stop:
            got.append(next(rest)["index"].tolist())
        state = json.loads(json.dumps(left.state()))
        left = Batches(kind(items), **plan)
        left.restore(state)
        got += indices(left)
        assert got == expected
        assert left.epoch == epoch + 1
    assert left.report() == whole.report()
    assert left.state() == whole.state()


def test_leaving_a_loop_early_goes_on_there():
    batches = Batches(examples(20), rows=4)
    expected = indices(Batches(examples(20), rows=4))
    for batch in batches:
        first = batch["index"].tolist()
        break
    assert [first, *indices(batches)] == expected


def test_the_state_of_one_rank_restores_every_other():
    items = examples(40)
    ranks = [Batches(items, tokens=30, shard=(rank, 3)) for rank in range(3)]
    left = [iter(batches) for batches in ranks]
    for _ in range(2):
        for one in left:
            next(one)
    place = ranks[0].state()
    for rank, one in enumerate(left):
        again = Batches(items, tokens=30, shard=(rank, 3))
        again.restore(place)
        assert indices(again) == [batch["index"].tolist() for batch in one]


def test_order_is_by_seed_and_epoch():
    def order(seed, epochs=1):
        batches = Batches(examples(50), rows=5, seed=seed)
        return [indices(batches) for _ in range(epochs)]

    assert order(3, 2) == order(3, 2)
    assert order(3, 2)[0] != order(3, 2)[1]
    assert order(3) != order(4)
    assert flat(order(None, 2)[0]) == flat(order(None, 2)[1]) == list(range(50))


def test_streams_are_shuffled_within_their_pools_only():
    batches = Batches(Stream(examples(30)), rows=3, pool=10)
    order = flat(indices(batches))
    assert order != sorted(order)
    assert [sorted(order[n : n + 10]) for n in (0, 10, 20)] == [list(range(n, n + 10)) for n in (0, 10, 20)]
    same = [{"a": [1]}] * 30
    assert max(np.ptp(one) for one in indices(Batches(Stream(same), rows=3, pool=30))) > 3


def test_streams_are_read_no_further_than_the_pool_at_hand():
    read = []

    class Watched:
        def __iter__(self):
            for n in range(100):
                read.append(n)
                yield {"a": [n]}

    next(iter(Batches(Watched(), rows=2, pool=10)))
    assert len(read) == 10


def test_order_does_not_draw_from_the_global_generators():
    batches = Batches(examples(20), rows=4)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    indices(batches)
    assert torch.equal(torch.rand(1), expected)


def test_too_long_is_an_error_that_names_the_example(tmp_path):
    (tmp_path / "a.tsv").write_text("x\ty\nlonger\ty\n")
    batches = Batches(pairs_tsv(tmp_path / "a.tsv"), lambda pair: {"a": [1] * len(pair.source)}, rows=2, limit=3)
    with pytest.raises(DataError, match=r"a.tsv line 2: the example exceeds limit=3: a 6; raise it, or pass a limit"):
        list(batches)
    with pytest.raises(DataError, match=r"example 1: the example exceeds limit=3"):
        list(Batches([{"a": [1]}, {"a": [1] * 4}], rows=2, limit=3))


def test_dropped_ones_are_gone_and_counted():
    items = [{"a": [1] * n, "b": [1]} for n in range(1, 8)]
    batches = Batches(items, rows=2, limit=4, long="drop")
    assert sorted(flat(indices(batches))) == [0, 1, 2, 3]
    assert batches.report().dropped == 3
    assert "3 dropped as too long" in str(batches.report())
    with pytest.raises(DataError, match=r"the epoch has no batch: 6 examples are longer than limit=1; raise the limit"):
        list(Batches(items[1:], rows=2, limit=1, long="drop"))


def test_truncated_ones_are_cut_at_the_end_and_counted():
    items = [{"a": list(range(n)), "b": [5, 6, 7]} for n in range(1, 8)]
    batches = Batches(items, rows=9, limit={"a": 4}, long="truncate", seed=None)
    (batch,) = batches
    assert batch["a"].shape[1] == 4
    assert batch["a"][batch["index"] == 6].tolist() == [[0, 1, 2, 3]]
    assert batch["b_lengths"].tolist() == [3] * 7
    assert batches.report().truncated == 3
    assert "3 truncated" in str(batches.report())


def test_an_example_larger_than_a_batch_is_an_error():
    with pytest.raises(DataError, match=r"example 0: the example exceeds tokens=4 per batch: a 5, b 1"):
        list(Batches([{"a": [1] * 5, "b": [1]}], tokens=4))


def test_report_counts_padding_and_starts_anew_each_epoch():
    batches = Batches([{"a": [1]}, {"a": [1, 2, 3]}], rows=2)
    assert batches.progress() == 0
    for _ in range(2):
        list(batches)
        assert batches.report() == Report(examples=2, tokens=4, cells=6)
        assert batches.report().padding == pytest.approx(1 / 3)
        assert batches.progress() == 1
    assert Batches(Stream([{"a": [1]}]), rows=2).progress() is None
    assert str(Report()) == "0 examples, 0 tokens, 0.0% padding"
    assert "2 left out to share evenly" in str(Report(uneven=2))


def test_little_is_padding():
    items = [{"a": one["a"]} for one in examples(3000, longest=60)]
    batches = Batches(items, tokens=1024)
    list(batches)
    assert batches.report().padding < 0.03
    unsorted = Batches(items, rows=50)
    list(unsorted)
    assert unsorted.report().padding > 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give the batch size as either tokens or rows, got tokens=None and rows=None"),
        ({"tokens": 8, "rows": 8}, "got tokens=8 and rows=8"),
        ({"tokens": 0}, "tokens must be a whole number, at least 1, got 0"),
        ({"rows": True}, "rows must be a whole number, at least 1, got True"),
        ({"rows": 1, "pool": -1}, "pool must be a whole number, at least 1, got -1"),
        ({"rows": 1, "long": "cut"}, "long must be one of error, drop, truncate, got 'cut'"),
        ({"rows": 1, "limit": 0}, "limit must be a whole number, at least 1, or one for each field, got 0"),
        (
            {"rows": 1, "limit": {"a": 0}},
            "limit must be a whole number, at least 1, or one for each field, got {'a': 0}",
        ),
        ({"rows": 1, "shard": (2, 2)}, r"shard must be \(rank, ranks\) with 0 <= rank < ranks, got \(2, 2\)"),
        ({"rows": 1, "shard": (0, 9)}, "the source has 5 examples, fewer than ranks=9"),
        ({"rows": 1, "seed": -1}, "seed must be a whole number, at least 0, or None for no shuffling, got -1"),
        ({"rows": 1, "workers": -1}, "workers must be 0 or more processes, got -1"),
    ],
)
def test_settings_that_cannot_be_say_why(settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(examples(5), **settings)


def test_a_source_without_examples_is_refused():
    with pytest.raises(ValueError, match="the source has no examples; pass at least one"):
        Batches([], rows=1)


def test_a_source_that_can_be_read_once_only_is_refused():
    with pytest.raises(
        TypeError, match=r"source must return a new iterator for each epoch, got generator; pass a list"
    ):
        Batches((one for one in examples(3)), rows=1)


def test_a_stream_with_fewer_examples_than_ranks_says_so():
    with pytest.raises(DataError, match=r"the source has fewer examples than ranks=3; expected at least one for each"):
        list(Batches(Stream(examples(2)), rows=1, shard=(0, 3)))


@pytest.mark.parametrize("changed", [{"rows": 3}, {"pool": 4}, {"multiple": 8}, {"shard": (0, 2)}])
def test_batches_of_other_sizes_begin_the_epoch_anew_and_say_so(changed):
    before = Batches(examples(9), rows=2)
    list(before)
    next(iter(before))
    now, fresh = (Batches(examples(9), **({"rows": 2} | changed)) for _ in range(2))
    with pytest.warns(UserWarning, match=r"the state was saved with \w+=.*, got \w+=.*; the epoch restarts"):
        now.restore(before.state())
    list(fresh)
    assert [batch["index"].tolist() for batch in now] == [batch["index"].tolist() for batch in fresh]
    assert now.report() == fresh.report()


@pytest.mark.parametrize("changed", [{"seed": 1}, {"limit": 50}, {"limit": 50, "long": "drop"}])
def test_a_state_of_other_settings_is_refused(changed):
    state = Batches(examples(9), rows=2, pool=4).state()
    with pytest.raises(ValueError, match=r"the state was saved with \w+=.*, got \w+=.*; use the same"):
        Batches(examples(9), **({"rows": 2, "pool": 4} | changed)).restore(state)
    with pytest.raises(ValueError, match=r"the state was saved with examples=9, got examples=8"):
        Batches(examples(8), rows=2).restore(state)


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 1}, {"epoch": "x", "chunk": 0, "batch": 0, "report": {}, "settings": {}}]
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=r"state must be a result of state\(\)"):
        Batches(examples(3), rows=1).restore(state)


@settings(max_examples=20)
@given(state=st.integers(0, 5))
def test_states_are_plain_numbers(state):
    batches = Batches(examples(9), rows=2, limit={"a": 9})
    for _, _batch in zip(range(state), batches, strict=False):
        pass
    assert json.loads(json.dumps(batches.state())) == batches.state()
    assert batches.state()["report"] == asdict(batches.report())


@given(count=st.integers(1, 60), multiple=st.integers(1, 9))
@settings(max_examples=20)
def test_sequences_are_padded_to_a_multiple_within_the_tokens(count, multiple):
    seen = set()
    for batch in Batches(examples(count), tokens=90, multiple=multiple):
        seen |= set(batch["index"].tolist())
        for name in ("a", "b"):
            rows, n = batch[name].shape
            assert n % multiple == 0
            assert rows * n <= 90
            assert batch[f"{name}_lengths"].max() <= n
    assert seen == set(range(count))


def test_with_a_multiple_few_shapes_come_up():
    items = [{"a": [1] * n} for n in range(1, 65)] * 40
    exact, rounded = (
        {tuple(batch["a"].shape) for batch in Batches(items, tokens=512, multiple=multiple)} for multiple in (1, 16)
    )
    assert len(rounded) < len(exact) / 4


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [{"a": [1]}, {"b": [1]}],
            r"encode must return the same fields for every example, got \['a'\] and \['b'\]",
        ),
        (
            [{"a": [1, 2]}, {"a": 3}],
            "the field 'a' must have the same number of dims in every example, got 1 and 0",
        ),
        (
            [{"a": 3}, {"a": [1, 2]}],
            "the field 'a' must have the same number of dims in every example, got 0 and 1",
        ),
    ],
)
def test_fields_that_differ_between_examples_are_refused(items, message):
    with pytest.raises(ValueError, match=message):
        list(Batches(items, rows=2, seed=None))
