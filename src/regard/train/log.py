"""The log of a run: what its steps and evaluations send to the loggers, the callbacks and the progress display."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .callbacks import Callback
from .loggers import Logger, Values
from .progress import Progress, StepReport, number
from .recipe import Recipe
from .training_state import TrainingState


class Log:
    """The outputs of a run: its loggers, its callbacks, and the progress display."""

    def __init__(
        self,
        run: Path,
        state: TrainingState,
        recipe: Recipe,
        shown: Progress,
        loggers: Sequence[Logger],
        *,
        epoch: int | None,
        unit: str | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.recipe, self.shown, self.loggers, self.unit = recipe, shown, loggers, unit
        self.callbacks = callbacks
        self.epoch = epoch  # steps per epoch; if the data has no length, None until the first epoch ends
        self.first = state.step
        self.began = self.step_began = time.monotonic()
        self.items = self.seconds = 0.0  # counted items and time of the steps since the last row
        for logger in loggers:
            logger.begin(run, state.step)
        for callback in callbacks:
            callback.begin(self.write)

    def write(self, step: int, values: Values) -> None:
        """Write values by name to every logger."""
        for logger in self.loggers:
            logger.log(step, values)

    def begin_step(self) -> None:
        """Start the clock of a step; the time of evaluations and checkpoints between steps is not counted."""
        self.step_began = time.monotonic()

    def training(
        self, state: TrainingState, total: float, count: float, norm: float, rate: float, *, batches: int
    ) -> None:
        """Report a training step; when a row is due, write the mean loss and the speed since the last row."""
        if self.unit is None:  # a scalar loss counts 1 for each batch
            self.unit = "batches" if count <= batches else "tokens"
        now = time.monotonic()
        state.sum, state.count, self.items = state.sum + total, state.count + count, self.items + count
        self.seconds += now - self.step_began
        speed, steps = self.items / max(self.seconds, 1e-9), self.total_steps(state)
        seconds = now - self.began
        report = StepReport(
            step=state.step,
            epoch=state.epoch,
            steps=steps,
            loss=total / max(count, 1.0),
            rate=rate,
            speed=speed,
            unit=self.unit,
            left=None if steps is None else max(0, steps - state.step) * seconds / (state.step - self.first),
        )
        self.shown.advance(report)
        if state.step % self.recipe.log_every == 0:
            row = {"epoch": state.epoch, "loss": state.sum / max(state.count, 1.0), "rate": rate}
            row |= {"norm": norm, f"{self.unit}_per_second": speed}
            state.sum = state.count = self.items = self.seconds = 0.0
            self.write(state.step, {f"training/{name}": value for name, value in row.items()})
        for callback in self.callbacks:
            callback.step(report)

    def evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Report the metrics of an evaluation and write them as a row."""
        best = " · best so far" if state.best == state.step else ""
        said = " · ".join(f"{name} {number(value, digits=4)}" for name, value in metrics.items())
        self.shown.say(f"step {state.step} · evaluation · {said}{best}")
        row = {"epoch": state.epoch, **metrics}
        self.write(state.step, {f"evaluation/{name}": value for name, value in row.items()})
        for callback in self.callbacks:
            callback.evaluate(state.step, metrics)

    def total_steps(self, state: TrainingState) -> int | None:
        """Return the number of steps the run will have, None if unknown."""
        if self.epoch is None and state.epoch > 0:
            self.epoch = (state.step - 1) // state.epoch
        counts = [self.recipe.steps]
        if self.recipe.epochs is not None and self.epoch is not None:
            counts.append(self.recipe.epochs * self.epoch)
        return min((count for count in counts if count is not None), default=None)
