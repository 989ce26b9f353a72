"""The conventions, and the bugs this field keeps making: each a test by name, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Causal,
    Chunked,
    Cosine,
    Dense,
    Documents,
    Dot,
    Entmax,
    Hard,
    Padding,
    Prefix,
    Relative,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Window,
    attend,
    weights,
)
from regard.ops.dispatch import BACKENDS
from tests.backends import attend_on, flex_on_the_cpu

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.usefixtures("small_blocks")]

NORMALIZERS = [Softmax(), SinkSoftmax(0.0), Sigmoid(), Sparsemax(), Entmax(1.5), Hard()]
SCORES = [Dot(), Cosine(0.5), Additive(torch.ones(8)), Bilinear(torch.eye(8))]


def qkv(i: int = 9, j: int = 9, h: int = 2, g: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((1, h, i, 8), (1, g, j, 8), (1, g, j, 8))
    return [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]


def test_causal_is_aligned_bottom_right_for_unequal_lengths(backend):
    q, k, v = qkv(i=3, j=7)
    seen = weights(q, k, mask=Causal(), backend=backend).dense() > 0
    assert torch.equal(seen[0, 0], torch.ones(3, 7).tril(4).bool())
    one_at_a_time = [attend(q[:, :, [r]], k[:, :, : 5 + r], v[:, :, : 5 + r], mask=Causal()) for r in range(3)]
    torch.testing.assert_close(attend_on(backend, q, k, v, mask=Causal()), torch.cat(one_at_a_time, 2))


def test_an_offset_places_the_queries_in_a_static_cache(backend):
    q, k, v = qkv(i=2, j=9)
    k[:, :, 6:], v[:, :, 6:] = 1e4, 1e4
    out = attend_on(backend, q, k, v, mask=Causal(), offset=4)
    for row, seen in enumerate((5, 6)):
        torch.testing.assert_close(out[:, :, [row]], attend(q[:, :, [row]], k[:, :, :seen], v[:, :, :seen]))


def test_an_offset_per_batch_row_places_the_queries_in_caches_of_different_lengths(backend):
    q, k, v = (torch.cat([x, -x, x.roll(1, 2)]) for x in qkv(i=2, j=9))
    lengths = (4, 0, 7)
    for b, length in enumerate(lengths):
        k[b, :, length + 2 :], v[b, :, length + 2 :] = 1e4, 1e4
    alone = torch.cat([attend(q[[b]], k[[b]], v[[b]], mask=Causal(), offset=n) for b, n in enumerate(lengths)])
    for offset in (lengths, torch.tensor(lengths)):
        torch.testing.assert_close(attend_on(backend, q, k, v, mask=Causal(), offset=offset), alone)


def test_a_width_per_head_is_the_window_of_each_head(backend):
    q, k, v = qkv(h=3, g=3, i=7, j=7)
    alone = torch.cat([attend(q[:, [h]], k[:, [h]], v[:, [h]], mask=Window(w)) for h, w in enumerate((1, 4, 20))], 1)
    for width in ((1, 4, 20), torch.tensor([1, 4, 20])):
        torch.testing.assert_close(attend_on(backend, q, k, v, mask=Window(width)), alone)


def test_packed_sequences_attend_as_each_would_alone(backend):
    q, k, v = qkv(i=9, j=9)
    mask = Causal() & Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 9]))
    alone = torch.cat(
        [attend(*(x[:, :, part] for x in (q, k, v)), mask=Causal()) for part in (slice(2), slice(2, 9))], 2
    )
    torch.testing.assert_close(attend_on(backend, q, k, v, mask=mask), alone)


def test_a_chunk_sees_nothing_of_the_chunk_before(backend):
    q, k, v = qkv(i=8, j=8)
    mask = Causal() & Chunked(3)
    parts = slice(0, 3), slice(3, 6), slice(6, 8)
    alone = torch.cat([attend(*(x[:, :, part] for x in (q, k, v)), mask=Causal()) for part in parts], 2)
    torch.testing.assert_close(attend_on(backend, q, k, v, mask=mask), alone)


def test_more_queries_than_keys_leaves_the_first_queries_with_nothing(backend):
    q, k, v = qkv(i=5, j=2)
    out = attend_on(backend, q, k, v, mask=Causal())
    assert (out[:, :, :3] == 0).all()
    assert (out[:, :, 3:] != 0).all()


@pytest.mark.parametrize("normalize", NORMALIZERS, ids=repr)
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_fully_masked_row_gives_zeros_and_zero_gradients(backend, score, normalize):
    keep = torch.ones(9, 9, dtype=torch.bool)
    keep[3] = keep[7] = False
    leaves = [x.requires_grad_() for x in qkv()]
    out = attend_on(backend, *leaves, score=score, mask=Dense(keep), normalize=normalize)
    assert (out[:, :, [3, 7]] == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, [3, 7]] == 0).all()


def test_everything_masked_gives_zeros_and_an_lse_of_minus_infinity(backend):
    q, k, v = qkv()
    A = weights(q, k, mask=Prefix(0), backend=backend)
    assert (attend_on(backend, q, k, v, mask=Prefix(0)) == 0).all()
    with flex_on_the_cpu():
        assert (A @ v == 0).all()
    assert (A.lse == -torch.inf).all()
    assert (A.entropy() == 0).all()
    assert (A.received() == 0).all()


def test_a_fully_masked_row_is_not_the_mean_of_the_values(backend):
    q, k, v = qkv(dtype=torch.float16)
    out = attend_on(backend, q, k, v + 5, mask=Padding((0,)))
    assert (out == 0).all()


def test_minus_infinity_in_a_bias_hides_and_leaves_no_nan(backend):
    values = torch.zeros(9, 9)
    values[:, 4:] = -torch.inf
    values[2] = -torch.inf
    leaves = [x.requires_grad_() for x in qkv()]
    bias = values.requires_grad_()
    out = attend_on(backend, *leaves, bias=Added(bias))
    assert (out[:, :, 2] == 0).all()
    torch.testing.assert_close(out[:, :, 5:], attend(*leaves, mask=Prefix(4))[:, :, 5:])
    grads = torch.autograd.grad(out.sum(), [*leaves, bias])
    assert all(grad.isfinite().all() for grad in grads)


def test_true_means_may_attend(backend):
    q, k, _ = qkv()
    keep = torch.zeros(9, 9, dtype=torch.bool)
    keep[:, 0] = True
    A = weights(q, k, mask=Dense(keep), backend=backend).dense()
    assert (A[..., 0] == 1).all()
    assert (A[..., 1:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_neither_overflows_nor_loses_masked_rows(backend, dtype):
    q, k, v = qkv(dtype=dtype)
    out = attend_on(backend, q * 200, k * 200, v, mask=Causal())
    truth = attend((q * 200).double(), (k * 200).double(), v.double(), mask=Causal())
    assert out.isfinite().all()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), truth, atol=0.02, rtol=0.02)


def test_row_statistics_of_half_precision_are_float32(backend):
    q, k, _ = qkv(dtype=torch.bfloat16)
    A = weights(q, k, backend=backend)
    assert A.lse.dtype == A.entropy().dtype == A.dense().dtype == torch.float32


def test_dropout_acts_in_attend_alone_and_only_when_asked(backend):
    q, k, v = qkv()
    calm = attend_on(backend, q, k, v)
    assert torch.equal(calm, attend_on(backend, q, k, v, dropout=0.0))
    dropped = attend_on(backend, q, k, torch.ones_like(v), dropout=0.5)
    assert not torch.allclose(dropped, torch.ones_like(dropped))
    torch.testing.assert_close(weights(q, k, backend=backend) @ v, calm)


def test_softmax_runs_over_keys_not_queries(backend):
    q, k, _ = qkv(i=4, j=7)
    torch.testing.assert_close(weights(q, k, backend=backend).dense().sum(-1), torch.ones(1, 2, 4))


def test_weights_are_not_averaged_over_heads(backend):
    q, k, _ = qkv()
    A = weights(q, k, backend=backend).dense()
    assert A.shape == (1, 2, 9, 9)
    assert not torch.allclose(A[:, 0], A[:, 1])


def test_grouped_heads_interleave_and_do_not_tile(backend):
    q, k, v = qkv(h=6, g=2)
    out = attend_on(backend, q, k, v)
    for head in range(6):
        group = head // 3
        alone = attend(q[:, [head]], k[:, [group]], v[:, [group]])
        torch.testing.assert_close(out[:, [head]], alone)


def test_padding_of_each_batch_row_reaches_all_its_heads_and_no_other_row(backend):
    q, k, v = (torch.randn(3, 4, 6, 8) for _ in range(3))
    lengths = torch.tensor([2, 6, 4])
    out = attend_on(backend, q, k, v, mask=Padding(lengths))
    for b, n in enumerate(lengths.tolist()):
        alone = attend(q[[b]], k[[b], :, :n], v[[b], :, :n])
        torch.testing.assert_close(out[[b]], alone)


def test_gradients_of_padding_are_zero_not_garbage(backend):
    leaves = [x.requires_grad_() for x in qkv()]
    out = attend_on(backend, *leaves, mask=Padding((5,)))
    _, dk, dv = torch.autograd.grad(out.square().sum(), leaves)
    assert (dk[:, :, 5:] == 0).all()
    assert (dv[:, :, 5:] == 0).all()


def test_a_window_sees_w_keys_including_its_own(backend):
    q, k, _ = qkv(i=20, j=20)
    seen = (weights(q, k, mask=Causal() & Window(4), backend=backend).dense() > 0).sum(-1)
    assert seen[0, 0].tolist() == [1, 2, 3] + [4] * 17


def test_a_window_ahead_of_the_first_visible_key_leaves_no_nan(backend):
    q, k, v = qkv(i=40, j=40)
    mask = Window(3) & ~Prefix(20)
    out = attend_on(backend, q, k, v, mask=mask, score=Dot(scale=-2.0))
    assert out.isfinite().all()
    assert (out[:, :, :17] == 0).all()


def test_nan_in_the_future_leaves_the_past_alone(backend):
    if backend == "flex":
        pytest.skip("a key hidden from some queries only may hold finite garbage alone")
    q, k, v = qkv(i=30, j=30)
    clean = attend_on(backend, q, k, v, mask=Causal())
    k[:, :, 20], v[:, :, 20] = torch.nan, torch.inf
    dirty = attend_on(backend, q, k, v, mask=Causal())
    torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])
    assert not dirty[:, :, 20:].isfinite().any()


def test_huge_finite_garbage_in_hidden_keys_changes_nothing(backend):
    q, k, v = qkv(i=30, j=30)
    clean = attend_on(backend, q, k, v, mask=Causal())
    k[:, :, 20], v[:, :, 20] = 3e38, -3e38
    dirty = attend_on(backend, q, k, v, mask=Causal())
    torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])


def test_nan_in_a_query_that_sees_nothing_changes_no_output(backend):
    q, k, v = qkv(i=6, j=4)
    q[:, :, 0] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend_on(backend, *leaves, mask=Causal())
    assert (out[:, :, :2] == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


def test_nan_in_a_bias_under_a_hidden_entry_changes_no_output(backend):
    q, k, v = qkv()
    values = torch.zeros(9, 9)
    values[2, 5], values[0, 8] = torch.nan, torch.inf
    torch.testing.assert_close(
        attend_on(backend, q, k, v, mask=Causal(), bias=Added(values)), attend(q, k, v, mask=Causal())
    )


def test_finite_numbers_whose_product_overflows_under_a_hidden_entry_change_nothing(backend):
    q, k, v = qkv()
    k[:, :, 8] = 1e16
    out = attend_on(backend, q * 1e25, k, v, mask=Causal())
    assert out[:, :, :8].isfinite().all()


def test_gradients_in_a_backward_under_autocast_are_those_without(backend):
    if backend == "reference":
        pytest.skip("its backward is PyTorch's own, operation by operation, and follows autocast like any other")
    leaves = [x.requires_grad_() for x in qkv()]
    out = attend_on(backend, *leaves, mask=Window(3))
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(out.sum(), leaves)
    for x, y in zip(plain, cast, strict=True):
        torch.testing.assert_close(x, y)


def test_no_label_leaks_through_composed_masks(backend):
    q, k, v = qkv(i=12, j=12)
    ids = torch.arange(12) // 5
    v = v.requires_grad_()
    out = attend_on(backend, q, k, v, mask=(Causal() & Documents(ids)) | (Prefix(2) & Causal()))
    for row in range(12):
        (grad,) = torch.autograd.grad(out[:, :, row].sum(), v, retain_graph=True)
        assert (grad[:, :, row + 1 :] == 0).all()


def test_length_one_and_expanded_inputs(backend):
    q, k, v = qkv(i=1, j=1)
    torch.testing.assert_close(attend_on(backend, q, k, v), v)
    shared = torch.randn(1, 1, 5, 8).expand(3, 2, 5, 8)
    torch.testing.assert_close(
        attend_on(backend, shared, shared, shared), attend_on(backend, *[shared.contiguous()] * 3)
    )


def test_calls_remember_nothing_of_each_other(backend):
    a, b = qkv(), qkv(i=4)
    first = attend_on(backend, *a, mask=Causal())
    attend_on(backend, *b, mask=Window(2))
    assert torch.equal(attend_on(backend, *a, mask=Causal()), first)


def test_autocast_lowers_the_precision_of_the_call_and_no_more(backend):
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_on(backend, q, k, v)
        A = weights(q, k, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attend(q, k, v), atol=0.03, rtol=0.03)
    assert A.dense().dtype == torch.float32


def test_nan_in_a_future_value_alone_leaves_the_past_alone(backend):
    if backend == "flex":
        pytest.skip("a key hidden from some queries only may hold finite garbage alone")
    q, k, v = qkv(i=30, j=30)
    clean = attend_on(backend, q, k, v, mask=Causal())
    v[:, :, 20] = torch.nan
    dirty = attend_on(backend, q, k, v, mask=Causal())
    torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])


def test_padding_of_one_batch_row_hides_nothing_of_a_longer_one(backend):
    q, k, v = (torch.randn(3, 2, 40, 8) for _ in range(3))
    lengths = (3, 40, 0)
    out = attend_on(backend, q, k, v, mask=Padding(lengths))
    for b, n in enumerate(lengths):
        torch.testing.assert_close(out[[b]], attend(q[[b]], k[[b], :, :n], v[[b], :, :n]))


def test_no_two_rows_drop_the_same_weights(backend):
    q, k, v = qkv(i=60, j=40)
    out = attend_on(backend, torch.zeros_like(q), k, v, dropout=0.5)
    assert out[0].flatten(0, 1).unique(dim=0).shape[0] == 120


def test_one_tensor_in_all_three_places_gets_the_sum_of_three_gradients(backend):
    x = torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    (together,) = torch.autograd.grad(attend_on(backend, x, x, x, mask=Causal()).sin().sum(), x)
    apart = torch.autograd.grad(attend_on(backend, *three, mask=Causal()).sin().sum(), three)
    torch.testing.assert_close(together, sum(apart))


def test_float64_stays_float64_under_autocast(backend):
    q, k, v = qkv(dtype=torch.float64)
    plain = attend_on(backend, q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend_on(backend, q, k, v), plain)


POSITIONAL = [
    None,
    Alibi(2),
    Relative.t5(torch.linspace(-2, 2, 16).view(2, 8), max_distance=16),
    Relative.shaw(torch.linspace(-1, 1, 40).view(5, 8)),
]


@pytest.mark.parametrize("bias", POSITIONAL, ids=repr)
def test_decoding_a_query_at_a_time_is_the_full_pass(backend, bias):
    q, k, v = qkv(i=21, j=21)
    terms = {"mask": Causal() & Window(9), "bias": bias}
    steps = [attend_on(backend, q[:, :, [n]], k[:, :, : n + 1], v[:, :, : n + 1], **terms) for n in range(21)]
    torch.testing.assert_close(torch.cat(steps, 2), attend_on(backend, q, k, v, **terms))


@pytest.mark.parametrize("mask", [None, Causal(), Window(3)], ids=repr)
def test_numbers_with_gaps_between_them_are_read_right(backend, mask):
    gaps = [torch.randn(1, 2, 19, 16)[..., ::2] for _ in range(3)]
    torch.testing.assert_close(
        attend_on(backend, *gaps, mask=mask), attend_on(backend, *[x.contiguous() for x in gaps], mask=mask)
    )
