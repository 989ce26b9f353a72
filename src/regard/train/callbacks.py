"""Callbacks: functions of the user that `fit` calls after steps, evaluations and checkpoints, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from .loggers import Values
from .progress import StepReport


class Ended(Protocol):
    """How a run ended: an `Outcome`."""

    @property
    def step(self) -> int: ...
    @property
    def best(self) -> Path: ...


class Callback:
    """A base class whose methods do nothing; override those that are needed.

    >>> from regard.train import Callback
    >>> class Losses(Callback):
    ...     def __init__(self):
    ...         self.losses = []
    ...     def step(self, report):
    ...         self.losses.append(report.loss)

    Only the first process calls them, after the step, evaluation or checkpoint is complete. An error ends the run; what
    a callback draws from random generators changes the run.
    """

    def begin(self, log: Callable[[int, Values], None]) -> None:
        """Called before the first step; `log(step, {"mine/entropy": value})` writes to every logger of the run."""

    def step(self, report: StepReport) -> None:
        """Called after each update of the weights."""

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation."""

    def save(self, step: int, path: Path) -> None:
        """Called after each checkpoint is written, that of step 0 included."""

    def end(self, outcome: Ended) -> None:
        """Called when the run has ended by itself, not after an error or a signal."""


class StepMonitor(Protocol):
    """An observer of whole training steps in every process, such as `regard.lens.Monitor`."""

    def start(
        self, folder: Path, step: int, *, say: Callable[[str], Any], loggers: Sequence[Any], compiled: bool
    ) -> None:
        """Called before the first step; `step` is the number of steps made before."""

    def begin_step(self, step: int) -> None:
        """Called before the forward passes of a step."""

    def end_step(self) -> None:
        """Called after its update of the weights."""

    def pause(self) -> AbstractContextManager[None]:
        """Return a block whose forward passes are not those of training."""

    def close(self) -> None:
        """Called when the run ends, after an error too."""
