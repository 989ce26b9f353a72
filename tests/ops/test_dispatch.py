"""Every branch of the choice of a backend, forced once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import regard as R
from regard import attend
from regard.ops import dispatch
from regard.ops.backend_plan import BackendPlan
from regard.ops.backends import tiled, triton
from regard.ops.call import Call
from regard.ops.dispatch import choose, order
from tests.backends import attend_on, flex_on_the_cpu
from tests.ops.inputs import qkv

OBJECTIONS = [
    ("sdpa", {"score": R.Additive(torch.ones(8))}, "Additive is no plain product"),
    ("sdpa", {"score": R.Dot(cap=3.0)}, "Dot with a cap is no plain product"),
    ("sdpa", {"normalize": R.Sparsemax()}, "the kernel is softmax, not Sparsemax"),
    ("sdpa", {"bias": R.Added(torch.randn(40, 40, requires_grad=True))}, "no gradient to a bias"),
    ("sdpa", {"dropout": 0.1}, "with dropout PyTorch stores the matrix"),
    ("flex", {}, "compiled for GPUs, and q is on cpu"),
    ("flex", {"dropout": 0.1}, "no dropout"),
    ("flex", {"score": R.Location(torch.ones(40, 8))}, "Location is no product"),
    ("flex", {"normalize": R.Hard()}, "the kernel is softmax, not Hard"),
    ("triton", {"score": R.Additive(torch.ones(8))}, "compiled for GPUs, and q is on cpu"),
    ("triton", {}, "for additive scores"),
]


@pytest.mark.parametrize(("backend", "terms", "reason"), OBJECTIONS, ids=[f"{b}-{r}" for b, _, r in OBJECTIONS])
def test_a_backend_asked_for_by_name_raises_its_objections(backend, terms, reason):
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this call: .*{reason}"):
        attend(*qkv(), **terms, backend=backend)


@pytest.mark.parametrize(
    ("terms", "backend"),
    [
        ({}, "sdpa"),
        ({"mask": R.Window(3)}, "sdpa"),
        ({"bias": R.Alibi(4)}, "sdpa"),
        ({"score": R.Cosine(0.5)}, "sdpa"),
        ({"score": R.Additive(torch.ones(8))}, "tiled"),
        ({"normalize": R.Sparsemax()}, "tiled"),
        ({"dropout": 0.5}, "tiled"),
    ],
)
def test_the_fastest_backend_without_objections_is_taken(terms, backend):
    assert choose(Call.of(*qkv(), **terms)).backend == backend


def test_the_reference_is_never_taken_unasked(monkeypatch):
    monkeypatch.setattr(tiled, "plan", lambda call: ["not today"])
    with pytest.raises(
        ValueError, match=r"no backend runs this call in linear memory: .*tiled: not today; pass backend"
    ):
        attend(*qkv(), normalize=R.Sparsemax())


@pytest.mark.parametrize(
    ("mask", "heads", "n", "first"),
    [
        (None, 1, 4096, "sdpa"),
        (R.Causal(), 1, 4096, "sdpa"),
        (R.Padding((9,)), 32, 2048, "sdpa"),
        (R.Padding((9,)), 33, 2048, "flex"),
        (R.Padding((9,)), 1, 2049, "flex"),
    ],
)
def test_on_a_gpu_long_masked_calls_go_to_flex_first(mask, heads, n, first):
    q = SimpleNamespace(device=torch.device("cuda"))
    call = SimpleNamespace(score=R.Dot(), mask=mask, shape=(1, heads, n, n), q=q, v=None)
    assert order(call)[0].name == first


def test_additive_calls_go_to_the_kernel_for_them_first():
    assert order(Call.of(*qkv(), score=R.Additive(torch.ones(8))))[0] is triton


def test_flex_comes_before_tiled_where_it_runs():
    with flex_on_the_cpu():
        assert choose(Call.of(*qkv(), score=R.Dot(cap=3.0))).backend == "flex"


@pytest.mark.parametrize(
    "terms", [{"mask": R.Causal() & R.Window(5)}, {"bias": R.Alibi(4)}, {"score": R.Dot(cap=2.0)}], ids=str
)
def test_every_pair_of_backends_agrees(terms):
    q, k, v = qkv(33, 50, shared=2)
    want = attend(q, k, v, **terms, backend="reference")
    for backend in dispatch.BACKENDS.values():
        with flex_on_the_cpu():
            if isinstance(backend.plan(Call.of(q, k, v, **terms)), BackendPlan):
                torch.testing.assert_close(attend_on(backend.name, q, k, v, **terms), want)
