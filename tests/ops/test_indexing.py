"""Parts of the matrix: indices, transposed indices, selections and limits."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import (
    Additive,
    Alibi,
    Causal,
    Documents,
    Entmax,
    Gaussian,
    Hard,
    Location,
    Relative,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Tapered,
    Weights,
    Window,
    weights,
)
from regard.ops.blocks import prepared_call

B, H, G, I, J, D = 2, 4, 2, 23, 31, 8
close = torch.testing.assert_close


class Maker:
    """Seeded tensors of float64."""

    def __init__(self, grad: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.grad = grad

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).requires_grad_(self.grad)


def ids(n: int) -> Tensor:
    return torch.stack([torch.arange(n) * parts // n for parts in (3, 2)])


TERMS = {
    "plain": lambda x: {},
    "causal alibi": lambda x: {"mask": Causal(), "bias": Alibi(slopes=x(H))},
    "early window": lambda x: {"mask": Window(5), "offset": -3},
    "documents": lambda x: {"mask": Documents(ids(I), ids(J)), "bias": Relative.shaw(x(H, 5, D))},
    "additive": lambda x: {"score": Additive(x(H, D)), "normalize": SinkSoftmax(x(H))},
    "location": lambda x: {"score": Location(x(H, J, D)), "normalize": Sigmoid(x(H))},
    "entmax": lambda x: {"mask": Causal(), "normalize": Entmax(1.3)},
    "hard": lambda x: {"mask": Causal(), "normalize": Hard()},
    "tapered": lambda x: {"normalize": Tapered(Softmax(), Gaussian(x(B, H, I), 20.0))},
}
every_term = pytest.mark.parametrize("name", TERMS)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ROWS_PER_BLOCK", 8), ("KEYS_PER_TILE", 4), ("SCORES_PER_BLOCK", 2**9)):
            patch.setattr(prepared_call, name, value)
        yield


def build(name: str, backend: str | None = None, lead: tuple[int, ...] = (B,), grad: bool = False) -> Weights:
    x = Maker(grad)
    return weights(x(*lead, H, I, D), x(*lead, G, J, D), backend=backend, **TERMS[name](x))


@cache
def matrix(name: str) -> Tensor:
    return build(name, "reference").dense()


def label(x: object) -> str:
    return " ".join(repr(x).split())[:60]


def flags(n: int) -> Tensor:
    return torch.arange(n) % 3 == 1


@pytest.fixture(params=["fresh", "after the statistic"])
def made(request):
    def make(name: str) -> Weights:
        A = build(name)
        if request.param != "fresh":
            A @ torch.ones(J, 1).double()
        return A

    return make


def indices(i: int, j: int) -> list:
    grid = np.s_
    return [
        0,
        -1,
        ...,
        None,
        slice(None),
        [1, 0, 1],
        [],
        (),
        torch.tensor(1),
        np.int64(1),
        flags(B),
        [False, True],
        grid[1, 2, 3, 4],
        grid[-1, -2, -3, -4],
        grid[0, ..., -1],
        grid[..., -1, :],
        grid[..., 5],
        grid[1, 3, 7:12],
        grid[:, :, ::3, 1::7],
        grid[:, 1:-1, -5:, :-20],
        grid[:, :, 9:9],
        grid[:, :, 20:90, -90:4],
        grid[None, 0, None, ..., None],
        grid[..., None, 2, :, None],
        grid[:, [3, 1]],
        grid[:, :, [i - 1, 0, 0, -1]],
        grid[..., torch.tensor([j - 1, 2, 2])],
        grid[..., np.array([j - 1, 2, 2])],
        grid[0, 1, torch.tensor([[4, 5], [6, -7]])],
        grid[:, torch.tensor([0, 3]), torch.tensor([5, 9])],
        grid[torch.tensor([0, 1]), :, torch.tensor([5, 9])],
        grid[:, torch.tensor([[0], [3]]), 2:6, torch.tensor([5, 9, 11])],
        grid[[1, 0], [2, 3], [4, 5], [6, 7]],
        grid[1, [2, 3], 4, [6, 7]],
        grid[torch.tensor(1), :, torch.tensor([6, 7])],
        grid[1, :, torch.tensor([6, 7])],
        grid[:, None, [2, 0], None, [6, 7]],
        grid[:, flags(H)],
        grid[..., flags(i), :],
        grid[:, :, flags(i), 4:8],
        grid[..., torch.zeros(j, dtype=torch.bool)],
        grid[:, flags(H), :, torch.tensor([3])],
        grid[:, :, torch.tensor([], dtype=torch.long)],
    ]


@pytest.mark.parametrize("index", indices(I, J), ids=label)
@pytest.mark.parametrize("name", ["causal alibi", "tapered"])
def test_an_index_gives_what_the_matrix_would(name, index, made):
    close(made(name)[index], matrix(name)[index])


@pytest.mark.parametrize("index", indices(J, I), ids=label)
def test_an_index_of_the_transpose_gives_what_the_transposed_matrix_would(index, made):
    close(made("causal alibi").T[index], matrix("causal alibi").mT[index])


@every_term
def test_every_term_is_indexed(name, made):
    A = made(name)
    for index in (np.s_[1, [0, 3], 3:17, ::2], np.s_[0, 2, -1], np.s_[..., torch.tensor([0, I - 1])], ...):
        close(A[index], matrix(name)[index])
        close(A.T[index], matrix(name).mT[index])
        close(build(name, "reference")[index], matrix(name)[index])


@st.composite
def any_index(draw, shape: tuple[int, ...]) -> tuple:
    length = draw(st.integers(1, 3))
    axes: list = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        one = st.integers(-n, n - 1)
        bound = st.none() | st.integers(-n - 2, n + 2)
        many = st.lists(one, min_size=length, max_size=length)
        some = st.builds(slice, bound, bound, st.none() | st.integers(1, 9))
        axes.append(draw(one | some | many | many.map(torch.LongTensor)))
    if draw(st.booleans()):
        axes.insert(draw(st.integers(0, len(axes))), None)
    if len(axes) < len(shape) and draw(st.booleans()):
        axes.append(...)
    return tuple(axes)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(index=any_index((B, H, I, J)), name=st.sampled_from(["causal alibi", "documents", "additive"]))
def test_any_index_gives_what_the_matrix_would(index, name):
    close(build(name)[index], matrix(name)[index])


@pytest.mark.parametrize("lead", [(2, 3), (3, 1, 2)])
def test_leading_dims_are_indexed_one_by_one(lead):
    x = Maker()
    qk = x(*lead, H, I, D), x(*lead, G, J, D)
    A = weights(*qk, mask=Causal())
    dense = A.dense()
    assert A.statistic.shape == (*lead, H, I)
    assert dense.shape == (*lead, H, I, J)
    for index in (0, -1, np.s_[1, 0], np.s_[:, 0, ..., 3], np.s_[[1, 0], 0, 1], np.s_[..., [0, 3], -1, 4:9]):
        close(weights(*qk, mask=Causal())[index], dense[index])
        close(A[index], dense[index])
        close(A.T[index], dense.mT[index])
    close(A[*(0 for _ in lead), [3, 1]], dense[*(0 for _ in lead), [3, 1]])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0, 0, 0), "too many indices: the weights have 4 dims, got 5"),
        ((..., 0, ...), "one Ellipsis"),
        (2, "dim 0 of the weights has 2 entries, got 2"),
        ((0, -5), "dim 1 of the weights has 4 entries, got -5"),
        ((..., [0, J]), f"dim 3 of the weights has {J} entries"),
        (
            (..., torch.ones(J + 1, dtype=torch.bool)),
            rf"a bool index of dim 3 must have shape \({J},\), got \({J + 1},\)",
        ),
        (torch.ones(B, H, dtype=torch.bool), r"a bool index of dim 0 must have shape"),
        ((0, 1.5), "an index must be whole numbers.*got 1.5"),
        (torch.tensor([0.0]), "an index must be whole numbers"),
        ("0", "an index must be whole numbers"),
    ],
    ids=label,
)
def test_an_index_the_matrix_would_refuse_is_refused(index, message, made):
    with pytest.raises((IndexError, TypeError), match=message):
        made("plain")[index]


def test_a_slice_steps_forward_only():
    with pytest.raises(ValueError, match="step must be greater than zero"):
        build("plain")[..., ::-1]


PARTS = {
    "a tile": lambda A: A[..., 3:9, ::4],
    "scattered entries": lambda A: A[[0, 1, 1], [1, 3, 3], [5, 22, 22], [0, 7, 7]],
    "a tile of the transpose": lambda A: A.T[:, [2, 0], 4:6],
    "a selection": lambda A: A.select(batch=[1, 1], heads=[3, 1])[..., 2:5, :],
}


@every_term
@pytest.mark.parametrize("part", PARTS)
def test_parts_have_the_gradient_of_the_reference_even_after_the_statistic(name, part):
    gradients = []
    for backend, cached in ((None, False), (None, True), ("reference", False)):
        A = build(name, backend, grad=True)
        if cached:
            A.summary()
        inputs = [x for x in A._call.tensors() if x.requires_grad]
        out = PARTS[part](A)
        gradients.append(torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True, materialize_grads=True))
    fresh, after, reference = gradients
    assert len(fresh) >= 2
    assert any(x.any() for x in reference)
    close(fresh, reference)
    close(after, reference)


@pytest.mark.parametrize(
    "heads", [None, 0, -1, slice(1, 3), slice(None, None, 2), [0, 2, 3], [3, 0], [1, 1]], ids=label
)
@pytest.mark.parametrize("batch", [None, 0, -1, slice(1, None), [1, 0]], ids=label)
def test_select_takes_ints_slices_and_lists(batch, heads, made):
    dense = matrix("tapered")
    dense = dense if batch is None else dense[[batch] if isinstance(batch, int) else batch]
    dense = dense if heads is None else dense[:, [heads] if isinstance(heads, int) else heads]
    part = made("tapered").select(batch=batch, heads=heads)
    assert isinstance(part, Weights)
    assert part.shape == dense.shape
    close(part.dense(), dense)
    close(part.max(), dense.amax(-1))
    close(part[0, 0, 4:6], dense[0, 0, 4:6])


@pytest.mark.parametrize(("batch", "heads"), [(2, None), (None, 4), (None, [0, 4]), (-3, None)])
def test_a_selection_out_of_range_is_refused(batch, heads):
    with pytest.raises(IndexError):
        build("plain").select(batch=batch, heads=heads)


class Largest(TorchDispatchMode):
    """Records the largest storage any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return out


def test_a_tile_costs_its_rows_and_after_the_statistic_its_entries():
    n = 2000
    x = Maker()
    A = weights(x(1, 1, n, 1), x(1, 1, n, 1), mask=Causal())
    with Largest() as fresh:
        tile = A[0, 0, 1500:1508, :3]
    assert n <= fresh.entries <= 16 * n
    assert A.statistic.shape == (1, 1, n)
    with Largest() as known:
        close(A[0, 0, 1500:1508, :3], tile)
    assert known.entries <= n


@every_term
def test_a_selection_of_a_selection_is_the_selection_of_both(name):
    A = build(name)
    part = A.select(batch=[1, 0], heads=[3, 1, 0]).select(batch=0, heads=[2, 0])
    close(part.dense(), A.dense()[[1]][:, [0, 3]])


@every_term
@pytest.mark.parametrize("known", [False, True])
def test_a_selection_is_its_part_of_the_matrix_before_and_after_the_statistic(name, known):
    A = build(name)
    if known:
        A.summary()
    dense = build(name).dense()
    for batch, heads in ((None, 3), (-1, [2, 0, -3]), (0, slice(1, None))):
        part = A.select(batch=batch, heads=heads).received()
        expected = dense.sum(-2)
        expected = expected if batch is None else expected[[batch]]
        close(part, expected[:, [heads] if isinstance(heads, int) else heads])
