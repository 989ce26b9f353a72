"""Align the tokens of two texts by a minimal edit script: which position of one is which of the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TABLE_ENTRIES = 2**18  # costs in memory at a time

Ints = npt.NDArray[np.int64]


def align_tokens(ours: Sequence[str], theirs: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the positions of kept and replaced tokens in both texts, in order, of a script with the fewest edits.

    An edit inserts, deletes or replaces a token (Levenshtein). Among scripts with the fewest edits, one that keeps the
    most tokens counts. Memory is linear in the texts. Time is the product of their lengths, without the tokens that
    both begin and end with.

    >>> ours, theirs = align_tokens("the red cat sat".split(), "a the black cat sat".split())
    >>> ours.tolist(), theirs.tolist()
    ([0, 1, 2, 3], [1, 2, 3, 4])
    """
    numbers: dict[str, int] = {}
    a, b = (np.array([numbers.setdefault(x, len(numbers)) for x in text], np.int64) for text in (ours, theirs))
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    middle = _align(a[start : len(a) - end], b[start : len(b) - end], len(a) + len(b) + 1)
    first, last = np.arange(start), np.arange(-end, 0)
    rows, cols = (np.concatenate([first, x + start, last + len(text)]) for x, text in zip(middle, (a, b), strict=True))
    return torch.from_numpy(rows), torch.from_numpy(cols)


def _common(a: Ints, b: Ints) -> int:
    """Return the number of equal entries before the first that differs."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _align(a: Ints, b: Ints, edit: int) -> tuple[Ints, Ints]:
    """Return the pairs of a cheapest script, halving `a` until the table of costs is small (Hirschberg 1975).

    `edit` is the cost of an edit. A replacement costs 1 more: scripts that keep more tokens are cheaper.
    """
    if not len(a) or not len(b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if len(a) == 1 or (len(a) + 1) * (len(b) + 1) <= TABLE_ENTRIES:
        return _trace(a, b, edit)
    half = len(a) // 2
    forth, back = _last_row(a[:half], b, edit), _last_row(a[half:][::-1], b[::-1], edit)[::-1]
    cut = int((forth + back).argmin())
    first, second = _align(a[:half], b[:cut], edit), _align(a[half:], b[cut:], edit)
    return np.concatenate([first[0], second[0] + half]), np.concatenate([first[1], second[1] + cut])


def _next_row(row: Ints, token: int, b: Ints, edit: int, inserted: Ints) -> Ints:
    """Return the costs of all beginnings of `b` after one more token of `a`, from those before it."""
    best = row + edit  # the token is deleted
    replaced = row[:-1] + (edit + 1)
    np.copyto(replaced, row[:-1], where=b == token)  # the token is kept
    np.minimum(best[1:], replaced, out=best[1:])
    best -= inserted
    np.minimum.accumulate(best, out=best)  # tokens of b are inserted
    best += inserted
    return best


def _rows(a: Ints, b: Ints, edit: int) -> Iterator[Ints]:
    inserted = np.arange(len(b) + 1) * edit
    row = inserted
    yield row
    for token in a.tolist():
        row = _next_row(row, token, b, edit, inserted)
        yield row


def _last_row(a: Ints, b: Ints, edit: int) -> Ints:
    return deque(_rows(a, b, edit), maxlen=1)[0]


def _trace(a: Ints, b: Ints, edit: int) -> tuple[Ints, Ints]:
    """Return the pairs of a cheapest script from the whole table of costs."""
    costs = [row.tolist() for row in _rows(a, b, edit)]
    i, j, pairs = len(a), len(b), []
    while i and j:
        if costs[i][j] == costs[i - 1][j - 1] + (a[i - 1] != b[j - 1]) * (edit + 1):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif costs[i][j] == costs[i - 1][j] + edit:
            i -= 1
        else:
            j -= 1
    aligned = np.array(pairs[::-1], np.int64).reshape(-1, 2)
    return aligned[:, 0], aligned[:, 1]
