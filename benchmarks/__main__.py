"""`python -m benchmarks [table] [--only part of a name]`: tests first, then tables, printed and saved, row by row."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from .cases import TABLES, TESTS, Case
from .measure import Measured, memory, save, speeds, times

RESULTS = Path(__file__).parent / "results"
REPEATS = 20
FIELDS = [
    *("case", "what", "ours", "ours_median", "ours_quartiles", "peer", "peer_median", "peer_quartiles"),
    *("ratio", "bar", "met", "repeats", "machine", "threads", "python", "torch", "transformers", "commit", "date"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=TABLES, help="measure this table alone")
    parser.add_argument("--only", default="", help="measure only cases whose name holds this")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"rows of fewer than {REPEATS} are not saved")
    arguments = parser.parse_args()
    tables = [arguments.table] if arguments.table else list(TABLES)
    check(tables)
    print(f"{machine()}, torch {torch.__version__}, median of {arguments.repeats}")
    for table in tables:
        for case in TABLES[table]:
            if arguments.only in case.name:
                row = measured(table, case, arguments.repeats)
                report(row)
                if arguments.repeats >= REPEATS:
                    update(row, RESULTS / f"{table}_cpu.csv", FIELDS, [case.name for case in TABLES[table]])


def report(row: dict[str, object]) -> None:
    mark = "   <- under the bar" if row["met"] == "no" else ""
    bar = f" (bar {row['bar']})" if row["bar"] else ""
    print(f"{row['case']:<52} {row['ours_median']:>9} vs {row['peer_median']:>9}  {row['peer']}")
    print(f"{'':<52} ratio {row['ratio']}{bar}{mark}", flush=True)


def check(tables: list[str]) -> None:
    """A benchmark of wrong numbers is worth nothing: the matching tests must be green."""
    for files, chosen in {str(TESTS[table]): TESTS[table] for table in tables}.values():
        command = [sys.executable, "-m", "pytest", "-q", *files, "-k", chosen]
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        if run.returncode:
            print(run.stdout[-2000:], file=sys.stderr)
            raise SystemExit(f"error: {', '.join(files)} are red; nothing was measured")


def measured(table: str, case: Case, repeats: int) -> dict[str, object]:
    torch.set_num_threads(case.threads)
    if case.memory:
        found = memory(table, case)
        show = megabytes
    elif case.speed:
        repeats = min(repeats, 5)  # each is a training
        found = speeds(case.build(), repeats)
        show = tokens
    else:
        found = times(case.build(), repeats)
        show = milliseconds
    ours, peer = found[case.ours], found[case.peer]
    ratio = ours.median / peer.median if case.speed else peer.median / ours.median
    promise, met = "", None
    if case.bar is not None:
        promise, met = f"{case.bar:.2f}", ratio >= case.bar
    elif case.added is not None:
        promise, met = f"{case.added * 1e6:.0f} us more", ours.median - peer.median <= case.added
    return {
        "case": case.name,
        "what": "memory" if case.memory else "speed" if case.speed else "time",
        "ours": case.ours,
        "ours_median": show(ours.median),
        "ours_quartiles": spread(ours, show),
        "peer": case.peer,
        "peer_median": show(peer.median),
        "peer_quartiles": spread(peer, show),
        "ratio": f"{ratio:.2f}",
        "bar": promise,
        "met": "" if met is None else "yes" if met else "no",
        "repeats": 3 if case.memory else repeats,
        "machine": machine(),
        "threads": case.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers") if table in ("decoding", "training", "monitoring") else "",
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def spread(x: Measured, show) -> str:
    return f"{show(x.low)} to {show(x.high)}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.3f} ms"


def tokens(n: float) -> str:
    return f"{n:,.0f} tokens/s"


def megabytes(n: float) -> str:
    return f"{n / 1e6:.0f} MB"


def machine() -> str:
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        model = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("Model name"))
    except (OSError, subprocess.CalledProcessError, StopIteration):
        model = platform.processor() or "unknown CPU"
    return f"{model} ({platform.machine()})"


def commit() -> str:
    """Return the commit, marked dirty if more than tables has changed; COMMIT overrides it outside a repository."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    found = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{found}-dirty" if changed else found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


COMMIT = commit()


def update(row: dict[str, object], path: Path, fields: Sequence[str], order: Sequence[str]) -> None:
    """Save the row in place of the older one of its case, after every case: an interrupted run keeps its results."""
    rows: dict[object, dict[str, object]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf8") as file:
            rows = {old["case"]: old for old in csv.DictReader(file)}
    rows[row["case"]] = row
    save((rows[case] for case in order if case in rows), path, fields)


if __name__ == "__main__":
    main()
