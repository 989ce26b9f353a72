"""Stand-ins for graph libraries, with the names and signatures of torch_geometric and dgl.

Written from what these libraries document; the softmax is a loop over the nodes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import ModuleType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

NODES, HEADS, WIDTH = 6, 2, 4
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 3, 0], [1, 2, 3, 4, 0, 1, 3, 0, 1]])  # none into node 5


def looped(logits, groups):
    """Softmax of logits within groups, `e ...`."""
    out = torch.zeros_like(logits)
    for group in groups.unique():
        out[groups == group] = logits[groups == group].softmax(0)
    return out


def softmax(src, index=None, ptr=None, num_nodes=None, dim=0):
    return looped(src, index)


def sigmoids(src, index=None, ptr=None, num_nodes=None, dim=0):
    """A function that does not do what its name says."""
    return src.sigmoid()


class MessagePassing(nn.Module):
    """Runs `edge_update`, then `message`, and sums the messages into each target; each step has hooks."""

    flow, node_dim = "source_to_target", 0
    steps = ("edge_update", "propagate", "message", "aggregate")

    def __init__(self):
        super().__init__()
        self.hooks = {(step, when): OrderedDict() for step in self.steps for when in (0, 1)}

    def register(self, step, when, hook):
        handle = RemovableHandle(self.hooks[step, when])
        self.hooks[step, when][handle.id] = hook
        return handle

    def register_edge_update_forward_pre_hook(self, hook):
        return self.register("edge_update", 0, hook)

    def register_edge_update_forward_hook(self, hook):
        return self.register("edge_update", 1, hook)

    def register_propagate_forward_pre_hook(self, hook):
        return self.register("propagate", 0, hook)

    def register_propagate_forward_hook(self, hook):
        return self.register("propagate", 1, hook)

    def register_message_forward_hook(self, hook):
        return self.register("message", 1, hook)

    def register_aggregate_forward_hook(self, hook):
        return self.register("aggregate", 1, hook)

    def run(self, step, given, compute):
        for hook in self.hooks[step, 0].values():
            hook(self, given)
        out = compute()
        for hook in self.hooks[step, 1].values():
            hook(self, given, out)
        return out


def keep(A, values):
    """The message of graph attention."""
    return A[..., None] * values


class GATConv(MessagePassing):
    """Additive attention over edges; the softmax runs in `edge_update`, or in `propagate`, or outside both."""

    def __init__(self, where="edge_update", wrong=False, shuffled=False, flow="source_to_target", **given):
        super().__init__()
        self.width = given.pop("width", WIDTH)
        self.lin, self.score = nn.Linear(WIDTH, HEADS * self.width), nn.Linear(2 * self.width, 1)
        self.where, self.wrong, self.shuffled, self.flow = where, wrong, shuffled, flow
        self.change, self.message, self.reduce = lambda A: A, keep, "sum"
        vars(self).update(given)

    def forward(self, x, edges, size=None):
        sources, targets = (x, x) if torch.is_tensor(x) else x
        h, g = (self.lin(each).unflatten(-1, (HEADS, self.width)) for each in (sources, targets))
        j, i = edges if self.flow == "source_to_target" else edges.flip(0)

        def attend():
            logits = nn.functional.leaky_relu(self.score(torch.cat((h[j], g[i]), -1)).squeeze(-1))
            function = sigmoids if self.wrong else softmax
            A = self.change(function(logits, i.flip(0) if self.shuffled else i, num_nodes=len(g)))
            self.weights = A.detach()
            return A

        def propagate():
            weights = attend() if A is None else A
            messages = self.run("message", ({},), lambda: self.message(weights, h[j]))
            return self.run("aggregate", ({},), lambda: self.aggregate(messages, i, g))

        given, A = (edges, size, {}), None
        if self.where != "propagate":
            A = attend() if self.where is None else self.run(self.where, given, attend)
        return self.run("propagate", given, propagate)

    def aggregate(self, messages, targets, g):
        ids = targets.view(-1, *(1,) * (messages.ndim - 1)).expand_as(messages)
        return torch.zeros_like(g).scatter_reduce(0, ids, messages, self.reduce, include_self=False)


class Graph:
    """A graph as dgl has it."""

    def __init__(self, edges, targets=NODES, sources=NODES):
        self.all, self.targets, self.sources = edges, targets, sources

    def edges(self, form="uv", order="eid"):
        return tuple(self.all)

    def num_dst_nodes(self):
        return self.targets

    def num_src_nodes(self):
        return self.sources


def edge_softmax(graph, logits, eids="__ALL__", norm_by="dst"):
    sources, targets = graph.edges()
    groups = targets if norm_by == "dst" else sources
    return looped(logits, groups if isinstance(eids, str) else groups[eids])


class DglLayer(nn.Module):
    """Attention over the edges of a dgl graph."""

    def __init__(self, **given):
        super().__init__()
        self.score, self.given = nn.Linear(2 * WIDTH, HEADS), given

    def forward(self, graph, x):
        sources, targets = torch.stack(graph.edges())[:, self.given.get("eids", slice(None))]
        logits = self.score(torch.cat((x[sources], x[targets]), -1))[..., None]  # e h 1
        weights = edge_softmax(graph, logits, **self.given)
        self.weights = weights.detach()
        return torch.zeros(NODES, HEADS, WIDTH).index_add(0, targets, weights * x[sources][:, None])


def install(monkeypatch, geometric_softmax=softmax):
    """Put the stand-ins where capture looks for the libraries."""
    names = {
        "torch_geometric.utils": {"softmax": geometric_softmax},
        "torch_geometric.nn": {"MessagePassing": MessagePassing},
        "dgl.ops": {"edge_softmax": edge_softmax},
    }
    for name, held in names.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
