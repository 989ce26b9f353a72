"""merge: attention over parts of the keys is attention over all of them."""

import math

import pytest
import torch

from regard import Causal, Dense, SinkSoftmax, Softmax, merge, weights

D = torch.float64
PARTS = slice(0, 3), slice(3, 4), slice(4, 11)


def leaves(dtype=D):
    shapes = ((2, 4, 7, 8), (2, 2, 11, 8), (2, 2, 11, 5))
    return [torch.randn(shape, dtype=D).to(dtype).requires_grad_() for shape in shapes]


def in_parts(q, k, v, keep, sinks=(None,) * 3):
    found = []
    for keys, sink in zip(PARTS, sinks, strict=True):
        A = weights(q, k[:, :, keys], mask=Dense(keep[:, keys]), normalize=sink)
        found.append((A @ v[:, :, keys], A.lse))
    return [list(x) for x in zip(*found, strict=True)]


def keep():
    """Rows that see all parts, one alone, or no key at all."""
    seen = torch.ones(7, 11, dtype=torch.bool).tril(4)
    seen[3], seen[5] = False, False
    seen[5, 3] = True
    return seen


@pytest.mark.parametrize("sink", [None, SinkSoftmax(0.5)])
def test_parts_merged_are_the_whole_with_its_gradients(sink):
    q, k, v = leaves()
    out, lse = merge(*in_parts(q, k, v, keep(), (None, sink, None)))
    A = weights(q, k, mask=Dense(keep()), normalize=sink)
    whole, statistic = A @ v, A.lse
    torch.testing.assert_close(out, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, statistic, atol=1e-12, rtol=0)
    w, seen = torch.randn_like(out), statistic > -math.inf
    ours, want = (
        torch.autograd.grad((o * w).sum() + x[seen].square().sum(), (q, k, v))
        for o, x in ((out, lse), (whole, statistic))
    )
    for grad, truth in zip(ours, want, strict=True):
        torch.testing.assert_close(grad, truth, atol=1e-11, rtol=0)


def test_a_row_that_sees_no_key_in_any_part_gives_zeros_and_minus_infinity():
    q, k, v = leaves()
    out, lse = merge(*in_parts(q, k, v, torch.zeros(7, 11, dtype=torch.bool)))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_what_a_part_holds_for_a_row_that_sees_nothing_there_is_not_read():
    q, k, v = leaves(torch.float32)
    outs, lses = in_parts(q, k, v, keep())
    want, _ = merge(outs, lses)
    outs = [torch.where(lse[..., None] == -math.inf, math.nan, out) for out, lse in zip(outs, lses, strict=True)]
    got, _ = merge(outs, lses)
    torch.testing.assert_close(got, want)


def test_parts_merge_one_after_the_other():
    outs, lses = in_parts(*leaves(), keep())
    first = merge(outs[:2], lses[:2])
    for got, want in zip(merge([first[0], outs[2]], [first[1], lses[2]]), merge(outs, lses), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32_at_scores_that_would_overflow(dtype):
    q, k, v = leaves(dtype)
    out, lse = merge(*in_parts(q * 30, k * 30, v, keep()))
    A = weights(q.detach().double() * 30, k.detach().double() * 30, mask=Dense(keep()), normalize=Softmax())
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), A @ v.detach().double(), atol=0.05, rtol=0.05)


def test_the_parts_of_a_ring_see_what_the_offset_says():
    q, k, v = leaves()
    parts = [(weights(q, k[:, :, p], mask=Causal(), offset=4 - p.start), v[:, :, p]) for p in PARTS]
    out, _ = merge([A @ x for A, x in parts], [A.lse for A, _ in parts])
    torch.testing.assert_close(out, weights(q, k, mask=Causal()) @ v, atol=1e-12, rtol=0)


X, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
BAD = [
    (X, [LSE], TypeError, r"takes a list of outputs and a list of log-sum-exps; write merge\(\[out\], \[lse\]\)"),
    ([], [], ValueError, r"a log-sum-exp for each output, got 0 and 0"),
    ([X, X], [LSE], ValueError, r"a log-sum-exp for each output, got 2 and 1"),
    ([X, X[:, :, 1:]], [LSE, LSE], ValueError, r"outs must have one shape and dtype, .* each part has all queries"),
    ([X, X.double()], [LSE, LSE], ValueError, r"outs must have one shape and dtype"),
    ([X], [LSE[..., None]], ValueError, r"dims b h i, \(1, 2, 3\), got \(1, 2, 3, 1\) for part 0; write lse.squeeze"),
    ([X], [LSE[..., :1]], ValueError, r"statistics must have dims b h i, \(1, 2, 3\), got \(1, 2, 1\) for part 0"),
]


@pytest.mark.parametrize(("outs", "statistics", "error", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_parts_that_do_not_fit_are_refused(outs, statistics, error, message):
    with pytest.raises(error, match=message):
        merge(outs, statistics)
