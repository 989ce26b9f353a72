"""Batcher: runs the examples of many requests together, in one thread.

While the model works, requests wait in a queue. The next run takes the oldest of them and all others with the same
settings, up to a number of examples. Nobody waits for a batch to fill.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

EXAMPLES_PER_RUN = 64
SECONDS_TO_FINISH = 10
MAX_WAITING = 1024  # examples in the queue; more are refused


class TooManyWaiting(Exception):
    """The queue is full."""


class BatcherClosed(Exception):
    """The batcher was closed before the request was answered."""


@dataclass(frozen=True, eq=False)
class Job:
    """The examples of one request, and the settings to run them with."""

    examples: Sequence[Any]
    settings: Hashable
    answers: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """Answers requests by `run(examples, settings)`, which returns one answer for each example."""

    def __init__(self, run: Callable[[list[Any], Any], list[Any]]) -> None:
        self._run = run
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="regard-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of examples in the queue."""
        with self._changed:
            return sum(len(job.examples) for job in self._jobs)

    def submit(self, examples: Sequence[Any], settings: Hashable) -> Future[list[Any]]:
        """Add a request to the queue; cancel the future to withdraw it."""
        job = Job(examples, settings)
        with self._changed:
            if self._is_closed:
                raise BatcherClosed
            if self._jobs and sum(len(other.examples) for other in self._jobs) + len(examples) > MAX_WAITING:
                raise TooManyWaiting
            self._jobs.append(job)
            self._changed.notify()
        return job.answers

    def close(self) -> None:
        """Refuse new requests and those in the queue; wait a moment for the run under way."""
        with self._changed:
            self._is_closed = True
            jobs, self._jobs = list(self._jobs), deque()
            self._changed.notify()
        for job in jobs:
            if job.answers.set_running_or_notify_cancel():
                job.answers.set_exception(BatcherClosed())
        self._thread.join(SECONDS_TO_FINISH)

    def _work(self) -> None:
        while jobs := self._next_jobs():
            self._answer(jobs)

    def _next_jobs(self) -> list[Job]:
        """Wait for a request; take it from the queue with others of its settings. Empty if the batcher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return []
                taken: list[Job] = []
                left, count = deque[Job](), 0
                for job in self._jobs:
                    fits = not taken or (
                        job.settings == taken[0].settings and count + len(job.examples) <= EXAMPLES_PER_RUN
                    )
                    if not fits:
                        left.append(job)
                    elif job.answers.set_running_or_notify_cancel():
                        taken.append(job)
                        count += len(job.examples)
                self._jobs = left
                if taken:
                    return taken

    def _answer(self, jobs: list[Job]) -> None:
        """Run the examples of some requests together; if that fails, each request by itself."""
        try:
            answers = iter(self._run([example for job in jobs for example in job.examples], jobs[0].settings))
            found = [[next(answers) for _ in job.examples] for job in jobs]
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([job])
            else:
                jobs[0].answers.set_exception(error)
            return
        for job, some in zip(jobs, found, strict=True):
            job.answers.set_result(some)
