"""How long a call takes on a GPU: calls in turn, until their rounds agree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..measure import seconds
from .cases import Call

Clock = Callable[[Call, int], float]  # seconds of a call, made so many times
FEWEST, ROUNDS = 3, 5  # rounds: few where they agree
AGREE = 0.02  # of the shortest round, between it and the longest
HOPELESS = 1.5  # times the fastest peer: a slower one is timed once
LEAST = 0.004  # seconds of calls in a round


def times(ours: Call, peers: dict[str, Call], clock: Clock) -> dict[str, list[float]]:
    """Seconds of each call, all in turn, until rounds agree; a short one is called many times in a round."""
    calls = {"regard": ours, **peers}
    first = {name: warm(call, clock) for name, call in calls.items()}
    best = min((first[name] for name in peers), default=0.0)
    taken = {name: [first[name]] if first[name] > HOPELESS * best else [] for name in peers}
    rivals = ["regard", *(name for name in peers if not taken[name])]
    taken |= {name: [] for name in rivals}
    for done in range(ROUNDS):
        if done >= FEWEST and all(agreed(taken[name]) for name in rivals):
            break
        for name in rivals:
            often = max(1, min(200, int(LEAST / max(first[name], 1e-6))))
            taken[name].append(clock(calls[name], often))
    return taken


def warm(call: Call, clock: Clock) -> float:
    """Seconds of a call, once it is compiled and, if it is short, has run a few times."""
    call()
    taken = clock(call, 1)
    return clock(call, 3) if taken < LEAST else taken


def agreed(values: list[float]) -> bool:
    return max(values) - min(values) <= AGREE * min(values)


def events(call: Call, often: int) -> float:
    """On the device, from its first kernel to the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(often):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / often


def host(call: Call, often: int) -> float:
    """Until the call returns; the device may still be at work."""
    torch.cuda.synchronize()
    taken = seconds(call, often)
    torch.cuda.synchronize()
    return taken
