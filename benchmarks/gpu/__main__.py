"""`python -m benchmarks.gpu [--only PART ...]`: attention and its weights on a GPU, beside PyTorch's kernels.

bfloat16, 16 heads, inputs drawn at random, CUDA events, the calls of a case in turn. What is measured is checked
against float64 first; the whole suite for a GPU is `pytest -m gpu` and `pytest tests/kernels`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from regard import Additive, Causal, Window, attend, weights

from ..__main__ import RESULTS, update
from .cases import cases, groups, tensors
from .table import FIELDS, measured, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="measure only cases whose name holds one of these")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    chosen = [case for case in cases() if any(part in case.name for part in arguments.only)]
    is_divergence = [case.name.startswith("A.kl") for case in chosen]
    # A benchmark of wrong numbers is worth nothing.
    if not all(is_divergence):
        check_attention()
    if any(is_divergence):
        check_divergences()
    for case in chosen:
        row = measured(case)
        report(row)
        update(row, RESULTS / "kernels_gpu.csv", FIELDS, [case.name for case in cases()])
        torch.cuda.empty_cache()


def check_attention() -> None:
    for mask in (None, Causal(), Causal() & Window(512)):
        for d in (64, 128):
            q, k, v = tensors(1, 2, 2048, d)
            A, exact = weights(q, k, mask=mask), weights(q.double(), k.double(), mask=mask, backend="reference")
            near("output", A @ v, exact @ v.double(), 0.02)
            got, want = A.summary(), exact.summary()
            for name in ("entropy", "received", "max", "distance", "map"):
                near(f"{name} under {mask}", getattr(got, name), getattr(want, name), 0.01)
            near(f"topk under {mask}", A.topk(8).values, exact.topk(8).values, 0.01)
            near(f"maxima under {mask}", A.pool(64, 64, "max"), exact.pool(64, 64, "max"), 0.01)
            both = groups(2048), groups(2048)
            near(f"mass under {mask}", A.mass(*both), exact.mass(*both), 0.01)
    q, k, v = tensors(2, 1, 300, 64)
    u = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    exact = attend(q.double(), k.double(), v.double(), score=Additive(u.double()), backend="reference")
    near("additive", attend(q, k, v, score=Additive(u)), exact, 0.02)


def check_divergences() -> None:
    """Check what is measured: KL, under each mask and in each width."""
    for mask, d in ((None, 64), (Causal(), 64), (Causal(), 128)):
        leaves = [*tensors(1, 2, 2048, d, grad=True)[:2], *tensors(1, 2, 2048, d, grad=True)[:2]]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        got = weights(*leaves[:2], mask=mask).kl(weights(*leaves[2:], mask=mask))
        a, b = (weights(*pair, mask=mask, backend="reference") for pair in (wide[:2], wide[2:]))
        want = a.kl(b)
        near(f"kl under {mask}", got, want, 0.02)
        grads = torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), wide)
        for ours, exact in zip(*grads, strict=True):
            near(f"gradient of kl under {mask}", ours, exact, 0.03)


def near(name: str, got: Tensor, want: Tensor, most: float) -> None:
    off = (got.double() - want).abs().max().item() / want.abs().max().item()
    if not off < most:
        raise SystemExit(f"error: {name} is off by {off:.3g} of the largest; nothing was measured")


if __name__ == "__main__":
    main()
