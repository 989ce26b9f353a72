"""Buckets: group examples of similar length into batches, to reduce padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .padding import round_up

Bucket = list[int]


def buckets(
    lengths: Sequence[tuple[int, ...]], *, tokens: int | None = None, rows: int | None = None, multiple: int = 1
) -> list[Bucket]:
    """Sort example numbers by length and cut them into batches.

    >>> buckets([(3,), (9,), (2,), (8,), (3,)], tokens=18)
    [[2, 0, 4], [3, 1]]

    A batch has at most `rows`, or costs at most `tokens`: rows times the longest sequence of any field, rounded up to a
    `multiple`.
    """
    order = sorted(range(len(lengths)), key=lambda n: _snake(lengths[n]))
    cut: list[Bucket] = []
    for n in order:
        full = not cut or len(cut[-1]) == rows
        if not full and tokens is not None:
            full = (len(cut[-1]) + 1) * round_up(max(lengths[n], default=0), multiple) > tokens
        if full:
            cut.append([])
        cut[-1].append(n)
    return cut


def _snake(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sort key: the longest field, then all fields, in alternating order so that neighbours are similar."""
    longest = max(lengths, default=0)
    return longest, *(length if longest % 2 else -length for length in lengths)


def share_evenly(cut: list[Bucket], ranks: int) -> tuple[list[Bucket], Bucket]:
    """Split batches until `ranks` divides their number; return them and the examples left out.

    >>> share_evenly([[0, 1, 2], [3, 4]], 3)
    ([[0, 1], [2], [3, 4]], [])

    The largest are halved until the count fits. Examples are left out, fewer than `ranks`, only if every batch is down
    to one example.
    """
    cut = list(cut)
    while len(cut) % ranks:
        widest = int(np.argmax([len(bucket) for bucket in cut]))
        bucket = cut[widest]
        if len(bucket) == 1:
            keep = len(cut) - len(cut) % ranks
            return cut[:keep], [n for spare in cut[keep:] for n in spare]
        half = (len(bucket) + 1) // 2
        cut[widest : widest + 1] = [bucket[:half], bucket[half:]]
    return cut, []
