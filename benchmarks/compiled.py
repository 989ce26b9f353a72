"""What watching a compiled model costs: `python -m benchmarks.compiled [--lengths N ...] [--modes MODE ...]`.

A Llama-shaped model of transformers with random weights under `torch.compile(fullgraph=True)`: its plain pass, the same
pass within a block of `capture`, and the block with the pass in it, in turn. On a GPU in bfloat16 and 2,048 wide, on a
CPU in float32 and 512 wide, CPU time of one thread. Beside them the seconds of the first plain call, and of the first
call in a block, which compiles the watched graph (on a CPU their CPU time, with that of the compilers they run); later
blocks compile nothing.

First the watched pass is compared with the plain compiled one. Where they differ, the watched one may be off by at most
twice what the plain one is off by, from the model as it is written in float32; else nothing is measured.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from regard.lens import capture

from . import lens
from .__main__ import RESULTS, milliseconds, spread
from .editing import peak, provenance, seconds, wait
from .measure import Measured, save
from .measure import peak as resident_peak

BAR = 1.05  # at most so many times the plain pass
MODES = ("default", "reduce-overhead")
LENGTHS = {"cuda": (2_048, 16_384), "cpu": (1_024,)}
HIDDEN = {"cuda": lens.HIDDEN, "cpu": 512}
SECONDS = 10.0  # of repeats of each length
FIELDS = [
    *("case", "mode", "tokens", "time", "quartiles", "ratio", "bar", "met", "output", "peak_memory", "repeats"),
    *("machine", "python", "torch", "transformers", "commit", "date"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS[device.type], help="others are not saved")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    chosen = parser.parse_args()
    if device.type == "cpu":
        torch.set_num_threads(1)
        config.compile_threads = 1
    path = RESULTS / f"compiled_{'gpu' if device.type == 'cuda' else 'cpu'}.csv"
    for mode in chosen.modes:
        for n in chosen.lengths:
            with fresh_cache():  # nothing that an earlier process compiled
                rows = measured(mode, n, device)
            for row in rows:
                bar = f"bar {row['bar']}, {row['met']}" if row["bar"] else ""
                print(
                    f"{mode:>16} {n:>7} tokens  {row['case']:<26}{row['time']:>12}  x {row['ratio'] or '-':<6} "
                    f"{row['peak_memory']:>9}  {row['output']:<22}{bar}",
                    flush=True,
                )
            if n in LENGTHS[device.type]:
                save_rows(rows, path)


def save_rows(rows: list[dict[str, object]], path: Path) -> None:
    """Save rows in the place of older ones of their mode and length."""
    saved: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="", encoding="utf8") as file:
            saved = list(csv.DictReader(file))
    mode, n = rows[0]["mode"], rows[0]["tokens"]
    others = [row for row in saved if (row["mode"], str(row["tokens"])) != (mode, str(n))]
    order = [(mode, n) for mode in MODES for n in (*LENGTHS["cuda"], *LENGTHS["cpu"])]
    save(sorted([*others, *rows], key=lambda row: order.index((row["mode"], int(str(row["tokens"]))))), path, FIELDS)


@torch.no_grad()
def measured(mode: str, n: int, device: torch.device) -> list[dict[str, object]]:
    """Return a row for each way to run the model over n tokens, compiled in a mode."""
    torch._dynamo.reset()
    model = lens.llama(HIDDEN[device.type], n).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = torch.randint(lens.VOCABULARY, (1, n), device=device)
    compiled = torch.compile(model.eval(), fullgraph=True, dynamic=False, mode=mode)

    def plain() -> Tensor:
        logits: Tensor = compiled(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    def block() -> Any:
        with capture(compiled) as tape:
            plain()
        return tape

    def within() -> float:
        with capture(compiled):
            return seconds(plain, device)

    first = {"first plain call": compiling(plain, device), "first call in a block": compiling(block, device)}
    output = compare(model, ids, plain, compiled)
    count = counters["stats"]["unique_graphs"]
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(plain, device),
        "watched": within,
        "watched, the whole block": lambda: seconds(block, device),
    }
    for _ in range(3):  # CUDA graphs are recorded in the second pass
        slowest = max([way() for way in ways.values()])
    repeats = max(5, min(100, int(SECONDS / len(ways) / slowest)))
    taken = [[way() for way in ways.values()] for _ in range(repeats)]
    if counters["stats"]["unique_graphs"] != count:
        raise SystemExit("error: a later block compiled the model again; nothing was measured")
    found = dict(zip(ways, (Measured.of(list(times)) for times in zip(*taken, strict=True)), strict=True))
    rows = []
    for case, each in found.items():
        ratio = each.median / found["plain"].median
        row = {"time": milliseconds(each.median), "quartiles": spread(each, milliseconds), "repeats": repeats}
        row |= {"case": case, "ratio": f"{ratio:.3f}", "bar": "", "met": "", "output": ""}
        if case == "watched":
            row |= {"bar": BAR, "met": "yes" if ratio <= BAR else "no", "output": output}
        call = plain if case == "plain" else block
        memory = peak(call, device) if device.type == "cuda" else resident_peak(call)
        row["peak_memory"] = f"{memory / 1e6:.0f} MB"
        rows.append(row)
    for case, duration in first.items():
        rows.append(
            {"case": case, "time": f"{duration:.1f} s", "ratio": "", "bar": "", "output": "", "peak_memory": ""}
        )
    return [{**row, "mode": mode, "tokens": n, **provenance(device)} for row in rows]


def compiling(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call that compiles; on a CPU the CPU time of this process and of the compilers that it runs."""
    clock = time.perf_counter if device.type == "cuda" else lambda: sum(os.times()[:4])
    start = clock()
    call()
    wait(device)
    return clock() - start


def compare(model: Any, ids: Tensor, plain: Callable[[], Tensor], compiled: Any) -> str:
    """Return how far the watched pass is off; raise if that is more than it may be, or if layers were not seen."""
    before = plain().clone()
    with capture(compiled) as tape:
        during = plain().clone()
    if len(tape) != lens.LAYERS:
        raise SystemExit(f"error: {len(tape)} of {lens.LAYERS} layers were seen; nothing was measured")
    if torch.equal(before, during):
        return "equal to the bit"
    truth = copy.deepcopy(model).float()(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    off, allowed = ((x.float() - truth).abs().max().item() for x in (during, before))
    if off > 2 * allowed:
        raise SystemExit(f"error: the watched pass is off by {off:.3g}, the plain one by {allowed:.3g}")
    return f"off by {off:.2g}, plain {allowed:.2g}"


if __name__ == "__main__":
    main()
