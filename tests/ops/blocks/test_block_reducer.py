"""BlockReducer: every answer is that of the dense matrix, with a known statistic and without, on either backend."""

import math
from dataclasses import replace

import pytest
import torch

from regard import Causal, Window, weights
from regard.ops.blocks import measures, prepared_call
from regard.ops.blocks.block_reducer import BlockReducer
from regard.ops.blocks.pool_bins import Axis, Mesh
from regard.ops.call import Call

B, H, G, I, J = 2, 4, 2, 13, 19
AWAY = (torch.arange(I)[:, None] + J - I - torch.arange(J)).abs()
ROWS, COLS = torch.arange(I) * 3 // I, torch.arange(J) * 4 // J  # the bins of each query and key
KEYS = torch.tensor([18, 2, 2])
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    for name, value in (("ROWS_PER_BLOCK", 4), ("KEYS_PER_TILE", 4), ("SCORES_PER_BLOCK", 2**6)):
        monkeypatch.setattr(prepared_call, name, value)


def causal_reducer(backend="tiled", known=False, learns=False):
    """A reducer with its weights and row statistic, written out."""
    q, k = torch.randn(B, H, I, 3).double(), torch.randn(B, G, J, 3).double()
    reducer = BlockReducer(Call.of(q.requires_grad_(learns), k, mask=Causal(), backend=backend))
    s = q.detach() @ k.repeat_interleave(H // G, 1).mT * 3**-0.5
    s = s.masked_fill(torch.arange(J) > torch.arange(I)[:, None] + J - I, -torch.inf)
    statistic = s.logsumexp(-1, keepdim=True)
    return replace(reducer, statistic=statistic if known else None), s.softmax(-1), statistic


def mesh_of(how="mean"):
    return Mesh(Axis.even(I, 3), Axis.even(J, 4), torch.device("cpu"), how)


def bin_sums(A):
    return torch.einsum("b h i j, i r, j c -> b h r c", A, torch.eye(3).double()[ROWS], torch.eye(4).double()[COLS])


def bin_maxima(A):
    pairs = [A[..., r == ROWS, :][..., c == COLS].amax((-1, -2)) for r in range(3) for c in range(4)]
    return torch.stack(pairs, -1).unflatten(-1, (3, 4))


def transposed_by(reducer):
    return reducer.transposed_product(torch.linspace(-1, 1, I).double().view(1, 1, I, 1).expand(B, -1, -1, -1))


AREA = ROWS.bincount()[:, None] * COLS.bincount()
ANSWERS = {
    "sum": (lambda r: r.pool(mesh_of("sum")), bin_sums),
    "mean": (lambda r: r.pool(mesh_of("mean")), lambda A: bin_sums(A) / AREA),
    "max": (lambda r: r.pool(mesh_of("max")), bin_maxima),
    "groups": (lambda r: r.group_sums(ROWS[None], COLS.expand(B, J), 3, 4), bin_sums),
    "transposed": (transposed_by, lambda A: A.mT @ torch.linspace(-1, 1, I).double()[:, None]),
    "entropy": (lambda r: r.measure(measures.entropy()), lambda A: torch.special.entr(A).sum(-1)),
    "received": (lambda r: r.measure(measures.key_sums()), lambda A: A.sum(-2)),
    "columns": (lambda r: (r.columns(KEYS), r.statistic), lambda A: A[..., KEYS]),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_answers_are_those_of_the_dense_matrix(backend, known, answer):
    reducer, A, statistic = causal_reducer(backend, known)
    ask, want = ANSWERS[answer]
    found, rows = ask(reducer)
    close(found, want(A))
    assert rows is None or torch.allclose(rows, statistic)


@pytest.mark.parametrize("known", [False, True])
def test_a_summary_holds_all_measures_and_the_mean_of_each_cell(known):
    reducer, A, statistic = causal_reducer(known=known)
    found, rows = reducer.summary(mesh_of())
    close(rows, statistic)
    want = {"entropy": torch.special.entr(A).sum(-1), "received": A.sum(-2), "max": A.amax(-1)}
    logit = A.amax(-1).log() + statistic.squeeze(-1)
    close(found, want | {"distance": (A * AWAY).sum(-1), "map": bin_sums(A) / AREA, "logit": logit})


def test_the_largest_weights_come_with_their_keys():
    reducer, A, _ = causal_reducer()
    (values, keys), _ = reducer.topk(4)
    close(values, A.topk(4).values)
    close(A.gather(-1, keys), values)


def test_columns_take_a_statistic_that_is_known_unless_gradients_flow_through_it():
    reducer, A, statistic = causal_reducer()
    doubled = statistic - torch.tensor(2.0).log()  # a statistic that would double every weight
    close(replace(reducer, statistic=doubled).columns(KEYS), 2 * A[..., KEYS])
    reducer, A, statistic = causal_reducer(learns=True)
    found = replace(reducer, statistic=statistic - 1).columns(KEYS)
    close(found.detach(), A[..., KEYS])
    assert found.requires_grad


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_only_the_reference_is_differentiable_twice(backend):
    reducer, _, _ = causal_reducer(backend, learns=True)
    entropy = reducer.measure(measures.entropy())[0]
    (grad,) = torch.autograd.grad(entropy.sin().sum(), reducer.call.q, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(grad.square().sum(), reducer.call.q)[0].any()
        return
    with pytest.raises(RuntimeError, match="differentiable once; pass backend='reference'"):
        torch.autograd.grad(grad.square().sum(), reducer.call.q)


def test_transforms_of_functions_are_refused_where_answers_are_written_in_place():
    reducer, _, _ = causal_reducer()
    with pytest.raises(ValueError, match=r"compute them from weights\(..., backend='reference'\)"):
        torch.func.vmap(lambda x: reducer.topk(2)[0])(torch.ones(2))
    with pytest.raises(ValueError, match=r"torch.func cannot follow; pass weights\(..., backend='reference'\)"):
        torch.func.vmap(lambda x: reducer.measure(measures.entropy())[0])(torch.ones(2))


def test_entries_of_a_hidden_key_are_zero_whatever_it_holds_also_for_few_queries():
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 300, 8)
    k[:, :, 3] = math.nan  # in a tile that no query sees
    A = weights(q, k, mask=Causal() & Window(10))
    A.entropy()  # leaves the row statistic
    assert (A[..., :20] == 0).all()
