"""The desk: those who wait come first, the rest in steps, failures are told, and the shelf stays small."""

import threading
import time

import pytest

from regard.views.viewer import worker as work
from regard.views.viewer.worker import Closed, ResponseCache, Worker


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def until(fact, seconds=5.0):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_results_and_errors_come_back(worker):
    assert worker.do(lambda: 6 * 7).result(5) == 42
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: 1 / 0).result(5)
    assert worker.do(lambda: "still there").result(5) == "still there"


def test_who_waits_comes_between_the_steps_of_long_work(worker):
    done, go = [], threading.Event()

    def long():
        go.wait(5)
        for n in range(5):
            done.append(n)
            yield n / 5
            time.sleep(0.01)

    worker.schedule("long", long)
    urgent = worker.do(lambda: done.append("urgent"))
    go.set()
    urgent.result(5)
    until(lambda: len(done) == 6)
    assert done.index("urgent") < 2
    assert [x for x in done if x != "urgent"] == [0, 1, 2, 3, 4]


def test_what_is_asked_for_last_is_done_first(worker):
    done, gate = [], threading.Event()
    worker.do(lambda: gate.wait(5))

    def one(name):
        def steps():
            done.append(name)
            yield

        return steps

    for name in ("a", "b", "c", "a"):
        worker.schedule(name, one(name))
    gate.set()
    until(lambda: len(done) == 3)
    assert done == ["a", "c", "b"]


def test_work_is_begun_once_and_tells_how_far_it_is(worker):
    begun, gate = [], threading.Event()

    def steps():
        begun.append(1)
        yield 0.25
        gate.wait(5)
        yield 0.5

    assert worker.schedule("x", steps) is None
    until(lambda: worker.schedule("x", steps) == 0.25)
    assert len(begun) == 1
    gate.set()
    until(lambda: worker.do(lambda: None).result(5) is None and "x" not in worker._background)


def test_a_failure_is_told_to_who_asks_next_and_then_forgotten(worker):
    def steps():
        yield
        raise ValueError("damaged")

    worker.schedule("x", steps)
    until(lambda: "x" in worker._failures)
    with pytest.raises(ValueError, match="damaged"):
        worker.schedule("x", steps)
    assert worker.schedule("x", lambda: iter(())) is None


def test_work_nobody_asks_for_any_more_is_dropped(worker, monkeypatch):
    monkeypatch.setattr(work, "MAX_BACKGROUND_JOBS", 3)
    gate = threading.Event()
    worker.do(lambda: gate.wait(5))
    for n in range(9):
        worker.schedule(n, lambda: iter(()))
    assert list(worker._background) == [6, 7, 8]
    gate.set()


def test_closing_lets_go_of_what_waits():
    worker, gate = Worker(), threading.Event()
    worker.do(lambda: gate.wait(5))
    waiting = worker.do(lambda: 1)
    threading.Timer(0.05, gate.set).start()
    worker.close()
    with pytest.raises(Closed, match="the worker is closed"):
        waiting.result(5)
    with pytest.raises(Closed, match="the worker is closed"):
        worker.do(lambda: 1)


def test_the_shelf_holds_so_many_bytes_and_drops_what_was_not_asked_for_longest():
    shelf = ResponseCache(10)
    for key in "abc":
        shelf.put(key, b"123")
    assert shelf.get("a") == b"123"
    shelf.put("d", b"45")
    assert shelf.get("b") is None
    assert shelf.get("a") == b"123"
    assert shelf.size == 8
    shelf.put("a", b"1")
    assert shelf.size == 6
    shelf.put("huge", b"x" * 99)
    assert shelf.size == 0
