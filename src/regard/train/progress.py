"""What a run shows while it works: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

LONG = 1e9


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a run stands after a step."""

    step: int
    epoch: int
    steps: int | None  # how many there will be, where known
    loss: float
    rate: float
    speed: float  # items a second
    unit: str
    left: float | None  # seconds

    def __str__(self) -> str:
        of = f"/{self.steps}" if self.steps else ""
        left = f" · {_clock(self.left)} left" if self.left is not None else ""
        return (
            f"step {self.step}{of} · epoch {self.epoch} · loss {self.loss:.4f} · rate {self.rate:.2e} · "
            f"{self.speed:,.0f} {self.unit}/s{left}"
        )


class Progress(Protocol):
    """Whatever wants to hear how a run goes."""

    def advance(self, report: Report) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    """A plain line every so many steps, and whatever else there is to say."""

    def __init__(self, *, every: int, file: IO[str] | None = None) -> None:
        self.every, self.file = every, file

    def advance(self, report: Report) -> None:
        """Print a step that is due."""
        if report.step % self.every == 0 or report.step == report.steps:
            self.say(str(report))

    def say(self, line: str) -> None:
        """Print a line."""
        print(printable(line), file=self.file or sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left open."""


class Bar:
    """One line that moves."""

    def __init__(self, *, file: IO[str] | None = None) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[said]}"))
        console = Console(file=file or sys.stderr)
        self.bar = RichProgress(*columns, TimeElapsedColumn(), console=console, transient=False)
        self.task: Any = None

    def advance(self, report: Report) -> None:
        """Move to a step."""
        said = str(report).partition(" · ")[2]
        if self.task is None:
            self.task = self.bar.add_task("", total=report.steps, said=said)
            self.bar.start()
        self.bar.update(self.task, completed=report.step, total=report.steps, said=said)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.stop()


class Silence:
    """For the processes that do not speak."""

    def advance(self, report: Report) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def fitting(*, every: int) -> Progress:
    """A bar where someone watches, lines where a file does."""
    return Bar() if sys.stderr.isatty() else Lines(every=every)


def number(value: float, *, digits: int) -> str:
    """A number as it is told: with so many digits behind the point, short where it would be long before it.

    >>> number(3.14159, digits=2), number(1e304, digits=2)
    ('3.14', '1.0e+304')
    """
    return f"{value:.1e}" if LONG <= abs(value) < math.inf else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def printable(line: str) -> str:
    """The line without what a terminal would obey: names of classes and files are the work of others."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
