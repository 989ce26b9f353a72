"""`python -m benchmarks.editing cost`: what an edited pass takes beside the plain fused pass.

A Llama-shaped model of transformers with random weights, in bfloat16 on a GPU: its plain pass, and the same with each
kind of edit in every layer, in turn. First one attention of the same shape is compared with a matrix of scores that is
changed entry by entry in float64: an edited output may be off by at most twice what that matrix in its dtype is off by.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lens import Boost, Cut, Freeze, From, Only, Scale, Temperature, capture, edit

from . import lens
from .__main__ import COMMIT, RESULTS, machine, milliseconds, spread, update
from .measure import Measured

TILES, OTHERS = 1.1, 1.3  # at most so many times the plain pass: edits that are masks of tiles, all others
SECONDS = 1.0  # of repeats of each edit
FIELDS = [
    *("case", "tokens", "time", "quartiles", "ratio", "bar", "met", "peak_memory", "repeats", "machine"),
    *("python", "torch", "transformers", "commit", "date"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost",))
    parser.add_argument("--tokens", type=int, default=16_384, help="of the text; another number is not saved")
    parser.add_argument("--hidden", type=int, default=lens.HIDDEN, help="another width is not saved")
    parser.add_argument("--only", default="", help="measure only edits whose source holds this")
    chosen = parser.parse_args(arguments)
    with torch.no_grad():
        measure_cost(chosen)


def cases(n: int) -> list[tuple[Any, float]]:
    """Edits of a text of n tokens, each with its bar."""
    word, later = slice(n // 8, n // 8 + 4), slice(n // 2, None)
    return [
        (Cut(keys=word), TILES),
        (Cut(keys=slice(n // 8, n // 4)), TILES),
        (Cut(queries=later, keys=slice(n // 8, n // 4)), TILES),
        (Cut(queries=-1, keys=word), TILES),
        (Cut(keys=word, heads=3), TILES),
        (Cut(queries=later, keys=word, heads=[3, 5]), TILES),
        (Boost(word, 2.0), OTHERS),
        (Boost(word, -2.0), OTHERS),
        (Boost(word, 2.0, queries=-1), OTHERS),
        (Boost(word, 2.0, heads=3), OTHERS),
        (Boost(slice(n // 8, n // 4), 2.0, queries=later), OTHERS),
        (Temperature(None, 0.5), OTHERS),
        (Temperature([0, 3], 0.5), OTHERS),
        (Scale(3, 0), OTHERS),
        (Only([0, 1, 2]), OTHERS),
        (Freeze(), OTHERS),
    ]


def measure_cost(chosen: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # many CPUs have no products in bfloat16
    for each, off, plain in errors(min(chosen.tokens, 1024), device, dtype):
        if chosen.only in repr(each) and not off <= 2 * plain + torch.finfo(dtype).eps:
            raise SystemExit(f"error: {each!r} is off by {off:.3g}, plain {plain:.3g}; nothing was measured")
    model, n = lens.llama(chosen.hidden, chosen.tokens).to(device, dtype).eval(), chosen.tokens
    ids = torch.randint(0, lens.VOCABULARY, (1, n), device=device)

    def plain() -> Any:
        return model(ids, use_cache=False, logits_to_keep=1)

    def edited(each: Any) -> Any:
        with edit(model, {"*": each}):
            return plain()

    with capture(model) as tape:
        plain()
    found = [*cases(n), (From(tape), OTHERS), (From(tape, heads=3), OTHERS)]
    rows = []
    for each, bar in found:
        if chosen.only in repr(each):
            row = measured(repr(each), plain, lambda each=each: edited(each), n, bar, device)
            rows.append(row)
            print(
                f"{row['case']:<64}{row['time']:>12}  x {row['ratio']:<6}(bar {bar}) {row['peak_memory']}", flush=True
            )
            if device.type == "cuda" and n == 16_384 and chosen.hidden == lens.HIDDEN:
                update(row, RESULTS / "editing_gpu.csv", FIELDS, [repr(one) for one, _ in found])


def measured(
    name: str, plain: Callable[[], Any], edited: Callable[[], Any], n: int, bar: float, device: torch.device
) -> dict[str, object]:
    edited()
    plain()
    slowest = max(seconds(edited, device), seconds(plain, device))
    repeats = max(3, min(30, int(SECONDS / 2 / slowest)))
    taken: list[tuple[float, float]] = [(seconds(edited, device), seconds(plain, device)) for _ in range(repeats)]
    ours, peer = (Measured.of(list(each)) for each in zip(*taken, strict=True))
    ratio = ours.median / peer.median
    return {
        "case": name,
        "tokens": n,
        "time": milliseconds(ours.median),
        "quartiles": spread(ours, milliseconds),
        "ratio": f"{ratio:.2f}",
        "bar": bar,
        "met": "yes" if ratio <= bar else "no",
        "peak_memory": f"{peak(edited, device) / 1e6:.0f} MB" if device.type == "cuda" else "",
        "repeats": repeats,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak(call: Callable[[], Any], device: torch.device) -> float:
    """Bytes allocated at most during a call, beyond what was allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


class OneAttention(nn.Module):
    """Causal attention of four query heads to a key head, by PyTorch's kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def errors(n: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, float, float]]:
    """Yield each edit with the error of one attention under it, and that of its whole matrix in the same dtype."""
    torch.manual_seed(0)
    q = torch.randn(1, 8, n, 64, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, 2, n, 64, device=device, dtype=dtype)
    model = nn.ModuleDict({"self_attn": OneAttention()})["self_attn"]
    exact = [x.double() for x in (q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))]
    halves = [x.to(dtype) for x in exact]
    for each, _ in cases(n):
        with edit(model, {"*": each}):
            out = model(q, k, v)
        want = dense(*exact, each)
        yield each, *((x.double() - want).abs().max().item() for x in (out, dense(*halves, each)))


def dense(q: Tensor, k: Tensor, v: Tensor, each: Any) -> Tensor:
    """Edited causal attention by its whole matrix; b h i d, b h j d, b h j e -> b h i e."""
    h, n = q.shape[1], q.shape[2]
    s = q @ k.mT * q.shape[-1] ** -0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    of_edit = torch.zeros(h, n, n, dtype=torch.bool, device=q.device)
    chosen = range(h) if getattr(each, "heads", None) is None else each.heads
    if isinstance(each, (Cut, Boost)):
        rows, cols = (slice(None) if x is None else [x] if isinstance(x, int) else x for x in (each.queries, each.keys))
        for head in chosen:
            part = torch.zeros(n, n, dtype=torch.bool, device=q.device)
            part[rows, cols] = True
            of_edit[head] = part
    if isinstance(each, Boost):
        s = s + each.amount * of_edit.to(s.dtype)
    if isinstance(each, Temperature):
        s = torch.cat([s[:, [x]] / (each.factor if x in chosen else 1) for x in range(h)], 1)
    keep = causal & ~of_edit if isinstance(each, Cut) else causal
    out = s.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0) @ v
    factors = each.factors(h) if isinstance(each, (Scale, Only)) else [1.0] * h
    return out * out.new_tensor(factors)[:, None, None]


if __name__ == "__main__":
    main()
