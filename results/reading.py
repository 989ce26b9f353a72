"""Milliseconds that a long text takes to read, with each attention of `recall`, in turn.

    python -m results.reading --length 32768

One text at a time, in bfloat16 autocast on a GPU; medians over all texts but the first few, at which kernels compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

from regard.train import own_device

from .recall import ATTENTION, Recaller, texts

WARM = 5


@torch.no_grad()
def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("length", 32_768), ("window", 512), ("texts", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    device = own_device()
    models = {attention: Recaller(attention, given.window).to(device).eval() for attention in ATTENTION}
    taken: dict[str, list[float]] = {attention: [] for attention in ATTENTION}
    for seed in range(given.texts + WARM):
        ids = texts(given.length, 1, seed)["ids"].to(device)
        for attention, model in models.items():
            began = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
                model(ids).argmax(-1).item()
            taken[attention].append(time.perf_counter() - began)
    for attention, seconds in taken.items():
        print(attention, f"{1000 * statistics.median(seconds[WARM:]):.3f}")


if __name__ == "__main__":
    main()
