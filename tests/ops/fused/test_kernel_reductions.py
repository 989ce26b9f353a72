"""Reductions by one launch of a kernel: which calls it takes, and groups of queries and keys."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels.summary import hopper_launcher as kernel
from regard.kernels.summary.generic import SummaryTensors
from regard.kernels.tiles import Pattern
from regard.ops.blocks import measures
from regard.ops.blocks.pool_bins import Axis
from regard.ops.fused import kernel_reductions as fused
from tests.kernels.judged import FEW, TERMS, judged


@pytest.mark.usefixtures("no_walk")
@pytest.mark.parametrize("terms", FEW.values(), ids=FEW)
def test_groups_of_any_queries_and_keys_get_their_mass_from_the_kernel(terms, device):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    B = exact.dense()
    for queries, keys in (
        (torch.arange(19) // 6, torch.arange(40) // 13),
        (torch.arange(19) % 3, torch.arange(40) % 7),
    ):
        rows, cols = (torch.nn.functional.one_hot(x).double() for x in (queries, keys))
        want = rows.T @ B @ cols / rows.sum(0)[:, None]
        got = A.mass(queries.to(device), keys.to(device))
        torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


EACH = {
    **{name: TERMS[name] for name in ("causal lengths", "keep", "dense")},
    "added": {"bias": R.Added(torch.randn(2, 1, 19, 40, generator=torch.Generator().manual_seed(7)))},
}


@pytest.mark.parametrize("terms", EACH.values(), ids=EACH)
def test_groups_may_differ_between_batch_rows(terms, device, monkeypatch):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    groups = torch.arange(38).view(2, 19) // 6 % 4, torch.arange(40) // 11
    want = exact.mass(*groups)
    monkeypatch.delattr(measures, "bin_sums")
    got = A.mass(*(x.to(device) for x in groups)).cpu().double()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"score": R.Additive(torch.ones(16))}, "no product"),
        ({"normalize": R.Sparsemax()}, "softmax"),
        ({"bias": R.Relative.shaw(torch.zeros(5, 16))}, "no Relative"),
    ],
    ids=["additive", "sparsemax", "shaw"],
)
def test_unsupported_terms_are_computed_without_the_kernel(terms, reason, device):
    q, k = torch.randn(1, 2, 12, 16, device=device), torch.randn(1, 2, 12, 16, device=device)
    A, exact = judged(q, k, terms)
    assert reason in " ".join(fused.objections(A._call))
    torch.testing.assert_close(A.entropy().cpu().double(), exact.entropy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("terms", "want", "binned"),
    [
        ({"normalize": R.SinkSoftmax(torch.zeros(2))}, "entropy", True),
        ({"bias": R.Alibi(2)}, "entropy", True),
        ({"score": R.Dot(cap=3.0)}, "entropy", True),
        ({"mask": R.Window(9)}, "entropy", True),
        ({"mask": R.Causal() | R.Prefix(3)}, "entropy", True),
        ({}, "peaks", True),
        ({}, "map", False),
    ],
)
def test_other_calls_go_to_the_generic_kernel(terms, want, binned, monkeypatch):
    monkeypatch.setattr(fused, "is_hopper", lambda device: True)
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    bins = fused.Mesh(Axis.even(64, 8), Axis.even(64, 8), q.device)

    def taken(want, bins, **terms):
        return fused._band_for_hopper(weights(q, q, **terms)._call, q, frozenset((want,)), bins) is not None

    assert taken("map", bins)
    assert taken("entropy", None, mask=R.Causal())
    assert taken("entropy", None, mask=R.Causal() & R.Padding((9,)))
    assert not taken(want, bins if binned else lambda cut: bins(cut), **terms)
    torch.use_deterministic_algorithms(True)
    try:
        assert not taken("entropy", None)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize(("n", "m"), [(64, 128), (70, 100), (65, 9), (16, 33)])
def test_smaller_last_cells_are_means_of_their_entries(n, m, how, monkeypatch):
    """By a kernel that is not one: sums over cells, times a share that is that of whole cells."""

    def summed(q, k, lse, *, scale, shape, bin_sizes, share, **others):
        A = (q @ k.mT * scale - lse[..., None]).exp()
        rows, cols = (torch.arange(count) // size for count, size in zip(A.shape[2:], bin_sizes, strict=True))
        sums = torch.zeros(*A.shape[:2], shape[0], A.shape[3]).index_add_(2, rows, A)
        return SummaryTensors(map=torch.zeros(*A.shape[:2], *shape).index_add_(3, cols, sums) * share)

    monkeypatch.setattr(kernel, "summarize_hopper", summed)
    q, k = torch.randn(1, 2, n, 8), torch.randn(1, 2, m, 8)
    A = weights(q, k)
    mesh = fused.Mesh(Axis(n, -(-n // 16), 16), Axis(m, -(-m // 8), 8), q.device, how)
    asked = {"want": frozenset(("map",)), "scale": 8**-0.5, "offset": 0}
    got = fused._by_hopper((q, k, A.lse), asked, Pattern(), mesh).map
    cells = [rows.split(8, -1) for rows in A.dense().split(16, -2)]
    want = torch.stack([torch.stack([getattr(cell, how)((-1, -2)) for cell in row], -1) for row in cells], -2)
    torch.testing.assert_close(got, want)
