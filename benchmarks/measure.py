"""How it is measured: calls in turn, medians and spread; peak memory in a process of its own."""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .cases import TABLES, Call, Case

LEAST = 0.02  # seconds a measurement lasts


@dataclass(frozen=True)
class Measured:
    """A median with its quartiles: seconds or bytes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Measured:
        """Of a few, the shortest and the longest stand for the quartiles."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


def times(calls: dict[str, Call], repeats: int) -> dict[str, Measured]:
    """Each call to warm up, then all of them in turn, `repeats` times; a short one is called many times at a time."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    often = {name: max(1, int(LEAST / seconds(call, 1))) for name, call in calls.items()}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(seconds(call, often[name]))
    return {name: Measured.of(values) for name, values in taken.items()}


def speeds(calls: dict[str, Call], repeats: int) -> dict[str, Measured]:
    """What the calls themselves say, all of them in turn, `repeats` times."""
    told: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            told[name].append(float(call()))  # type: ignore[arg-type]
    return {name: Measured.of(values) for name, values in told.items()}


def seconds(call: Call, often: int) -> float:
    """Of one call, made so many times; with one thread its CPU time, in which other processes do not count."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(often):
        call()
    return (clock() - start) / often


def memory(table: str, case: Case, repeats: int = 3) -> dict[str, Measured]:
    """Peak resident memory of one call beyond what stood before it, each time in a fresh process."""
    found: dict[str, Measured] = {}
    for name in (case.ours, case.peer):
        command = [sys.executable, "-m", "benchmarks.measure", table, case.name, name]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
        found[name] = Measured.of([float(run) for run in runs])
    return found


def peak(call: Call) -> int:
    """Bytes the resident set grew by, at its highest, while the call ran."""
    # Linux resets the high-water mark when 5 is written here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def save(rows: Iterable[Mapping[str, object]], path: Path, fields: Sequence[str]) -> None:
    """Write the rows to a CSV file; an interrupted run leaves the old file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


if __name__ == "__main__":
    torch.set_num_threads(2)
    table, case, name = sys.argv[1:]
    print(peak(next(one for one in TABLES[table] if one.name == case).build()[name]))
