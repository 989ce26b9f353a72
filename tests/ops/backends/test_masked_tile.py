"""Masked attention of few tokens: the tile is cached, hidden keys are not read, and nothing of them leaks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import regard as R
from regard import attend
from regard.ops.backends.masked_tile import attend_masked
from regard.ops.blocks.prepared_call import prepare
from regard.ops.call import Call
from tests.ops.inputs import LENGTHS, qkv

KEEP = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.3
IDS = torch.tensor([[0] * 15 + [1] * 25, [0] * 33 + [1] * 7])
MASKS = {
    "lengths": R.Padding(LENGTHS),
    "numbers": R.Padding((17, 40)),
    "keep": R.Padding(KEEP),
    "causal keep": R.Causal() & R.Padding(KEEP),
    "causal window": R.Causal() & R.Window(3),
    "documents": R.Documents(IDS),
    "or": R.Window(2) | R.Global(1),
    "not": ~R.Diagonal(),
    "dense": R.Dense(torch.rand(1, 4, 40, 40, generator=torch.Generator().manual_seed(1)) > 0.5),
    "rows that see nothing": R.Causal() & ~R.Window(4),
    "a batch row that sees nothing": R.Padding((0, 9)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shared", [None, 2])
def test_output_and_gradients_are_those_of_the_definition(mask, shared):
    leaves = [x.requires_grad_() for x in qkv(shared=shared)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = attend_masked(*leaves, mask)
    assert out is not None
    want = attend(*exact, mask=mask, backend="reference")
    plain = attend(*leaves, mask=mask, backend="reference")
    answers = ((out, leaves), (plain, leaves), (want, exact))
    ours, theirs, truth = ([x, *torch.autograd.grad(x.sin().sum(), given)] for x, given in answers)
    scale = max(1.0, *(x.abs().max().item() for x in truth))
    for n, (x, y, right) in enumerate(zip(ours, theirs, truth, strict=True)):
        error, plain_error = ((z - right).abs().max().item() for z in (x, y))
        # Terms of a gradient may cancel: each rounds once, relative to the largest.
        assert error <= (3 if n else 2) * plain_error + 4 * torch.finfo(torch.float32).eps * scale


@pytest.mark.parametrize("offset", [None, 100, 500, 900])
@pytest.mark.parametrize("mask", [R.Causal(), R.Causal() & R.Window(70), R.Window(before=3, after=70)], ids=repr)
def test_one_query_of_a_static_cache(mask, offset):
    q, k, v = (x.double() for x in qkv(1, 1000))
    out = attend_masked(q, k, v, mask, offset)
    assert out is not None
    torch.testing.assert_close(out, attend(q, k, v, mask=mask, offset=offset, backend="reference"))


SPARSE = {
    "window": (R.Causal() & R.Window(70), 600),
    "offset": (R.Causal(), 600),
    "lengths": (R.Padding((630, 600)), None),
    "documents": (R.Documents(torch.ones(1, dtype=torch.long), (torch.arange(1000) // 64 == 9).long()), None),
}


@pytest.mark.parametrize(("mask", "offset"), SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("grad", [False, True])
def test_keys_in_empty_tiles_are_not_read(mask, offset, grad):
    q, k, v = qkv(1, 1000)
    seen = mask.over(Call.of(q, k, mask=mask, offset=offset).whole()).expand(2, 4, 1, 1000).any((0, 1, 2))
    last = int(seen.nonzero().max()) // 64 * 64 + 64
    assert last < 1000
    for x in (k, v):
        x[:, :, last:] = torch.nan
    q.requires_grad_(grad)
    out = attend_masked(q, k, v, mask, offset)
    assert out is not None  # a look at those keys would have found the NaN
    torch.testing.assert_close(out, attend(q, k, v, mask=mask, offset=offset, backend="reference"))


@pytest.mark.parametrize(("mask", "offset"), SPARSE.values(), ids=SPARSE)
def test_keys_in_empty_tiles_are_not_looked_at_on_the_other_paths_either(mask, offset):
    q, k, v = qkv(1, 1000)
    k[:, :, 700:] = torch.nan
    v[:, :, 700:] = torch.inf
    terms = {"mask": mask, "offset": offset}
    assert prepare(Call.of(q, k, v, **terms, normalize=R.SinkSoftmax(0.0))).nonfinite_keys is None
    for more in ({"normalize": R.Sparsemax()}, {"bias": R.Alibi(4)}, {"score": R.Dot(cap=5.0)}):
        ours, want = (attend(q, k, v, **terms, **more, backend=name) for name in (None, "reference"))
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30, 1e38])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize(
    "mask", [R.Padding((30, 30)), R.Causal() & R.Padding((30, 30)), R.Causal() & R.Window(3)], ids=repr
)
def test_garbage_in_a_visible_tile_changes_neither_output_nor_gradient(mask, which, bad):
    clean = [x.requires_grad_() for x in qkv()]
    dirty = [x.detach().clone() for x in clean]
    at = 35 if "Padding" in repr(mask) else 39
    dirty[which][:, :, at] = bad
    dirty = [x.requires_grad_() for x in dirty]
    rows = slice(0, 37)  # the last query sees the last keys in a window, and passes NaN on to them
    results = []
    for given in (clean, dirty):
        out = attend(*given, mask=mask)[:, :, rows]
        results.append([out, *torch.autograd.grad((7 * out).sum(), given)])
    for ours, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours[:, :, rows], want[:, :, rows])
    with torch.no_grad():
        torch.testing.assert_close(attend(*dirty, mask=mask)[:, :, rows], results[0][0])


@pytest.mark.parametrize("backend", [None, "sdpa", "tiled", "reference"])
def test_a_huge_value_in_the_future_does_not_reach_the_gradient_of_the_past(backend):
    q, k, v = (torch.randn(1, 1, 8, 16) for _ in range(3))
    v[..., -1, 0] = 1e38
    if backend == "sdpa":
        with pytest.raises(ValueError, match="would leak through the kernel"):
            attend(q, k, v, mask=R.Causal(), backend=backend)
        return
    q.requires_grad_()
    out = attend(q, k, v, mask=R.Causal(), backend=backend)[..., :-1, :]
    (dq,) = torch.autograd.grad((out * 7).sum(), q)
    assert dq[..., :-1, :].isfinite().all()


def test_the_tile_follows_the_offset_and_a_tensor_changed_in_place():
    q, k, v = qkv(1, 40)
    keep = KEEP.clone()
    mask = R.Causal() & R.Padding(keep)
    for offset, hidden in ((3, None), (30, None), (30, 17), (39, 4)):
        if hidden is not None:
            keep[:, hidden] = False
        seen = keep & (torch.arange(40) <= offset)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        torch.testing.assert_close(attend_masked(q, k, v, mask, offset), want)


def test_a_tile_of_inference_mode_serves_training():
    mask = R.Causal() & R.Window(5)
    q, k, v = qkv()
    with torch.inference_mode():
        attend(q, k, v, mask=mask)
    attend(q.requires_grad_(), k, v, mask=mask).sum().backward()
    assert q.grad.isfinite().all()


def test_a_mask_that_does_not_fit_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="must hold one length per batch row"):
            attend(*qkv(), mask=R.Padding((3, 4, 5)))


def test_rules_and_masks_of_the_user_are_read_at_each_call():
    width = [3]
    rule = R.Rule(lambda b, h, i, j: (i - j).abs() < width[0])
    tensors = qkv()
    for width[0] in (3, 5):
        assert attend_masked(*tensors, rule) is None
        assert attend_masked(*tensors, ~(R.Causal() & rule)) is None
        torch.testing.assert_close(attend(*tensors, mask=rule), attend(*tensors, mask=R.Window(width[0])))


LEFT = {
    "many tokens": (qkv(200), R.Window(3), None),
    "scattered keys": (qkv(1, 1000), R.Window(3) | R.Global(1), None),
    "no key": (qkv(), R.Padding((0, 0)), None),
    "no query": ([x[:, :, :0] for x in qkv()], R.Causal(), None),
    "dtypes": ((qkv()[0].double(), *qkv()[1:]), R.Window(3), None),
    "three dims": ([x[0] for x in qkv()], R.Window(3), None),
    "value width": ((*qkv()[:2], qkv()[2][..., :4]), R.Window(3), None),
    "offset": (qkv(), R.Causal(), True),
    "no tensor": ((1, 2, 3), R.Causal(), None),
}


@pytest.mark.parametrize(("tensors", "mask", "offset"), LEFT.values(), ids=LEFT)
def test_other_calls_are_left_to_the_backends(tensors, mask, offset):
    assert attend_masked(*tensors, mask, offset) is None


def test_autocast_and_meta_tensors_are_left_to_the_backends():
    with torch.autocast("cpu", torch.bfloat16):
        assert attend_masked(*qkv(), R.Window(3)) is None
    assert attend_masked(*(x.to("meta") for x in qkv()), R.Window(3)) is None
