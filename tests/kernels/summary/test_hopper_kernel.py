"""The kernel laid out for Hopper: how work is dealt out, what it takes, and on such a GPU its measures in float64."""

from __future__ import annotations

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
from regard.kernels.summary.hopper_pdl import allow_next_kernel
from regard.kernels.tiles import Pattern
from regard.ops.blocks.pool_bins import Axis
from regard.ops.fused import kernel_reductions as fused
from regard.ops.weights import choose_reducer, map_axes
from tests.kernels import compile_hopper as compiled

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
NAMES = ("entropy", "received", "max", "distance", "map")


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
@pytest.mark.parametrize("d", [64, 80, 128, 192, 256])
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
@pytest.mark.parametrize("d", [32, 64, 128, 256])
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


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_features_beside_those_of_a_narrow_head_may_hold_anything():
    q, k = (torch.randn(1, 200, 3, 80, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    k[:, 1] = torch.nan
    A = weights(q, k)
    assert fused._band_for_hopper(A._call, q, frozenset(("received",)), None) is not None
    assert A.received()[:, 0].isfinite().all()


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
