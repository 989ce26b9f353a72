"""Ledger: one row a measured number, with all it takes to measure it again."""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
import threading
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parent / "results.csv"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number, what it should be, and where it comes from."""

    recipe: str
    seed: int
    metric: str
    value: float
    bar: str
    published: str
    steps: int
    seconds: float  # of training
    speed: str  # as `31,000 tokens/s`
    note: str
    command: str
    machine: str
    versions: str
    commit: str


class Ledger:
    """A CSV file that rows are appended to, from any thread."""

    def __init__(self, path: Path = FILE) -> None:
        self.path, self.lock = path, threading.Lock()

    def add(self, row: Row) -> None:
        """Append a row, below the names of the columns."""
        with self.lock:
            new = not self.path.exists()
            with self.path.open("a", encoding="utf8", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(asdict(row))

    def rows(self) -> list[Row]:
        """All rows so far."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf8", newline="") as file:
            kinds = {"seed": int, "steps": int, "value": float, "seconds": float}
            return [Row(**{key: kinds.get(key, str)(x) for key, x in one.items()}) for one in csv.DictReader(file)]


def machine() -> str:
    """The GPU if there is one, else the processor."""
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
        if found:
            return found
    return f"{os.cpu_count()} cores, {platform.machine()}"


def versions() -> str:
    """Of Python and PyTorch."""
    return f"python {platform.python_version()}, torch {version('torch')}"


def commit() -> str:
    """What is checked out here, empty where that is unknown."""
    asked = ["git", "-C", str(FILE.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
