"""The desk: those who wait come first, the rest in steps, failures are told, and the shelf stays small."""

import threading
import time

import pytest

from regard.views.viewer import worker as work
from regard.views.viewer.worker import Closed, Desk, Shelf


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def until(fact, seconds=5.0):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_results_and_errors_come_back(desk):
    assert desk.do(lambda: 6 * 7).result(5) == 42
    with pytest.raises(ZeroDivisionError):
        desk.do(lambda: 1 / 0).result(5)
    assert desk.do(lambda: "still there").result(5) == "still there"


def test_who_waits_comes_between_the_steps_of_long_work(desk):
    done, go = [], threading.Event()

    def long():
        go.wait(5)
        for n in range(5):
            done.append(n)
            yield n / 5
            time.sleep(0.01)

    desk.later("long", long)
    urgent = desk.do(lambda: done.append("urgent"))
    go.set()
    urgent.result(5)
    until(lambda: len(done) == 6)
    assert done.index("urgent") < 2
    assert [x for x in done if x != "urgent"] == [0, 1, 2, 3, 4]


def test_what_is_asked_for_last_is_done_first(desk):
    done, gate = [], threading.Event()
    desk.do(lambda: gate.wait(5))

    def one(name):
        def steps():
            done.append(name)
            yield

        return steps

    for name in ("a", "b", "c", "a"):
        desk.later(name, one(name))
    gate.set()
    until(lambda: len(done) == 3)
    assert done == ["a", "c", "b"]


def test_work_is_begun_once_and_tells_how_far_it_is(desk):
    begun, gate = [], threading.Event()

    def steps():
        begun.append(1)
        yield 0.25
        gate.wait(5)
        yield 0.5

    assert desk.later("x", steps) is None
    until(lambda: desk.later("x", steps) == 0.25)
    assert len(begun) == 1
    gate.set()
    until(lambda: desk.do(lambda: None).result(5) is None and "x" not in desk._behind)


def test_a_failure_is_told_to_who_asks_next_and_then_forgotten(desk):
    def steps():
        yield
        raise ValueError("damaged")

    desk.later("x", steps)
    until(lambda: "x" in desk._failures)
    with pytest.raises(ValueError, match="damaged"):
        desk.later("x", steps)
    assert desk.later("x", lambda: iter(())) is None


def test_work_nobody_asks_for_any_more_is_dropped(desk, monkeypatch):
    monkeypatch.setattr(work, "WAITING", 3)
    gate = threading.Event()
    desk.do(lambda: gate.wait(5))
    for n in range(9):
        desk.later(n, lambda: iter(()))
    assert list(desk._behind) == [6, 7, 8]
    gate.set()


def test_closing_lets_go_of_what_waits():
    desk, gate = Desk(), threading.Event()
    desk.do(lambda: gate.wait(5))
    waiting = desk.do(lambda: 1)
    threading.Timer(0.05, gate.set).start()
    desk.close()
    with pytest.raises(Closed, match="the desk is closed"):
        waiting.result(5)
    with pytest.raises(Closed, match="the desk is closed"):
        desk.do(lambda: 1)


def test_the_shelf_holds_so_many_bytes_and_drops_what_was_not_asked_for_longest():
    shelf = Shelf(10)
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
