"""Sequences of different lengths: their cuts on the CPU, and on a GPU what the kernels make of them."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import attend, explain, weights
from regard.ops.backends import sdpa_varlen as module
from regard.ops.backends.sdpa_varlen import (
    LatestPlan,
    attend_varlen,
    cut_sequences,
    dense_mask,
    plan_varlen,
    plan_window,
    row_starts,
    run_dense,
)
from regard.ops.call import Call
from regard.ops.dispatch import choose
from regard.ops.terms.masks.mask_algebra import conjuncts

N = 12
LEFT = torch.arange(N) >= torch.tensor([[3], [0], [N]])
BOTH = LEFT & (torch.arange(N) < torch.tensor([[7], [N], [N]]))
IDS = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
MASKS = {
    "lengths": R.Padding((7, N, 0)),
    "lengths in a tensor": R.Padding(torch.tensor([7, N, 0])),
    "two paddings": R.Padding((7, N, 3)) & R.Padding((9, 5, N)),
    "left": R.Padding(LEFT),
    "both sides": R.Padding(BOTH),
    "packed": R.Documents(IDS),
    "packed, causal": R.Documents(IDS) & R.Causal(),
    "packed by row": R.Documents(torch.stack((IDS, IDS.flip(0), IDS * 0))),
    "packed and padded": R.Documents(IDS) & R.Padding((7, N, 2)),
    "documents without keys": R.Documents(IDS, IDS.clamp(max=1)),
    "causal, lengths": R.Causal() & R.Padding((7, N, 0)),
    "causal, lengths in a tensor": R.Causal() & R.Padding(torch.tensor([7, N, 0])),
    "causal, left": R.Causal() & R.Padding(LEFT),
    "causal, both sides": R.Causal() & R.Padding(BOTH),
}


def drawn(b=3, h=2, g=2, i=N, j=N, d=16, **options):
    torch.manual_seed(0)
    return [torch.randn(b, heads, n, d, **options) for heads, n in ((h, i), (g, j), (g, j))]


def visible(cuts, i, j, *, causal=False):
    """The matrix that sequences with these cuts leave visible, `b i j`, by one call of the kernel or by two."""
    seen = torch.zeros(len(cuts.queries), i, j, dtype=torch.bool)
    for text, (rows, keys) in enumerate(zip(cuts.queries.tolist(), cuts.keys.tolist(), strict=True)):
        assert (rows[-1], keys[-1]) == (i, j)
        row = key = 0
        for last_row, last_key in zip(rows, keys, strict=True):
            part = torch.ones(last_row - row, last_key - key, dtype=torch.bool)
            assert len(part) <= cuts.max_queries
            assert part.shape[1] <= cuts.max_keys
            assert cuts.is_causal or not causal
            seen[text, row:last_row, key:last_key] = part.tril(part.shape[1] - len(part)) if causal else part
            row, key = last_row, last_key
    if cuts.later is not None:
        later = visible(cuts.later, i, j)
        assert not (later.any(-1) & seen.any(-1)).any()  # each query has its keys in one call
        seen |= later
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_sequences_show_what_the_mask_shows(name):
    q, k, v = drawn()
    call = Call.of(q, k, v, mask=MASKS[name])
    cuts = cut_sequences(call)
    want = weights(torch.zeros_like(q), torch.zeros_like(k), mask=MASKS[name], backend="reference").dense()[:, 0] > 0
    assert torch.equal(visible(cuts, N, N, causal="causal" in name), want)


def test_padding_of_other_queries_than_keys_is_cut():
    q, k, v = drawn(i=5, j=9)
    cuts = cut_sequences(Call.of(q, k, v, mask=R.Padding((4, 9, 0))))
    assert visible(cuts, 5, 9).sum((1, 2)).tolist() == [20, 45, 0]


@pytest.mark.parametrize(
    "mask",
    [
        R.Padding(torch.tensor([True, False] * 6)[None]),
        R.Documents(torch.tensor([0, 1, 0, 1] * 3)),
        R.Documents(IDS, IDS.flip(0)),
        R.Causal() & R.Documents(IDS) & R.Padding((7, N, 2)),
    ],
    ids=["gaps", "scattered", "keys in another order", "causal, packed and padded"],
)
def test_masks_of_other_forms_are_not_cut(mask):
    q, k, v = drawn()
    assert cut_sequences(Call.of(q, k, v, mask=mask)) is None


@pytest.mark.parametrize("name", [name for name in MASKS if name.startswith("causal,")])
def test_fewer_causal_queries_than_keys_are_cut_too(name):
    q, k, v = drawn(i=5)
    cuts = cut_sequences(Call.of(q, k, v, mask=MASKS[name]))
    want = weights(torch.zeros_like(q), torch.zeros_like(k), mask=MASKS[name], backend="reference").dense()[:, 0] > 0
    assert torch.equal(visible(cuts, 5, N, causal=True), want)


def test_padding_on_the_left_alone_takes_one_call():
    cuts = cut_sequences(Call.of(*drawn(), mask=R.Causal() & R.Padding(LEFT)))
    assert cuts.later is None


@pytest.mark.parametrize("i", [N, 5])
@pytest.mark.parametrize("name", ["lengths", "lengths in a tensor", "both sides", "all whole"])
@pytest.mark.parametrize("statistic", [False, True])
def test_a_short_causal_text_is_one_call_with_a_mask(name, i, statistic):
    masks = {
        "lengths": R.Padding((7, N, N - i + 1)),
        "lengths in a tensor": R.Padding(torch.tensor([7, N, N])),
        "both sides": R.Padding(torch.arange(N) >= torch.tensor([[0], [0], [N - i]])) & R.Padding((N - 1, N, N)),
        "all whole": R.Padding((N, N, N)),
    }
    mask = R.Causal() & masks[name]
    q, k, v = leaves = drawn(i=i, requires_grad=True)
    dense = dense_mask(Call.of(q, k, v, mask=mask))
    assert (dense.seen is None) == (name == "all whole")
    assert dense.added.stride(-2) % 16 == 0
    want, A = attend(q, k, v, mask=mask, backend="reference"), weights(q, k, mask=mask, backend="reference")
    out, lse = run_dense(dense, 0.25, q, k, v, dropout=0.0, statistic=statistic)
    torch.testing.assert_close(out, want)
    if statistic:
        torch.testing.assert_close(lse.squeeze(-1), A.statistic)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad))
    seen = (A.dense() > 0).any(1).any(1)[:, None, :, None]
    dirty = [q, *(torch.where(seen, x, torch.nan).detach().requires_grad_() for x in (k, v))]
    out, _ = run_dense(dense, 0.25, *dirty, dropout=0.0, statistic=statistic)
    torch.testing.assert_close(out, want)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, dirty, grad))


def test_one_call_with_a_mask_is_for_very_short_texts_and_for_backwards(monkeypatch):
    monkeypatch.setattr(module, "MAX_DENSE_FORWARD", N - 1)
    q, k, v = drawn()
    assert not module._is_faster_dense(q, k, v)
    v.requires_grad_()
    assert module._is_faster_dense(q, k, v)
    with torch.no_grad():
        assert not module._is_faster_dense(q, k, v)
        assert module._is_faster_dense(q[:, :, 1:], k, v)


def test_long_texts_and_texts_without_keys_have_no_mask_of_numbers(monkeypatch):
    call = Call.of(*drawn(), mask=R.Causal() & R.Padding((7, N, 0)))
    assert dense_mask(call) is None
    call = Call.of(*drawn(), mask=R.Causal() & R.Padding((7, N, 1)))
    assert dense_mask(call) is not None
    monkeypatch.setattr(module, "MAX_DENSE_ENTRIES", 3 * N * N - 1)
    assert dense_mask(call) is None


@pytest.mark.parametrize(("i", "offset"), [(5, 2), (N + 3, None)])
def test_causal_queries_that_do_not_end_at_the_last_key_are_not_cut(i, offset):
    call = Call.of(*drawn(i=i), mask=R.Causal() & R.Padding((7, N, 0)), offset=offset)
    assert cut_sequences(call) is None


def test_each_head_may_be_a_row_of_its_own():
    ends = torch.tensor([[2, 5], [4, 5]])
    assert row_starts(ends, 1).tolist() == [0, 2, 5, 9, 10]
    assert row_starts(ends, 2).tolist() == [0, 2, 5, 7, 10, 14, 15, 19, 20]


@pytest.mark.parametrize(
    ("mask", "i", "want"),
    [
        (R.Causal() & R.Window(4), N, (3, 0, 0)),
        (R.Window(4), N, (3, 3, 0)),
        (R.Window(before=5, after=1) & R.Window(4), N, (3, 1, 0)),
        (R.Causal() & R.Window(4), 3, (3, 0, N - 3 - 3)),
        (R.Causal(), 5, (None, None, 0)),
        (R.Causal() & R.Window(4), 1, None),
        (R.Causal(), N, None),
        (R.Window((4, 2)), N, None),
        (R.Window(4), 3, None),
    ],
    ids=str,
)
def test_a_window_is_how_far_a_query_sees(mask, i, want):
    call = Call.of(*drawn(i=i, dtype=torch.bfloat16), mask=mask)
    plan = plan_window(call, list(conjuncts(mask)), scale=1.0)
    assert (plan and (plan.before, plan.after, plan.first_key)) == want


def test_on_the_cpu_these_kernels_run_nothing():
    q, k, v = drawn()
    assert attend_varlen(q, k, v, R.Padding((7, N, 0))) is None
    assert plan_varlen(Call.of(q, k, v, mask=R.Padding((7, N, 0)))) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "grouped"])
@pytest.mark.parametrize(
    "name", [*MASKS, "causal, no text is empty", "window", "window, both sides", "packed, window", "chunk"]
)
def test_outputs_statistics_and_gradients_are_those_of_the_matrix(name, layout):
    more = {
        "causal, no text is empty": R.Causal() & R.Padding((7, N, 1)),
        "window": R.Causal() & R.Window(4),
        "window, both sides": R.Window(before=4, after=2),
        "packed, window": R.Causal() & R.Documents(IDS) & R.Window(2),
        "chunk": R.Causal() & R.Window(3),
    }
    mask = (MASKS | more)[name].map_tensors(torch.Tensor.cuda)
    grouped, i = layout == "grouped", 5 if name == "chunk" else N
    q, k, v = leaves = drawn(h=4, g=2 if grouped else 4, i=i, device="cuda", dtype=torch.bfloat16)
    if layout == "tokens first":
        q, k, v = leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    for x in leaves:
        x.requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    A, exact = weights(q, k, mask=mask), weights(*wide[:2], mask=mask, backend="reference")
    want, got = exact @ wide[2], attend(q, k, v, mask=mask)
    off = 2e-2
    torch.testing.assert_close(got.double(), want, atol=off, rtol=off)
    torch.testing.assert_close((A @ v).double(), want, atol=off, rtol=off)
    torch.testing.assert_close(A.statistic.double(), exact.statistic, atol=off, rtol=off)
    grad = torch.randn_like(got)
    pairs = zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, wide, grad.double()), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, atol=3 * off, rtol=3 * off)
    call = Call.of(q, k, v, mask=mask)
    assert plan_varlen(call) is not None
    assert choose(call).backend == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name",
    ["lengths in a tensor", "left", "causal, left", "causal, lengths", "causal, no text is empty", "packed and padded"],
)
def test_hidden_garbage_does_not_leak(name, dtype):
    mask = (MASKS | {"causal, no text is empty": R.Causal() & R.Padding((7, N, 1))})[name].map_tensors(
        torch.Tensor.cuda
    )
    q, k, v = drawn(device="cuda", dtype=torch.bfloat16)
    seen = (weights(q * 0, k * 0, mask=mask, backend="reference").dense() > 0).any(-2)[..., None]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = [
        leaves[0],
        *(torch.where(seen, x, torch.nan).detach().requires_grad_() for x in leaves[1:]),
    ]
    clean, got = attend(*leaves, mask=mask), attend(*dirty, mask=mask)
    assert torch.equal(clean, got)
    for a, b in zip(torch.autograd.grad(clean.sum(), leaves), torch.autograd.grad(got.sum(), dirty), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_lengths_that_change_in_place_are_read_again_also_in_a_graph():
    q, k, v = drawn(device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([7, N, 2], device="cuda")
    mask = R.Padding(lengths)
    attend(q, k, v, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend(q, k, v, mask=mask)
    lengths.copy_(torch.tensor([3, 1, N], device="cuda"))
    graph.replay()
    want = attend(q, k, v, mask=R.Padding((3, 1, N)), backend="reference")
    for got in (replayed, attend(q, k, v, mask=mask)):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert "sdpa" in explain(q, k, v, mask=mask)


def test_the_plan_of_the_latest_mask_holds_until_its_lengths_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lengths = torch.tensor([3, 4])
    latest = LatestPlan(R.Padding(lengths), (), [(lengths, lengths._version)], None)
    assert latest.is_current()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not latest.is_current()  # a replay reads them again
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lengths += 1
    assert not latest.is_current()
    assert LatestPlan(R.Causal(), (), [], None).is_current()
