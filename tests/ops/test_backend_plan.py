"""A plan runs its call; a backend without one gives objections."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import regard as R
from regard.ops import dispatch
from regard.ops.backend_plan import BackendPlan
from regard.ops.call import Call
from tests.ops.inputs import qkv

CALLS = {
    "plain": {},
    "causal": {"mask": R.Causal()},
    "window": {"mask": R.Window(3), "bias": R.Alibi(4)},
    "padding": {"mask": R.Padding((17, 0))},
    "cosine": {"score": R.Cosine(0.5)},
    "cap": {"score": R.Dot(cap=2.0)},
    "additive": {"score": R.Additive(torch.ones(8))},
    "sparse": {"normalize": R.Sparsemax()},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", dispatch.BACKENDS.values(), ids=lambda backend: backend.name)
def test_a_backend_has_a_plan_of_its_name_or_objections_in_words(backend, name):
    q, k, v = qkv(33, 50, shared=2)
    plan = backend.plan(Call.of(q, k, v[..., :5], **CALLS[name]))
    if not isinstance(plan, BackendPlan):
        assert plan
        assert all(isinstance(reason, str) and " " in reason for reason in plan)
        return
    out, statistic = plan.run()
    assert plan.backend == backend.name
    assert out.shape == (2, 4, 33, 5)
    assert statistic is None or statistic.shape == (2, 4, 33, 1)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "padding"])
def test_the_statistic_of_a_plan_is_the_log_sum_exp_of_its_row(name):
    q, k, v = (x.double() for x in qkv(33, 50, shared=2))
    terms = CALLS[name]
    i, j = torch.arange(33)[:, None] + 17, torch.arange(50)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    s = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    s = s + terms["bias"](b, h, i, j) if "bias" in terms else s
    s = s.masked_fill(~terms["mask"](b, h, i, j), -torch.inf) if "mask" in terms else s
    want = s.logsumexp(-1, keepdim=True)
    for backend in dispatch.BACKENDS.values():
        plan = backend.plan(Call.of(q, k, v, **terms).with_values(v))
        if isinstance(plan, BackendPlan):
            torch.testing.assert_close(plan.run()[1], want)


def test_a_module_with_a_name_and_a_plan_is_a_backend(monkeypatch):
    mean = ModuleType("mean")
    mean.name = "mean"

    def plan(call):
        if call.mask is not None:
            return ["it has no mask"]
        return BackendPlan("mean", lambda: (call.v.mean(2, keepdim=True), None))

    mean.plan = plan
    monkeypatch.setitem(dispatch.BACKENDS, "mean", mean)
    q, k, v = qkv(1, 50)
    assert torch.equal(R.attend(q, k, v, backend="mean"), v.mean(2, keepdim=True))
    with pytest.raises(ValueError, match="backend 'mean' cannot run this call: it has no mask"):
        R.attend(q, k, v, mask=R.Causal(), backend="mean")
