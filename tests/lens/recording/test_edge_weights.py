"""EdgeWeights: measures of each head and node, against loops over the edges."""

from __future__ import annotations

import math

import pytest
import torch

from regard.lens import EdgeWeights

HEADS, TARGETS, SOURCES = 3, 5, 7


@pytest.fixture
def graph():
    """Thirteen edges, two of them between the same nodes, into four of five targets from seven sources."""
    torch.manual_seed(0)
    targets = torch.tensor([3, 0, 0, 1, 4, 1, 3, 3, 3, 4, 1, 3, 0])
    sources = torch.tensor([6, 1, 2, 2, 0, 5, 6, 3, 2, 4, 0, 1, 5])
    weights = torch.rand(13, HEADS, dtype=torch.float64)
    for target in range(TARGETS):
        weights[targets == target] /= weights[targets == target].sum(0)
    return EdgeWeights(torch.stack((sources, targets)), weights, (TARGETS, SOURCES))


def by_target(A, head):
    """The weights into each target, as lists of (weight, source)."""
    found = [[] for _ in range(TARGETS)]
    for (source, target), weight in zip(A.edge_index.T.tolist(), A.weights[:, head].tolist(), strict=True):
        found[target].append((weight, source))
    return found


def test_rows_are_those_of_the_dense_matrix(graph):
    expected = torch.zeros(HEADS, TARGETS, SOURCES, dtype=torch.float64)
    for head in range(HEADS):
        for target, edges in enumerate(by_target(graph, head)):
            for weight, source in edges:
                expected[head, target, source] += weight
    assert torch.allclose(graph.dense(), expected)
    assert graph.dense()[:, 3, 6].tolist() == (graph.weights[0] + graph.weights[6]).tolist()
    for target in range(TARGETS):
        assert torch.allclose(graph.row(target), expected[:, target])
        assert torch.allclose(graph[-1, target - TARGETS], expected[-1, target])


def test_measures_are_sums_over_edges(graph):
    for head in range(HEADS):
        into = by_target(graph, head)
        entropy = [-sum(w * math.log(w) for w, _ in edges) for edges in into]
        assert torch.allclose(graph.entropy()[head], torch.tensor(entropy, dtype=torch.float64))
        assert graph.max()[head].tolist() == [max((w for w, _ in edges), default=0.0) for edges in into]
        received = [sum(w for edges in into for w, source in edges if source == j) for j in range(SOURCES)]
        assert torch.allclose(graph.received()[head], torch.tensor(received, dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_topk_lists_the_strongest_edges_of_each_target(graph, k):
    values, indices = graph.topk(k)
    assert values.shape == indices.shape == (HEADS, TARGETS, k)
    for head in range(HEADS):
        for target, edges in enumerate(by_target(graph, head)):
            expected = (sorted(edges, reverse=True) + [(0.0, -1)] * k)[:k]
            assert list(zip(values[head, target].tolist(), indices[head, target].tolist(), strict=True)) == expected


def test_a_graph_without_edges_has_zeros():
    A = EdgeWeights(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 2), 3)
    assert A.dense().shape == (2, 3, 3)
    assert not A.dense().any()
    assert not A.entropy().any()
    assert A.topk(1).indices.unique().tolist() == [-1]


def test_the_text_names_heads_nodes_and_edges(graph):
    assert repr(graph) == "EdgeWeights(1 x 3 x 5 x 7, 13 edges)"


def test_it_cannot_be_changed(graph):
    with pytest.raises(AttributeError):
        graph.weights = torch.zeros(13, HEADS)


def test_a_dense_matrix_has_a_limit(graph):
    with pytest.raises(ValueError, match=r"takes .* GB, more than limit='500B'; ask for a row, A\[head, target\]"):
        graph.dense(limit="500B")


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (0, TypeError, r"write A\[head, target\]"),
        ((HEADS, 0), IndexError, "head must be from 0 to 2, or negative from the end, got 3"),
        ((0, -6), IndexError, "target must be from 0 to 4, or negative from the end, got -6"),
    ],
)
def test_other_indices_are_refused(graph, key, error, message):
    with pytest.raises(error, match=message):
        graph[key]


def test_k_must_be_positive(graph):
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        graph.topk(0)


@pytest.mark.parametrize(
    ("edges", "weights", "nodes", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.long), torch.ones(4, 1), 3, "edge_index must hold integers of dims 2 e"),
        (torch.zeros(2, 4), torch.ones(4, 1), 3, "edge_index must hold integers of dims 2 e"),
        (torch.zeros(2, 4, dtype=torch.long), torch.ones(4), 3, "weights must hold floats of dims e h for the 4 edges"),
        (torch.zeros(2, 4, dtype=torch.long), torch.ones(5, 1), 3, "weights must hold floats of dims e h"),
        (torch.tensor([[3], [0]]), torch.ones(1, 1), 3, "each source in edge_index must be from 0 to 2, got 3"),
        (torch.tensor([[0], [2]]), torch.ones(1, 1), (2, 3), "each target in edge_index must be from 0 to 1, got 2"),
    ],
)
def test_edges_and_weights_must_belong_together(edges, weights, nodes, message):
    with pytest.raises(ValueError, match=message):
        EdgeWeights(edges, weights, nodes)
