"""KernelReducer: what it answers by a kernel, what it hands to blocks, and the row statistic it asks for once."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard.kernels.launch_cache import StillCompiling
from regard.ops.blocks import measures
from regard.ops.blocks.block_reducer import BlockReducer
from regard.ops.blocks.pool_bins import Axis, Mesh
from regard.ops.call import Call
from regard.ops.fused import kernel_reducer as module
from regard.ops.fused.kernel_reducer import KernelReducer
from regard.ops.weights import Summary
from tests.kernels.judged import FEW, judged

NONE = torch.zeros(1, 2, 9, 1)


class Recorder:
    """Stands for the kernels, or for the blocks: keeps the names of what it is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        if name.startswith("has_"):
            return getattr(module.kernel_reductions, name)
        return lambda *given, **options: self.asked.append(name) or ("answer", None)


def reducer_of(statistic=NONE, grad=False, **terms):
    q, k = torch.randn(1, 2, 9, 4, requires_grad=grad), torch.randn(1, 2, 12, 4)
    blocks = Recorder()
    return KernelReducer(Call.of(q, k, **terms), statistic, blocks), blocks


def test_the_row_statistic_is_that_of_a_product_and_is_not_computed_again(monkeypatch):
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 12, 4)
    call = Call.of(q, k, mask=R.Causal())
    found = KernelReducer(call, None, BlockReducer(call)).row_statistic()
    torch.testing.assert_close(found.squeeze(-1), R.weights(q, k, mask=R.Causal()).lse)
    monkeypatch.setattr(module.dispatch, "choose", None)
    assert KernelReducer(call, found, BlockReducer(call)).row_statistic() is found


def test_columns_and_products_with_gradients_are_left_to_blocks():
    reducer, blocks = reducer_of()
    reducer.columns(torch.tensor([3]))
    reducer.transposed_product(torch.ones(1, 2, 9, 3, requires_grad=True))
    assert blocks.asked == ["columns", "transposed_product"]
    reducer, blocks = reducer_of(grad=True)
    reducer.transposed_product(torch.ones(1, 2, 9, 3))
    assert blocks.asked == ["transposed_product"]


def test_measures_without_a_kernel_or_without_its_gradient_are_left_to_blocks():
    reducer, blocks = reducer_of(grad=True, bias=R.Alibi(2))
    assert [reducer.can_measure(name) for name in ("entropy", "received", "max", "distance")] == [
        True,
        True,
        False,
        False,
    ]
    reducer.measure(measures.largest())
    assert blocks.asked == ["measure"]
    reducer, blocks = reducer_of()
    assert all(reducer.can_measure(name) for name in ("entropy", "received", "max", "distance"))
    reducer.measure(measures.columns(torch.tensor([1]), 12))
    assert blocks.asked == ["measure"]


@pytest.mark.parametrize(
    "terms",
    [
        {"score": R.Dot(cap=3.0)},
        {"normalize": R.SinkSoftmax(0.0)},
        {"bias": R.Alibi(slopes=torch.ones(2, requires_grad=True))},
    ],
    ids=repr,
)
def test_capped_scores_sinks_and_learned_biases_have_no_gradient_by_kernel(terms):
    reducer, _ = reducer_of(grad=True, **terms)
    assert not reducer.can_measure("entropy")


def test_groups_of_nothing_are_left_to_blocks():
    reducer, blocks = reducer_of()
    reducer.group_sums(torch.zeros(1, 9), torch.zeros(1, 12), 0, 3)
    assert blocks.asked == ["group_sums"]


@pytest.mark.parametrize(("saves", "asked"), [(True, []), (False, ["topk"])])
def test_the_largest_weights_are_left_to_blocks_where_runs_save_no_work(saves, asked, monkeypatch):
    monkeypatch.setattr(module, "saves_work", lambda call, k: saves)
    monkeypatch.setattr(module, "topk", lambda call, statistic, k: ("values", "keys"))
    reducer, blocks = reducer_of()
    found = reducer.topk(3)
    assert blocks.asked == asked
    assert saves is (found == (("values", "keys"), NONE))


def test_it_describes_itself():
    assert reducer_of()[0].describe() == "one fused product for the row statistic, if it is not known, and one kernel"


@pytest.mark.parametrize("size", [8, 4], ids=["in one pass", "in two"])
@pytest.mark.parametrize("terms", FEW.values(), ids=FEW)
def test_means_and_maxima_of_cells_of_the_queries_that_count(terms, size, device):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    A, exact = judged(q, k, terms)
    queries = torch.arange(38).view(2, 19) % 5 > 1
    cells = Axis.cells(19, -(-19 // size)), Axis.cells(40, -(-40 // size))
    got = A.summary_in(*cells, peaks=True, queries=queries.to(device))
    want = exact.summary_in(*cells, peaks=True, queries=queries)
    for name in ("entropy", "received", "max", "distance", "logit", "map", "peaks", "statistic"):
        torch.testing.assert_close(
            getattr(got, name).cpu().double(), getattr(want, name), atol=1e-4, rtol=1e-4, msg=name
        )
    torch.testing.assert_close(A.logit().cpu().double(), exact.logit(), atol=1e-4, rtol=1e-4)
    for name, value in A.measures(queries=queries.to(device)).items():
        torch.testing.assert_close(value.cpu().double(), getattr(want, name), atol=1e-4, rtol=1e-4, msg=name)


def test_a_logit_far_below_its_sink_is_exact(device):
    q, k = torch.randn(1, 2, 5, 16, device=device), torch.randn(1, 1, 9, 16, device=device)
    A, exact = judged(q, k, {"normalize": R.SinkSoftmax(torch.tensor([200.0, 0.0])), "mask": R.Causal()}, offset=-1)
    assert not A.max()[0, 0].any()
    assert exact.logit()[..., 0].isneginf().all()
    for found in (A.logit(), A.summary().logit):
        torch.testing.assert_close(found.cpu().double(), exact.logit(), atol=1e-4, rtol=1e-4)


def test_one_pass_finds_maxima_of_cells_of_whole_parts_of_a_tile(monkeypatch):
    asked = []
    monkeypatch.setattr(
        module.kernel_reductions,
        "reduce_by_kernel",
        lambda call, lse, want, mesh: asked.append(sorted(want)) or {"max": 1 - NONE[..., 0]},
    )
    reducer, _ = reducer_of()
    for size in (8, 4):
        reducer.summary(Mesh(Axis.cells(9, -(-9 // size)), Axis.cells(12, 3), torch.device("cpu")), peaks=True)
    names = ["distance", "entropy", "map", "max", "received"]
    assert asked == [sorted([*names, "peaks"]), names, ["peaks"]]


def refuse(*_, **__):
    raise StillCompiling


@pytest.mark.parametrize(
    "ask",
    [
        lambda A: A.summary(peaks=True, queries=torch.ones(1, 9, dtype=torch.bool)),
        lambda A: A.measures(),
        lambda A: A.entropy(),
        lambda A: A.logit(),
        lambda A: A.pool(3, 3),
        lambda A: A.pool(3, 3, "max"),
        lambda A: A.mass(torch.arange(9) // 3, torch.arange(12) // 3),
        lambda A: A.topk(2),
        lambda A: A.T @ torch.ones(1, 2, 9, 4),
    ],
)
def test_blocks_answer_while_another_thread_compiles(monkeypatch, ask):
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 12, 4)
    for name in ("reduce_by_kernel", "group_sums", "transposed_product"):
        monkeypatch.setattr(module.kernel_reductions, name, refuse)
    monkeypatch.setattr(module, "topk", refuse)
    monkeypatch.setattr(module, "saves_work", lambda *_: True)
    monkeypatch.setattr(module.kernel_reductions, "objections", lambda call: [])
    found = ask(R.weights(q, k, mask=R.Causal()))
    monkeypatch.setattr(module.kernel_reductions, "objections", lambda call: ["none"])
    want = ask(R.weights(q, k, mask=R.Causal()))
    of_summary = isinstance(found, Summary)
    torch.testing.assert_close(vars(found) if of_summary else found, vars(want) if of_summary else want)


def test_deterministic_algorithms_and_long_texts_wait_for_the_kernel(monkeypatch):
    monkeypatch.setattr(module.kernel_reductions, "reduce_by_kernel", refuse)
    reducer, _ = reducer_of()
    monkeypatch.setattr(module, "MAX_BLOCK_ENTRIES", 1 * 2 * 9 * 12 - 1)
    with pytest.raises(StillCompiling):
        reducer.summary(None)
    monkeypatch.setattr(module, "MAX_BLOCK_ENTRIES", 1 * 2 * 9 * 12)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(StillCompiling):
        reducer.summary(None)


@pytest.mark.parametrize("measure", ["entropy", "received"])
@pytest.mark.parametrize("missing", ["reduce_by_kernel", "_gradients"])
def test_blocks_differentiate_while_another_thread_compiles(monkeypatch, measure, missing):
    q, k = torch.randn(1, 2, 9, 4, requires_grad=True), torch.randn(1, 2, 12, 4, requires_grad=True)

    def differentiate():
        return torch.autograd.grad(getattr(R.weights(q, k, mask=R.Causal()), measure)().square().sum(), (q, k))

    want = differentiate()
    monkeypatch.setattr(module.kernel_reductions, "_compiled_gradients", set())
    monkeypatch.setattr(module.kernel_reductions, missing, refuse)
    monkeypatch.setattr(module.kernel_reductions, "objections", lambda call: [])
    torch.testing.assert_close(differentiate(), want)
