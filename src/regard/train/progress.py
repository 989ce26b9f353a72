"""Progress display of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ..printable import printable

SCIENTIFIC_FROM = 1e9


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The progress of a run after a step."""

    step: int
    epoch: int
    steps: int | None  # total, None if unknown
    loss: float
    rate: float
    speed: float  # items per second
    unit: str
    left: float | None  # seconds until the end, None if unknown

    def __str__(self) -> str:
        of = f"/{self.steps}" if self.steps else ""
        left = f" · {_clock(self.left)} left" if self.left is not None else ""
        return (
            f"step {self.step}{of} · epoch {self.epoch} · loss {self.loss:.4f} · rate {self.rate:.2e} · "
            f"{self.speed:,.0f} {self.unit}/s{left}"
        )


class Progress(Protocol):
    """Receiver of progress reports and messages."""

    def advance(self, report: StepReport) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class ProgressLines:
    """Prints a plain line every `every` steps, and messages."""

    def __init__(self, *, every: int, file: IO[str] | None = None) -> None:
        self.every, self.file = every, file

    def advance(self, report: StepReport) -> None:
        """Print the report if it is due."""
        if report.step % self.every == 0 or report.step == report.steps:
            self.say(str(report))

    def say(self, line: str) -> None:
        """Print a line."""
        print(printable(line), file=self.file or sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Bar:
    """A progress bar."""

    def __init__(self, *, file: IO[str] | None = None) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[said]}"))
        console = Console(file=file or sys.stderr)
        self.bar = RichProgress(*columns, TimeElapsedColumn(), console=console, transient=False)
        self.task: Any = None

    def advance(self, report: StepReport) -> None:
        """Move the bar to a step."""
        said = str(report).partition(" · ")[2]
        if self.task is None:
            self.task = self.bar.add_task("", total=report.steps, said=said)
            self.bar.start()
        self.bar.update(self.task, completed=report.step, total=report.steps, said=said)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        self.bar.stop()


class Silence:
    """A progress display that shows nothing, for all processes but the first."""

    def advance(self, report: StepReport) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def default_progress(*, every: int) -> Progress:
    """Return a bar if stderr is a terminal, otherwise plain lines."""
    return Bar() if sys.stderr.isatty() else ProgressLines(every=every)


def number(value: float, *, digits: int) -> str:
    """Format a number with `digits` decimals, or in scientific notation if it is large.

    >>> number(3.14159, digits=2), number(1e304, digits=2)
    ('3.14', '1.0e+304')
    """
    return f"{value:.1e}" if SCIENTIFIC_FROM <= abs(value) < math.inf else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
