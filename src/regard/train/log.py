"""The log of a run: CSV tables that a resumed run continues from its checkpoint, and TensorBoard if installed."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .callbacks import Callback
from .checkpoint import write_text
from .failures import disk_errors
from .progress import Progress, StepReport, number
from .recipe import Recipe
from .training_state import TrainingState


class Log:
    """The outputs of a run: `log.csv`, `evaluations.csv`, TensorBoard, and the progress display."""

    def __init__(
        self,
        run: Path,
        state: TrainingState,
        recipe: Recipe,
        shown: Progress,
        board: Board | None,
        *,
        epoch: int | None,
        unit: str | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run, self.recipe, self.shown, self.board, self.unit = run, recipe, shown, board, unit
        self.callbacks = callbacks
        self.epoch = epoch  # steps per epoch; if the data has no length, None until the first epoch ends
        self.first = state.step
        self.began = self.step_began = time.monotonic()
        self.items = self.seconds = 0.0  # counted items and time of the steps since the last row
        if board is not None:  # None on the processes that do not write
            self.training_rows = Table(run / "log.csv", upto=state.step)
            # The evaluation at the step resumed from is repeated.
            self.evaluation_rows = Table(run / "evaluations.csv", upto=state.step - 1)

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
            row = {"step": state.step, "epoch": state.epoch, "loss": state.sum / max(state.count, 1.0), "rate": rate}
            row |= {"norm": norm, f"{self.unit}_per_second": speed}
            state.sum = state.count = self.items = self.seconds = 0.0
            if self.board is not None:
                self.training_rows.add(row)
                self.board.add(self.run, "training", row)
        for callback in self.callbacks:
            callback.step(report)

    def evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Report the metrics of an evaluation and write them as a row."""
        best = " · best so far" if state.best == state.step else ""
        said = " · ".join(f"{name} {number(value, digits=4)}" for name, value in metrics.items())
        self.shown.say(f"step {state.step} · evaluation · {said}{best}")
        row = {"step": state.step, "epoch": state.epoch, **metrics}
        if self.board is not None:
            self.evaluation_rows.add(row)
            self.board.add(self.run, "evaluation", row)
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


class Table:
    """A CSV file with a row per step.

    Opening it at step `upto` drops the rows after that step, and an incomplete last line that a killed process left:
    an interrupted run ends with the same rows as an uninterrupted one.
    """

    def __init__(self, path: Path, *, upto: int) -> None:
        self.path = path
        self.columns: Sequence[str] = ()
        with disk_errors(path):
            if path.exists():
                self._trim(upto)

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row, blank in the columns it lacks; a new column is blank in earlier rows."""
        new = [name for name in row if name not in self.columns]
        if new and self.columns:
            self._widen(new)
        with disk_errors(self.path), self.path.open("a", encoding="utf8", newline="") as file:
            writer = csv.DictWriter(file, self.columns or list(row), lineterminator="\n")
            if not self.columns:
                writer.writeheader()
                self.columns = list(row)
            writer.writerow(row)

    def _widen(self, new: Sequence[str]) -> None:
        """Add blank columns to every row, atomically."""
        with disk_errors(self.path), self.path.open(encoding="utf8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.columns = [*self.columns, *new]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())

    def _trim(self, upto: int) -> None:
        lines = [line for line in self.path.read_text(encoding="utf8").splitlines(keepends=True) if line[-1] == "\n"]
        if lines:
            self.columns = next(csv.reader(lines[:1]))
        if not all(line.partition(",")[0].isdecimal() for line in lines[1:]):
            raise ValueError(f"{self.path} must have a step at the start of each row; move it away to begin a new one")
        kept = lines[:1] + [line for line in lines[1:] if int(line.partition(",")[0]) <= upto]
        write_text(self.path, "".join(kept))


class Board:
    """Writer for TensorBoard, in the folder `tensorboard` of the run; does nothing without the package."""

    def __init__(self) -> None:
        self.writer: Any = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, run: Path, group: str, row: Mapping[str, float]) -> None:
        """Write each number of a row except the step, as `group/name`."""
        if self.writer is None and importlib.util.find_spec("tensorboard") is not None:
            module = importlib.import_module("torch.utils.tensorboard")
            self.writer = module.SummaryWriter(str(run / "tensorboard"), purge_step=row["step"] + 1)
        if self.writer is not None:
            for name in row.keys() - {"step"}:
                self.writer.add_scalar(f"{group}/{name}", row[name], row["step"])
