"""Requests that wait are run together, and one that fails takes none with it."""

from __future__ import annotations

import threading

import pytest

from regard.serving import batcher as module
from regard.serving.batcher import Batcher, BatcherClosed, TooManyWaiting


class Slow:
    """Doubles numbers; the first run waits for `go`."""

    def __init__(self):
        self.runs, self.started, self.go = [], threading.Event(), threading.Event()

    def __call__(self, examples, settings):
        self.runs.append((list(examples), settings))
        self.started.set()
        assert self.go.wait(30)
        if 13 in examples:
            raise ValueError("13 is refused")
        return [2 * example for example in examples]


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def batcher(slow):
    """A batcher whose model is busy with the number 0."""
    made = Batcher(slow)
    made.submit([0], "a")
    assert slow.started.wait(30)
    yield made
    slow.go.set()
    made.close()


def test_what_waits_with_the_same_settings_is_run_together_in_order(slow, batcher):
    futures = [batcher.submit(*job) for job in (([1, 2], "a"), ([3], "b"), ([4], "a"))]
    assert batcher.waiting == 4
    slow.go.set()
    assert [future.result(30) for future in futures] == [[2, 4], [6], [8]]
    assert slow.runs == [([0], "a"), ([1, 2, 4], "a"), ([3], "b")]
    assert batcher.waiting == 0


def test_a_run_has_a_bound_and_a_larger_request_runs_alone(slow, batcher, monkeypatch):
    monkeypatch.setattr(module, "EXAMPLES_PER_RUN", 3)
    futures = [batcher.submit(list(range(size)), "a") for size in (2, 2, 5)]
    slow.go.set()
    assert [len(future.result(30)) for future in futures] == [2, 2, 5]
    assert [len(examples) for examples, _ in slow.runs] == [1, 2, 2, 5]


def test_a_request_that_fails_takes_no_other_with_it(slow, batcher):
    good, bad, other = (batcher.submit([number], "a") for number in (1, 13, 2))
    slow.go.set()
    assert (good.result(30), other.result(30)) == ([2], [4])
    with pytest.raises(ValueError, match="13 is refused"):
        bad.result(30)


def test_a_withdrawn_request_is_not_run(slow, batcher):
    gone, stays = batcher.submit([1], "a"), batcher.submit([2], "a")
    assert gone.cancel()
    slow.go.set()
    assert stays.result(30) == [4]
    assert slow.runs[1] == ([2], "a")


def test_more_than_the_queue_holds_is_refused(slow, batcher, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    batcher.submit([1, 2, 3, 4], "a")  # one request of any size may wait
    with pytest.raises(TooManyWaiting):
        batcher.submit([5], "a")


def test_what_waits_at_the_end_is_refused(slow, batcher):
    waiting = batcher.submit([1], "b")
    slow.go.set()
    thread = threading.Thread(target=batcher.close)
    thread.start()
    thread.join(30)
    assert isinstance(waiting.exception(30), BatcherClosed) or waiting.result() == [2]
    with pytest.raises(BatcherClosed):
        batcher.submit([2], "a")
