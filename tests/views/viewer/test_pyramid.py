"""The pyramid: every level of any length, cell by cell as a loop would have it; previews near, and marked."""

import pytest
import torch

from regard import Causal, Padding, Prefix, Window, weights
from regard.ops.blocks.pool_bins import Axis, area
from regard.views.viewer import pyramid
from regard.views.viewer.matrix_view import Difference, HeadView, StoredMap, map_of_summary
from regard.views.viewer.pyramid import (
    TILE,
    CellSpan,
    exact,
    from_map,
    has_whole_cells,
    is_finer,
    levels,
    preview,
    span,
)


def by_hand(A, level):
    """Mean and largest entry of each cell, one after the other."""
    A, size = A.double().numpy(), 2**level
    rows, cols = range(0, A.shape[0], size), range(0, A.shape[1], size)
    parts = [[A[y : y + size, x : x + size].ravel() for x in cols] for y in rows]
    mean = torch.tensor([[part.mean() for part in line] for line in parts])
    peak = torch.tensor([[max(part, key=abs) for part in line] for line in parts])
    return mean, peak


def means(A, size):
    """Means of whole cells."""
    return A.double().unflatten(0, (-1, size)).unflatten(2, (-1, size)).mean((1, 3))


def head(n_i, n_j, *, mask=None, summarized=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(1, 1, n, 8, generator=generator) for n in (n_i, n_j))
    A = weights(q, k, mask=mask)
    stored = map_of_summary(A.summary(peaks=True), 0, 0) if summarized else None
    return HeadView(A, 0, 0, stored), A.dense()[0, 0]


@pytest.mark.parametrize(("n_i", "n_j", "count"), [(1, 1, 1), (256, 3, 1), (257, 1, 2), (512, 512, 2), (513, 9, 3)])
def test_the_last_level_is_one_tile(n_i, n_j, count):
    assert levels(n_i, n_j) == count
    last = levels(n_i, n_j) - 1
    assert max(span(n_i, last, 0).cells, span(n_j, last, 0).cells) <= TILE
    assert span(n_i, last, 1).cells == 0


def test_131072_tokens_have_ten_levels():
    assert levels(131072, 131072) == 10


def test_tiles_cover_an_axis_once():
    for n in (1, 7, 255, 256, 257, 1000):
        for level in range(levels(n, n)):
            tiles = [span(n, level, tile) for tile in range(9)]
            covered = [entry for tile in tiles for entry in range(tile.start, tile.stop)]
            assert covered == list(range(n))
            assert all(int(tile.counts().sum()) == tile.stop - tile.start for tile in tiles)


def test_cells_that_hold_no_number_say_so():
    q, k = torch.randn(2, 1, 1, 9, 8)
    q[0, 0, 5] = torch.nan
    A = weights(q, k)
    *_, cells = exact(HeadView(A, 0, 0, None), span(9, 1, 0), span(9, 1, 0))
    for found in (cells.mean, cells.max):
        assert found.isnan().all(1).tolist() == [False, False, True, False, False]
        assert found.isnan().any(1).tolist() == found.isnan().all(1).tolist()


@pytest.mark.parametrize("step", [(2048, 4096), (16, 32), (7, 64)])
@pytest.mark.parametrize(("n_i", "n_j"), [(63, 63), (129, 70), (1, 300), (300, 7)])
def test_cells_are_means_and_largest_entries(monkeypatch, n_i, n_j, step):
    monkeypatch.setattr(pyramid, "STEP", step)
    view, A = head(n_i, n_j, mask=Causal() if n_i <= n_j else None)
    for level in range(levels(n_i, n_j) + 3):
        *_, cells = exact(view, span(n_i, level, 0), span(n_j, level, 0))
        high, wide = (min(TILE * 2**level, n) for n in (n_i, n_j))
        mean, peak = by_hand(A[:high, :wide], level)
        assert (cells.mean - mean).abs().max() < 1e-6
        assert (cells.max - peak).abs().max() < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(20), Causal() & (Window(9) | Prefix(3)), ~Prefix(690), Padding((5,)), Padding((0,))],
    ids=repr,
)
def test_what_a_mask_hides_is_zero_in_every_cell(mask):
    view, A = head(900, 700, mask=mask)
    for level in (1, 2, 4, 6, 8, 9):
        for row, col in ((0, 0), (1, 1), (1, 0)):
            rows, cols = span(900, level, row), span(700, level, col)
            if rows.cells and cols.cells:
                *_, cells = exact(view, rows, cols)
                mean, peak = by_hand(A[rows.start : rows.stop, cols.start : cols.stop], level)
                assert (cells.mean - mean).abs().max() < 1e-6
                assert (cells.max - peak).abs().max() < 1e-6


def test_inner_tiles_begin_where_the_one_before_ends():
    view, A = head(700, 600)
    *_, cells = exact(view, span(700, 1, 1), span(600, 1, 1))
    mean, _ = by_hand(A[512:, 512:], 1)
    assert cells.mean.shape == (94, 44)
    assert (cells.mean - mean).abs().max() < 1e-6


def test_differences_show_the_entry_of_largest_size_with_its_sign():
    (left, A), (right, B) = head(65, 65), head(65, 65, seed=1)
    *_, cells = exact(Difference(left, right), span(65, 3, 0), span(65, 3, 0))
    mean, peak = by_hand(A - B, 3)
    assert (cells.mean - mean).abs().max() < 1e-6
    assert (cells.max - peak).abs().max() < 1e-6
    assert bool((peak < 0).any())
    assert bool((peak > 0).any())


def test_exact_work_comes_in_steps(monkeypatch):
    monkeypatch.setattr(pyramid, "STEP", (16, 32))
    view, _ = head(64, 64)
    found = list(exact(view, span(64, 1, 0), span(64, 1, 0)))
    assert found[:-1] == [None] * 8


@pytest.mark.thorough
@pytest.mark.parametrize(("n_i", "n_j"), [(1024, 1024), (1000, 900), (513, 2100), (700, 5)])
def test_the_map_of_a_summary_is_a_level_of_the_pyramid(n_i, n_j):
    view, A = head(n_i, n_j, summarized=True)
    stored = view.stored_map()
    own = max(axis.size for axis in stored.axes).bit_length() - 1
    assert stored.exact
    for level in range(own, own + 2):
        rows, cols = span(n_i, level, 0), span(n_j, level, 0)
        assert has_whole_cells(stored, rows, cols)
        assert is_finer(stored, rows, cols)
        at = slice(rows.cells), slice(cols.cells)
        found, truth = from_map(stored, rows, cols), by_hand(A, level)
        assert (found.mean - truth[0][at]).abs().max() < 1e-6
        assert (found.max - truth[1][at]).abs().max() < 1e-6
    assert not is_finer(stored, span(n_i, own - 1, 0), span(n_j, own - 1, 0))


def test_previews_keep_the_mass_of_a_map_whose_cells_do_not_fit():
    _, A = head(1000, 900)
    rows, cols = span(1000, 2, 0), span(900, 2, 0)
    axes = Axis.even(1000, 512), Axis.even(900, 512)
    ids = [axis.ids(A.device)[0] for axis in axes]
    sums = torch.zeros(512, 900).index_add_(0, ids[0], A)
    sums = torch.zeros(512, 512).index_add_(1, ids[1], sums)
    stored = StoredMap(sums / area(*axes, A.device), axes, True)
    assert is_finer(stored, rows, cols)
    assert not has_whole_cells(stored, rows, cols)
    found = from_map(stored, rows, cols).mean
    assert from_map(stored, rows, cols).max is None
    counts = rows.counts()[:, None] * cols.counts()
    assert abs(float((found * counts).sum()) - 1000) < 0.01
    assert (found - means(A, 4)).abs().mean() < 0.5 * A.mean()


def test_previews_without_a_map_come_from_rows_within_their_budget(monkeypatch):
    view, A = head(64, 600)
    monkeypatch.setattr(
        pyramid, "MAX_PREVIEW_WEIGHTS", 10 * 1200
    )  # a row takes 600 weights, and 600 more for its statistic
    rows, cols = CellSpan(0, 64, 2), span(600, 2, 0)
    assert len(pyramid.sample_rows(view, rows, cols)) == 10
    found = preview(view, rows, cols).mean
    middle = pyramid.sample_rows(view, rows, cols)
    truth = by_hand(A, 2)[0]
    assert found.shape == (32, 150)
    assert len(middle) <= 32
    lines = A[middle].double().view(len(middle), -1, 4).mean(-1)
    assert all(bool((lines - line).abs().max(1).values.min() < 1e-6) for line in found.double())
    assert truth.shape == (16, 150)
