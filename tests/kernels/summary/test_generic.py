"""Reductions by the kernel are those of the dense matrix in float64."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels.summary.generic import summarize_generic
from regard.kernels.tiles import TileConfig
from regard.ops.blocks.pool_bins import Axis
from regard.ops.fused import kernel_reductions as fused
from tests.kernels.judged import NAMES, TERMS, judged


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_a_summary_is_that_of_the_dense_matrix(terms, device):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    assert fused.objections(A._call) == []
    summary, want = A.summary(), exact.summary()
    for name in (*NAMES, "map"):
        got = getattr(summary, name).cpu().double()
        assert not got.isnan().any()
        torch.testing.assert_close(got, getattr(want, name), atol=5e-5, rtol=1e-5, msg=lambda m, name=name: name + m)


@pytest.mark.interpreter
@pytest.mark.parametrize(("n", "m"), [(70, 70), (33, 100), (64, 65), (100, 9)])
@pytest.mark.parametrize("most", [2, 5, 9, 40])
@pytest.mark.parametrize("terms", [{}, {"mask": R.Causal()}], ids=["plain", "causal"])
def test_the_last_cells_of_a_map_may_hold_fewer(terms, most, n, m, device):
    A, exact = judged(torch.randn(1, 2, n, 16, device=device), torch.randn(1, 2, m, 16, device=device), terms)
    axes = Axis.cells(n, most), Axis.cells(m, most)
    got, want = A.summary_in(*axes).map.cpu().double(), exact.summary_in(*axes).map
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    cells = [rows.split(axes[1].size, -1) for rows in exact.dense().split(axes[0].size, -2)]
    by_hand = torch.stack([torch.stack([cell.mean((-1, -2)) for cell in row], -1) for row in cells], -2)
    torch.testing.assert_close(want, by_hand)


@pytest.mark.parametrize(
    ("n", "m", "d", "offset"),
    [(1, 1, 3, None), (7, 63, 16, None), (63, 7, 5, None), (33, 33, 111, None), (5, 40, 8, 3)],
)
def test_odd_shapes_and_offsets_are_right(n, m, d, offset, device):
    q, k = torch.randn(1, 2, n, d, device=device), torch.randn(1, 2, m, d, device=device)
    A, exact = judged(q, k, {"mask": R.Causal()}, offset=offset)
    for name in NAMES:
        got = getattr(A, name)().cpu().double()
        torch.testing.assert_close(got, getattr(exact, name)(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (4, 8), (5, 7), (32, 64), (16, 4)])
def test_a_map_of_any_resolution_is_right(rows, cols, device):
    q, k = torch.randn(1, 2, 32, 16, device=device), torch.randn(1, 1, 64, 16, device=device)
    A, exact = judged(q, k, {"mask": R.Causal()})
    for how in ("mean", "sum", "max"):
        torch.testing.assert_close(
            A.pool(rows, cols, how).cpu().double(), exact.pool(rows, cols, how), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("terms", [{}, {"mask": R.Causal()}, TERMS["documents"]], ids=["plain", "causal", "documents"])
def test_sums_over_rows_come_out_the_same_when_determinism_is_asked_for(terms, device, monkeypatch):
    monkeypatch.setattr("regard.kernels.summary.generic.MAX_PARTIAL_SUMS", 1000)
    q, k = torch.randn(1, 2, 19, 16, device=device), torch.randn(1, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    queries, keys = torch.arange(19, device=device) % 3, torch.arange(40, device=device) % 5
    torch.use_deterministic_algorithms(True)
    try:
        first, second = ((*summed(A.summary()), A.mass(queries, keys)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    want = (*summed(exact.summary()), exact.mass(queries.cpu(), keys.cpu()))
    for one, again, right in zip(first, second, want, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(one.cpu().double(), right, atol=1e-5, rtol=1e-5)


def test_deterministic_sums_of_bins_in_parts_are_repeatable(device):
    q, k = torch.randn(1, 2, 48, 16, device=device), torch.randn(1, 1, 32, 16, device=device)
    A, exact = judged(q, k, {})
    torch.use_deterministic_algorithms(True)
    try:
        first, second = A.pool(3, 2), A.pool(3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.cpu().double(), exact.pool(3, 2), atol=1e-5, rtol=1e-5)


def summed(summary):
    return summary.received, summary.map


def test_maps_of_other_bins_are_cut_anew(device):
    q, k = torch.randn(1, 1, 19, 16, device=device), torch.randn(1, 1, 40, 16, device=device)
    A, exact = judged(q, k, TERMS["documents"])
    for rows in (1, 3, 4):  # orders of rows that are all filled up to one tile
        got = A.pool(rows, 5, "sum").cpu().double()
        torch.testing.assert_close(got, exact.pool(rows, 5, "sum"), atol=1e-5, rtol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize(
    "mask", [R.Padding((25, 25)), R.Causal() & R.Padding((25, 25)), TERMS["keep"]["mask"]], ids=repr
)
def test_hidden_garbage_changes_nothing(mask, garbage, device):
    q, k = torch.randn(2, 1, 20, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    mask = mask.map_tensors(lambda x: x.to(device))
    hidden = ~mask.over(weights(q, k, mask=mask)._call.whole()).expand(2, 1, 20, 40).any(2)[:, 0]
    poisoned = k.masked_fill(hidden[:, None, :, None], garbage)
    clean, dirty = (weights(q, x, mask=mask) for x in (k, poisoned))
    torch.testing.assert_close(clean.topk(2), dirty.topk(2))
    clean, dirty = clean.summary(), dirty.summary()
    for name in (*NAMES, "map"):
        torch.testing.assert_close(getattr(clean, name), getattr(dirty, name))


def test_only_requested_measures_are_returned(device):
    q, k = torch.randn(1, 1, 20, 16, device=device), torch.randn(1, 1, 20, 16, device=device)
    lse = weights(q, k).lse
    found = summarize_generic(
        q, k, lse, want=frozenset(["received"]), scale=0.25, offset=0, config=TileConfig(16, 32, 4, 2)
    )
    assert [name for name, value in found._asdict().items() if value is not None] == ["received"]


@pytest.mark.parametrize(("i", "j"), [(0, 5), (5, 0), (0, 0)])
def test_a_summary_of_nothing_is_nothing(i, j, device):
    A, exact = judged(torch.randn(1, 2, i, 16, device=device), torch.randn(1, 2, j, 16, device=device), {})
    for name in (*NAMES, "map"):
        torch.testing.assert_close(getattr(A.summary(), name).cpu().double(), getattr(exact.summary(), name))
    if j:
        assert not A.mass(torch.zeros(i, dtype=torch.long), torch.arange(j)).any()
