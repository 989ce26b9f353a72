"""A measured case as a row, with machine, versions and commit."""

from __future__ import annotations

import functools
import platform
from datetime import date

import torch

from ..__main__ import COMMIT
from ..measure import Measured
from .cases import Case
from .clock import Taken, events, host, times

FIELDS = [
    *("case", "ours", "quartiles", "peer", "peer_time", "peer_quartiles", "ratio", "bar", "met", "rounds"),
    *("host", "peer_host"),
    *("machine", "python", "torch", "triton", "commit", "date"),
]


def measured(case: Case) -> dict[str, object]:
    ours, peers = case.build()
    is_number = case.show in ("MB", "%")  # our call returns what is shown
    if is_number:
        taken = {"regard": [Taken(float(ours()), 0.0) for _ in range(3)]}  # type: ignore[arg-type]
    else:
        taken = times(ours, peers, host if case.show == "us" else events)
    found = {name: Measured.of([each.time for each in values]) for name, values in taken.items()}
    mine = found.pop("regard")
    best = min(found, key=lambda name: found[name].median) if found else ""
    ratio, met = None, None
    if best:
        ratio = mine.median / found[best].median if case.cost else found[best].median / mine.median
    if case.bar is not None:
        if is_number:
            met = mine.median <= case.bar
        elif case.show == "us":
            met = mine.median - found[best].median <= case.bar / 1e6
        elif ratio is not None:
            met = ratio <= case.bar if case.cost else ratio >= case.bar
    show = functools.partial(shown, unit=case.show)
    return {
        "case": case.name,
        "ours": show(mine.median),
        "quartiles": f"{show(mine.low)} to {show(mine.high)}",
        "peer": best,
        "peer_time": show(found[best].median) if best else "",
        "peer_quartiles": f"{show(found[best].low)} to {show(found[best].high)}" if best else "",
        "ratio": "" if ratio is None else f"{'costs ' if case.cost else ''}{ratio:.2f}",
        "bar": "" if case.bar is None else promise(case),
        "met": "" if met is None else "yes" if met else "no",
        "rounds": len(taken["regard"]),
        "host": "" if is_number else waited(taken["regard"]),
        "peer_host": waited(taken[best]) if best else "",
        "machine": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def waited(taken: list[Taken]) -> str:
    """How long Python takes for a call."""
    return shown(Measured.of([each.host for each in taken]).median, "us")


def promise(case: Case) -> str:
    if case.show == "ms":
        return f"at most {case.bar:.2f}" if case.cost else f"{case.bar:.2f}"
    return f"at most {case.bar:.0f} {case.show}{' more' if case.show == 'us' else ''}"


def shown(x: float, unit: str) -> str:
    return {"ms": f"{x * 1e3:.3f} ms", "us": f"{x * 1e6:.1f} us", "MB": f"{x:.0f} MB", "%": f"{x:.2f} %"}[unit]


def report(row: dict[str, object]) -> None:
    mark = "   <- under the bar" if row["met"] == "no" else ""
    against = f"{row['peer_time']:>12} {row['peer']:<20} {row['ratio']}"
    print(
        f"{row['case']:<70} {row['ours']:>12} vs {against} (host {row['host']}, {row['peer_host']}){mark}", flush=True
    )
