"""`python -m tests.kernels.compile_hopper KIND`: compile the Hopper kernel for a kind of call, without a GPU.

Triton compiles it anew for numbers that are 1, which it takes for known beforehand, and for measures nobody asked for.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from triton.runtime import driver

from regard.kernels.summary.hopper_launcher import summarize_hopper
from regard.kernels.tiles import Pattern
from tests.kernels.fake_launches import GIVEN, Driver

ALL = frozenset({"entropy", "received", "max", "distance", "map"})
# Texts, heads, queries, keys and width; what is asked for; what is hidden.
KINDS = {
    "all seen": ((2, 4, 256, 256, 64), ALL, Pattern()),
    "one head, all seen": ((2, 1, 256, 256, 128), ALL, Pattern()),
    "one attention, causal": ((1, 1, 256, 256, 64), ALL, Pattern(low=0)),
    "one block, part of a tile": ((1, 1, 40, 40, 64), frozenset({"received"}), Pattern()),
    "narrow": ((2, 4, 256, 256, 32), ALL, Pattern(low=0)),
    "wide": ((2, 4, 256, 256, 192), ALL, Pattern(low=0)),
    "widest": ((2, 4, 256, 256, 256), ALL, Pattern(low=0)),
    "lengths": ((2, 4, 100, 256, 128), ALL - {"distance"}, Pattern(lengths=torch.tensor([3, 256], dtype=torch.int32))),
}


def main(kind: str) -> None:
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    (b, h, i, j, d), want, pattern = KINDS[kind]
    q, k = (torch.zeros(b, h, n, d, dtype=torch.bfloat16) for n in (i, j))
    mapped = {"shape": (-(-i // 8), -(-j // 8)), "bin_sizes": (8, 8)}
    summarize_hopper(q, k, torch.zeros(b, h, i), want=want, scale=0.25, offset=0, pattern=pattern, **mapped)
    print(*(name for name, *_ in GIVEN))


if __name__ == "__main__":
    main(sys.argv[1])
