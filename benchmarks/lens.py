"""`python -m benchmarks.lens [--lengths N ...]`: what watching a model costs, in time and memory, on a GPU.

A Llama-shaped model of transformers with random weights, in bfloat16: its plain fused pass; the same under `capture`,
which keeps q and k; with a summary of every layer and head; and its eager pass with `output_attentions`. Then the same
model by flex_attention, plain and under `capture`. That the watched pass gives the same numbers, to the bit, and the
right weights is checked first.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from regard.lens import capture

from .__main__ import COMMIT, RESULTS, machine, milliseconds, spread
from .measure import Measured, save

LENGTHS = (2_048, 8_192, 32_768, 131_072)
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 8, 2048, 16, 4, 8192, 1000  # as wide as Llama 3.2 1B
WATCHED, SUMMARIZED = 1.05, 1.8  # at most so many times the plain pass; summaries up to LONGEST tokens
LONGEST = 32_768
SECONDS = 4.0  # of repeats of each length
FIELDS = [
    *("case", "tokens", "time", "quartiles", "ratio", "bar", "met", "peak_memory", "repeats", "machine"),
    *("python", "torch", "transformers", "commit", "date"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="other lengths are not saved")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="another width is not saved")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # many CPUs have no products in bfloat16
    model = llama(arguments.hidden, max(arguments.lengths)).to(device, dtype).eval()
    check(model, device)
    rows = []
    for n in arguments.lengths:
        for row in measured(model, n, device):
            rows.append(row)
            bar = f"bar {row['bar']}, {row['met']}" if row["bar"] else ""
            times = f"{row['time']:>14}  x {row['ratio'] or '-':<6}"
            print(f"{row['tokens']:>9} tokens  {row['case']:<34}{times}{row['peak_memory']:>10}  {bar}", flush=True)
    if device.type == "cuda" and tuple(arguments.lengths) == LENGTHS and arguments.hidden == HIDDEN:
        save(rows, RESULTS / "lens_gpu.csv", FIELDS)
        print(f"saved {RESULTS / 'lens_gpu.csv'}")


def llama(hidden: int, longest: int) -> Any:
    """A model with random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * INNER // HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def ways(model: Any, ids: Tensor) -> dict[str, Callable[[], Any]]:
    """The passes that are compared, each over the same tokens."""

    def plain() -> Any:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    def watched() -> Any:
        with capture(model) as tape:
            plain()
        return tape

    def summarized() -> Any:
        tape = watched()
        tape.summarize()
        return tape

    return {"plain fused pass": plain, "capture, q and k": watched, "capture, summaries": summarized}


def eager(model: Any, ids: Tensor) -> Callable[[], Any]:
    """The pass of transformers that returns the weights."""

    def run() -> Any:
        with by(model, "eager"):
            return model(input_ids=ids, use_cache=False, logits_to_keep=1, output_attentions=True).attentions

    return run


@contextmanager
def by(model: Any, implementation: str) -> Iterator[None]:
    """Let the model attend in another way within the block."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def check(model: Any, device: torch.device) -> None:
    """Watching changes no bit, and what was seen is what the eager pass says."""
    # At the first length the kernels of a GPU are asked for their row statistic, at the second they are not yet.
    for n in (2_311, 517) if device.type == "cuda" else (517,):
        ids = torch.randint(VOCABULARY, (1, n), device=device)
        calls = ways(model, ids)
        before = calls["plain fused pass"]()
        with capture(model) as tape:
            during = calls["plain fused pass"]()
        if not torch.equal(before, during):
            raise SystemExit("error: the watched pass gives other numbers than the plain one; nothing was measured")
    tape.summarize()
    for key, theirs in zip(tape, eager(model, ids)(), strict=True):
        ours, summary = tape[key].dense(), tape.summary(key)
        apart = (ours - theirs).abs().max().item()
        off = (summary.received - ours.sum(-2)).abs().max().item()
        if not (apart < 0.02 and off < 0.02):  # theirs are in bfloat16
            raise SystemExit(f"error: weights of {key[0]} differ by {apart:.3g} and {off:.3g}; nothing was measured")


@torch.no_grad()
def measured(model: Any, n: int, device: torch.device) -> list[dict[str, object]]:
    """A row for each way to run the model over n tokens."""
    ids = torch.randint(VOCABULARY, (1, n), device=device)
    calls = ways(model, ids)
    for call in calls.values():  # kernels are compiled the first time
        timed(call, device)
    slowest = max(timed(call, device) for call in calls.values())
    repeats = max(3, min(100, int(SECONDS / len(calls) / slowest)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(timed(call, device))
    found: dict[str, Measured | str] = {name: Measured.of(times) for name, times in taken.items()}
    peaks: dict[str, int | None] = {name: peak(call, device) for name, call in calls.items()}
    name = "eager with output_attentions"
    found[name], peaks[name] = stored(model, ids, device)
    plain = found["plain fused pass"]
    assert isinstance(plain, Measured)
    bars = {"capture, q and k": WATCHED} | ({"capture, summaries": SUMMARIZED} if n <= LONGEST else {})
    rows = [row(name, n, value, plain, bars.get(name), peaks[name], repeats, device) for name, value in found.items()]
    return rows + (flexible(model, n, calls, repeats) if device.type == "cuda" else [])


def flexible(model: Any, n: int, calls: dict[str, Callable[[], Any]], repeats: int) -> list[dict[str, object]]:
    """The rows of the model by flex_attention, whose kernel is handed a block mask, over its own plain pass."""
    chosen = {f"flex_attention, {name}": calls[name] for name in ("plain fused pass", "capture, q and k")}
    device, taken = torch.device("cuda"), {name: list[float]() for name in chosen}
    with by(model, "flex_attention"):
        for call in 2 * list(chosen.values()):
            timed(call, device)
        for _ in range(repeats):
            for name, call in chosen.items():
                taken[name].append(timed(call, device))
        peaks = {name: peak(call, device) for name, call in chosen.items()}
    found = {name: Measured.of(times) for name, times in taken.items()}
    plain = next(iter(found.values()))
    return [row(name, n, value, plain, None, peaks[name], repeats, device) for name, value in found.items()]


def stored(model: Any, ids: Tensor, device: torch.device) -> tuple[Measured | str, int | None]:
    """Time and peak memory of the pass that stores every weight, where there is the memory for it."""
    one = HEADS * ids.shape[1] ** 2 * 2  # bytes of a layer's weights
    if one > (torch.cuda.mem_get_info()[1] if device.type == "cuda" else 2**31):
        return f"{one / 1e9:.0f} GB a layer", None
    run = eager(model, ids)
    try:
        times = [timed(run, device) for _ in range(4)]
        return Measured.of(times[1:]), peak(run, device)
    except torch.OutOfMemoryError:
        return "out of memory", None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, until the device is done; what it returns is let go of afterwards."""
    if device.type != "cuda":
        start = time.perf_counter()
        kept = call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    kept = call()
    end.record()
    torch.cuda.synchronize()
    del kept
    return start.elapsed_time(end) / 1e3


def peak(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes allocated at most during a call, the model's weights among them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def row(
    case: str,
    n: int,
    found: Measured | str,
    plain: Measured,
    bar: float | None,
    most: int | None,
    repeats: int,
    device: torch.device,
) -> dict[str, object]:
    ratio = None if isinstance(found, str) else found.median / plain.median
    met = "" if bar is None or ratio is None else "yes" if ratio <= bar else "no"
    return {
        "case": case,
        "tokens": f"{n:,}",
        "time": found if isinstance(found, str) else milliseconds(found.median),
        "quartiles": "" if isinstance(found, str) else spread(found, milliseconds),
        "ratio": "" if ratio is None else f"{ratio:.3f}",
        "bar": "" if bar is None else f"{bar:.2f}",
        "met": met,
        "peak_memory": "" if most is None else f"{most / 1e9:.2f} GB",
        "repeats": 3 if case.startswith("eager") else repeats,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
