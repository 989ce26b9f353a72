"""HeadHistory: a number for each layer, head and measure at each watched step, kept as CSV and safetensors.

`heads.csv` has a row for each step, layer and head, and grows with each step; `heads.safetensors` holds the numbers as
tensors, steps x heads, under `MEASURE/LAYER`, beside the `steps`. Events are in `head_events.csv`. A missing number
is NaN.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...atomic_files import atomic_path, save_tensors
from ..layer_names import list_names, shown_name

TABLE, EVENTS, TENSORS = "heads.csv", "head_events.csv", "heads.safetensors"
EVENT_COLUMNS = ("step", "kind", "layer", "head", "value", "text")
FILES_OF_EVERY_STEP = 64  # steps after which the tensors are written at a part of the steps alone


class HeadEvent(NamedTuple):
    """An event that a rule found in the numbers of a head; `head` is None for an event of the whole layer."""

    step: int
    kind: str
    layer: str
    head: int | None
    value: float
    text: str

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        return f"step {self.step} · {self.kind} · {self.layer}{head}: {self.text}"


class HeadHistory:
    """The numbers of every head over steps.

    >>> history = HeadHistory(("logit", "entropy"))
    >>> for step, logit in ((1, 4.0), (51, 9.0)):
    ...     history.add(step, {"layers.0": {"logit": torch.tensor([logit, 3.0]), "entropy": torch.tensor([1.5, 2.0])}})
    >>> history.steps, history["logit"]["layers.0"].tolist()
    ([1, 51], [[4.0, 3.0], [9.0, 3.0]])
    """

    def __init__(self, measures: Sequence[str], events: Iterable[HeadEvent] = ()) -> None:
        self.measures = tuple(measures)
        self.steps: list[int] = []
        self.events: list[HeadEvent] = list(events)
        self._ran: list[tuple[str, ...]] = []  # the layers of each step
        self._values: dict[str, Tensor] = {}  # layer -> steps measures heads, with room for more steps
        self._joined: Tensor | None = None  # the numbers of all layers at the steps so far

    def add(self, step: int, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add the numbers of a step, a tensor of heads for each layer and measure; a measure may be left out."""
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"steps must rise, got {step} after {self.steps[-1]}")
        n = len(self.steps)
        for layer, named in values.items():
            heads = len(next(iter(named.values())))
            kept = self._values.get(layer)
            if kept is None or len(kept) <= n:
                room = torch.full((max(16, 2 * n), len(self.measures), heads), math.nan)
                if kept is not None:
                    room[: len(kept)] = kept
                self._values[layer] = room
            if tuple(named) == self.measures:
                self._values[layer][n] = torch.stack([*named.values()])
                continue
            for at, name in enumerate(self.measures):
                if name in named:
                    self._values[layer][n, at] = named[name]
        self.steps.append(step)
        self._ran.append(tuple(values))

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of the model."""
        return list(self._values)

    @property
    def last_layers(self) -> list[str]:
        """The names of the layers that ran at the last watched step."""
        return list(self._ran[-1]) if self._ran else []

    def heads(self, layer: str) -> int:
        """Return the number of heads of a layer."""
        return self._values[layer].shape[2]

    def numbers(self, layer: str) -> Tensor:
        """Return the numbers of a layer, `steps measures heads`; NaN at steps in which it did not run."""
        kept, n = self._values[layer], len(self.steps)
        if len(kept) < n:  # the layer did not run at the last steps
            kept = self._values[layer] = torch.cat([kept, kept.new_full((n, *kept.shape[1:]), math.nan)])
        return kept[:n]

    def all_heads(self, measure: str) -> Tensor:
        """Return a measure of all heads over steps, `steps heads`, layer by layer."""
        if self._joined is None or self._joined.shape[0] != len(self.steps):  # rules read several measures of a step
            self._joined = torch.cat([self.numbers(layer) for layer in self._values], 2)
        return self._joined[:, self._index(measure)]

    def __getitem__(self, measure: str) -> dict[str, Tensor]:
        """Return a measure over steps, `steps heads` for each layer; NaN at steps in which the layer did not run."""
        at = self._index(measure)
        return {layer: self.numbers(layer)[:, at] for layer in self._values}

    def latest(self, measure: str, layer: str) -> Tensor:
        """Return a measure of a layer's heads at the last watched step."""
        if shown_name(layer) not in (ran := self.last_layers):
            raise KeyError(f"no layer {layer!r} was watched at the last step, only {list_names(ran)}")
        return self.numbers(shown_name(layer))[-1, self._index(measure)]

    def upto(self, step: int) -> HeadHistory:
        """Return the history of the steps up to this one."""
        found = HeadHistory(self.measures, (event for event in self.events if event.step <= step))
        n = sum(each <= step for each in self.steps)
        found.steps, found._ran = self.steps[:n], self._ran[:n]
        seen = dict.fromkeys(layer for ran in found._ran for layer in ran)
        found._values = {layer: self._values[layer][:n].clone() for layer in seen}
        return found

    def _index(self, measure: str) -> int:
        if measure not in self.measures:
            raise KeyError(f"{measure!r} was not watched, only {', '.join(self.measures)}; add it to measures=")
        return self.measures.index(measure)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        span = f", steps {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        heads = sum(map(self.heads, self.layers))
        return (
            f"HeadHistory({', '.join(self.measures)} of {heads} heads in {layers} at {len(self)} steps{span}, "
            f"{len(self.events)} events)"
        )

    def save(self, folder: str | Path) -> None:
        """Write all files to a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / TABLE, ["step", "layer", "head", *self.measures], self._table_rows(0))
        _write(folder / EVENTS, EVENT_COLUMNS, map(_event_row, self.events))
        self.save_tensors(folder)

    def append_to(self, folder: Path) -> None:
        """Append the last step to the table of a folder, and its events; write the tensors from time to time."""
        n, step = len(self), self.steps[-1]
        _append(folder / TABLE, self._table_rows(n - 1))
        _append(folder / EVENTS, [_event_row(event) for event in self.events if event.step == step])
        if n <= FILES_OF_EVERY_STEP or n % (n // FILES_OF_EVERY_STEP) == 0:
            self.save_tensors(folder)

    def append_event(self, folder: Path, event: HeadEvent) -> None:
        """Append an event of the last step, after that step was written."""
        _append(folder / EVENTS, [_event_row(event)])

    def save_tensors(self, folder: Path) -> None:
        """Write the safetensors file."""
        tensors = {f"{name}/{layer}": x.contiguous() for name in self.measures for layer, x in self[name].items()}
        tensors["steps"] = torch.tensor(self.steps, dtype=torch.int64)
        described = {"measures": self.measures, "layers": self.layers, "events": self.events}
        with atomic_path(folder / TENSORS) as temporary:
            save_tensors(temporary, tensors, {"regard": json.dumps(described)})

    @classmethod
    def load(cls, folder: str | Path) -> HeadHistory:
        """Read the tables of a folder; a last line that a killed process left incomplete is dropped."""
        table = Path(folder) / TABLE
        if not table.is_file():
            raise FileNotFoundError(f"{table} does not exist; watch a run with Monitor(model, to={str(folder)!r})")
        columns, *rows = _whole_rows(table)
        if columns[:3] != ["step", "layer", "head"]:
            raise ValueError(f"{table} must begin with the columns step, layer, head, got {', '.join(columns[:3])}")
        history, at = cls(columns[3:]), 0
        try:
            while at < len(rows):
                step, values = int(rows[at][0]), {}
                while at < len(rows) and int(rows[at][0]) == step:
                    layer, end = rows[at][1], at
                    while end < len(rows) and rows[end][:2] == rows[at][:2]:
                        end += 1
                    values[layer] = torch.tensor([[float(x) for x in row[3:]] for row in rows[at:end]]).mT
                    at = end
                history.add(step, {layer: dict(zip(columns[3:], x, strict=True)) for layer, x in values.items()})
        except (ValueError, IndexError) as error:
            raise ValueError(f"{table} is not a table of heads: {error}; move it away to begin a new one") from None
        events = Path(folder) / EVENTS
        for row in _whole_rows(events)[1:] if events.is_file() else []:
            number, kind, layer, head, value, text = row
            event = HeadEvent(int(number), kind, layer, int(head) if head else None, float(value), text)
            history.events.append(event)
        return history

    def _table_rows(self, first: int) -> list[list[str]]:
        """Return the rows of the table from the step of this index on."""
        return [
            [str(step), layer, str(head), *(f"{x:.9g}" for x in numbers)]
            for n, step in enumerate(self.steps[first:], start=first)
            for layer in self._ran[n]
            for head, numbers in enumerate(self.numbers(layer)[n].mT.tolist())
        ]


def _event_row(event: HeadEvent) -> list[str]:
    head = "" if event.head is None else str(event.head)
    return [str(event.step), event.kind, event.layer, head, f"{event.value:.9g}", event.text]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def _append(path: Path, rows: Sequence[Sequence[str]]) -> None:
    if rows:
        with path.open("a", encoding="utf8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def _whole_rows(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file; the step at its end is dropped if its last line is not complete."""
    text = path.read_text(encoding="utf8")
    whole = text[: text.rfind("\n") + 1]
    rows = list(csv.reader(io.StringIO(whole)))
    if whole != text and len(rows) > 1:
        last = rows[-1][0]
        rows = [rows[0], *(row for row in rows[1:] if row[0] != last)]
    return rows
