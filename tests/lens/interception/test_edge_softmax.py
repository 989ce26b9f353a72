"""The softmax of graph libraries is recorded with its edges, and only if it is one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tests.lens.graph_layers as fake
from regard.lens import CaptureWarning, EdgeWeights, ablate, capture
from regard.nn import Attention
from tests.lens.graph_layers import EDGES, HEADS, NODES, WIDTH, DglLayer, GATConv, Graph

SUBSET = torch.tensor([4, 0, 8])


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    torch.manual_seed(0)
    fake.install(monkeypatch)


def nodes(n=NODES):
    return torch.randn(n, WIDTH)


class Pair(nn.Module):
    """A graph layer after a layer that is recorded in any case."""

    def __init__(self, graph):
        super().__init__()
        self.seen, self.graph = Attention(WIDTH, heads=2), graph

    def forward(self, x, *args, **kwargs):
        return self.graph(self.seen(x[None])[0], *args, **kwargs)


@pytest.mark.parametrize("where", ["edge_update", "propagate"])
def test_the_weights_are_those_of_the_layer(where):
    layer, x = GATConv(where), nodes()
    expected = layer(x, EDGES)
    with capture(layer) as tape:
        out = layer(x, EDGES)
    A = tape[0]
    assert isinstance(A, EdgeWeights)
    assert torch.equal(out, expected)
    assert A.shape == (1, HEADS, NODES, NODES)
    assert torch.equal(A.weights, layer.weights)
    assert torch.equal(A.edge_index, EDGES)
    assert torch.allclose(A.dense().sum(-1)[:, :5], torch.ones(HEADS, 5))
    assert not A.dense()[:, 5].any()
    assert not A.weights.requires_grad
    assert tape.unseen == []


def test_each_call_and_layer_has_its_entry():
    model, x = nn.ModuleList([GATConv(), GATConv("propagate")]), nodes()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = model

        def forward(self, x):
            return [conv(x, EDGES) for conv in (*self.convs, self.convs[0])]

    net = Model()
    with capture(net) as tape:
        net(x)
    assert list(tape) == [("convs.0", 0), ("convs.1", 0), ("convs.0", 1)]
    assert "EdgeWeights(1 x 2 x 6 x 6, 9 edges)" in repr(tape)


def test_edges_may_name_the_targets_first():
    layer = GATConv(flow="target_to_source")
    with capture(layer) as tape:
        layer(nodes(), EDGES)
    assert torch.equal(tape[0].edge_index, EDGES.flip(0))


@pytest.mark.parametrize("size", [None, (9, 4), (None, None)])
def test_sources_and_targets_may_be_different_nodes(size):
    layer, edges = GATConv(), torch.tensor([[5, 0, 2], [1, 1, 3]])
    with capture(layer) as tape:
        layer((nodes(9), nodes(4)), edges, size)
    assert tape[0].shape == (1, HEADS, 4, 9)


def test_in_the_other_flow_the_sources_come_second():
    class Reversed(GATConv):
        def forward(self, x, edges):
            return super().forward(x[::-1], edges)

    layer, edges = Reversed(flow="target_to_source"), torch.tensor([[1, 1, 3], [5, 0, 2]])
    with capture(layer) as tape:
        layer((nodes(4), nodes(9)), edges)
    assert tape[0].shape == (1, HEADS, 4, 9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GATConv(where=None), "torch_geometric.utils.softmax was called outside message passing"),
        (lambda: GATConv(shuffled=True), "with groups that are not the targets of the edges of the layer"),
    ],
)
def test_a_softmax_over_other_groups_is_unseen(build, message):
    model = Pair(build())
    with pytest.warns(CaptureWarning, match=message), capture(model) as tape:
        model(nodes(), EDGES)
    assert tape.layers == ["seen"]
    assert [(each.layer, each.kind) for each in tape.unseen] == [("graph", "graph attention")]


def test_a_function_that_is_no_softmax_is_unseen(monkeypatch):
    fake.install(monkeypatch, fake.sigmoids)
    model = Pair(GATConv(wrong=True))
    with pytest.warns(CaptureWarning, match="did not return the softmax of its logits"), capture(model) as tape:
        model(nodes(), EDGES)
    assert tape.layers == ["seen"]


def test_edges_that_are_no_dense_tensor_are_unseen():
    class Sparse(GATConv):
        def run(self, step, given, compute):
            sparse = torch.sparse_coo_tensor(EDGES, torch.ones(9), (NODES, NODES), check_invariants=True)
            return super().run(step, (sparse, *given[1:]), compute)

    model = Pair(Sparse())
    with pytest.warns(CaptureWarning, match="its edges are torch.sparse_coo, not a dense"), capture(model) as tape:
        model(nodes(), EDGES)
    assert tape.layers == ["seen"]


@pytest.mark.parametrize("given", [{}, {"eids": SUBSET}])
def test_dgl_passes_its_graph(given):
    layer, x = DglLayer(**given), nodes()
    with capture(layer) as tape:
        layer(Graph(EDGES), x)
    A = tape[0]
    assert torch.equal(A.edge_index, EDGES[:, given.get("eids", slice(None))])
    assert torch.equal(A.weights, layer.weights.squeeze(-1))


def test_weights_that_sum_to_1_over_sources_are_unseen():
    class Model(Pair):
        def forward(self, x):
            return self.graph(Graph(EDGES), self.seen(x[None])[0])

    model = Model(DglLayer(norm_by="src"))
    with pytest.warns(CaptureWarning, match="with norm_by='src' gives no weights"), capture(model) as tape:
        model(nodes())
    assert tape.layers == ["seen"]


def test_heads_and_layers_are_chosen_as_for_other_layers():
    model, x = Pair(GATConv()), nodes()
    with capture(model, heads=[1]) as tape:
        model(x, EDGES)
    assert torch.equal(tape["graph"].weights, model.graph.weights[:, [1]])
    with capture(model, layers="seen") as tape:
        model(x, EDGES)
    assert (tape.layers, tape.unseen) == (["seen"], [])
    with pytest.raises(IndexError, match=r"heads must be from 0 to 1 in '\(model\)'"), capture(model.graph, heads=[2]):
        model.graph(x, EDGES)


@pytest.mark.parametrize("given", [{"keep": ["entropy"]}, {"to": "cpu"}, {"budget": "1MB"}, {"to": "folder"}])
def test_edges_are_kept_whole_wherever_tensors_are_kept(given, tmp_path):
    given = {"to": tmp_path} if given.get("to") == "folder" else given
    layer = GATConv()
    with capture(layer, **given) as tape:
        layer(nodes(), EDGES)
    assert torch.equal(tape[0].weights, layer.weights)


def test_later_writes_of_the_model_do_not_change_the_tape():
    layer, x = GATConv().requires_grad_(False), nodes()
    with capture(layer) as tape:
        layer(x, EDGES)
    expected = layer.weights.clone()
    layer.weights.zero_()
    assert torch.equal(tape[0].weights, expected)


def test_the_layer_is_left_as_it_was():
    layer = GATConv()
    with capture(layer):
        layer(nodes(), EDGES)
        copy.deepcopy(layer)
    assert not any(layer.hooks.values())
    assert fake.softmax is vars(fake)["softmax"]
    assert type(fake.softmax).__name__ == "function"


def test_ablating_another_layer_leaves_the_softmax_over_edges_as_it_is():
    model, x = Pair(GATConv()), nodes()
    expected = model(x, EDGES)
    with ablate(model, {"seen": [0]}):
        changed = model(x, EDGES)
    assert not torch.equal(changed, expected)
