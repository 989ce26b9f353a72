"""Clusters of heads: planted groups of equal heads are found; similarities against dense matrices."""

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from regard import Causal, Padding, weights
from regard.lens import Tape, head_clusters, similarity
from regard.lens.analysis import head_clusters as module
from regard.lens.analysis.head_clusters import clusters, comparable_layers, cosines, products


def found(tape, **arguments):
    table = head_clusters(tape, **arguments)
    return {name: list(table[name]) for name in table}


def planted(n=40):
    """Three layers of six heads in all, two of each kind: at the diagonal, at the first key, even."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    kinds = [6.0 * (i == j), 6.0 * (j == 0).expand(n, n), torch.zeros(n, n)]
    noise = 0.05 * torch.randn(6, n, n, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([kinds[kind] for kind in (0, 1, 2, 2, 1, 0)]) + noise
    unit = torch.eye(n).expand(1, 2, -1, -1)
    layers = scores[None].mul(n**0.5).split(2, 1)
    return Tape({(str(at), 0): weights(q, unit, mask=Causal()) for at, q in enumerate(layers)})


def test_planted_heads_that_attend_alike_share_a_cluster_across_layers():
    rows = found(planted())
    groups = {}
    for layer, head, cluster in zip(rows["layer"], rows["head"], rows["cluster"], strict=True):
        groups.setdefault(cluster, set()).add((layer, head))
    pairs = [{("0", 0), ("2", 1)}, {("0", 1), ("2", 0)}, {("1", 0), ("1", 1)}]
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, pairs))
    assert rows["cluster"] == sorted(rows["cluster"])
    assert min(rows["mean_similarity"]) > 0.9
    assert set(found(planted(), similarity=0.0)["cluster"]) == {0}
    apart = found(planted(), similarity=1.0)
    assert apart["cluster"] == list(range(6))
    assert apart["mean_similarity"] == [1.0] * 6


@pytest.mark.parametrize("chunk", [2**21, 300])
def test_similarities_are_those_of_the_dense_matrices_without_padding(chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", chunk)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 2, 4, 13, 8, generator=generator, dtype=torch.float64)
    mask = Padding(torch.tensor([13, 8])) & Causal()
    tape = Tape({("a", 0): weights(q, k, mask=mask), ("b", 0): weights(k, q[:, :2], mask=mask)})
    (keys,) = comparable_layers(tape)
    *_, (_, inner) = products(tape, keys)
    dense = torch.cat([A.dense() for A in tape.values()], 1)
    dense[1, :, 8:] = 0
    rows = torch.nn.functional.normalize(dense.transpose(0, 1).flatten(1))
    torch.testing.assert_close(cosines(inner), rows @ rows.T)
    flat = Tape({("a", 0): weights(q[None], k[None], mask=Causal())})
    *_, (_, inner) = products(flat, [("a", 0)])
    alone = Tape({("a", 0): weights(q, k, mask=Causal())})["a"].dense().transpose(0, 1).flatten(1)
    torch.testing.assert_close(inner, alone @ alone.T)


def test_one_text_has_the_similarity_of_the_measure():
    q, k = torch.randn(2, 1, 5, 30, 8)
    tape = Tape({("layer", 0): weights(q, k)})
    *_, (_, inner) = products(tape, list(tape))
    torch.testing.assert_close(cosines(inner).float(), similarity(tape["layer"])[0])


def test_clusters_are_those_of_average_linkage_and_lie_together():
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.rand(30, 5, generator=generator, dtype=torch.float64))
    S = x @ x.T
    groups = clusters(S, 0.9)
    upper = S[*torch.triu_indices(30, 30, 1)]
    expected = fcluster(linkage((1 - upper).numpy(), "average"), 0.1, "distance")
    assert sorted(map(sorted, groups)) == sorted(
        sorted((expected == label).nonzero()[0].tolist()) for label in set(expected.tolist())
    )
    assert 1 < len(groups) < 30


def test_layers_of_other_sizes_and_heads_without_weights_are_apart():
    q, k = torch.randn(2, 1, 2, 20, 8)
    empty = Padding(torch.tensor([0]))
    tape = Tape({("a", 0): weights(q, k), ("b", 0): weights(q[:, :, :9], k), ("c", 0): weights(q, k, mask=empty)})
    rows = found(tape, similarity=0.1)
    by_layer = {}
    for layer, cluster in zip(rows["layer"], rows["cluster"], strict=True):
        by_layer.setdefault(layer, set()).add(cluster)
    assert {layer: len(found) for layer, found in by_layer.items()} == {"a": 1, "b": 1, "c": 2}
    assert set.union(*by_layer.values()) == set(range(4))


def test_a_similarity_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="similarity must be a number, got 'high'"):
        head_clusters(planted(), similarity="high")
