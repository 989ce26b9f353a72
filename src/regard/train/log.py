"""The record of a run: CSV tables that a resumed run takes up at its checkpoint, and TensorBoard where installed."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .checkpoint import write_text
from .failures import disk_errors
from .progress import Progress, Report, number
from .recipe import Recipe
from .state import State


class Log:
    """Everything a run tells: rows in `log.csv` and `evaluations.csv`, numbers for TensorBoard, and what is shown."""

    def __init__(
        self,
        run: Path,
        state: State,
        recipe: Recipe,
        shown: Progress,
        board: Board | None,
        *,
        epoch: int | None,
        unit: str,
    ) -> None:
        self.run, self.recipe, self.shown, self.board, self.unit = run, recipe, shown, board, unit
        self.epoch = epoch  # steps in one; where the data does not say, known after the first
        self.first, self.began, self.items = state.step, time.monotonic(), 0.0
        if board is not None:  # None on the processes that do not write
            self.training_rows = Table(run / "log.csv", upto=state.step)
            # An evaluation of the step resumed from is made again.
            self.evaluation_rows = Table(run / "evaluations.csv", upto=state.step - 1)

    def training(self, state: State, total: float, count: float, norm: float, rate: float) -> None:
        """A step was made: show it, and when a row is due write the mean loss since the last one."""
        state.sum, state.count, self.items = state.sum + total, state.count + count, self.items + count
        seconds = time.monotonic() - self.began
        speed, steps = self.items / max(seconds, 1e-9), self._steps(state)
        report = Report(
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
            state.sum = state.count = 0.0
            if self.board is not None:
                self.training_rows.add(row)
                self.board.add(self.run, "training", row)

    def evaluation(self, state: State, metrics: Mapping[str, float]) -> None:
        """The numbers of an evaluation."""
        best = " · best so far" if state.best == state.step else ""
        said = " · ".join(f"{name} {number(value, digits=4)}" for name, value in metrics.items())
        self.shown.say(f"step {state.step} · evaluation · {said}{best}")
        row = {"step": state.step, "epoch": state.epoch, **metrics}
        if self.board is not None:
            self.evaluation_rows.add(row)
            self.board.add(self.run, "evaluation", row)

    def _steps(self, state: State) -> int | None:
        """How many steps the run will have, as far as can be told."""
        if self.epoch is None and state.epoch > 0:
            self.epoch = (state.step - 1) // state.epoch
        counts = [self.recipe.steps]
        if self.recipe.epochs is not None and self.epoch is not None:
            counts.append(self.recipe.epochs * self.epoch)
        return min((count for count in counts if count is not None), default=None)


class Table:
    """A CSV file with a row per step.

    Opening it at step `upto` drops the rows after that step, and a last line that a killed process left unfinished:
    the rows of a run that was interrupted are those of one that was not.
    """

    def __init__(self, path: Path, *, upto: int) -> None:
        self.path = path
        self.columns: Sequence[str] = ()
        with disk_errors(path):
            if path.exists():
                self._trim(upto)

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row, with blanks where it lacks a column; one of a new name is blank in the rows before."""
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
        """Give every row more columns, blank ones; the file is the one before or the one after."""
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
    """Numbers for TensorBoard, in the folder `tensorboard` of the run; without the package, nothing."""

    def __init__(self) -> None:
        self.writer: Any = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, run: Path, group: str, row: Mapping[str, float]) -> None:
        """Each number of a row but the step, as `group/name`."""
        if self.writer is None and importlib.util.find_spec("tensorboard") is not None:
            module = importlib.import_module("torch.utils.tensorboard")
            self.writer = module.SummaryWriter(str(run / "tensorboard"), purge_step=row["step"] + 1)
        if self.writer is not None:
            for name in row.keys() - {"step"}:
                self.writer.add_scalar(f"{group}/{name}", row[name], row["step"])
