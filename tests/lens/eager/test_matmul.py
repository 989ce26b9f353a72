"""Calls of matrix products: which of them are q @ k.mT, and which are weights @ v."""

import pytest
import torch
from torch import nn

from regard.lens.eager.matmul import has_data, parse_average, parse_einsum, parse_product

Q, K, V = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
SCORES = Q @ K.mT
WEIGHTS = SCORES.softmax(-1)
START = torch.randn(2, 5, 7)
ONE = WEIGHTS[0, 0]
BETWEEN = torch.randn(4, 4)


def product_of(name, *args, **kwargs):
    found = parse_product(name, args, kwargs)
    made = found.scale * found.left @ found.right.mT
    return made if found.added is None else made + found.added


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "want"),
    [
        ("matmul", (Q, K.mT), {}, SCORES),
        ("matmul", (), {"input": Q, "other": K.mT}, SCORES),
        ("__matmul__", (Q, K.mT), {}, SCORES),
        ("bmm", (Q[0], K[0].mT), {}, SCORES[0]),
        ("bmm", (Q[0],), {"mat2": K[0].mT}, SCORES[0]),
        ("mm", (Q[0, 0], K[0, 0].mT), {}, SCORES[0, 0]),
        ("baddbmm", (START, Q[:, 0], K[:, 0].mT), {"alpha": 0.5}, START + 0.5 * SCORES[:, 0]),
        ("baddbmm", (START, Q[:, 0], K[:, 0].mT), {"beta": 2, "alpha": 3}, 2 * START + 3 * SCORES[:, 0]),
        ("baddbmm", (START * torch.nan, Q[:, 0], K[:, 0].mT), {"beta": 0}, SCORES[:, 0]),
        ("einsum", ("bhid,bhjd->bhij", Q, K), {}, SCORES),
        ("einsum", ("bhjd,bhid->bhij", K, Q), {}, SCORES),
        ("einsum", ("...id,...jd->...ij", [Q, K]), {}, SCORES),
        ("einsum", ("bihd, bjhd -> bhij", Q.transpose(1, 2), K.transpose(1, 2)), {}, SCORES),
        ("einsum", ("id,jd", Q[0, 0], K[0, 0]), {}, SCORES[0, 0]),
        ("einsum", ("bhid,bhjd", Q, K), {}, SCORES.sum((0, 1))),
        ("einsum", ("bhid,de,bhje->bhij", Q, BETWEEN, K), {}, Q @ BETWEEN @ K.mT),
        ("einsum", ("bhid,bhjd,h->bhij", Q, K, torch.arange(3.0)), {}, SCORES * torch.arange(3.0)[:, None, None]),
        ("linalg_matmul", (Q, K.mT), {}, SCORES),
        ("addmm", (START[0], Q[0, 0], K[0, 0].mT), {"alpha": 0.5}, START[0] + 0.5 * SCORES[0, 0]),
        ("tensordot", (Q[0, 0], K[0, 0]), {"dims": ([1], [1]), "out": None}, SCORES[0, 0]),
        ("tensordot", (Q[0, 0], K[0, 0].T), {"dims": 1}, SCORES[0, 0]),
        ("tensordot", (Q[0, 0], K[0, 0].T, torch.tensor([[1], [0]])), {}, SCORES[0, 0]),
        ("inner", (Q[0, 0], K[0, 0]), {}, SCORES[0, 0]),
        ("linear", (Q[0, 0], K[0, 0]), {"bias": None}, SCORES[0, 0]),
        ("linalg_multi_dot", ([Q[0, 0], BETWEEN, K[0, 0].T],), {}, Q[0, 0] @ BETWEEN @ K[0, 0].T),
        ("chain_matmul", (Q[0, 0], BETWEEN, K[0, 0].T), {}, Q[0, 0] @ BETWEEN @ K[0, 0].T),
    ],
)
def test_a_product_of_queries_and_keys_is_parsed(name, args, kwargs, want):
    torch.testing.assert_close(product_of(name, *args, **kwargs), want)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("matmul", (Q, nn.Parameter(K[0, 0].mT))),
        ("matmul", (Q, K[0, 0].mT)),
        ("matmul", (Q, torch.randn(4))),
        ("matmul", (Q.long(), K.mT.long())),
        ("linear", (Q[0, 0], nn.Parameter(K[0, 0]))),
        ("linear", (Q, K[0, 0])),
        ("linear", (Q[0, 0], K[0, 0], torch.zeros(7))),
        ("addmm", (START[0], Q[0, 0], nn.Parameter(K[0, 0].mT))),
        ("tensordot", (Q, K)),
        ("einsum", ("bhid,bhjd,bhjd->bhij", Q, K, K)),
        ("einsum", ("bhid,bhjd,j->bhij", Q, K, torch.ones(7))),
        ("einsum", ("bhid,bhjd->bhji", Q, K[:, :, :, :1])),
        ("einsum", ("bhid,bhjd->bhijd", Q, K)),
        ("einsum", ("bhid->bhi", Q)),
        ("einsum", ("bhii,bhji->bhij", Q, K)),
    ],
)
def test_other_products_are_not_scores(name, args):
    assert parse_product(name, args, {}) is None


@pytest.mark.parametrize(
    ("name", "args", "weights", "behind", "out"),
    [
        ("matmul", (WEIGHTS, V), WEIGHTS, 0, WEIGHTS @ V),
        ("matmul", (V.mT, WEIGHTS.mT), None, 1, (WEIGHTS @ V).mT),
        ("einsum", ("bhij,bhje->bhie", WEIGHTS, V), WEIGHTS, 0, WEIGHTS @ V),
        ("einsum", ("bhje,bhij->bihe", V, WEIGHTS), WEIGHTS, 0, (WEIGHTS @ V).transpose(1, 2)),
        ("linalg_matmul", (WEIGHTS, V), WEIGHTS, 0, WEIGHTS @ V),
    ],
)
def test_an_average_of_values_is_parsed(name, args, weights, behind, out):
    weights = args[1] if weights is None else weights
    found = parse_average(name, args, {}, weights, behind=behind)
    torch.testing.assert_close(found.v, V)
    torch.testing.assert_close(found.heads(out), WEIGHTS @ V)
    torch.testing.assert_close(found.weights(WEIGHTS), WEIGHTS)
    assert not found.summed


def test_an_average_without_queries_gets_one():
    weights = WEIGHTS[:, :, 0]
    found = parse_average("einsum", ("bhj,bhje->bhe", weights, V), {}, weights, behind=0)
    assert found.summed
    assert found.weights(weights).shape == (2, 3, 1, 7)
    want = WEIGHTS[:, :, :1] @ V
    torch.testing.assert_close(found.heads(want[:, :, 0]), want)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "behind"),
    [
        ("tensordot", (ONE, V[0, 0]), {"dims": 1}, 0),
        ("tensordot", (ONE.T, V[0, 0]), {"dims": ([0], [0])}, 1),
        ("linear", (ONE, V[0, 0].T), {}, 0),
        ("inner", (ONE, V[0, 0].T), {}, 0),
        ("einsum", ("ij,jd", ONE, V[0, 0]), {}, 0),
        ("addmm", (ONE[:, :6], ONE, V[0, 0]), {"beta": 0}, 0),
    ],
)
def test_an_average_of_one_matrix_is_parsed(name, args, kwargs, behind):
    weights = next(x for x in args if isinstance(x, torch.Tensor) and x.data_ptr() == ONE.data_ptr() and 7 in x.shape)
    weights = args[1] if name == "addmm" else weights
    found = parse_average(name, args, kwargs, weights, behind=behind)
    torch.testing.assert_close(found.v, V[0, 0])
    torch.testing.assert_close(found.weights(ONE) @ found.v, ONE @ V[0, 0])
    assert found.projection is None


def test_an_average_and_its_projection_are_told_apart():
    matrix = torch.randn(8, 3, 6)
    args = "bhij,bhje,che->bic", WEIGHTS, V, matrix
    found = parse_average("einsum", args, {}, WEIGHTS, behind=0)
    torch.testing.assert_close(found.v, V)
    torch.testing.assert_close(found.heads(found.projection.averages), WEIGHTS @ V)
    torch.testing.assert_close(found.projection.apply(found.projection.averages), torch.einsum(*args))
    grad = torch.randn(2, 5, 8)
    want = torch.einsum("bic,che->bhie", grad, matrix)
    torch.testing.assert_close(found.heads(found.projection.gradient_of_averages(grad)), want)


@pytest.mark.parametrize(
    ("name", "args", "behind"),
    [
        ("matmul", (WEIGHTS, V), 1),
        ("matmul", (Q.mT, WEIGHTS), 0),
        ("baddbmm", (START, WEIGHTS, V), 0),
        ("einsum", ("bhij,bgje->bhige", WEIGHTS, V[:, :2]), 1),
        ("einsum", ("bhij,bhie->bhje", WEIGHTS, Q), 0),
    ],
)
def test_products_that_sum_over_something_else_are_no_average(name, args, behind):
    assert parse_average(name, args, {}, WEIGHTS, behind=behind) is None


def test_an_ellipsis_gets_labels_of_its_own():
    (a, _), (b, _), out = parse_einsum(("...id,jd->...ij", Q, K[0, 0]))
    assert (a, b, out) == ("abid", "jd", "abij")


def test_three_factors_with_an_ellipsis_are_multiplied_like_any_others():
    kernel, scale = torch.randn(4, 5), torch.randn(2, 3, 6)
    given = ("...id,jd,...i->...ij", torch.randn(2, 3, 6, 5), kernel, scale)
    product = parse_product("einsum", given, {})
    assert torch.allclose(product.left @ product.right.mT, torch.einsum(*given), atol=1e-6)


def test_nested_and_meta_tensors_hold_no_data():
    assert has_data(Q)
    assert not has_data(Q.to("meta"))
