"""Weights answers every question as the dense matrix would, without storing it."""

import pickle
from functools import cache
from math import log

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Causal,
    Cosine,
    Documents,
    Dot,
    Entmax,
    Gaussian,
    Global,
    Hard,
    Location,
    Near,
    Padding,
    Prefix,
    Relative,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Summary,
    Tapered,
    Weights,
    Window,
    attend,
    weights,
)
from regard.ops import weights as lazy
from regard.ops.blocks import prepared_call
from regard.ops.blocks.pool_bins import Axis

B, H, G, I, J, D = 2, 4, 2, 70, 100, 8
BLOCKS = {name: getattr(prepared_call, name) for name in ("ROWS_PER_BLOCK", "KEYS_PER_TILE", "SCORES_PER_BLOCK")}
HALF = (torch.float16, torch.bfloat16)
close = torch.testing.assert_close


class Maker:
    """Seeded tensors of one dtype."""

    def __init__(self, i: int = I, j: int = J, dtype: torch.dtype = torch.float64, grad: bool = False) -> None:
        self.i, self.j, self.dtype, self.grad = i, j, dtype, grad
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)
        return x.requires_grad_(self.grad)

    def centers(self) -> Tensor:
        return self(B, H, self.i).detach().abs().mul(self.j / 3).requires_grad_(self.grad)

    def ids(self, n: int) -> Tensor:
        return torch.stack([torch.arange(n) * parts // n for parts in (3, 5)])

    def holes(self) -> Tensor:
        values = self(H, self.i, self.j).detach()
        values[values > 0.8] = float("-inf")
        values[1, self.i // 2] = float("-inf")
        return values.requires_grad_(self.grad)


TERMS = {
    "plain": lambda x: {},
    "capped": lambda x: {"score": Dot(scale=x(H), cap=1.5)},
    "causal": lambda x: {"mask": Causal()},
    "causal at an early offset": lambda x: {"mask": Causal(), "offset": -20},
    "window at an offset": lambda x: {"mask": Window(17), "offset": 20},
    "padding": lambda x: {"mask": Padding((x.j, x.j // 3))},
    "global or window": lambda x: {"mask": Global((0, x.j - 2)) | Window(9)},
    "prefix per batch row": lambda x: {"mask": Causal() | Prefix(torch.tensor([x.j // 4, x.j - 1]))},
    "documents": lambda x: {"mask": Documents(x.ids(x.i), x.ids(x.j))},
    "near": lambda x: {"mask": Near(x.centers().detach(), 6.5)},
    "alibi": lambda x: {"mask": Causal(), "bias": Alibi(slopes=x(H))},
    "t5": lambda x: {"bias": Relative.t5(x(H, 32))},
    "shaw": lambda x: {"bias": Relative.shaw(x(H, 17, D)), "offset": 3},
    "added": lambda x: {"bias": Added(x.holes())},
    "additive": lambda x: {"score": Additive(x(H, D)), "mask": Padding((x.j, x.j // 3))},
    "bilinear": lambda x: {"score": Bilinear(x(H, D, D))},
    "cosine": lambda x: {"score": Cosine(x(H)), "mask": Window(40)},
    "location": lambda x: {"score": Location(x(H, x.j + 3, D)), "mask": Causal()},
    "sink": lambda x: {"normalize": SinkSoftmax(x(H)), "mask": Causal()},
    "sigmoid": lambda x: {"normalize": Sigmoid(x(H)), "mask": Causal()},
    "sparsemax": lambda x: {"normalize": Sparsemax(), "mask": Window(30)},
    "entmax": lambda x: {"normalize": Entmax(1.4), "mask": Causal()},
    "hard": lambda x: {"normalize": Hard(), "mask": ~Global(3)},
    "tapered": lambda x: {"normalize": Tapered(Softmax(), Gaussian(x.centers(), 9.0)), "mask": Window(60)},
}
every_term = pytest.mark.parametrize("name", TERMS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    cut(monkeypatch, 32, 16, 2**13)


def cut(monkeypatch, rows: int, cols: int, entries: int) -> None:
    for name, value in (("ROWS_PER_BLOCK", rows), ("KEYS_PER_TILE", cols), ("SCORES_PER_BLOCK", entries)):
        monkeypatch.setattr(prepared_call, name, value)


def build(name: str, backend: str | None = None, **sizes) -> Weights:
    x = Maker(**sizes)
    return weights(x(B, H, x.i, D), x(B, G, x.j, D), backend=backend, **TERMS[name](x))


@cache
def matrix(name: str) -> Tensor:
    return build(name, "reference").dense()


def positions(name: str) -> tuple[Tensor, Tensor]:
    return torch.arange(I)[:, None] + TERMS[name](Maker()).get("offset", J - I), torch.arange(J)


def onehot(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids).double()


MEASURES = {
    "entropy": lambda A, i, j: -torch.special.xlogy(A, A).sum(-1),
    "received": lambda A, i, j: A.sum(-2),
    "max": lambda A, i, j: A.amax(-1),
    "distance": lambda A, i, j: (A * (i - j).abs()).sum(-1),
}


@every_term
class TestAgainstTheMatrix:
    def test_dense_is_the_reference(self, name):
        A = build(name)
        assert A.shape == (B, H, I, J)
        assert A.dtype == torch.float64
        assert A.device == torch.device("cpu")
        close(A.dense(), matrix(name))

    @pytest.mark.parametrize("measure", MEASURES)
    def test_a_measure_is_that_of_the_matrix(self, name, measure):
        expected = MEASURES[measure](matrix(name), *positions(name))
        close(getattr(build(name), measure)(), expected)

    def test_a_measure_after_the_statistic_is_that_of_the_matrix(self, name):
        A = build(name)
        A.summary()
        for measure, expected in MEASURES.items():
            close(getattr(A, measure)(), expected(matrix(name), *positions(name)))

    def test_topk_holds_the_largest_and_where_they_are(self, name):
        for k in (1, 7, J):
            found = build(name).topk(k)
            close(found.values, matrix(name).topk(k).values)
            close(matrix(name).gather(-1, found.indices), found.values)
            assert (found.indices.sort(-1).values.diff(dim=-1) > 0).all()

    @pytest.mark.parametrize(("rows", "cols"), [(7, 13)])
    def test_pool_bins_the_matrix(self, name, rows, cols):
        A, dense = build(name), matrix(name)
        row_bins, col_bins = torch.arange(I) * rows // I, torch.arange(J) * cols // J
        sums = onehot(row_bins).T @ dense @ onehot(col_bins)
        area = row_bins.bincount()[:, None] * col_bins.bincount()
        close(A.pool(rows, cols, how="sum"), sums)
        close(A.pool(rows, cols), sums / area)
        places = (row_bins[:, None] * cols + col_bins).flatten().expand(B, H, -1)
        maxima = dense.new_zeros(B, H, rows * cols).scatter_reduce(2, places, dense.flatten(2), "amax")
        close(A.pool(rows, cols, how="max"), maxima.unflatten(-1, (rows, cols)))

    @pytest.mark.parametrize("per_row", [(False, False), (True, True)])
    def test_mass_sums_over_keys_and_averages_over_queries(self, name, per_row):
        generator = torch.Generator().manual_seed(1)
        query, key = torch.randint(5, (B, I), generator=generator), torch.randint(9, (B, J), generator=generator)
        query, key = (x if each else x[0] for x, each in zip((query, key), per_row, strict=True))
        picks = onehot(query.expand(B, I))
        means = (picks / picks.sum(1, keepdim=True)).mT[:, None]
        expected = means @ matrix(name) @ onehot(key.expand(B, J))[:, None]
        close(build(name).mass(query, key), expected)

    def test_summary_is_every_measure_at_once(self, name):
        A = build(name)
        found = A.summary()
        assert isinstance(found, Summary)
        for measure, expected in MEASURES.items():
            close(getattr(found, measure), expected(matrix(name), *positions(name)))
        close(found.map, matrix(name))
        if found.statistic is None:
            assert A.statistic is None
        else:
            close(found.statistic, A.statistic)

    @pytest.mark.parametrize("heads", [1, G, H])
    def test_products_take_one_g_or_h_heads(self, name, heads):
        x, dense = Maker(), matrix(name)
        v, u = x(B, heads, J, 3), x(B, heads, I, 3)
        close(build(name) @ v, dense @ v.repeat_interleave(H // heads, 1))
        close(build(name).T @ u, dense.mT @ u.repeat_interleave(H // heads, 1))

    def test_a_product_from_the_left_is_one_of_the_transpose(self, name):
        u = Maker()(B, H, 3, I)
        close(u @ build(name), u @ matrix(name))

    def test_products_broadcast_batch_and_heads(self, name):
        v = Maker()(J, 3)
        close(build(name) @ v, matrix(name) @ v)
        close(build(name) @ v.expand(H, J, 3), matrix(name) @ v)

    def test_the_transpose_is_a_matrix_too(self, name):
        T = build(name).T
        assert T.shape == (B, H, J, I)
        assert isinstance(T.T, Weights)
        close(T.dense(), matrix(name).mT)
        close(T[1, :, 5:9], matrix(name).mT[1, :, 5:9])

    def test_select_stays_lazy_and_keeps_four_dims(self, name):
        heads = [0, 2, 3]
        A = build(name)
        check_selection(A.select(batch=1, heads=heads), matrix(name)[1:], heads)
        A.summary()
        check_selection(A.select(batch=1, heads=heads), matrix(name)[1:], heads)

    def test_selections_nest(self, name):
        part = build(name).select(heads=[3, 1, 0]).select(batch=[1, 0], heads=slice(1, None)).select(heads=-1)
        close(part.dense(), matrix(name)[[1, 0]][:, [0]])

    def test_attend_is_the_product_with_the_values(self, name):
        x = Maker()
        q, k = x(B, H, I, D), x(B, G, J, D)
        terms = TERMS[name](x)
        v = x(B, G, J, 3)
        close(attend(q, k, v, **terms), weights(q, k, **terms) @ v)


def check_selection(part: Weights, dense: Tensor, heads: int | slice | list[int] | None) -> None:
    dense = dense if heads is None else dense[:, [heads] if isinstance(heads, int) else heads]
    assert isinstance(part, Weights)
    close(part.dense(), dense)
    close(part.received(), dense.sum(-2))
    close(part.summary().map, dense)
    close(part.T @ torch.ones(I, 1).double(), dense.sum(-2)[..., None])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (I, 3), (64, J)])
@pytest.mark.parametrize("name", ["padding", "global or window"])
def test_pool_takes_any_resolution(name, rows, cols):
    TestAgainstTheMatrix().test_pool_bins_the_matrix(name, rows, cols)


@pytest.mark.parametrize("per_row", [(True, False), (False, True)])
def test_mass_takes_groups_for_all_batch_rows_on_either_side(per_row):
    TestAgainstTheMatrix().test_mass_sums_over_keys_and_averages_over_queries("documents", per_row)


@every_term
def test_blocks_of_the_usual_size_give_the_same_answers(name, monkeypatch):
    cut(monkeypatch, *BLOCKS.values())
    ours, theirs = build(name, i=150, j=200), build(name, "reference", i=150, j=200)
    close(ours.entropy(), theirs.entropy())
    close(ours.received(), theirs.received())


def test_a_summary_maps_long_sequences_to_a_limited_resolution(monkeypatch):
    """In cells of 4 queries, the last of 2, and 8 keys, the last of 4."""
    monkeypatch.setattr(lazy, "MAX_MAP_CELLS", 20)
    A = build("causal")
    cells = [[part.mean((-1, -2)) for part in rows.split(8, -1)] for rows in A.dense().split(4, -2)]
    close(A.summary().map, torch.stack([torch.stack(row, -1) for row in cells], -2))
    assert build("causal", i=11).summary().map.shape == (B, H, 11, 13)
    close(build("causal", i=80, j=80).summary().map, build("causal", i=80, j=80).pool(20, 20))


@every_term
def test_a_summary_holds_the_largest_weight_of_each_cell_if_asked(name, monkeypatch):
    monkeypatch.setattr(lazy, "MAX_MAP_CELLS", 7)
    A = build(name)
    assert A.summary().peaks is None
    cells = [[part.amax((-1, -2)) for part in rows.split(16, -1)] for rows in A.dense().split(16, -2)]
    close(A.summary(peaks=True).peaks, torch.stack([torch.stack(row, -1) for row in cells], -2))


@pytest.mark.parametrize("entries", [2**9, 2**10, 2**11, 5 * 2**9, 2**12, 2**20])
@pytest.mark.parametrize("w", [(40, D), (12, 40, D)])
@pytest.mark.parametrize(("h", "g"), [(12, 3), (12, 12), (12, 4)])
def test_values_keep_their_heads_however_heads_are_cut_into_blocks(entries, w, h, g, monkeypatch):
    cut(monkeypatch, 16, 8, entries)
    x = Maker()
    q, k, v, u = x(B, h, 20, D), x(B, g, 40, D), x(B, g, 40, 3), x(B, g, 20, 3)
    A = weights(q, k, score=Location(x(*w)))
    close(A @ v, A.dense() @ v.repeat_interleave(h // g, 1))
    close(A.T @ u, A.dense().mT @ u.repeat_interleave(h // g, 1))


def scores(x: Maker) -> tuple[Tensor, Tensor, Tensor]:
    q, k = x(B, H, I, D), x(B, H, J, D)
    return q, k, q @ k.mT * D**-0.5


class TestStatistic:
    def test_softmax_is_rebuilt_from_its_lse(self):
        q, k, s = scores(Maker())
        A = weights(q, k)
        close(A.lse, s.logsumexp(-1))
        close((s - A.statistic[..., None]).exp(), A.dense())

    def test_sink_softmax_is_rebuilt_from_an_lse_with_the_sink_in_it(self):
        q, k, s = scores(Maker())
        sink = torch.tensor([-1.0, 0.0, 2.0, 9.0]).double()
        A = weights(q, k, normalize=SinkSoftmax(sink))
        close(A.lse, torch.logaddexp(s.logsumexp(-1), sink[:, None]))
        close((s - A.statistic[..., None]).exp(), A.dense())

    @pytest.mark.parametrize(("normalize", "alpha"), [(Sparsemax(), 2.0), (Entmax(), 1.5), (Entmax(1.2), 1.2)])
    def test_entmax_is_rebuilt_from_its_threshold(self, normalize, alpha):
        q, k, s = scores(Maker())
        A = weights(q, k, normalize=normalize)
        rebuilt = ((s - A.statistic[..., None]) * (alpha - 1)).clamp(min=0) ** (1 / (alpha - 1))
        close(rebuilt, A.dense())
        close(rebuilt.sum(-1), torch.ones(B, H, I).double())

    def test_hard_is_rebuilt_from_the_key_it_chose(self):
        q, k, s = scores(Maker())
        A = weights(q, k, normalize=Hard())
        assert torch.equal(A.statistic, s.argmax(-1))
        close((A.statistic[..., None] == torch.arange(J)).double(), A.dense())

    def test_sigmoid_has_none(self):
        q, k, s = scores(Maker())
        A = weights(q, k, normalize=Sigmoid(-log(J)))
        assert A.statistic is None
        assert A.summary().statistic is None
        close((s - log(J)).sigmoid(), A.dense())

    def test_tapered_has_that_of_its_inner_map(self):
        x = Maker()
        q, k, s = scores(x)
        center = x.centers()
        A = weights(q, k, normalize=Tapered(Softmax(), Gaussian(center, 5.0)))
        close(A.lse, s.logsumexp(-1))
        taper = torch.exp(-((torch.arange(J) - center[..., None]) ** 2) / 50)
        close((s - A.statistic[..., None]).exp() * taper, A.dense())

    @pytest.mark.parametrize("normalize", [Sigmoid(), Sparsemax(), Entmax(), Hard(), Tapered(Hard(), Alibi(H))])
    def test_lse_exists_for_softmax_kinds_only(self, normalize):
        q, k, _ = scores(Maker(5, 6))
        with pytest.raises(AttributeError, match=r"lse exists for softmax kinds.*use A\.statistic"):
            _ = weights(q, k, normalize=normalize).lse

    @every_term
    def test_it_is_that_of_the_reference_where_a_row_sees_a_key(self, name):
        reference = build(name, "reference")
        reference.entropy()
        ours, theirs = build(name).statistic, reference.statistic
        assert (ours is None) == (theirs is None) == (name == "sigmoid")
        if ours is not None and theirs is not None:
            assert ours.shape == (B, H, I)
            seen = matrix(name).sum(-1) > 0
            close(ours[seen], theirs[seen])

    @pytest.mark.parametrize("normalize", [Softmax(), SinkSoftmax(0.3), Entmax(), Sparsemax(), Hard()], ids=repr)
    def test_a_row_that_sees_no_key_has_the_same_however_it_is_cut(self, normalize):
        x = Maker()
        q, k = x(B, H, I, D), x(B, G, J, D)
        terms = {"mask": Causal(), "offset": -50, "normalize": normalize}
        whole = weights(q, k, backend="reference", **terms)
        whole.entropy()
        close(weights(q, k, **terms).statistic, whole.statistic)

    @pytest.mark.parametrize("first", [lambda A: A @ torch.ones(J, 1).double(), lambda A: A.entropy(), lambda A: A.lse])
    def test_the_first_pass_stores_it_and_no_later_one_normalizes_again(self, first, monkeypatch):
        A = build("causal")
        expected = build("causal").summary()
        calls = []
        weigh = Softmax.weigh
        monkeypatch.setattr(Softmax, "weigh", lambda *at: calls.append(at) or weigh(*at))
        first(A)
        assert len(calls) > 1
        calls.clear()
        summary = A.summary()
        for measure in MEASURES:
            close(getattr(summary, measure), getattr(expected, measure))
            close(getattr(A, measure)(), getattr(expected, measure))
        A.topk(3), A.pool(4, 4), A.dense(), A[0, 1, 3:9], A.lse, A.select(heads=2).dense(), A.T @ torch.ones(I, 1)
        assert not calls

    def test_one_that_was_handed_out_is_not_written_again(self):
        A = build("causal")
        handed_out = A.statistic
        version = handed_out._version
        A.summary(), A.entropy(), A @ torch.ones(J, 1).double()
        assert handed_out._version == version

    def test_the_summary_of_a_product_costs_no_second_statistic(self, monkeypatch):
        x = Maker()
        q, k, v = x(B, H, I, D), x(B, G, J, D), x(B, G, J, 3)
        A = weights(q, k, mask=Causal())
        close(A @ v, attend(q, k, v, mask=Causal()))
        monkeypatch.setattr(Softmax, "weigh", None)
        summary = A.summary()
        close(summary.received, matrix("causal").sum(-2))
        close(summary.statistic, A.lse)


class TestDtype:
    @pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
    def test_results_are_float32_for_half_inputs_and_a_product_has_the_dtype_of_its_factor(self, dtype):
        A = build("causal", i=40, j=50, dtype=dtype)
        wide = torch.float32 if dtype in HALF else dtype
        groups = torch.zeros(40, dtype=torch.long), torch.arange(50)
        summary = A.summary()
        results = [A.entropy(), A.received(), A.max(), A.distance(), A.topk(2).values, A.pool(2, 2), A.mass(*groups)]
        results += [A.dense(), A[0], A.T[1], A.statistic, A.lse, summary.entropy, summary.map, summary.statistic]
        assert A.dtype == wide
        assert {x.dtype for x in results} == {wide}
        for other in (*HALF, torch.float32, torch.float64):
            x = torch.ones(40, 2, dtype=other)
            assert (A @ x.new_ones(50, 2)).dtype == other
            assert (A.T @ x).dtype == (x.mT @ A).dtype == wide

    @pytest.mark.parametrize("name", ["causal", "additive", "shaw", "entmax", "sink"])
    @pytest.mark.parametrize("dtype", HALF)
    def test_half_inputs_are_accumulated_in_float32(self, name, dtype):
        A = build(name, i=40, j=50, dtype=dtype)
        same = {x: x.detach().double() for x in A._call.tensors() if x.is_floating_point()}
        terms = A._call.slots
        exact = {slot: term.map_tensors(lambda x: same.get(x, x)) for slot, term in terms.items() if term is not None}
        wide = weights(same[A._call.q], same[A._call.k], offset=A._call.offset, **exact)
        close(A.entropy().double(), wide.entropy(), atol=2e-5, rtol=2e-5)
        close(A.received().double(), wide.received(), atol=2e-5, rtol=2e-5)

    def test_integer_factors_are_refused(self):
        with pytest.raises(ValueError, match=r"A @ x takes a floating tensor.*int64"):
            build("plain", i=5, j=6) @ torch.ones(6, 1, dtype=torch.long)

    @pytest.mark.parametrize("shape", [(B, 3, J, 2), (3, H, J, 2), (B, H, I, 2), (1, 1, B, H, J, 2)])
    def test_factors_of_another_shape_are_refused(self, shape):
        with pytest.raises(ValueError, match=rf"heads 1, {G} or {H}, {J}, e; got shape"):
            build("plain") @ torch.ones(shape)


@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 3), (6,)])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_leading_dims_are_restored_in_every_answer(lead, backend):
    x = Maker(20, 30)
    q, k = x(*lead, H, 20, D), x(*lead, G, 30, D)
    A = weights(q, k, mask=Causal(), backend=backend)
    s = (q @ k.repeat_interleave(2, -3).mT * D**-0.5).masked_fill(~torch.ones(20, 30).tril(10).bool(), -torch.inf)
    dense = s.softmax(-1)
    i, j = torch.arange(20)[:, None] + 10, torch.arange(30)
    assert A.shape == (*lead, H, 20, 30)
    assert A.T.shape == (*lead, H, 30, 20)
    close(A.dense(), dense)
    close(A.T.dense(), dense.mT)
    close(A.statistic, s.logsumexp(-1))
    for name, measure in MEASURES.items():
        close(getattr(A, name)(), measure(dense, i, j))
        close(getattr(A.summary(), name), measure(dense, i, j))
    close(A.summary().map, dense)
    close(A.topk(4).values, dense.topk(4).values)
    close(dense.gather(-1, A.topk(4).indices), A.topk(4).values)
    close(A.pool(2, 3, how="sum"), dense.unflatten(-2, (2, 10)).unflatten(-1, (3, 10)).sum((-1, -3)))
    groups = torch.arange(20) // 10, torch.arange(30) // 10
    close(A.mass(*groups), dense.unflatten(-2, (2, 10)).unflatten(-1, (3, 10)).sum(-1).mean(-2))
    for heads in (1, G, H):
        v, u = x(*lead, heads, 30, 5), x(*lead, heads, 20, 5)
        close(A @ v, dense @ v.repeat_interleave(H // heads, -3))
        close(A.T @ u, dense.mT @ u.repeat_interleave(H // heads, -3))
        close(u.mT @ A, u.repeat_interleave(H // heads, -3).mT @ dense)
    for shape in ((2,), (H, 2), (1, H, 2), (*(1 for _ in lead), H, 2)):
        v = x(*shape[:-1], 30, 2)
        close(A @ v, dense @ v)
    close(A.select(heads=[0, 3]).entropy(), A.entropy()[..., [0, 3], :])


DIFFERENTIABLE = {
    "product": lambda A: A @ Maker()(A.shape[-1], 2),
    "transposed product": lambda A: A.T @ Maker()(A.shape[-2], 2),
    "tile": lambda A: A[..., [0, 3], 1:, ::2],
    "entropy": Weights.entropy,
    "received": Weights.received,
    "max": Weights.max,
    "distance": Weights.distance,
    "logit": Weights.logit,
    "dense of a selection": lambda A: A.select(batch=1, heads=[0, 1, 3]).dense(),
}
every_gradient = pytest.mark.parametrize("method", DIFFERENTIABLE)


def leaves(A: Weights) -> list[Tensor]:
    return [x for x in A._call.tensors() if x.requires_grad]


CHECKED = [(name, "tile") for name in TERMS if name not in ("causal", "hard")]
CHECKED += [("causal", method) for method in DIFFERENTIABLE]


@pytest.mark.parametrize(("name", "method"), CHECKED)
def test_the_gradient_is_that_of_finite_differences(name, method, monkeypatch):
    cut(monkeypatch, 4, 4, 2**6)
    A = build(name, i=7, j=10, grad=True)
    call, inputs = A._call, [x for x in leaves(A) if x.isfinite().all()]

    def function(*tensors: Tensor) -> Tensor:
        new = dict(zip(inputs, tensors, strict=True))
        slots = call.slots.items()
        terms = {x: term.map_tensors(lambda old: new.get(old, old)) for x, term in slots if term is not None}
        return DIFFERENTIABLE[method](weights(new[call.q], new[call.k], offset=call.offset, **terms))

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


COMPARED = [(name, method) for name in TERMS for method in ("product", "received", "entropy")]
COMPARED += [("tapered", method) for method in DIFFERENTIABLE if ("tapered", method) not in COMPARED]


@pytest.mark.parametrize(("name", "method"), COMPARED)
def test_the_gradient_is_that_of_the_reference_even_after_the_statistic(name, method, monkeypatch):
    cut(monkeypatch, 8, 4, 2**10)
    gradients = []
    for backend, cached in ((None, False), (None, True), ("reference", False)):
        A = build(name, backend, i=18, j=23, grad=True)
        if cached:
            A.summary()
            assert A._statistic is not None or name == "sigmoid"
        out = DIFFERENTIABLE[method](A)
        gradients.append(torch.autograd.grad(out.sin().sum(), leaves(A), allow_unused=True, materialize_grads=True))
    fresh, after, reference = gradients
    assert len(fresh) >= 2
    close(fresh, reference)
    close(after, reference)


@every_gradient
def test_a_second_derivative_raises_on_tiled_and_exists_on_the_reference(method):
    small = {"i": 4, "j": 5, "grad": True}
    A = build("causal", "tiled", **small)
    (first,) = torch.autograd.grad(DIFFERENTIABLE[method](A).sin().sum(), A._call.q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once; pass backend='reference'"):
        first.sum().backward()

    def function(q: Tensor, k: Tensor) -> Tensor:
        return DIFFERENTIABLE[method](weights(q, k, mask=Causal(), backend="reference"))

    assert torch.autograd.gradgradcheck(function, (A._call.q, A._call.k), fast_mode=True)


ANSWERS = {
    **DIFFERENTIABLE,
    "topk": lambda A: A.topk(3).values,
    "pool": lambda A: A.pool(3, 4),
    "maxima": lambda A: A.pool(3, 4, how="max"),
    "mass": lambda A: A.mass(torch.arange(A.shape[-2]) // 5, torch.arange(A.shape[-1]) // 7),
    "summary": lambda A: A.summary().entropy,
    "map": lambda A: A.summary().map,
    "statistic": lambda A: A.statistic,
    "dense": Weights.dense,
    "dense after the statistic": lambda A: (A.statistic, A.dense())[1],
}
every_answer = pytest.mark.parametrize("answer", ANSWERS)


class TestModes:
    @pytest.mark.parametrize(
        ("method", "lead"), [*((method, (B,)) for method in DIFFERENTIABLE), ("product", (2, 1)), ("max", (1, 2, 1))]
    )
    def test_grad_mode_counts_at_evaluation(self, method, lead):
        x = Maker(12, 15, grad=True)
        q, k = x(*lead, H, 12, D), x(*lead, G, 15, D)
        ask = DIFFERENTIABLE[method]
        with torch.no_grad():
            made = weights(q, k, mask=Causal())
        expected = torch.autograd.grad(ask(weights(q, k, mask=Causal())).sin().sum(), (q, k))
        close(torch.autograd.grad(ask(made).sin().sum(), (q, k)), expected)
        A = weights(q, k, mask=Causal())
        with torch.no_grad():
            assert not ask(A).requires_grad

    def test_grad_mode_at_a_selection_does_not_count(self):
        A = build("causal", i=12, j=15, grad=True)
        with torch.no_grad():
            part = A.select(batch=0, heads=[0, 2])
        expected = torch.autograd.grad(A.entropy()[:1, [0, 2]].sum(), A._call.q)
        close(torch.autograd.grad(part.entropy().sum(), A._call.q), expected)

    def test_grad_mode_at_creation_does_not_count_under_autocast_either(self):
        x = Maker(12, 15, torch.float32, grad=True)
        q, k = x(B, H, 12, D), x(B, G, 15, D)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            A = weights(q, k)
        grad = torch.autograd.grad(A.entropy().sum(), q)[0]
        close(grad, torch.autograd.grad(weights(q.bfloat16(), k.bfloat16()).entropy().sum(), q)[0])

    @every_answer
    def test_autocast_counts_at_creation(self, answer):
        x = Maker(40, 50, torch.float32)
        q, k = x(B, H, 40, D), x(B, G, 50, D)
        with torch.autocast("cpu", torch.bfloat16):
            made = weights(q, k, mask=Causal())
            assert made._call.q.dtype == torch.bfloat16
        close(ANSWERS[answer](made), ANSWERS[answer](weights(q.bfloat16(), k.bfloat16(), mask=Causal())))
        A = weights(q, k, mask=Causal())
        expected = ANSWERS[answer](weights(q, k, mask=Causal()))
        with torch.autocast("cpu", torch.bfloat16):
            close(ANSWERS[answer](A), expected)

    @every_answer
    def test_inference_mode_works_inside_and_out(self, answer):
        expected = ANSWERS[answer](build("causal"))
        with torch.inference_mode():
            made, asked = build("causal"), build("causal")
            close(ANSWERS[answer](asked), expected)
        close(ANSWERS[answer](made), expected)
        A = build("causal")
        with torch.inference_mode():
            close(ANSWERS[answer](A), expected)

    def test_a_statistic_of_inference_mode_serves_outside_it(self):
        A = build("causal")
        with torch.inference_mode():
            A @ torch.ones(J, 1).double()
        close(A.entropy(), build("causal").entropy())
        close(A.summary().entropy, build("causal").entropy())


class TestBorders:
    @every_answer
    @pytest.mark.parametrize("which", ["q", "k", "slopes"])
    def test_a_change_in_place_raises(self, answer, which):
        A = build("alibi", i=12, j=15)
        {"q": A._call.q, "k": A._call.k, "slopes": A._call.bias.slopes}[which].mul_(2)
        with pytest.raises(RuntimeError, match=r"was changed in place after weights\(...\); call weights\(...\) again"):
            ANSWERS[answer](A)

    def test_a_change_in_place_raises_after_an_answer_too(self):
        x = Maker(12, 15)
        q, k, keep = x(B, H, 12, D), x(B, G, 15, D), torch.ones(B, 15, dtype=torch.bool)
        A = weights(q, k, mask=Padding(keep))
        A @ x(15, 1)
        A.summary()
        keep[0, 3] = False
        with pytest.raises(RuntimeError, match=r"shape \(2, 15\), was changed in place"):
            A.entropy()

    def test_repr_shows_the_shape_and_the_terms_that_matter(self):
        q, k = torch.zeros(3, 1, 4, 5, 8), torch.zeros(3, 1, 2, 6, 8)
        assert repr(weights(q, k)) == "Weights(3 x 1 x 4 x 5 x 6)"
        assert repr(weights(q[0], k[0], mask=Causal() & Window(3)).T) == (
            "Weights(1 x 4 x 5 x 6, mask=Causal() & Window(3)).T"
        )
        A = weights(q[0], k[0], score=Dot(cap=2.0), bias=Alibi(4), normalize=Entmax())
        assert repr(A) == "Weights(1 x 4 x 5 x 6, score=Dot(cap=2.0), bias=Alibi(heads=4), normalize=Entmax())"

    @pytest.mark.parametrize("k", [0, -1, J + 1])
    def test_topk_takes_1_to_all_keys(self, k):
        with pytest.raises(ValueError, match=f"k must be (from 1 to the number of keys {J}|1 or more), got {k}"):
            build("plain").topk(k)

    @pytest.mark.parametrize(("rows", "cols", "named"), [(0, 1, "rows"), (I + 1, 1, "rows"), (1, 0, "cols")])
    def test_pool_takes_at_most_a_bin_for_each(self, rows, cols, named):
        with pytest.raises(ValueError, match=f"{named} must be from 1 to the number of"):
            build("plain").pool(rows, cols)

    def test_pool_knows_three_ways(self):
        with pytest.raises(ValueError, match="how must be 'mean', 'sum' or 'max', got 'median'"):
            build("plain").pool(2, 2, how="median")

    @pytest.mark.parametrize(
        ("groups", "error", "message"),
        [
            (torch.zeros(I), TypeError, "query_groups must be a tensor of whole numbers, got torch.float32"),
            (torch.zeros(I, dtype=torch.bool), TypeError, "got torch.bool"),
            ([0] * I, TypeError, "got list"),
            (torch.zeros(J, dtype=torch.long), ValueError, rf"must have dims \({I},\) or \({B}, {I}\)"),
            (torch.arange(I) - 1, ValueError, "must be 0 or more, got -1"),
        ],
    )
    def test_mass_takes_whole_numbers_from_0(self, groups, error, message):
        with pytest.raises(error, match=message):
            build("plain").mass(groups, torch.zeros(J, dtype=torch.long))

    def test_products_with_what_is_no_tensor_are_type_errors(self):
        A = build("plain")
        for ask in (lambda: A @ 2, lambda: A.T @ [1.0], lambda: 2 @ A):
            with pytest.raises(TypeError, match="unsupported operand"):
                ask()

    @pytest.mark.parametrize(("i", "j"), [(0, 5), (5, 0), (1, 1)])
    def test_lengths_may_be_nothing_or_one(self, i, j):
        A = build("causal", i=i, j=j)
        assert A.dense().shape == (B, H, i, j)
        assert A.entropy().eq(0).all()
        assert A.received().shape == (B, H, j)
        assert (A @ torch.ones(j, 3).double()).shape == (B, H, i, 3)
        assert (A.T @ torch.ones(i, 3).double()).shape == (B, H, j, 3)
        assert A.summary().received.shape == (B, H, j)
        assert A[0, :, :, :].shape == (H, i, j)


class Largest(TorchDispatchMode):
    """Records the largest storage any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return out


class TestMemory:
    n = 3000
    limit = 2**16

    @pytest.fixture(autouse=True)
    def few_entries(self, monkeypatch):
        cut(monkeypatch, 64, 64, self.limit // 4)
        monkeypatch.setattr(lazy, "MAX_MAP_CELLS", 64)

    def made(self, grad: bool = False, **terms) -> Weights:
        x = Maker(dtype=torch.float32, grad=grad)
        return weights(x(1, 1, self.n, D), x(1, 1, self.n, D), **terms)

    def test_a_matrix_would_be_seen(self):
        with Largest() as seen:
            build("plain", i=600, j=600, dtype=torch.float32).select(batch=0, heads=0).dense()
        assert seen.entries >= 600**2 > self.limit

    @pytest.mark.parametrize("name", ["entropy", "received", "summary", "topk", "pool", "product"])
    def test_no_answer_holds_more_than_a_block(self, name):
        A = self.made(mask=Causal())
        with Largest() as seen:
            ANSWERS[name](A)
        assert 2**12 < seen.entries <= self.limit

    def test_no_gradient_holds_more_than_a_block(self):
        A = self.made(grad=True, mask=Causal())
        with Largest() as seen:
            (A @ torch.ones(self.n, 2)).sum().backward()
        assert A._call.q.grad is not None
        assert 2**12 < seen.entries <= self.limit

    @pytest.mark.parametrize(
        "terms",
        [
            {"mask": Window(20) | Global((1500,))},
            {"bias": Relative.shaw(torch.ones(9, D))},
        ],
        ids=repr,
    )
    def test_no_term_makes_a_summary_hold_more_than_a_block(self, terms):
        A = self.made(**terms)
        with Largest() as seen:
            A.summary()
        assert 2**12 < seen.entries <= self.limit


def test_numpy_takes_the_matrix():
    A = build("causal")
    array = np.asarray(A)
    assert np.array_equal(array, A.dense().numpy())
    assert np.asarray(A, dtype=np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="without copy=False"):
        np.array(A, copy=False)
    with pytest.raises(ValueError, match="ask for a tile"):
        np.asarray(weights(*torch.zeros(2, 1, 1, 20_000, 1)))


def test_weights_come_back_from_pickle_and_from_a_file(tmp_path):
    q, k = torch.zeros(1, 2, 5, 4) + 1, torch.randn(1, 2, 5, 4)  # neither has been written to since, or both have
    A = weights(q, k, mask=Causal())
    expected = A.entropy()
    torch.save(A, tmp_path / "A.pt")
    for again in (pickle.loads(pickle.dumps(A)), torch.load(tmp_path / "A.pt", weights_only=False)):
        torch.testing.assert_close(again.entropy(), expected)
        assert repr(again) == repr(A)


@pytest.mark.parametrize("name", ["sum", "mean", "argmax", "abs"])
def test_what_a_tensor_has_and_weights_have_not_is_told(name):
    A = weights(*torch.randn(2, 1, 2, 5, 4))
    told = rf"Weights has no {name}: .*received\(\), .*pool\(rows, cols\).*; of a small one write A\.dense\(\)\.{name}"
    with pytest.raises(AttributeError, match=told):
        getattr(A, name)
    assert not hasattr(A, name)


def test_len_ndim_and_size_are_those_of_the_matrix():
    A = weights(*torch.randn(2, 3, 2, 5, 4))
    D = A.dense()
    assert (len(A), A.ndim, A.size(), A.size(-1)) == (len(D), D.ndim, D.size(), D.size(-1))
    assert [part.shape for part in A] == [part.shape for part in D]
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(A)


def test_detached_weights_are_lazy_and_give_no_gradients():
    q, k = torch.randn(2, 1, 2, 6, 4, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    A = weights(q, k, normalize=SinkSoftmax(sink))
    free = A.detach()
    assert not free.entropy().requires_grad
    assert A.entropy().requires_grad
    close(free.dense(), A.dense().detach())


def test_weights_move_to_a_dtype_and_remember_where_they_are():
    q, k = torch.randn(2, 2, 2, 6, 4)
    A = weights(q, k, mask=Causal(), bias=Alibi(slopes=torch.ones(2)), offset=(0, 3))
    A.entropy()
    assert A.to("cpu") is A.to(q) is A
    double = A.to(torch.float64)
    assert double.dtype == torch.float64
    close(double.dense(), A.dense().double(), atol=1e-6, rtol=0)
    assert A.to("cpu", dtype=torch.float64).dtype == torch.float64
    with pytest.raises(TypeError, match=r"write A\.dense\(\)\.to\(torch\.int32\)"):
        A.to(torch.int32)
    with pytest.raises(AttributeError, match=r"write A\.to\(device\) or A\.to\(dtype\)"):
        A.cpu()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="another device")
def test_weights_move_to_another_device():
    q, k = torch.randn(2, 2, 2, 6, 4)
    A = weights(q, k, mask=Padding([6, 3]), offset=(0, 3)).select(heads=1)
    A.entropy()
    there = A.to(torch.accelerator.current_accelerator())
    close(there.dense().cpu(), A.dense())


class TestScores:
    """A.scores: the scores before the normalizer, with bias and mask."""

    @pytest.mark.parametrize("lead", [(2,), (3, 2)])
    def test_they_are_written_out_of_queries_keys_and_bias(self, lead):
        q, k = torch.randn(*lead, 4, 7, 8).double(), torch.randn(*lead, 2, 9, 8).double()
        bias = torch.randn(7, 9).double()
        A = weights(q, k, mask=Causal(), bias=Added(bias), normalize=Sparsemax())
        hidden = torch.arange(9) > torch.arange(7)[:, None] + 2
        want = q @ k.repeat_interleave(2, -3).mT / 8**0.5 + bias
        want = want.masked_fill(hidden, -torch.inf)
        close(A.scores.dense(), want)
        close(A.scores[..., 1:3, [4, 0]], want[..., 1:3, [4, 0]])
        close(A.scores[0, ..., -1], want[0, ..., -1])
        assert A.scores.shape == A.shape
        assert repr(A.scores) == f"{A!r}.scores"

    def test_the_normalizer_makes_the_weights_of_them(self):
        A = build("entmax")
        close(A.call.normalize.weigh(A.scores.dense(), A.call.whole())[0], A.dense())

    def test_parts_have_the_gradient_of_the_whole_matrix(self):
        x = Maker(grad=True)
        q, k, bias = x(2, 4, 7, 8), x(2, 2, 9, 8), x(4, 7, 9)
        A = weights(q, k, mask=Window(3), bias=Added(bias), score=Dot(cap=2.0))
        found = torch.autograd.grad(A.scores[0, 2:, 3, 3:8].square().sum(), (q, k, bias))
        s = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 8**0.5 / 2) + bias
        seen = (torch.arange(9) - torch.arange(7)[:, None] - 2).abs() < 3
        assert seen[3, 3:8].all()
        want = torch.autograd.grad(s[0, 2:, 3, 3:8].square().sum(), (q, k, bias))
        for one, other in zip(found, want, strict=True):
            close(one, other)

    def test_what_hidden_keys_hold_reaches_neither_scores_nor_gradients(self):
        q, k = torch.randn(1, 2, 6, 4, requires_grad=True), torch.randn(1, 2, 6, 4)
        k[:, :, 4] = torch.nan
        A = weights(q, k, mask=Causal())
        part = A.scores[:, :, :4]
        assert part.isneginf().equal(torch.ones(1, 2, 4, 6).triu(1).bool())
        (grad,) = torch.autograd.grad(part[:, :, :, :1].sum(), q)
        assert grad.isfinite().all()
        few = weights(q[:, :, :1], torch.cat([k, torch.full((1, 2, 300, 4), torch.nan)], 2), mask=Window(2), offset=0)
        assert few.scores[..., 2:].isneginf().all()  # tiles that no query sees

    def test_a_part_of_a_long_matrix_stays_below_the_limit(self):
        A = weights(*torch.zeros(2, 1, 1, 2**16, 1))
        assert A.scores[0, 0, 5, -3:].tolist() == [0.0, 0.0, 0.0]
        for ask in (A.scores.dense, lambda: A.scores[...]):
            with pytest.raises(ValueError, match=r"more than limit='1GB'"):
                ask()

    def test_changed_tensors_are_noticed(self):
        q, k = torch.randn(2, 1, 1, 6, 8)
        scores = weights(q, k).scores
        k.mul_(2)
        with pytest.raises(RuntimeError, match="was changed in place"):
            scores[0]


def test_what_neither_has_is_missing_as_ever():
    A = weights(*torch.randn(2, 1, 2, 5, 4), normalize=Sparsemax())
    with pytest.raises(AttributeError, match=r"^'Weights' object has no attribute 'anything'$"):
        A.anything  # noqa: B018
    with pytest.raises(AttributeError, match="lse exists for softmax kinds"):
        A.lse  # noqa: B018


@pytest.mark.parametrize("change", [lambda x: x.mul_(3), lambda x: x.copy_(x.flip(-2)), lambda x: x.zero_()])
def test_inference_tensors_are_guarded_once_a_statistic_is_kept(change):
    with torch.inference_mode():
        q, k = torch.randn(2, 1, 1, 6, 8)
        A = weights(q, k)
        change(k)
        torch.testing.assert_close(A.dense(), torch.softmax(q @ k.mT / 8**0.5, -1))  # nothing of the old k was kept
        A = weights(q, k)
        A.entropy()
        A.dense()
        change(q)
        if q.any():
            change(k)
        with pytest.raises(RuntimeError, match="was changed in place"):
            A.dense()


def test_the_names_of_tensors_for_a_transpose_lead_to_T():
    A = weights(*torch.randn(2, 1, 1, 6, 8))
    for name in ("mT", "transpose", "permute"):
        with pytest.raises(AttributeError, match=r"A\.T is the transpose"):
            getattr(A, name)


@every_term
def test_rows_that_do_not_count_are_zeros_in_a_summary(name):
    A, dense = build(name), matrix(name)
    queries = torch.arange(I) % 3 > 0
    queries = torch.stack([queries, ~queries])
    kept = dense * queries[:, None, :, None]
    found = A.summary(peaks=True, queries=queries)
    close(found.received, kept.sum(-2))
    close(found.max, kept.amax(-1) if not A.call.normalize.signed else dense.amax(-1) * queries[:, None])
    close(found.map, kept)
    close(found.entropy, A.entropy() * queries[:, None])
    close(found.distance, A.distance() * queries[:, None])
    if found.statistic is not None:
        close(found.statistic, A.statistic)


@every_term
def test_measures_are_those_of_a_summary(name):
    A = build(name)
    summary, found = A.summary(), A.measures()
    assert list(found) == ["entropy", "received", "max", "distance", "logit"]
    for measure, value in found.items():
        close(value, getattr(summary, measure))


@pytest.mark.parametrize("queries", [torch.ones(B, I), torch.ones(B, I + 1).bool(), torch.ones(I).bool()])
def test_queries_that_count_are_bools_of_each_text(queries):
    with pytest.raises(ValueError, match=r"queries must be a bool tensor of shape"):
        build("plain").measures(queries=queries)


@pytest.mark.parametrize(("n", "most"), [(63, 63), (63, 20), (9, 512), (1, 1), (1025, 300)])
def test_a_summary_knows_the_cells_of_its_map(n, most):
    A = weights(*torch.randn(2, 1, 1, n, 4))
    axis = Axis.cells(n, most)
    assert A.summary_in(axis, axis).axes == (axis, axis)
