"""What is shown while a command works: a bar where someone watches, a line now and then where nobody does."""

from __future__ import annotations

import io
import sys

from regard.cli import terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("translating") as show:
        show(3, 9)
    assert "translating" in stream.getvalue()
    assert "3/9" in stream.getvalue()


def test_a_file_sees_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    now = iter([0.0, 1.0, 10.0, 11.0, 20.5])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with terminal.progress("translating") as show:
        for done in (1, 2_000, 3_000, 4_000):
            show(done, 6_000)
    assert stream.getvalue().splitlines() == [
        "translating: 2,000 of 6,000 · 200.0/s · 20 s left",
        "translating: 4,000 of 6,000 · 195.1/s · 10 s left",
    ]
