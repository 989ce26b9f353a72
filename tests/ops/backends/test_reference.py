"""The reference: the definition, for every call, differentiable twice and by torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import regard as R
from regard import attend
from regard.ops.backend_plan import BackendPlan
from regard.ops.backends import reference
from regard.ops.blocks.prepared_call import prepare
from regard.ops.call import Call
from tests import oracle
from tests.cases import CASES
from tests.oracle import Shape

SHAPE = Shape(b=2, h=4, g=2, i=7, j=11, d=5, e=3)
NAMED = {case.name: case for case in CASES}


def answer(q, k, v, **terms):
    return reference.plan(Call.of(q, k, v, **terms)).run()


@pytest.mark.parametrize("name", ["Dot", "Causal", "Alibi", "Additive-heads", "Documents-cross", "Sparsemax"])
def test_weights_and_output_are_those_of_the_oracle(name):
    case = NAMED[name]
    qkv, tensors = oracle.inputs(SHAPE, case)
    call = Call.of(*qkv, **case.terms(*tensors), backend="reference")
    A, statistic = reference.weigh(prepare(call))
    out, same = reference.plan(call).run()
    assert (A - oracle.weights(case, SHAPE, *qkv[:2], tensors)).abs().max() < 1e-12
    assert (out - oracle.attention(case, SHAPE, *qkv, tensors)).abs().max() < 1e-12
    assert torch.equal(statistic, same)
    assert statistic.shape == (2, 4, 7, 1)


@pytest.mark.parametrize(
    "terms",
    [
        {"score": R.Location(torch.ones(6, 4))},
        {"normalize": R.Hard()},
        {"dropout": 0.5},
        {"mask": R.Rule(lambda *at: at[2] == 3)},
    ],
    ids=str,
)
def test_it_objects_to_no_call(terms):
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    assert isinstance(reference.plan(Call.of(q, k, v, **terms)), BackendPlan)
    with forward_ad.dual_level():
        assert isinstance(reference.plan(Call.of(q, k, v, **terms)), BackendPlan)
    assert torch.vmap(lambda q: answer(q, k, v, **terms)[0], randomness="different")(q[None]).shape == (1, 1, 2, 6, 4)


def test_dropout_keeps_a_weight_scaled_or_drops_it():
    q, k = torch.randn(2, 1, 2, 40, 4, dtype=torch.float64)
    every = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    dropped, whole = answer(q, k, every, dropout=0.25)[0], answer(q, k, every)[0]
    kept = dropped != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(dropped, torch.where(kept, whole / 0.75, 0.0))


@pytest.fixture
def garbage():
    """q, k and v of two key heads, with NaN and Inf at key 5 of one head each."""
    q, (k, v) = torch.randn(1, 4, 7, 3, dtype=torch.float64), torch.randn(2, 1, 2, 7, 3, dtype=torch.float64)
    k[:, 0, 5], v[:, 1, 5] = torch.nan, torch.inf
    return [x.requires_grad_() for x in (q, k, v)]


def test_a_key_that_is_not_finite_reaches_no_query_it_is_hidden_from(garbage):
    clean = [x.detach()[:, :, :5].requires_grad_() for x in garbage]
    out, want = (answer(*given, mask=R.Causal())[0] for given in (garbage, clean))
    torch.testing.assert_close(out[:, :, :5], want)
    assert not out[:, :, 5:].isfinite().all(-1).any()
    (got,), (exact,) = (torch.autograd.grad(x[:, :, :5].sin().sum(), y[0]) for x, y in ((out, garbage), (want, clean)))
    torch.testing.assert_close(got[:, :, :5], exact)


def test_a_key_that_is_hidden_from_every_query_has_no_part_in_any_gradient(garbage):
    q, *kv = garbage
    clean = [x.detach()[:, :, :5].requires_grad_() for x in kv]
    got = torch.autograd.grad(answer(*garbage, mask=R.Padding((5,)))[0].sin().sum(), garbage)
    want = torch.autograd.grad(answer(q, *clean)[0].sin().sum(), (q, *clean))
    torch.testing.assert_close((got[0], *(x[:, :, :5] for x in got[1:])), want)
    assert all((x[:, :, 5:] == 0).all() for x in got[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    q, k, v = torch.randn(3, 1, 2, 63, 4).to(dtype)
    out, statistic = answer(q, k, v)
    exact, exact_statistic = answer(q.double(), k.double(), v.double())
    assert statistic.dtype == torch.float32
    torch.testing.assert_close(statistic.double(), exact_statistic, atol=1e-5, rtol=1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_second_derivatives_are_those_of_differences():
    leaves = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64, requires_grad=True).unbind()
    terms = {"mask": R.Causal(), "score": R.Dot(cap=2.0)}
    assert torch.autograd.gradgradcheck(lambda *given: answer(*given, **terms)[0], leaves)


def test_the_reference_serves_torch_func():
    q, k, v = torch.randn(3, 2, 1, 2, 30, 8)
    mask = R.Window(5)
    out = torch.func.vmap(lambda q, k, v: attend(q, k, v, mask=mask, backend="reference"))(q, k, v)
    torch.testing.assert_close(out, torch.stack([attend(*x, mask=mask) for x in zip(q, k, v, strict=True)]))
