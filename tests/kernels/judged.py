"""Terms that our kernels take, and the same weights by kernel and by the definition in float64."""

from __future__ import annotations

import torch

import regard as R
from regard import weights

NAMES = ("entropy", "received", "max", "distance")


IDS = torch.arange(40) // 9


TERMS = {
    "plain": {},
    "causal": {"mask": R.Causal()},
    "window": {"mask": R.Causal() & R.Window(9)},
    "both sides": {"mask": R.Window(before=3, after=12)},
    "diagonal": {"mask": R.Diagonal()},
    "lengths": {"mask": R.Padding((40, 13))},
    "causal lengths": {"mask": R.Causal() & R.Padding(torch.tensor([0, 33]))},
    "keep": {"mask": R.Padding(torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.4)},
    "prefix": {"mask": R.Causal() | R.Prefix(7)},
    "documents": {"mask": R.Documents(IDS[-19:], IDS)},
    "global": {"mask": R.Window(4) | R.Global(3)},
    "not self": {"mask": R.Causal() & ~R.Diagonal()},
    "dense": {"mask": R.Dense(torch.rand(2, 2, 19, 40, generator=torch.Generator().manual_seed(2)) > 0.5)},
    "rule": {"mask": R.Rule(lambda b, h, i, j: (i + j) % 3 > 0)},
    "rule of heads": {"mask": R.Rule(lambda b, h, i, j: (j <= i) & ((i + j + h) % 3 > b))},
    "alibi": {"bias": R.Alibi(2)},
    "t5": {"bias": R.Relative.t5(torch.randn(2, 32, generator=torch.Generator().manual_seed(3)))},
    "added": {"bias": R.Added(torch.randn(2, 19, 40, generator=torch.Generator().manual_seed(4))), "mask": R.Causal()},
    "cosine": {"score": R.Cosine(0.3)},
    "bilinear": {"score": R.Bilinear(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))},
    "location": {"score": R.Location(torch.randn(50, 16, generator=torch.Generator().manual_seed(6)))},
    "negative scale": {"score": R.Dot(scale=-0.5)},
    "cap": {"score": R.Dot(cap=2.0)},
    "sink": {"normalize": R.SinkSoftmax(torch.tensor([-1.0, 1.0]))},
}
FEW = {name: TERMS[name] for name in ("plain", "causal lengths", "documents", "added", "sink")}


def moved(terms, device, dtype=None):
    def move(x):
        return x.to(device, dtype) if dtype and x.is_floating_point() else x.to(device)

    return {name: term.map_tensors(move) for name, term in terms.items()}


def judged(q, k, terms, **options):
    """The weights by the kernel, and those of the definition in float64."""
    A = weights(q, k, **moved(terms, q.device), **options)
    exact = weights(
        q.cpu().double(), k.cpu().double(), **moved(terms, "cpu", torch.float64), **options, backend="reference"
    )
    return A, exact
