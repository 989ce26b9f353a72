"""The kernel laid out for Hopper: how work is dealt out, what it takes, and on such a GPU its measures in float64."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import regard as R
from regard import weights
from regard.kernels.summary import hopper_launcher as kernel
from regard.kernels.summary.generic import SummaryTensors
from regard.kernels.summary.hopper_pdl import allow_next_kernel
from regard.kernels.summary.hopper_schedule import split_causal_blocks, split_even_blocks
from regard.kernels.tiles import Pattern
from regard.ops.blocks.pool_bins import Axis
from regard.ops.fused import kernel_reductions as fused
from regard.ops.weights import choose_reducer, map_axes
from tests.kernels import compile_hopper as compiled

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
NAMES = ("entropy", "received", "max", "distance", "map")


def rounds(lengths, at_once):
    """How long it takes if whoever is done takes the next."""
    ends = [0.0] * at_once
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def portions(split, blocks):
    """By block, how many programs share its keys."""
    return (
        [split.to_first] * split.first
        + [split.to_second] * split.second
        + [split.to_rest] * (blocks - split.first - split.second)
    )


@pytest.mark.parametrize("at_once", [264, 396])
@pytest.mark.parametrize("blocks", [1, 16, 256, 264, 395, 396, 400, 512, 1024, 2048, 8192])
def test_split_even_blocks_covers_all_blocks_and_processors_finish_together(blocks, at_once):
    split = split_even_blocks(blocks, at_once)
    shared = portions(split, blocks)
    assert len(shared) == blocks
    assert sum(shared) == split.programs(blocks)
    taken = rounds([1 / of for of in shared for _ in range(of)], at_once)
    assert blocks / at_once <= taken <= blocks / at_once + 1 / 4


@pytest.mark.parametrize(("blocks", "at_once", "places"), [(512, 396, 32), (256, 396, 16), (128, 264, 8), (3, 396, 3)])
def test_split_causal_blocks_shares_the_longest_blocks(blocks, at_once, places):
    split = split_causal_blocks(blocks, at_once, places)
    shared = portions(split, blocks)
    assert len(shared) == blocks
    assert sum(shared) == split.programs(blocks)
    lengths = [2 * (places - n * places // blocks) for n in range(blocks)]  # in tiles, the longest first
    apart = [length / of for length, of in zip(lengths, shared, strict=True) for _ in range(of)]
    assert split.to_first == 1 or lengths[0] / split.to_first >= 8
    assert rounds(apart, at_once) <= rounds(lengths, at_once)
    if blocks > 100:
        assert rounds(apart, at_once) < 0.85 * rounds(lengths, at_once)


def test_outputs_do_not_overlap_and_are_padded_by_a_tile(monkeypatch):
    monkeypatch.setattr(kernel, "zeros_for_next_kernel", lambda n, device: torch.zeros(n, device=device))
    shapes = {"received": (1, 2, 70), "map": (1, 2, 3, 4), "entropy": (1, 2, 64)}
    found = kernel._make_outputs(shapes, torch.device("cpu"), map_is_written=False)
    taken = {}
    for name, shape in shapes.items():
        x = getattr(found, name)
        assert x.shape == shape
        assert not x.any()
        assert not x._is_view()  # so that it may be written to where gradients flow
        first = x.data_ptr() // 4
        taken[name] = range(first, first + x.numel() + kernel.TILE_KEYS)
        assert x.data_ptr() % 16 == 0
        assert (x.storage_offset() + len(taken[name])) * 4 <= x.untyped_storage().nbytes()
    assert not set(taken["received"]) & set(taken["entropy"])
    assert found.map.untyped_storage().data_ptr() != found.entropy.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("takes", "d", "dtype", "sizes"),
    [
        (True, 64, torch.bfloat16, None),
        (True, 128, torch.float16, (8, 32)),
        (True, 64, torch.float16, (8, 8)),
        (False, 32, torch.bfloat16, None),
        (False, 64, torch.float32, None),
        (False, 64, torch.bfloat16, (4, 8)),
        (False, 64, torch.bfloat16, (8, 4)),
        (False, 64, torch.bfloat16, (12, 16)),
        (False, 64, torch.bfloat16, (None, 16)),
    ],
)
def test_is_supported(takes, d, dtype, sizes):
    assert kernel.is_supported(torch.zeros(1, 1, 9, d, dtype=dtype), sizes) is takes


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


COPIED = ("features apart", "off its bytes")
STORED = {
    "as they come": lambda b, g, n, d: torch.randn(b, g, n, d),
    "heads side by side": lambda b, g, n, d: torch.randn(b, n, g, d).transpose(1, 2),
    "beside values": lambda b, g, n, d: torch.randn(b, n, 2, g, d)[:, :, 0].transpose(1, 2),
    "some heads": lambda b, g, n, d: torch.randn(b, 2 * g, n, d)[:, :g],
    "part of a cache": lambda b, g, n, d: torch.randn(b, g, 3 * n, d)[:, :, n : 2 * n],
    "features apart": lambda b, g, n, d: torch.randn(b, g, d, n).transpose(2, 3),
    "off its bytes": lambda b, g, n, d: torch.randn(b * g * n * d + 1)[1:].view(b, g, n, d),
    "one for all": lambda b, g, n, d: torch.randn(1, g, n, d).expand(b, g, n, d),
}


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("stored", STORED)
def test_keys_as_matrix_addresses_every_head_in_any_memory_layout(stored, b, g):
    k = STORED[stored](b, g, 10, 64)
    matrix, (batch, head), side = kernel.keys_as_matrix(k)
    assert (matrix.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()) is (stored not in COPIED)
    assert matrix.stride(1) == 1
    assert matrix.stride(0) % 16 == matrix.data_ptr() % 16 == 0
    for m in range(b):
        for h in range(g):
            row = m * batch + h * head
            assert torch.equal(matrix[row : row + 10, h * side : h * side + 64], k[m, h])


@pytest.mark.parametrize(("n", "m"), [(5, 0), (0, 5)])
def test_without_queries_or_keys_all_measures_are_zero(n, m, monkeypatch):
    q, k = torch.ones(1, 2, n, 64, dtype=torch.bfloat16), torch.ones(1, 2, m, 64, dtype=torch.bfloat16)
    asked = {"want": frozenset(NAMES), "shape": (2, 3), "bin_sizes": (8, 8)}
    monkeypatch.setattr(torch, "empty", lambda sizes, **options: torch.full(sizes, float("nan"), **options))
    torch.set_default_dtype(torch.float64)  # what is asked for is float32 all the same
    try:
        found = kernel.summarize_hopper(q, k, torch.zeros(1, 2, n), scale=1.0, offset=0, pattern=Pattern(), **asked)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(measure.dtype == torch.float32 for measure in found if measure is not None)
    assert torch.equal(found.received, torch.zeros(1, 2, m))
    assert torch.equal(found.map, torch.zeros(1, 2, 2, 3))
    for measure in (found.entropy, found.max, found.distance):
        assert torch.equal(measure, torch.zeros(1, 2, n))


@pytest.mark.compiled
@pytest.mark.parametrize("kind", compiled.KINDS)
def test_the_kernel_compiles_for_any_call(kind):
    """Apart from these tests, in which kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_hopper", kind], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "_clear_kernel hopper_summary_kernel\n"


CASES = {
    "plain": ((1, 4, 2, 1024, 1024), (32, 32), {}, {}),
    "causal": ((2, 4, 1, 512, 512), (16, 64), {"mask": R.Causal()}, {}),
    "bins of 8": ((1, 2, 2, 1024, 1024), (128, 128), {"mask": R.Causal()}, {}),
    "bins of 8, all seen": ((1, 2, 2, 1024, 1024), (128, 128), {}, {}),
    "bins of 8, the last rows short": ((1, 2, 2, 1000, 1024), (125, 128), {}, {}),
    "bins of 8 and 128": ((1, 2, 2, 512, 512), (64, 4), {}, {}),
    "one bin": ((1, 2, 2, 512, 512), (1, 1), {"mask": R.Causal()}, {}),
    "half a tile": ((1, 2, 1, 96, 96), (6, 6), {"mask": R.Causal()}, {}),
    "fewer queries": ((1, 4, 4, 256, 2048), (16, 64), {"mask": R.Causal()}, {}),
    "more queries": ((1, 2, 1, 1024, 512), (64, 16), {"mask": R.Causal()}, {}),
    "an offset": ((1, 2, 2, 512, 512), (32, 32), {"mask": R.Causal()}, {"offset": 100}),
    "lengths": ((3, 2, 2, 512, 512), (32, 32), {"mask": R.Causal() & R.Padding((512, 100, 0))}, {}),
    "lengths alone": ((2, 2, 2, 512, 512), (32, 32), {"mask": R.Padding((77, 300))}, {}),
    "many rows": ((3, 16, 8, 1536, 1536), (48, 48), {}, {}),
    "many rows, causal": ((3, 16, 8, 1536, 1536), (48, 48), {"mask": R.Causal()}, {}),
    "many rows, lengths": ((3, 16, 8, 1536, 1536), (48, 48), {"mask": R.Padding((1536, 40, 700))}, {}),
    "whole cells, lengths": ((3, 4, 4, 1000, 1024), (125, 128), {"mask": R.Padding((1024, 300, 0))}, {}),
    "many rows, few keys": ((2, 16, 16, 1536, 96), (48, 12), {}, {}),
    "another scale": ((1, 2, 2, 512, 512), (32, 32), {"score": R.Dot(scale=-0.3)}, {}),
}


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_measures_equal_the_definition(case, d, dtype):
    (b, h, g, i, j), shape, terms, options = CASES[case]
    q = torch.randn(b, h, i, d, device="cuda", dtype=dtype)
    k = torch.randn(b, j, g, d, device="cuda", dtype=dtype).transpose(1, 2)
    A, exact = (weights(x, y, **terms, **options) for x, y in ((q, k), (q.double(), k.double())))
    bins = fused.Mesh(Axis.even(i, shape[0]), Axis.even(j, shape[1]), q.device)
    assert fused._band_for_hopper(A._call, q, frozenset(NAMES), bins) is not None
    found = fused.reduce_by_kernel(A._call, choose_reducer(A._call).row_statistic(), frozenset(NAMES), bins)
    for name in NAMES:
        want = exact.pool(*shape) if name == "map" else getattr(exact, name)()
        close = {"atol": 1e-3 if name == "distance" else 2e-5, "rtol": 2e-4}
        torch.testing.assert_close(found[name].double(), want, **close, msg=lambda m, name=name: name + m)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("mask", [None, R.Causal()], ids=["plain", "causal"])
def test_a_long_sequence_has_the_measures_of_the_generic_kernel(mask, monkeypatch):
    q, k = (torch.randn(1, 2, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = weights(q, k, mask=mask).summary()
    monkeypatch.setattr(fused, "_band_for_hopper", lambda *call: None)
    other = weights(q, k, mask=mask).summary()
    for name in NAMES:
        got, want = getattr(found, name), getattr(other, name)
        torch.testing.assert_close(
            got, want, atol=1e-5 * float(want.max()), rtol=1e-4, msg=lambda m, name=name: name + m
        )


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (63, 63), (64, 64), (129, 129), (1000, 1000), (77, 301), (301, 77)])
@pytest.mark.parametrize("mask", [None, R.Causal()], ids=["plain", "causal"])
def test_single_measures_of_any_length_equal_the_definition(mask, n, m, d):
    q, k = (torch.randn(2, 3, size, d, device="cuda", dtype=torch.bfloat16) for size in (n, m))
    A, exact = weights(q, k, mask=mask), weights(q.double(), k.double(), mask=mask)
    assert fused._band_for_hopper(A._call, q, frozenset(("received",)), None) is not None
    for name in NAMES[:4]:
        got, want = getattr(A, name)().double(), getattr(exact, name)()
        torch.testing.assert_close(got, want, atol=1e-3 if name == "distance" else 2e-5, rtol=2e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("mask", [None, R.Causal()], ids=["plain", "causal"])
@pytest.mark.parametrize(("n", "m"), [(4097, 4097), (5000, 5000), (4100, 9000), (9000, 4100)])
def test_a_sequence_of_any_length_has_a_map(n, m, mask):
    """Whose last cells are of fewer entries."""
    q, k = (torch.randn(1, 2, size, 64, device="cuda", dtype=torch.bfloat16) for size in (n, m))
    A = weights(q, k, mask=mask)
    mesh = fused.Mesh(*map_axes(n, m), q.device)
    assert fused._band_for_hopper(A._call, q, frozenset(NAMES), mesh) is not None
    exact = weights(q.double(), k.double(), mask=mask).summary()
    torch.testing.assert_close(A.summary().map.double(), exact.map, atol=1e-7, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("mask", [None, R.Causal()], ids=["plain", "causal"])
def test_a_nan_row_is_not_treated_as_an_empty_row(mask):
    q, k = (torch.randn(2, 2, 150, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k[1, 0, 90, 5] = torch.nan
    A = weights(q, k, mask=mask)
    assert fused._band_for_hopper(A._call, q, frozenset(NAMES[:4]), None) is not None
    rows, keys = (torch.zeros(2, 2, 150, dtype=torch.bool) for _ in range(2))
    rows[1, 0, 0 if mask is None else 90 :] = True
    keys[1, 0] = True
    for name in ("entropy", "max", "distance"):
        assert torch.equal(getattr(A, name)().isnan().cpu(), rows), name
    assert torch.equal(A.received().isnan().cpu(), keys)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_key_that_no_query_sees_may_hold_anything():
    q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 40))
    k[:, :, 10] = torch.nan  # after the last query, in the tile of keys it sees
    A = weights(q, k, mask=R.Causal(), offset=3)
    assert fused._band_for_hopper(A._call, q, frozenset(("received",)), None) is not None
    assert A.received().isfinite().all()


@gluon.jit
def _copy_late(X, OUT):
    """The kernel that follows may begin long before anything is written."""
    allow_next_kernel()
    for _ in gl.static_range(20):  # about a millisecond each, longer than Python takes
        gl.inline_asm_elementwise("nanosleep.u32 1000000; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(OUT + at, gl.load(X + at))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("want", [{"map"}, {"received"}, set(NAMES)], ids=["map", "received", "all"])
@pytest.mark.parametrize("size", [8, 128])
def test_the_kernel_waits_for_kernels_that_write_its_inputs(size, want):
    ready = torch.randn(2, 8, 16 * size, 64, device="cuda", dtype=torch.bfloat16)
    lse = torch.logsumexp(ready.float() @ ready.float().mT, -1)
    terms = {"want": frozenset(want), "scale": 1.0, "offset": 0, "pattern": Pattern(), "shape": (16, 16)}
    expected = kernel.summarize_hopper(ready, ready, lse, bin_sizes=(size, size), **terms)
    late = torch.zeros_like(ready)
    _copy_late[(ready.numel() // 1024,)](ready, late, num_warps=4)
    found = kernel.summarize_hopper(late, late, lse, bin_sizes=(size, size), **terms)
    for name in want:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_received_mass_may_be_changed_in_place_and_differentiated():
    q, k = (torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    share = weights(q, k).received()
    share /= 100
    share[..., 0].sum().backward()
    assert q.grad.abs().sum() > 0
