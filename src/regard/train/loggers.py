"""Loggers write the numbers of a run: to CSV tables, to TensorBoard or to Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from .checkpoint import NAME, write_text
from .failures import disk_errors

LoggerName = Literal["csv", "tensorboard", "wandb"]
Values = Mapping[str, float | Tensor]

NAMES: tuple[LoggerName, ...] = get_args(LoggerName)
EVALUATION = "evaluation"
TABLES = {"training": "log.csv", EVALUATION: "evaluations.csv"}  # other groups: GROUP.csv
MAX_NUMBERS = 4096  # elements per tensor; each becomes a column
WANDB_ID = "wandb-id.txt"


class Logger(Protocol):
    """A place for the numbers of a run, which `fit` writes to.

    >>> from regard.train import Logger
    >>> class Printed(Logger):
    ...     def log(self, step, values):
    ...         print(step, dict(values))
    >>> Printed().log(50, {"training/loss": 0.5})
    50 {'training/loss': 0.5}

    A name is a group, a slash and the rest, `training/loss` or `evaluation/bleu`. A value is a number or a tensor.
    Callbacks write to all loggers of a run by the function that `Callback.begin` receives. Only the first process logs.
    """

    def begin(self, run: Path, step: int) -> None:
        """Called before the first step, and when a run is resumed at `step`.

        Numbers of later steps, and of the evaluation at this one, will be logged again.
        """

    def log(self, step: int, values: Values) -> None:
        """Write values by name."""

    def close(self) -> None:
        """Called at the end, after an error too."""


class CsvLogger(Logger):
    """A table for each group of names: `log.csv` of training, `evaluations.csv`, and `GROUP.csv` of any other.

    A resumed run ends with the same tables as an uninterrupted one.
    """

    def begin(self, run: Path, step: int) -> None:
        """Drop the rows that will be written again."""
        self._run, self._step = run, step
        self._tables: dict[str, Table] = {}
        for group in TABLES:
            self._table(group)

    def log(self, step: int, values: Values) -> None:
        """Append a row to the table of each group."""
        groups: dict[str, dict[str, float]] = {}
        for name, value in flat_numbers(values):
            group, _, column = name.partition("/")
            groups.setdefault(group, {"step": step})[column] = value
        for group, row in groups.items():
            self._table(group).add(row)

    def _table(self, group: str) -> Table:
        if group not in self._tables:
            path = self._run / TABLES.get(group, f"{group}.csv")
            self._tables[group] = Table(path, upto=self._step - (group == EVALUATION))
        return self._tables[group]


class TensorBoardLogger(Logger):
    """Event files of TensorBoard, in the folder `tensorboard` of the run; needs the package tensorboard."""

    def __init__(self) -> None:
        check_installed("tensorboard")
        self._writer: Any = None

    def begin(self, run: Path, step: int) -> None:
        """Open the event file."""
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Values) -> None:
        """Write each number as a scalar."""
        for name, value in flat_numbers(values):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases, in `project`, with the name of the run's folder; needs the package wandb.

    A resumed run goes on with the same run of Weights & Biases, whose id is in `wandb-id.txt`. The package reads its
    own settings: `WANDB_MODE=offline` writes to the run's folder only.
    """

    def __init__(self, project: str = "regard") -> None:
        check_installed("wandb")
        self.project = project
        self._run: Any = None

    def begin(self, run: Path, step: int) -> None:
        """Start the run, or go on with it."""
        id_file = run / WANDB_ID
        if step > 0 and id_file.exists():
            id = id_file.read_text(encoding="utf8").strip()
        else:
            id = secrets.token_hex(8)
            write_text(id_file, f"{id}\n")
        module = importlib.import_module("wandb")
        self._run = module.init(
            project=self.project, name=run.resolve().name, id=id, resume="allow", dir=str(run.resolve())
        )
        # Steps of a resumed run repeat, and the package drops rows whose own step goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """Send the numbers."""
        self._run.log({"step": step, **dict(flat_numbers(values))})

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


def make_loggers(names: Sequence[LoggerName]) -> list[Logger]:
    """Return a new logger for each name."""
    makers: dict[LoggerName, Callable[[], Logger]] = {
        "csv": CsvLogger,
        "tensorboard": TensorBoardLogger,
        "wandb": WandbLogger,
    }
    return [makers[name]() for name in names]


def check_installed(*names: LoggerName) -> None:
    """Raise if the package of a logger is not installed."""
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"the logger {name!r} needs the package {name}, which is not installed; run pip install {name}, or "
                "choose 'csv'"
            )


def flat_numbers(values: Values) -> Iterator[tuple[str, float]]:
    """Yield each number with its name; that of a tensor's element ends in its indices.

    >>> import torch
    >>> dict(flat_numbers({"attention/entropy": torch.tensor([[1.0, 2.0]])}))
    {'attention/entropy/0/0': 1.0, 'attention/entropy/0/1': 2.0}
    """
    for name, value in values.items():
        group, _, rest = name.partition("/")
        if not NAME.fullmatch(group) or not rest:
            raise ValueError(
                f"a logged name must be a group, a slash and a name, such as 'training/loss', got {name!r}"
            )
        if not isinstance(value, Tensor):
            yield name, value
            continue
        if value.numel() > MAX_NUMBERS:
            raise ValueError(
                f"a logged tensor has at most {MAX_NUMBERS:,} numbers, got {value.numel():,} for {name!r}; log a mean"
            )
        numbers = value.detach().cpu()
        for at in itertools.product(*map(range, numbers.shape)):
            yield "/".join([name, *map(str, at)]), numbers[at].item()


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


def read_curves(run: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values by name from the CSV tables of a run, `training/loss` for instance.

    The last line is left out while it is being written, and so are tables with text in them, such as a monitor's.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    groups = {file: group for group, file in TABLES.items()}
    for path in sorted(run.glob("*.csv"), key=lambda path: ([*groups, path.name].index(path.name), path.name)):
        text = path.read_text(encoding="utf8")
        rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
        if not rows or rows[0][:1] != ["step"] or not all(map(_is_number, itertools.chain(*rows[1:2]))):
            continue  # the file is not a table of a logger
        group = groups.get(path.name, path.stem)
        for row in rows[1:]:
            for column, value in zip(rows[0][1:], row[1:], strict=False):
                if value:
                    steps, values = curves.setdefault(f"{group}/{column}", ([], []))
                    steps.append(int(row[0]))
                    values.append(float(value))
    return curves


def _is_number(cell: str) -> bool:
    """Whether a cell of a table is a number, or blank."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
