"""Every search over every stand-in for a model."""

from __future__ import annotations

import torch

from regard.decode import Gnmt, beam, greedy, sample
from tests.decode.steppers import Cached, Recurrent, Table

SEARCHES = {
    "greedy": lambda *data, **limits: [[one] for one in greedy(*data, **limits)],
    "sample": lambda *data, **limits: sample(*data, seed=3, **limits),
    "beam": lambda *data, **limits: beam(*data, width=4, n_best=3, **limits),
}
LENGTHS = [None, Gnmt(0.6), Gnmt(1.5), Gnmt(-1.0), float]
ROWS = 6
MODELS = {
    "table": (Table(9, 0), torch.arange(ROWS)),
    "recurrent": (Recurrent(vocabulary=9), torch.randint(1, 9, (ROWS, 5), generator=torch.Generator().manual_seed(0))),
    "cached": (Cached(vocabulary=9), ROWS),
}
END, MOST = 8, 12


def starts():
    return torch.arange(ROWS)[:, None]


def tokens(found):
    return [[one.tokens for one in best] for best in found]
