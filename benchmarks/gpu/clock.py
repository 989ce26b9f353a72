"""How long a call takes a GPU, and how long it takes Python: calls in turn, until their rounds agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..measure import seconds
from .cases import Call

Clock = Callable[[Call, int], "Taken"]  # for a call, made so many times
FEWEST, ROUNDS = 3, 5  # rounds: few where they agree
AGREE = 0.02  # of the shortest round, between it and the longest
HOPELESS = 1.5  # times the fastest peer: a slower one is timed once
LEAST, MOST = 0.004, 50  # seconds of calls in a round, and calls: what a GPU lets wait is limited
CYCLES = 2 * 10**9  # of a GPU in a second, about


class Taken(NamedTuple):
    """Seconds of a call: what is compared, and until it returns."""

    time: float
    host: float


def times(ours: Call, peers: dict[str, Call], clock: Clock) -> dict[str, list[Taken]]:
    """Seconds of each call, all in turn, until rounds agree; a short one is called many times in a round."""
    calls = {"regard": ours, **peers}
    first = {name: warm(call, clock) for name, call in calls.items()}
    best = min((first[name].time for name in peers), default=0.0)
    taken = {name: [first[name]] if first[name].time > HOPELESS * best else [] for name in peers}
    rivals = ["regard", *(name for name in peers if not taken[name])]
    taken |= {name: [] for name in rivals}
    for done in range(ROUNDS):
        if done >= FEWEST and all(agreed(taken[name]) for name in rivals):
            break
        for name in rivals:
            often = max(1, min(MOST, int(LEAST / max(first[name].time, 1e-6))))
            taken[name].append(clock(calls[name], often))
    return taken


def warm(call: Call, clock: Clock) -> Taken:
    """For a call, once it is compiled and, if it is short, has run a few times."""
    call()
    taken = clock(call, 1)
    return clock(call, 3) if taken.time < LEAST else taken


def agreed(values: list[Taken]) -> bool:
    times = [taken.time for taken in values]
    return max(times) - min(times) <= AGREE * min(times)


def events(call: Call, often: int) -> Taken:
    """On the device, from its first kernel to the last: it is kept busy until all calls wait in its queue.

    As in a model that keeps a GPU busy, where Python runs ahead. How long Python takes is told beside.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    once = seconds(call, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2 * once * often * CYCLES))
    start.record()
    host = seconds(call, often)
    end.record()
    torch.cuda.synchronize()
    return Taken(start.elapsed_time(end) / 1e3 / often, host)


def host(call: Call, often: int) -> Taken:
    """Until the call returns; the device may still be at work."""
    torch.cuda.synchronize()
    taken = seconds(call, often)
    torch.cuda.synchronize()
    return Taken(taken, taken)
