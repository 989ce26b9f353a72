"""Reductions by the kernel are those of the dense matrix in float64."""

from __future__ import annotations

import platform

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels.summary.bins import assign_bins
from regard.kernels.summary.generic import summarize_generic
from regard.kernels.tiles import TileConfig
from regard.ops.blocks import measures
from regard.ops.blocks.pool_bins import Axis
from regard.ops.fused import kernel_reductions as fused

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


@pytest.fixture
def no_walk(monkeypatch):
    """Whoever asks for blocks of rows fails."""
    for name in ("topk", "bin_sums", "bin_maxima"):
        monkeypatch.delattr(measures, name)


FEW = {name: TERMS[name] for name in ("plain", "causal lengths", "documents", "added", "sink")}


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


@pytest.mark.interpreter
@pytest.mark.usefixtures("no_walk")
@pytest.mark.parametrize("terms", [*FEW.values(), *(TERMS[name] for name in ("dense", "alibi", "cap", "t5"))])
def test_topk_equals_topk_of_the_dense_matrix(terms, device, monkeypatch):
    monkeypatch.setattr("regard.ops.fused.topk_entries.STRIP_BYTES", 1)
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    B = exact.dense()
    for count in (1, 2):
        values, keys = (x.cpu() for x in A.topk(count))
        torch.testing.assert_close(values.double(), B.topk(count).values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(B.gather(-1, keys), values.double(), atol=1e-5, rtol=1e-5)
        assert (keys.sort(-1).values.diff() > 0).all()


@pytest.mark.usefixtures("no_walk")
def test_topk_finds_entries_in_one_run_and_in_the_last_run(device):
    q, k = torch.ones(1, 1, 3, 16, device=device), torch.zeros(1, 1, 83, 16, device=device)
    k[:, :, 32:36] = torch.tensor([4.0, 3.0, 2.0, 1.0], device=device)[:, None]
    k[:, :, 82] = 2.5
    found = weights(q, k).topk(5)
    assert found.indices.tolist() == [[[[32, 33, 82, 34, 35]] * 3]]


@pytest.mark.usefixtures("no_walk")
def test_topk_returns_no_key_past_the_end(device):
    q, k = torch.ones(1, 1, 3, 16, device=device), -torch.ones(1, 1, 83, 16, device=device)
    k[:, :, 80:] = torch.tensor([-0.3, -0.2, -0.1], device=device)[:, None]
    assert weights(q, k).topk(4).indices[..., :3].tolist() == [[[[82, 81, 80]] * 3]]
    assert weights(q, k).topk(4).indices.max() < 83


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


@pytest.mark.parametrize("shifted", [True, False], ids=["softmax", "with a sink"])
@pytest.mark.parametrize("bins", [5, 7, 75], ids=["parts of their own", "across parts", "a row each"])
def test_half_precision_sums_keep_small_weights(bins, shifted, device):
    """With a sink, rows sum to less than 1."""
    n = 80 if bins == 5 else 75
    q, k = (2 * torch.randn(1, 1, n, 16, device=device).half() for _ in range(2))
    k[:, :, 0] = 12 * torch.nn.functional.normalize(q.mean(2), dim=-1)  # most of them look there
    s = q.double() @ k.double().mT / 4
    lse = torch.logsumexp(s, -1) + (0 if shifted else 0.5)
    A = (s - lse[..., None]).exp()
    ids = torch.arange(n, device=device) * bins // n
    even = (n // bins,) * 2 if n % bins == 0 else None
    config = TileConfig(32, 32, 4, 2)
    found = summarize_generic(
        q, k, lse.float(), want=frozenset((*NAMES, "map")), scale=0.25, offset=0, config=config, sums_to_one=shifted,
        bins=assign_bins(ids.int(), ids.int(), (bins, bins), config, even),
    )  # fmt: skip
    member = torch.nn.functional.one_hot(ids, bins).double()
    assert A.min() < 2**-20
    torch.testing.assert_close(found.map.double(), member.mT @ A @ member, atol=1e-9, rtol=2e-3)
    torch.testing.assert_close(found.received.double(), A.sum(-2), atol=1e-9, rtol=1e-3)
    torch.testing.assert_close(found.max.double(), A.amax(-1), atol=0, rtol=1e-4)
    torch.testing.assert_close(found.entropy.double(), -(A * A.log()).sum(-1), atol=1e-4, rtol=1e-4)


def test_bins_that_do_not_fill_their_eights_are_filled_up():
    ids = (torch.arange(20) * 3 // 20).int()
    bins = assign_bins(ids, torch.zeros(20).int(), (3, 1), TileConfig(16, 32, 4, 2), None, parted=True)
    assert bins.parts == 2
    assert bins.row_order.view(-1, 8).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 20],
        [7, 8, 9, 10, 11, 12, 13, 20],
        [14, 15, 16, 17, 18, 19, 20, 20],
        [20] * 8,
    ]


def test_scattered_bins_are_gathered():
    rows, cols, config = (torch.arange(9) % 2).int(), torch.zeros(9).int(), TileConfig(16, 32, 4, 2)
    parted = assign_bins(rows, cols, (2, 1), config, None, parted=True)
    assert parted.row_order.view(-1, 8).tolist() == [[0, 2, 4, 6, 8, 9, 9, 9], [1, 3, 5, 7, 9, 9, 9, 9]]
    gathered = assign_bins(rows, cols, (2, 1), config, None)
    assert gathered.row_order.tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, *[9] * 7]
    assert gathered.slots.tolist() == [[*[0] * 5, *[1] * 4, *[-1] * 7]]
    assert gathered.owners.tolist() == [[0, 1, *[-1] * 6]]


def test_bins_of_a_tile_have_slots_of_their_own():
    rows = torch.arange(21).int() // 4
    bins = assign_bins(rows, torch.zeros(21).int(), (6, 1), TileConfig(16, 32, 4, 2), None)
    assert bins.row_order is None
    assert bins.slots.tolist() == [[n // 4 for n in range(16)], [0, 0, 0, 0, 1, *[-1] * 11]]
    assert bins.owners.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [4, 5, *[-1] * 6]]


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


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["plain", "causal", "documents", "alibi", "added", "cap"])
def test_a_nan_row_is_not_treated_as_an_empty_row(name, device):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    seen = judged(q, k, TERMS[name])[1].dense() != 0
    k[1, 0, 30, 5] = torch.nan
    A, _ = judged(q, k, TERMS[name])
    rows = seen[..., 30] & torch.tensor([False, True])[:, None, None]
    summary = A.summary()
    for got in (summary.entropy, summary.max, summary.distance, A.topk(1).values[..., 0]):
        assert torch.equal(got.isnan().cpu(), rows)
    cells = seen & rows[..., None]
    assert torch.equal(summary.received.isnan().cpu(), cells.any(-2))
    # A GPU's NaN has no sign. The interpreter has the processor's, on x86 a minus here, which maxima by bits lose.
    if device != "cpu" or name != "alibi" or platform.machine() == "aarch64":
        assert torch.equal(A.pool(19, 40, "max").isnan().cpu(), cells)


def test_a_key_that_no_query_sees_may_hold_anything(device):
    q, k = torch.randn(1, 2, 5, 16, device=device), torch.randn(1, 2, 40, 16, device=device)
    k[:, :, 10] = torch.nan  # after the last query, in the tile of keys it sees
    A = weights(q, k, mask=R.Causal(), offset=3)
    summary = A.summary()
    for got in (A.received(), summary.received, summary.map, A.pool(5, 40, "max"), A.T @ q):
        assert got.isfinite().all()
