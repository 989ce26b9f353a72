"""Inputs of figures: the numbers of a matrix, pooled alike whatever it is, or a refusal that says what to write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regard import Causal, Padding, weights
from regard.views.figures import figure_inputs

close = np.testing.assert_allclose


def one(n=5, m=7, heads=1, batch=1, **terms):
    generator = torch.Generator().manual_seed(n * m)
    q, k = torch.randn(batch, heads, n, 4, generator=generator), torch.randn(batch, heads, m, 4, generator=generator)
    return weights(q, k, **terms)


@pytest.mark.parametrize("most", [1, 3, 4, 99])
def test_weights_tensors_and_arrays_are_pooled_alike(most):
    A = one(7, 9, mask=Causal())
    dense = A.dense()[0, 0]
    expected = figure_inputs.cells(A, most)
    assert expected.shape == (min(7, most), min(9, most))
    assert expected.dtype == np.float64
    close(figure_inputs.cells(dense, most), expected, atol=1e-6)
    close(figure_inputs.cells(dense.numpy(), most), expected, atol=1e-6)


def test_each_cell_is_the_mean_of_its_entries():
    dense = np.arange(12.0).reshape(3, 4)
    close(figure_inputs.cells(dense, 2), [[dense[:2, :2].mean(), dense[:2, 2:].mean()], [8.5, 10.5]])
    close(figure_inputs.cells(dense, 1), [[dense.mean()]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_numbers_of_every_dtype_are_float64_and_free_of_gradients(dtype):
    found = figure_inputs.numbers(torch.tensor([[1, 0]]).to(dtype))
    assert found.dtype == np.float64
    assert found.tolist() == [[1.0, 0.0]]
    assert figure_inputs.numbers(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_complex_numbers_are_refused(kind):
    with pytest.raises(TypeError, match=r"A must hold real numbers, got .*complex.*; write A\.real or abs\(A\)"):
        figure_inputs.numbers(kind([1j]))


def test_a_matrix_has_queries_and_keys_and_nothing_else():
    assert figure_inputs.shape(one(5, 7)) == (5, 7)
    assert figure_inputs.shape(np.zeros((3, 4))) == (3, 4)
    for A, message in (
        (one(heads=2), r"got shape \(1, 2, 5, 7\); write A\.select\(batch=0, heads=0\)"),
        (torch.zeros(1, 3, 4), r"got shape \(1, 3, 4\); write A\[0, 0\], or A\.mean"),
        (np.zeros(3), r"A must be one matrix of queries by keys, got shape \(3,\)"),
        (np.zeros((0, 4)), r"A must have queries and keys to show, got shape \(0, 4\)"),
        (np.zeros((4, 0)), r"A must have queries and keys to show, got shape \(4, 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            figure_inputs.shape(A)
    with pytest.raises(TypeError, match="A must be a Weights, or a 2-D tensor or array, got list"):
        figure_inputs.shape([[1.0]])


def test_a_query_counts_from_either_end():
    A = one()
    dense = A.dense()[0, 0].numpy()
    for query in (0, 4, -1, -5, np.int64(2)):
        close(figure_inputs.row(A, query), dense[query], atol=1e-6)
        close(figure_inputs.row(dense, query), dense[query])
    for query in (5, -6):
        with pytest.raises(ValueError, match=f"query must be from 0 to 4, or negative from the end, got {query}"):
            figure_inputs.row(A, query)
    with pytest.raises(TypeError, match=r"query must be a whole number, got 1\.0"):
        figure_inputs.row(A, 1.0)


def test_what_keys_receive_is_the_mean_over_queries():
    A = one(mask=Causal())
    dense = A.dense()[0, 0].numpy()
    close(figure_inputs.mean_received(A), dense.mean(0), atol=1e-6)
    close(figure_inputs.mean_received(dense), dense.mean(0))
    assert figure_inputs.mean_received(dense).sum() == pytest.approx(1)


def test_heads_of_a_layer_come_with_its_full_shape():
    A = one(6, 8, heads=3)
    dense = A.dense()[0]
    found, shape = figure_inputs.heads(A, 4)
    assert shape == (6, 8)
    assert found.shape == (3, 4, 4)
    for plain in (dense, dense.numpy()):
        pooled, shape = figure_inputs.heads(plain, 4)
        assert shape == (6, 8)
        close(pooled, found, atol=1e-6)


def test_entropy_and_distance_of_weights_are_those_of_their_dense_layer():
    A = one(6, 8, heads=3, mask=Causal())
    for ours, theirs in zip(
        figure_inputs.entropy_and_distance(A), figure_inputs.entropy_and_distance(A.dense()[0]), strict=True
    ):
        assert ours.shape == (3,)
        close(ours, theirs, atol=1e-5)


def test_padding_counts_in_no_figure():
    A = one(6, 6, heads=3, mask=Padding((4,)))
    text = A.dense()[0, :, :4, :4]
    for ours, theirs in zip(
        figure_inputs.entropy_and_distance(A), figure_inputs.entropy_and_distance(text), strict=True
    ):
        close(ours, theirs, atol=1e-5)
    found = figure_inputs.mean_received(A.select(heads=1))
    close(found, np.append(text[1].mean(0).numpy(), [0.0, 0.0]), atol=1e-6)


def test_batch_rows_count_alike_in_entropy_and_distance():
    A = one(heads=2, batch=3)
    each = [figure_inputs.entropy_and_distance(A.select(batch=n)) for n in range(3)]
    for whole, parts in zip(figure_inputs.entropy_and_distance(A), zip(*each, strict=True), strict=True):
        close(whole, np.mean(parts, 0), atol=1e-6)


def test_distance_is_counted_from_the_last_key_a_query_may_see():
    entropy, distance = figure_inputs.entropy_and_distance(np.array([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]))
    assert entropy.tolist() == [0]
    assert distance.tolist() == [0.5]  # query 0 stands at key 1, query 1 at key 2


def test_a_layer_of_several_batch_rows_or_of_other_dims_is_refused():
    with pytest.raises(ValueError, match=r"a layer must have one batch row, got shape \(2, 1, 5, 7\); write A\.select"):
        figure_inputs.heads(one(batch=2), 4)
    for layer, got in ((np.zeros((2, 3)), r"\(2, 3\)"), (torch.zeros(1, 1, 2, 3), r"\(1, 1, 2, 3\)"), ([1], "list")):
        for show in (lambda layer: figure_inputs.heads(layer, 4), figure_inputs.entropy_and_distance):
            with pytest.raises(ValueError, match=f"or a tensor or array of dims h i j, got {got}"):
                show(layer)
    with pytest.raises(ValueError, match=r"have batch rows, heads, queries and keys to show, got shape \(0, 2, 3\)"):
        figure_inputs.heads(np.zeros((0, 2, 3)), 4)
