"""EdgeWeights: attention over the edges of a graph, one weight per edge and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor

from ...ops.memory_limit import LIMIT, parse_size
from ..real_tokens import RealTokens
from .reduced import Reduced
from .store import TensorInMemory


@dataclass(frozen=True, eq=False, repr=False)
class EdgeWeights:
    """Attention over the edges of a graph: `edge_index` of dims 2 x e, source then target, and `weights` of e x h.

    The targets are the queries and the sources are the keys: the weights of the edges into a target sum to 1, unless
    the layer changed them after the softmax. Nothing of size targets x sources is stored.

    >>> # Three edges, into node 0 from nodes 1 and 2, and into node 1 from node 2:
    >>> edges, weights = torch.tensor([[1, 2, 2], [0, 0, 1]]), torch.tensor([[0.25], [0.75], [1.0]])
    >>> A = EdgeWeights(edges, weights, nodes=3)
    >>> A
    EdgeWeights(1 x 1 x 3 x 3, 3 edges)

    >>> # The weights of one target over the sources, for one head and for all heads:
    >>> A[0, 0]
    tensor([0.0000, 0.2500, 0.7500])
    >>> A.row(1)
    tensor([[0., 0., 1.]])

    >>> # Measures for each head:
    >>> A.received()
    tensor([[0.0000, 0.2500, 1.7500]])
    >>> A.entropy()
    tensor([[0.5623, 0.0000, 0.0000]])

    >>> # The strongest sources of each target; -1 if a target has fewer edges:
    >>> A.topk(2).indices
    tensor([[[ 2,  1],
             [ 2, -1],
             [-1, -1]]])

    `nodes` is the number of nodes, or (targets, sources) if these are nodes of different kinds. Parallel edges, between
    the same two nodes, count one by one in every measure; `dense` and rows add them up. `regard.views.edges(A)` draws
    the graph.
    """

    edge_index: Tensor  # 2 e
    weights: Tensor  # e h
    nodes: int | tuple[int, int]

    def __post_init__(self) -> None:
        edge_index, weights = self.edge_index, self.weights
        if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "edge_index must hold integers of dims 2 e, the source and the target of each edge, "
                f"got {edge_index.dtype} of shape {tuple(edge_index.shape)}"
            )
        if weights.ndim != 2 or len(weights) != edge_index.shape[1] or not weights.is_floating_point():
            raise ValueError(
                f"weights must hold floats of dims e h for the {edge_index.shape[1]} edges, "
                f"got {weights.dtype} of shape {tuple(weights.shape)}"
            )
        *_, targets, sources = self.shape
        for name, ids, n in (("source", edge_index[0], sources), ("target", edge_index[1], targets)):
            if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
                raise ValueError(f"each {name} in edge_index must be from 0 to {n - 1}, got {int(ids.max())}")

    @property
    def shape(self) -> torch.Size:
        """The dims `b h i j`, as other entries of a tape have them: 1, heads, targets, sources."""
        targets, sources = (self.nodes, self.nodes) if isinstance(self.nodes, int) else self.nodes
        return torch.Size((1, self.weights.shape[1], targets, sources))

    @property
    def real(self) -> RealTokens:
        """All queries and keys: a graph has no padding."""
        return RealTokens.all_of(self.shape)

    def __repr__(self) -> str:
        return f"EdgeWeights({' x '.join(map(str, self.shape))}, {len(self.weights)} edges)"

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        if not isinstance(key, tuple) or len(key) != 2:
            raise TypeError(f"write A[head, target] for a row of EdgeWeights, got A[{key!r}]; A.dense() is the matrix")
        head = _number("head", key[0], self.shape[1])
        return self.row(key[1])[head]

    def row(self, target: int) -> Tensor:
        """Return the weights of one target over the sources: `h j`."""
        edges = self.edge_index[1] == _number("target", target, self.shape[2])
        return _sums(self.weights[edges], self.edge_index[0, edges], self.shape[3])

    def received(self) -> Tensor:
        """Return the attention that each source receives from all targets: `h j`."""
        return _sums(self.weights, self.edge_index[0], self.shape[3])

    def entropy(self) -> Tensor:
        """Return -sum A log A over the edges into each target: `h i`; 0 for a target without edges."""
        return _sums(torch.special.entr(self.weights), self.edge_index[1], self.shape[2])

    def max(self) -> Tensor:
        """Return the largest weight into each target: `h i`; 0 for a target without edges."""
        largest = self.weights.new_zeros(self.shape[2], self.shape[1])
        targets = self.edge_index[1].long()[:, None].expand_as(self.weights)
        return largest.scatter_reduce(0, targets, self.weights, "amax").mT

    def topk(self, k: int) -> torch.return_types.topk:
        """Return the k largest weights into each target and their sources: `h i k` twice, as `values` and `indices`.

        A target with fewer than k edges has weights 0 and sources -1 at the end.
        """
        if index(k) < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        _, h, i, _ = self.shape
        sources, targets = self.edge_index.long()
        values, found = self.weights.new_zeros(h, i, k), sources.new_full((h, i, k), -1)
        count = targets.bincount(minlength=i)
        first = count.cumsum(0) - count  # number of edges into the targets before each
        for head, weights in enumerate(self.weights.unbind(1)):
            order = weights.argsort(descending=True, stable=True)
            order = order[targets[order].argsort(stable=True)]  # sorted by target, then by weight, the largest first
            place = torch.arange(len(order), device=order.device) - first[targets[order]]
            order, place = order[place < k], place[place < k]
            values[head, targets[order], place] = weights[order]
            found[head, targets[order], place] = sources[order]
        return torch.return_types.topk((values, found))

    def dense(self, limit: str = LIMIT) -> Tensor:
        """Return the matrix `h i j` of targets by sources, if it takes no more memory than `limit`."""
        _, h, i, j = self.shape
        need = h * i * j * self.weights.element_size()
        if need > parse_size(limit):
            raise ValueError(
                f"the dense matrix takes {need / 1e9:.3g} GB, more than limit={limit!r}; "
                "ask for a row, A[head, target], or raise the limit of A.dense(limit=...)"
            )
        sources, targets = self.edge_index.long()
        return _sums(self.weights, targets * j + sources, i * j).unflatten(1, (i, j))

    def measures(self) -> Reduced:
        """Return entropy, received and max as a layer of a tape has them, with a batch dim: `b h i` or `b h j`."""
        found = {"entropy": self.entropy(), "received": self.received(), "max": self.max()}
        return Reduced(self.shape, {name: TensorInMemory(x[None]) for name, x in found.items()}, self.real)

    def select_heads(self, heads: Sequence[int]) -> EdgeWeights:
        """Return these heads alone."""
        return replace(self, weights=self.weights[:, list(heads)])

    def map_tensors(self, function: Callable[[Tensor, str], Tensor]) -> EdgeWeights:
        """Return the same weights with each tensor replaced by a function of it and of its name."""
        edge_index = function(self.edge_index, "edges")
        return replace(self, edge_index=edge_index, weights=function(self.weights, "weights of edges"))


def _sums(weights: Tensor, groups: Tensor, n: int) -> Tensor:
    """Sum weights `e h` within n groups: `h n`."""
    return weights.new_zeros(n, weights.shape[1]).index_add(0, groups.long(), weights).mT


def _number(name: str, value: int, n: int) -> int:
    """Return a number of a head or target; a negative one counts from the end."""
    number = index(value)
    if not -n <= number < n:
        raise IndexError(f"{name} must be from 0 to {n - 1}, or negative from the end, got {number}")
    return number % n
