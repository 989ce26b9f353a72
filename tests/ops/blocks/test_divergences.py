"""Divergences of two attention matrices, block by block: the definition entry by entry, closed forms, gradients."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from regard import Causal, Dense, Diagonal, Padding, Weights, Window, weights
from regard.ops.blocks.divergences import KINDS, row_divergence
from tests.ops.test_weights import TERMS, B, D, G, H, Largest, Maker, cut

close = torch.testing.assert_close
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    cut(monkeypatch, 4, 4, 2**7)


def by_definition(kind: str, A: Tensor, B: Tensor) -> Tensor:
    """Plain Python, entry by entry."""
    A, B = torch.broadcast_tensors(A, B)
    found = torch.zeros(A.shape[:-1], dtype=torch.float64)
    for at in product(*map(range, A.shape[:-1])):
        total, n = 0.0, A.shape[-1]
        for a, b in zip(A[at].tolist(), B[at].tolist(), strict=True):
            if kind == "kl" and a:
                total += a * math.log(a / b) if b else math.inf
            elif kind == "js":
                total += sum(x * math.log(2 * x / (a + b)) / 2 for x in (a, b) if x)
            elif kind == "mse":
                total += (a - b) ** 2 / n
            elif kind == "dot":
                total += a * b
        found[at] = total
    return found


def made(
    name: str, i: int = 9, j: int = 14, seed: int = 7, heads: int = H, g: int = G, d: int = D, **options
) -> Weights:
    x = Maker(i=i, j=j, grad=options.pop("grad", False))
    x.generator.manual_seed(seed)
    return weights(x(B, heads, i, d), x(B, g, j, d), **TERMS[name](x), **options)


@every_kind
@pytest.mark.parametrize("name", TERMS)
def test_each_term_has_the_divergence_of_its_matrix_in_both_directions(name, kind):
    A, other = made(name), made("causal", seed=8, g=1, d=5)
    a, b = A.dense(), other.dense()
    close(getattr(A, kind)(other), by_definition(kind, a, b), atol=1e-9, rtol=0)
    close(getattr(other, kind)(A), by_definition(kind, b, a), atol=1e-9, rtol=0)


@every_kind
def test_masks_whose_keys_are_scattered_or_disjoint(kind):
    A, other = made("global or window", j=30), made("documents", seed=3, j=30)
    close(getattr(A, kind)(other), by_definition(kind, A.dense(), other.dense()), atol=1e-9, rtol=0)


@every_kind
@pytest.mark.parametrize(("heads", "g"), [(12, 4), (12, 6), (1, 1)])
@pytest.mark.parametrize("entries", [2**7, 2**9, 2**12])
def test_however_heads_are_cut_into_blocks(heads, g, entries, kind, monkeypatch):
    cut(monkeypatch, 4, 4, entries)
    A, other = made("plain", heads=12, g=3), made("plain", heads=heads, g=g, seed=8)
    close(getattr(A, kind)(other), by_definition(kind, A.dense(), other.dense()), atol=1e-9, rtol=0)


@every_kind
def test_the_mean_of_heads_is_either_side_or_both(kind):
    A, other = made("causal"), made("sink", seed=8)
    a, b = A.dense(), other.dense()
    mean_a, mean_b = a.mean(1, keepdim=True), b.mean(1, keepdim=True)
    for got, x, y in (
        (getattr(A.mean_heads(), kind)(other), mean_a, b),
        (getattr(A, kind)(other.mean_heads()), a, mean_b),
        (getattr(A.mean_heads(), kind)(other.mean_heads()), mean_a, mean_b),
    ):
        close(got, by_definition(kind, x, y), atol=1e-9, rtol=0)


@every_kind
def test_targets_broadcast_over_batch_rows_and_heads(kind):
    A = made("plain")
    for target in (torch.rand(B, H, 9, 14).double(), torch.rand(9, 14).double(), torch.rand(B, 1, 9, 14).double()):
        full = target.expand(B, H, 9, 14)
        close(getattr(A, kind)(target), by_definition(kind, A.dense(), full), atol=1e-9, rtol=0)
        mean = A.dense().mean(1, keepdim=True)
        close(getattr(A.mean_heads(), kind)(full), by_definition(kind, mean, full), atol=1e-9, rtol=0)


def learnable(A: Weights) -> list[Tensor]:
    return [x for x in A.call.tensors() if x.requires_grad]


def sides(kind: str, which: str, backend: str | None = None) -> tuple[Tensor, list[Tensor]]:
    sizes = {"i": 5, "j": 7, "grad": True, "backend": backend}
    A, other = made("alibi", **sizes), made("sink", seed=8, **sizes)
    if which == "target":
        target = torch.rand(B, 1, 5, 7, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        return getattr(A, kind)(target), [*learnable(A), target]
    pair = {"weights": (A, other), "mean": (A.mean_heads(), other), "mean on the right": (A, other.mean_heads())}[which]
    return getattr(pair[0], kind)(pair[1]), [*learnable(A), *learnable(other)]


@every_kind
@pytest.mark.parametrize("which", ["weights", "mean", "mean on the right", "target"])
def test_the_gradient_for_both_sides_is_that_of_the_reference(kind, which):
    grads = []
    for backend in ("tiled", "reference"):
        value, inputs = sides(kind, which, backend)
        grads.append((value, *torch.autograd.grad(value.sin().sum(), inputs)))
    for ours, want in zip(*grads, strict=True):
        close(ours, want, atol=1e-10, rtol=0)


@every_kind
@pytest.mark.parametrize("mean", [False, True])
def test_the_gradient_is_that_of_finite_differences(kind, mean):
    x = Maker(grad=True)
    inputs = [x(1, 2, 5, 3), x(1, 1, 7, 3), x(1, 1 if mean else 2, 5, 4), x(1, 1, 7, 4), x(5, 7)]

    def function(q, k, q2, k2, values):
        A, other = weights(q, k, mask=Padding((6,))), weights(q2, k2)
        A = A.mean_heads() if mean else A
        return getattr(A, kind)(other), getattr(A, kind)(values.softmax(-1))

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@every_kind
def test_one_pass_backward_gives_each_side_of_a_matrix_beside_itself_its_part(kind):
    A = made("causal", grad=True)
    value = getattr(A, kind)(A)
    ours = torch.autograd.grad(value.sin().sum(), learnable(A))
    R = made("causal", grad=True, backend="reference")
    want = torch.autograd.grad(getattr(R, kind)(R).sin().sum(), learnable(R))
    for x, y in zip(ours, want, strict=True):
        close(x, y, atol=1e-10, rtol=0)


def test_a_second_derivative_raises_on_blocks_and_exists_on_the_reference():
    for backend, works in (("tiled", False), ("reference", True)):
        value, inputs = sides("js", "weights", backend)
        (grad, *_) = torch.autograd.grad(value.sum(), inputs, create_graph=True)
        if works:
            torch.autograd.grad(grad.sin().sum(), inputs[0])
        else:
            with pytest.raises(RuntimeError, match="differentiable once"):
                grad.sum().backward()


def even(seen: Tensor) -> Weights:
    """Weights that are even over the keys that a row sees."""
    i, j = seen.shape
    return weights(torch.zeros(1, 1, i, 4).double(), torch.randn(1, 1, j, 4).double(), mask=Dense(seen))


NESTED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
OTHERS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()


def test_even_rows_over_nested_keys_have_the_divergences_of_their_closed_form():
    """Inside; around; A sees no key; B sees none; neither does."""
    A, other = even(NESTED), even(OTHERS)
    log2 = math.log(2)
    close(A.kl(other)[0, 0], torch.tensor([log2, math.inf, 0.0, math.inf, 0.0]).double())
    js = A.js(other)[0, 0]
    close(js, other.js(A)[0, 0])
    close(js[2:], torch.tensor([log2 / 2, log2 / 2, 0.0]).double())
    m, n = 0.375, 0.125  # the mean of both sides, at keys that both see and at keys that one sees
    half = (math.log(0.5 / m) + 0.5 * math.log(0.25 / m) + 0.5 * math.log(0.25 / n)) / 2
    close(js[:2], torch.full((2,), half).double())
    close(A.mse(other)[0, 0], torch.tensor([0.0625, 0.0625, 0.0625, 0.125, 0.0]).double())
    close(A.dot(other)[0, 0], torch.tensor([0.25, 0.25, 0.0, 0.0, 0.0]).double())


def test_rows_that_see_no_common_key_are_log_2_apart():
    n = 6
    A, other = even(torch.eye(n).bool()), even(~torch.eye(n).bool())
    close(A.js(other), torch.full((1, 1, n), math.log(2)).double())
    assert (A.kl(other) == math.inf).all()
    assert (A.dot(other) == 0).all()


def test_keys_that_the_other_side_alone_sees_count():
    n = 8
    A, other = even(torch.eye(n).bool()), even(torch.ones(n, n).bool())
    close(A.mse(other), torch.full((1, 1, n), ((n - 1) ** 2 + n - 1) / n**3).double())
    close(other.mse(A), A.mse(other))


def test_a_row_beside_itself_is_0_apart_and_others_keep_their_bounds():
    A, other = made("causal", i=20, j=30), made("plain", i=20, j=30, seed=8)
    for name in ("kl", "js", "mse"):
        assert getattr(A, name)(A).abs().max() < 1e-12
    assert (A.kl(other) >= 0).all()
    js = A.js(other)
    assert ((js >= 0) & (js <= math.log(2))).all()
    close(js, other.js(A))


def test_infinite_rows_and_rows_that_see_no_key_pass_no_gradient():
    q, k = torch.randn(1, 1, 5, 4).requires_grad_(), torch.randn(1, 1, 4, 4).requires_grad_()
    q2, k2 = torch.randn(1, 1, 5, 4).requires_grad_(), torch.randn(1, 1, 4, 4).requires_grad_()
    A, other = weights(q, k, mask=Dense(NESTED)), weights(q2, k2, mask=Dense(OTHERS))
    for grad in torch.autograd.grad(A.kl(other).sum(), (q, q2)):
        assert grad.isfinite().all()
        assert (grad[0, 0, 1:] == 0).all()
        assert (grad[0, 0, 0] != 0).any()
    assert all(x.isfinite().all() for x in torch.autograd.grad(A.js(other).sum(), (q, k, q2, k2)))


def test_logarithms_reach_beyond_the_smallest_float32():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 200.0]).view(1, 1, 2, 1)
    A, other = weights(q, k * 0), weights(q, k)
    close(A.kl(other), torch.full((1, 1, 1), 100 - math.log(2)))
    close(A.mean_heads().kl(other.mean_heads()), torch.full((1, 1, 1), 100 - math.log(2)))


def test_negative_targets_make_a_row_no_number():
    A = made("plain", i=3, j=4)
    target = torch.full((3, 4), 0.25).double()
    target[1, 2] = -0.25
    for kind in ("kl", "js"):
        found = getattr(A, kind)(target)
        assert found[:, :, 1].isnan().all()
        assert not found[:, :, [0, 2]].isnan().any()


@every_kind
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_that_one_side_hides_changes_nothing_on_that_side(kind, garbage):
    def compared(value):
        q, k, q2, k2 = (torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(n)) for n in range(4))
        k, k2 = k.clone(), k2.clone()
        k[..., 9:, :], k2[..., 0, :] = value, value
        inputs = [x.requires_grad_() for x in (q, k, q2, k2)]
        A, other = (
            weights(q, k, mask=Causal() & Padding((9,))),
            weights(q2, k2, mask=Window(3) & Causal() & ~Diagonal()),
        )
        return getattr(other, kind)(A), inputs

    # Rows from 4 on see no garbage on either side, and keys from 4 to 8 get gradients from them alone.
    results = []
    for value in (garbage, 1.0):
        found, inputs = compared(value)
        rows = torch.where(found.isfinite(), found, 0.0)[..., 4:]
        results.append((rows, *(x[..., 4:9, :] for x in torch.autograd.grad(rows.sum(), inputs))))
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_no_answer_and_no_gradient_holds_more_than_a_block(monkeypatch):
    n, limit = 300, 2**14
    cut(monkeypatch, 64, 64, limit // 4)
    x = Maker(dtype=torch.float32, grad=True)
    A, other = (weights(x(1, 2, n, D), x(1, 2, n, D), mask=Causal()) for _ in range(2))
    for one in (A, A.mean_heads()):
        with Largest() as seen:
            one.kl(other).sum().backward()
        assert 2**10 < seen.entries <= limit < n**2


def test_no_keys_and_no_queries_are_0_apart():
    for i, j in ((3, 0), (0, 3)):
        A = weights(torch.randn(1, 2, i, 4), torch.randn(1, 2, j, 4))
        for kind in KINDS:
            assert torch.equal(getattr(A, kind)(A), torch.zeros(1, 2, i))


def test_a_tile_of_some_keys_has_the_mean_over_all():
    A, B = torch.rand(2, 1, 1, 2, 3)
    close(row_divergence("mse", 30, A, A.log(), B, B.log()), ((A - B) ** 2).sum(-1) / 30)
