"""`python -m benchmarks.everyday [--only PART ...] [--within S] [--tiny]`: everyday sizes on a GPU, beside PyTorch.

Short texts in batches, padding, float32, odd widths, decoding, and the first call of a process. Wall clock with a
synchronize around each call, the calls of a case in turn, medians; memory is the peak that a call allocates beyond its
inputs and the model. `--tiny` runs every case at a small size, on a CPU too, and saves nothing.

`--within 150` repeats less, begins no case that may not end within 150 seconds, and measures the first calls of two
kinds at a time. Cases whose saved rows are the oldest come first, long ones last. Those that it did not reach are
named, and keep their saved rows.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import date
from importlib.metadata import version

import torch

from .__main__ import COMMIT, RESULTS, machine
from .everyday_cases import Call, Case, Size
from .everyday_models import cases as model_cases
from .everyday_operator import cases as operator_cases
from .first_calls import FIRST, KINDS, LATER, latencies
from .measure import Measured, save

SECONDS, SHORT_SECONDS = 0.5, 0.2  # of repeats of one case
FEWEST, MOST = 3, 30  # repeats
LONG_SECONDS = 20  # cases that may take longer come last
TABLE = RESULTS / "everyday_gpu.csv"
FIELDS = [
    *("case", "call", "time", "quartiles", "baseline", "ratio", "bar", "met", "memory", "repeats", "machine"),
    *("python", "torch", "triton", "transformers", "commit", "date"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="measure only cases whose name holds one of these")
    parser.add_argument("--within", type=float, metavar="S", help="begin no case that may not end within S seconds")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any device; nothing is saved")
    arguments = parser.parse_args()
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("there is no CUDA GPU here; --tiny runs the cases at small sizes on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size(device, torch.bfloat16 if device.type == "cuda" else torch.float32, arguments.tiny)
    found = [*model_cases(), *operator_cases()]
    order = [*(case.name for case in found), *(f"first call, {kind}" for kind in KINDS)]

    begun, within = time.monotonic(), arguments.within
    chosen = [case for case in found if any(part in case.name for part in arguments.only)]
    kinds = [kind for kind in KINDS if any(part in f"first call, {kind}" for part in arguments.only)]
    if within is not None:
        saved = {str(row["case"]): row for row in saved_rows()}
        chosen.sort(key=lambda case: (case.takes > LONG_SECONDS, *age(saved.get(case.name)), case.takes))
        with ThreadPoolExecutor(2) as pool:  # more would take each other's time
            tables = list(pool.map(lambda kind: list(first_calls(kind, size)), kinds))
        for rows in tables:
            show(rows, order, size)
    left = []
    for case in chosen:
        if within is not None and time.monotonic() - begun > within - case.takes:
            left.append(case.name)
            continue
        show(measured(case, size, SECONDS if within is None else SHORT_SECONDS), order, size)
    if left:
        print("not measured:", *(f"{name};" for name in left))
    if within is None:
        for kind in kinds:
            show(first_calls(kind, size), order, size)


def age(row: dict[str, object] | None) -> tuple[str, bool]:
    """Return what is smaller for an older row: none at all, then by its day, and last the rows of this commit."""
    return ("", False) if row is None else (str(row["date"]), row["commit"] == COMMIT)


def show(rows: Iterable[dict[str, object]], order: list[str], size: Size) -> None:
    """Print the rows of a case as they come, and save them."""
    found = []
    for each in rows:
        report(each)
        found.append(each)
    if found and not size.tiny:
        keep(found, order)


def measured(case: Case, size: Size, seconds: float = SECONDS) -> Iterator[dict[str, object]]:
    """Yield a row for each call of a case; a call that fails is a row too."""
    torch.manual_seed(0)
    with torch.no_grad() if not case.grad else nullcontext():
        try:
            calls = case.build(size)
        except Exception as error:  # the failure is what the row shows
            traceback.print_exc(limit=-8)
            yield row(case.name, "regard", said(error), met="no", size=size)
            return
        failed: dict[str, str] = {}
        for name, call in calls.items():
            try:
                wall(call, size)
                wall(call, size)
            except Exception as error:  # the failure is what the row shows
                traceback.print_exc(limit=-8)
                failed[name] = said(error)
        running = {name: call for name, call in calls.items() if name not in failed}
        slowest = max([wall(call, size) for call in running.values()], default=1.0)
        repeats = 1 if size.tiny else max(FEWEST, min(MOST, int(seconds / max(1, len(running)) / slowest)))
        taken: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(repeats):
            for name, call in running.items():
                taken[name].append(wall(call, size))
        peaks = {name: megabytes(call, size) for name, call in running.items()}
    times = {name: Measured.of(values) for name, values in taken.items()}
    peers = [name for name in case.baseline if name in times]
    best = min(peers, key=lambda name: times[name].median) if peers else ""
    for name in calls:
        if name in failed:
            yield row(case.name, name, failed[name], bar=case.bars.get(name), met="no", size=size)
            continue
        bar, ratio = case.bars.get(name), times[name].median / times[best].median if best and name != best else None
        met = "" if bar is None or ratio is None else "yes" if ratio <= bar else "no"
        yield row(
            case.name,
            name,
            f"{times[name].median * 1e3:.3f} ms",
            quartiles=f"{times[name].low * 1e3:.3f} to {times[name].high * 1e3:.3f} ms",
            baseline=best if ratio is not None else "",
            ratio=ratio,
            bar=bar,
            met=met,
            memory=peaks[name],
            repeats=repeats,
            size=size,
        )
    del calls, running
    if size.device.type == "cuda":
        torch.cuda.empty_cache()


def first_calls(kind: str, size: Size) -> Iterator[dict[str, object]]:
    """Yield a row for each call of one kind in a fresh process with empty caches, in the order of the calls."""
    for n, (name, seconds) in enumerate(latencies(kind, tiny=size.tiny)):
        most = LATER if n else FIRST
        bar = f"{most} s"
        if isinstance(seconds, str):
            yield row(f"first call, {kind}", name, seconds, bar=bar, met="no", size=size)
        else:
            met = "yes" if seconds <= most else "no"
            yield row(f"first call, {kind}", name, f"{seconds:.2f} s", bar=bar, met=met, size=size)


def said(error: Exception) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"[:120]


def wall(call: Call, size: Size) -> float:
    """Seconds from a device that is done to a device that is done again."""
    synchronize(size)
    start = time.perf_counter()
    kept = call()
    synchronize(size)
    taken = time.perf_counter() - start
    del kept
    return taken


def synchronize(size: Size) -> None:
    if size.device.type == "cuda":
        torch.cuda.synchronize()


def megabytes(call: Call, size: Size) -> float | None:
    """Megabytes allocated at most during a call, beyond what was allocated before it."""
    if size.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def row(
    case: str,
    call: str,
    time: str,
    *,
    size: Size,
    quartiles: str = "",
    baseline: str = "",
    ratio: float | None = None,
    bar: float | str | None = None,
    met: str = "",
    memory: float | None = None,
    repeats: int = 1,
) -> dict[str, object]:
    return {
        "case": case,
        "call": call,
        "time": time,
        "quartiles": quartiles,
        "baseline": baseline,
        "ratio": "" if ratio is None else f"{ratio:.2f}",
        "bar": "" if bar is None else f"at most {bar}",
        "met": met,
        "memory": "" if memory is None else f"{memory:.0f} MB",
        "repeats": repeats,
        "machine": torch.cuda.get_device_name() if size.device.type == "cuda" else machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(__import__("triton"), "__version__", "") if size.device.type == "cuda" else "",
        "transformers": version("transformers"),
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def report(row: dict[str, object]) -> None:
    mark = "   <- over the bar" if row["met"] == "no" else ""
    ratio = f"x {row['ratio']} of {row['baseline']}" if row["ratio"] else ""
    print(f"{row['case']:<48} {row['call']:<34} {row['time']:>12} {row['memory']:>9}  {ratio}{mark}", flush=True)


def keep(rows: list[dict[str, object]], order: list[str]) -> None:
    """Save the rows of a case in place of its older ones; rows of cases that are no more are dropped."""
    known: dict[object, list[dict[str, object]]] = {}
    for old in saved_rows():
        known.setdefault(old["case"], []).append(old)
    known[rows[0]["case"]] = rows
    save([row for case in order for row in known.get(case, [])], TABLE, FIELDS)


def saved_rows() -> list[dict[str, object]]:
    """Return the rows that were measured before."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="", encoding="utf8") as file:
        return [dict(row) for row in csv.DictReader(file)]


if __name__ == "__main__":
    main()
