"""Status lines and progress bars of commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0  # how often progress is printed if standard error is not a terminal


def is_main_process() -> bool:
    """Whether this process prints: the first process that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def print_status(line: str) -> None:
    """Print a line on standard error, so that standard output holds results only."""
    print(line, file=sys.stderr, flush=True)


def print_truncated(what: str, long: int, number: int, limit: int | None) -> None:
    """Print how many texts were longer than the model reads."""
    if long:
        print_status(f"{long:,} of {number:,} {what} have more than {limit} tokens; only the first {limit} were read")


def one_line(text: str) -> str:
    """Return a text on one line, with each line break replaced by a space."""
    return " ".join(text.splitlines())


def n_best_lines(number: int, best: Sequence[tuple[str, float]], nbest: int) -> list[str]:
    """Return the lines to print for an example: the best text, or each of the n best with number and score."""
    if nbest == 1:
        return [best[0][0]]
    return [f"{number} ||| {text} ||| {score:.4f}" for text, score in best]


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress as a bar on a terminal, else as a line every ten seconds; yields `update(done, total)`."""
    if not sys.stderr.isatty():
        yield _PlainProgress(doing).update
        return
    from rich.console import Console  # rich takes a tenth of a second to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainProgress:
    def __init__(self, doing: str) -> None:
        self.doing, self.began = doing, time.monotonic()
        self.next = self.began + SECONDS_BETWEEN_LINES

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + SECONDS_BETWEEN_LINES
            left = (now - self.began) / max(done, 1) * (total - done)
            print_status(
                f"{self.doing}: {done:,} of {total:,} · {done / (now - self.began):,.1f}/s · {left:,.0f} s left"
            )
