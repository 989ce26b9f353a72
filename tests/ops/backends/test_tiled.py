"""Attention by blocks of rows: the oracle's numbers, in linear memory, without the tiles a mask leaves empty."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard as R
from regard.ops.backends import reference, tiled
from regard.ops.blocks import prepared_call
from regard.ops.call import Call
from regard.ops.terms.scores import Score
from tests import oracle
from tests.cases import CASES
from tests.oracle import Shape

SHAPE = Shape(b=1, h=4, g=2, i=23, j=27, d=5, e=3)
NAMED = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _small(small_blocks):
    """Every call is cut into several blocks."""


def answer(q, k, v, **terms):
    return tiled.plan(Call.of(q, k, v, **terms)).run()


class LargestTensor(TorchFunctionMode):
    """Records the entries of the largest tensor that a function of PyTorch returns."""

    entries = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.entries = max(self.entries, out.untyped_storage().nbytes() // out.itemsize)
        return out


@pytest.mark.parametrize("name", ["Dot", "Longformer", "Alibi", "Additive-heads", "Documents-cross", "Sparsemax"])
def test_output_and_statistic_are_those_of_the_definition(name):
    case = NAMED[name]
    qkv, tensors = oracle.inputs(SHAPE, case)
    terms = case.terms(*tensors)
    out, statistic = answer(*qkv, **terms)
    assert (out - oracle.attention(case, SHAPE, *qkv, tensors)).abs().max() < 1e-12
    torch.testing.assert_close(statistic, reference.plan(Call.of(*qkv, **terms)).run()[1])


def test_memory_is_linear_in_the_sequence():
    n = 400
    q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3))
    with LargestTensor() as tiles:
        answer(q, k, v, mask=R.Causal())[0].sum().backward()
    with LargestTensor() as whole:
        reference.plan(Call.of(q, k, v, mask=R.Causal())).run()[0].sum().backward()
    assert tiles.entries <= prepared_call.ROWS_PER_BLOCK * n
    assert whole.entries >= n * n


def test_no_score_is_computed_in_an_empty_tile(monkeypatch):
    entries, tile = [], Score.tile
    monkeypatch.setattr(R.Cosine, "tile", lambda *at: entries.append(tile(*at)) or entries[-1])
    q, k, v = torch.randn(3, 1, 1, 320, 4)
    answer(q, k, v, score=R.Cosine(), mask=R.Causal() & R.Window(9))
    rows, keys = prepared_call.ROWS_PER_BLOCK, prepared_call.KEYS_PER_TILE
    assert 0 < sum(s.numel() for s in entries) <= 320 * (rows + 8 + 2 * keys)


def test_dropout_keeps_a_weight_scaled_or_drops_it():
    q, k = torch.randn(2, 1, 2, 40, 4, dtype=torch.float64)
    every = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    dropped, whole = answer(q, k, every, dropout=0.25)[0], answer(q, k, every)[0]
    kept = dropped != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(dropped, torch.where(kept, whole / 0.75, 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    q, k, v = torch.randn(3, 1, 2, 63, 4).to(dtype)
    out, statistic = answer(q, k, v)
    exact, exact_statistic = answer(q.double(), k.double(), v.double())
    assert statistic.dtype == torch.float32
    torch.testing.assert_close(statistic.double(), exact_statistic, atol=1e-5, rtol=1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_a_second_derivative_raises_and_names_the_backend_that_has_one():
    q, k, v = torch.randn(3, 1, 2, 20, 4, requires_grad=True).unbind()
    (once,) = torch.autograd.grad(answer(q, k, v)[0].sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once; pass backend='reference'"):
        once.sum().backward()


def test_it_objects_within_torch_func_alone():
    q, k, v = torch.randn(3, 1, 2, 20, 4)
    plans = [tiled.plan(Call.of(q, k, v))]
    torch.vmap(lambda q: plans.append(tiled.plan(Call.of(q, k, v))) or q)(q[None])
    assert plans[0].backend == "tiled"
    assert plans[1] == ["it works block by block, in place, which torch.func cannot follow"]
