"""PyTorch's fused kernel in one call: what it takes, and what hidden garbage may not do to it."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import attend, weights
from regard.ops.backends import reference, sdpa
from regard.ops.call import Call
from regard.ops.dispatch import choose
from tests.ops.inputs import LENGTHS, qkv

KEEP = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.3


SINGLE = {
    "plain": None,
    "causal": R.Causal(),
    "lengths": R.Padding(LENGTHS),
    "keep": R.Padding(KEEP),
    "both": R.Padding(KEEP) & R.Padding(LENGTHS),
    "causal lengths": R.Causal() & R.Padding(LENGTHS),
    "causal keep": R.Padding(KEEP) & R.Causal(),
}


@pytest.mark.parametrize("mask", SINGLE.values(), ids=SINGLE)
@pytest.mark.parametrize("shared", [None, 2])
def test_plain_causal_and_padded_calls_are_one_call_of_the_kernel(mask, shared, calls):
    leaves = [x.double().requires_grad_() for x in qkv(shared=shared)]
    out = attend(*leaves, mask=mask, backend="sdpa")
    assert calls == ["run_fused"]
    want = attend(*leaves, mask=mask, backend="reference")
    torch.testing.assert_close(out, want)
    grads = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, want))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", SINGLE.values(), ids=SINGLE)
def test_the_statistic_of_a_single_call_is_that_of_the_reference(mask):
    call = Call.of(*qkv(), mask=mask)
    torch.testing.assert_close(sdpa.plan(call).run()[1], reference.plan(call).run()[1])


@pytest.mark.parametrize("mask", [R.Padding((5, 0)), R.Prefix(0), R.Causal() & R.Padding((5, 0))], ids=str)
def test_rows_that_see_nothing_have_an_lse_of_minus_infinity(mask):
    out, lse = sdpa.plan(Call.of(*qkv(20), mask=mask)).run()
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()


def test_one_query_sees_every_key_under_causal(calls):
    q, k, v = qkv(1, 40)
    torch.testing.assert_close(attend(q, k, v, mask=R.Causal(), backend="sdpa"), attend(q, k, v, backend="reference"))
    earlier = attend(q, k, v, mask=R.Causal(), offset=20, backend="sdpa")
    torch.testing.assert_close(earlier, attend(q, k[:, :, :21], v[:, :, :21], backend="reference"))
    assert calls == ["run_fused", "run_fused"]


def test_small_problems_are_one_call_with_the_mask_made_whole(calls):
    q, k, v = qkv(20)
    terms = {"mask": R.Window(3) | R.Global(1), "bias": R.Alibi(4)}
    torch.testing.assert_close(attend(q, k, v, **terms), attend(q, k, v, **terms, backend="reference"))
    assert calls == ["run_fused"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scale", "shift"), [(2.0, 30.0), (0.0, 7e4), (0.0, -1e9)])
def test_small_problems_in_half_precision_do_not_round_the_bias(scale, shift, dtype, calls):
    given = [x.to(dtype) for x in qkv()]
    bias = R.Added(scale * torch.randn(40, 40) + shift)
    exact = attend(*(x.double() for x in given), bias=bias, backend="reference")
    if shift < -1e8:  # in float32 all scores are the same
        exact = given[2].double().mean(2, keepdim=True)
    ours, theirs = (attend(*given, bias=bias, backend=name) for name in (None, "reference"))
    assert calls == ["run_fused"]
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


SHORT = {
    "square": (qkv(), None, True),
    "causal": (qkv(), R.Causal(), True),
    "grouped": (qkv(shared=2), R.Causal(), True),
    "one query": (qkv(1, 30), R.Causal(), True),
    "cross": (qkv(7, 30), None, True),
    "unequal causal": (qkv(7, 30), R.Causal(), False),
    "masked": (qkv(), R.Window(3), False),
    "padded": (qkv(), R.Padding(LENGTHS), False),
    "empty": ([x[:, :, :0] for x in qkv()], None, False),
    "three dims": ([x[0] for x in qkv()], None, False),
    "five dims": ([x[None] for x in qkv()], None, False),
    "dtypes": ((qkv()[0].double(), *qkv()[1:]), None, False),
    "integers": ([x.long() for x in qkv()], None, False),
    "batches": ((qkv()[0][:1], *qkv()[1:]), None, False),
    "widths": ((qkv()[0][..., :4], *qkv()[1:]), None, False),
    "value width": ((*qkv()[:2], qkv()[2][..., :4]), None, False),
    "heads": ((qkv(heads=3)[0], *qkv(shared=2)[1:]), None, False),
    "no tensor": ((1, 2, 3), None, False),
    "no mask": (qkv(), "causal", False),
}


@pytest.mark.parametrize(("tensors", "mask", "taken"), SHORT.values(), ids=SHORT)
def test_the_shortcut_takes_plain_and_causal_calls_of_well_made_tensors(tensors, mask, taken):
    out = sdpa.attend_directly(*tensors, mask)
    assert (out is not None) == taken
    if taken:
        torch.testing.assert_close(out, attend(*tensors, mask=mask, backend="reference"))


def test_the_shortcut_takes_the_usual_offset_and_no_other():
    q, k, v = qkv(1, 30)
    assert sdpa.attend_directly(q, k, v, R.Causal(), 29) is not None
    for offset in (28, True, 29.0, "29"):
        assert sdpa.attend_directly(q, k, v, R.Causal(), offset) is None


def test_lengths_changed_in_place_are_read_again():
    q, k, v = qkv()
    lengths = torch.tensor([40, 23])
    for _ in range(3):
        want = attend(q, k, v, mask=R.Padding(lengths.clone()), backend="reference")
        torch.testing.assert_close(attend(q, k, v, mask=R.Padding(lengths)), want)
        lengths -= 7


def test_the_shortcut_leaves_autocast_and_other_devices_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa.attend_directly(*qkv(), None) is None
    assert sdpa.attend_directly(*(x.to("meta") for x in qkv()), None) is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_shortcut_steps_aside_when_hidden_garbage_would_leak(grad, which, bad):
    tensors = [x.requires_grad_(grad) for x in qkv()]
    clean = attend(*tensors, mask=R.Causal())
    dirty = [x.detach().clone() for x in tensors]
    dirty[which][:, :, 30] = bad
    dirty = [x.requires_grad_(grad) for x in dirty]
    out = attend(*dirty, mask=R.Causal())
    torch.testing.assert_close(out[:, :, :30], clean[:, :, :30])
    if grad:
        want, ours = (
            torch.autograd.grad(x[:, :, :30].sum(), given[0])[0] for x, given in ((clean, tensors), (out, dirty))
        )
        torch.testing.assert_close(ours[:, :, :30], want[:, :, :30])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("mask", [R.Padding(LENGTHS), R.Causal() & R.Padding(LENGTHS), R.Padding((40, 0))])
def test_garbage_in_padding_changes_nothing(mask, bad):
    tensors = [x.requires_grad_() for x in qkv()]
    dirty = [x.detach().clone() for x in tensors]
    hidden = ~mask(torch.tensor(1), torch.tensor(0), torch.tensor(39), torch.arange(40)).expand(40)
    for x in dirty[1:]:
        x[1, :, hidden] = bad
    dirty = [x.requires_grad_() for x in dirty]
    clean, out = (attend(*x, mask=mask) for x in (tensors, dirty))
    torch.testing.assert_close(out, clean)
    for want, ours in zip(*(torch.autograd.grad(x.sum(), y) for x, y in ((clean, tensors), (out, dirty))), strict=True):
        torch.testing.assert_close(ours, want)


def test_a_query_of_nan_that_sees_nothing_gives_zeros():
    q, k, v = qkv()
    q[1, :, 0] = torch.nan
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1, 0] = False
    out = attend(q, k, v, mask=R.Causal() & R.Padding(keep))
    assert (out[1, :, 0] == 0).all()
    assert out.isfinite().all()


def test_queries_of_nan_beside_nothing_but_padding_give_zeros():
    q, k, v = qkv()
    q[1] = torch.nan
    out = attend(q, k, v, mask=R.Padding((40, 0)), backend="sdpa")
    assert (out[1] == 0).all()
    assert out.isfinite().all()


WIDTHS = {  # of values; keys are 16 wide
    **SINGLE,
    "window": R.Causal() & R.Window(5),
    "bias": None,
    "long window": R.Causal() & R.Window(70),
    "documents": R.Documents(torch.arange(300) // 100),
}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("width", [0, 1, 7, 16, 24, 32])
def test_values_of_another_width_run_on_the_kernel(name, width):
    n, mask = 300 if name in ("long window", "documents") else 40, WIDTHS[name]
    bias = R.Alibi(4) if name == "bias" else None
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h in (4, 2, 2))
    v = torch.randn(2, 2, n, width, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert choose(Call.of(*leaves, mask=mask, bias=bias)).backend == "sdpa"
    out, want = (attend(*leaves, mask=mask, bias=bias, backend=backend) for backend in (None, "reference"))
    torch.testing.assert_close(out, want)
    grads = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, want))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    lse = sdpa.plan(Call.of(*leaves, mask=mask, bias=bias)).run()[1]
    torch.testing.assert_close(lse, reference.plan(Call.of(*leaves, mask=mask, bias=bias)).run()[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("width", [7, 24])
def test_garbage_in_padded_values_of_another_width_changes_nothing(width, bad):
    q, k, _ = qkv()
    v = torch.randn(2, k.shape[1], k.shape[2], width)
    keep = torch.arange(k.shape[2]) < torch.tensor([[40], [7]])
    expected = attend(q, k, v, mask=R.Padding(keep))
    assert expected.shape[-1] == width
    k, v = (torch.where(keep[:, None, :, None], x, bad) for x in (k, v))
    torch.testing.assert_close(attend(q, k, v, mask=R.Padding(keep)), expected)


def test_much_wider_values_are_an_objection():
    q, k, v = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 17)
    with pytest.raises(ValueError, match="padded to the 17 features of values, more than 2 times"):
        attend(q, k, v, backend="sdpa")
    assert choose(Call.of(q, k, v)).backend == "tiled"


def test_hidden_garbage_is_an_objection_where_it_would_leak():
    q, k, v = qkv()
    k[:, :, 30] = torch.nan
    with pytest.raises(ValueError, match="would leak through the kernel"):
        attend(q, k, v, mask=R.Causal(), backend="sdpa")
    assert choose(Call.of(q, k, v, mask=R.Causal())).backend == "tiled"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        R.Dilated(8, 2),
        R.Causal() & ~R.Diagonal(),
        R.Rule(lambda b, h, i, j: (j <= i) & ((i + j + h) % 3 > b)),
        R.Causal() & R.Padding(torch.arange(40)[None] % 3 > 0),
    ],
    ids=["dilated", "rows without keys", "rule of heads", "padding with gaps"],
)
def test_on_a_gpu_a_mask_of_few_entries_is_dense_and_nothing_is_compiled(mask, dtype):
    mask = mask.map_tensors(torch.Tensor.cuda)
    leaves = [torch.randn(2, 4, 40, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, want = attend(*leaves, mask=mask), attend(*wide, mask=mask, backend="reference")
    off = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), want, atol=off, rtol=off)
    A, exact = weights(*leaves[:2], mask=mask), weights(*wide[:2], mask=mask, backend="reference")
    torch.testing.assert_close((A @ leaves[2]).double(), want, atol=off, rtol=off)
    torch.testing.assert_close(A.statistic.double(), exact.statistic, atol=off, rtol=off)
    pairs = zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), wide), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, atol=3 * off, rtol=3 * off)
    assert choose(Call.of(*leaves, mask=mask)).backend == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_key_that_a_dense_mask_hides_from_all_queries_may_hold_anything():
    mask = R.Causal() & R.Prefix(20) & ~R.Diagonal()
    q, k, v = torch.randn(3, 1, 2, 40, 32, device="cuda", dtype=torch.bfloat16)
    clean = attend(q, k, v, mask=mask)
    k[:, :, 20:], v[:, :, 20:] = torch.nan, torch.nan
    torch.testing.assert_close(attend(q, k, v, mask=mask), clean)
