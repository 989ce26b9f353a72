"""Edge softmax: `torch_geometric.utils.softmax` and `dgl.ops.edge_softmax`, the attention of graph libraries.

regard imports neither library: it looks for functions that are imported already. dgl passes its graph to the softmax.
torch_geometric passes the target of each edge alone, so hooks of `MessagePassing` note the edges of the layer, and the
softmax is recorded only if its groups are the targets of these edges. The weights are computed once more from the
logits; a call whose result differs, or whose weights into a target do not sum to 1, is not recorded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..recording.edge_weights import EdgeWeights
from .edge_proof import EdgeProofs, passes_messages
from .intercepted import HEADS_SECOND
from .kernel_call import NotUnderstood
from .patching import Kernel, KernelRun, original_function

TARGET_TO_SOURCE = "target_to_source"  # a `flow` of MessagePassing whose edge_index has the targets first
HOOKS = ("edge_update", "propagate")  # steps of MessagePassing that take edges and have hooks
_PROOFS: list[EdgeProofs] = []  # the captures that are open


class _Edges(NamedTuple):
    """The edges that a layer passes messages along."""

    pairs: Tensor  # 2 e: source, target
    sources: int | None  # number of nodes, None if unknown


class _Running(threading.local):
    """The edges of the layers of torch_geometric under way in this thread, by the id of the layer."""

    def __init__(self) -> None:
        self.edges: dict[int, _Edges | NotUnderstood] = {}
        self.pairs: dict[int, tuple[int, int]] = {}  # numbers of nodes of the two kinds, for layers that got both


_RUNNING = _Running()


def kernels() -> list[Kernel]:
    """Return the edge softmax functions of the libraries that are imported already."""
    geometric = _functions("softmax", "torch_geometric.utils")
    dgl = _functions("edge_softmax", "dgl.ops", "dgl.nn.functional")
    return [
        *(_kernel(function, homes, _geometric_weights) for function, homes in geometric),
        *(_kernel(function, homes, _dgl_weights) for function, homes in dgl),
    ]


@contextmanager
def edges_noted(parts: Collection[nn.Module], proofs: EdgeProofs | None) -> Iterator[None]:
    """Note the edges of each `MessagePassing` layer of torch_geometric while it uses them, and prove its messages."""
    is_imported = "torch_geometric.nn" in sys.modules
    layers: list[Any] = [part for part in parts if passes_messages(part)] if is_imported else []
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(_note_nodes).remove)
            for step in HOOKS:
                stack.callback(getattr(layer, f"register_{step}_forward_pre_hook")(_note_edges).remove)
                stack.callback(getattr(layer, f"register_{step}_forward_hook")(_forget_edges).remove)
            if proofs is not None:
                stack.callback(layer.register_message_forward_hook(_note_messages).remove)
                stack.callback(layer.register_aggregate_forward_hook(_prove_sums).remove)
        if layers and proofs is not None:
            _PROOFS.append(proofs)
            stack.callback(proofs.finish)
            stack.callback(_PROOFS.remove, proofs)
        yield


def edge_weights(logits: Tensor, weights: Tensor, edges: Tensor, nodes: tuple[int, int], name: str) -> EdgeWeights:
    """Return the weights, `e` or `e ...`, if they are the softmax of the logits over the edges into each target.

    `edges` are `2 e`, source and target, and `nodes` the numbers of targets and sources.
    """
    if logits.shape != weights.shape or not logits.ndim or len(logits) != edges.shape[1]:
        raise NotUnderstood(f"{name} got logits of shape {tuple(logits.shape)} for {edges.shape[1]} edges")
    # A trailing dim of 1 is a width that dgl adds; all dims after the first are heads.
    given, found = (x.detach().reshape(len(x), x.shape[1:].numel()) for x in (logits, weights))
    expected = _softmax(given.double(), edges[1], nodes[0])
    degree = edges[1].bincount().max().item() if edges.shape[1] else 0
    tolerance = torch.finfo(found.dtype).eps * (16 + degree**0.5)
    if not torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise NotUnderstood(f"{name} did not return the softmax of its logits over the edges into each node")
    return EdgeWeights(edges, found, nodes)


def _softmax(logits: Tensor, targets: Tensor, n: int) -> Tensor:
    """Return the softmax of logits `e h` over the edges into each of n targets."""
    highest = logits.new_full((n, logits.shape[1]), -torch.inf)
    highest = highest.scatter_reduce(0, targets[:, None].expand_as(logits), logits, "amax")
    weights = (logits - highest[targets]).exp()
    return weights / weights.new_zeros(highest.shape).index_add(0, targets, weights)[targets]


def _geometric_weights(run: KernelRun, part: nn.Module) -> EdgeWeights:
    """Return the weights of a call of `torch_geometric.utils.softmax` in a layer."""
    name, given = "torch_geometric.utils.softmax", run.arguments
    edges = _RUNNING.edges.get(id(part))
    if edges is None:
        raise NotUnderstood(f"{name} was called outside message passing, so the edges of its weights are unknown")
    if isinstance(edges, NotUnderstood):
        raise edges
    logits, targets = given["src"], given["index"]
    if targets is None or given["dim"] not in (0, -logits.ndim):
        raise NotUnderstood(f"{name} was called without index=, or with dim={given['dim']!r}")
    if not torch.equal(_plain(targets), edges.pairs[1]):
        raise NotUnderstood(f"{name} was called with groups that are not the targets of the edges of the layer")
    last = [int(ids.max()) + 1 if ids.numel() else 0 for ids in edges.pairs]
    n = last[1] if given["num_nodes"] is None else int(given["num_nodes"])
    sources = max(n if edges.sources is None else edges.sources, last[0])
    return edge_weights(logits, run.returned, edges.pairs, (n, sources), name)


def _dgl_weights(run: KernelRun, part: nn.Module) -> EdgeWeights:
    """Return the weights of a call of `dgl.ops.edge_softmax`."""
    name, given = "dgl.ops.edge_softmax", run.arguments
    if given.get("norm_by", "dst") != "dst":
        raise NotUnderstood(f"{name} with norm_by={given['norm_by']!r} gives no weights that sum to 1 into a node")
    graph, chosen = given["graph"], given.get("eids")
    edges = torch.stack(graph.edges(order="eid")).long()
    if isinstance(chosen, Tensor):
        edges = edges[:, chosen.long()]
    nodes = graph.num_dst_nodes(), graph.num_src_nodes()
    return edge_weights(given["logits"], run.returned, edges, nodes, name)


def _note_nodes(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before a layer: note the numbers of its nodes, if it got features of two kinds, (x_source, x_target)."""
    _RUNNING.pairs.pop(id(layer), None)
    x = inputs[0] if inputs else None
    if isinstance(x, tuple | list) and len(x) == 2 and all(isinstance(each, Tensor) and each.ndim for each in x):
        _RUNNING.pairs[id(layer)] = len(x[0]), len(x[1])


def _note_edges(layer: Any, inputs: tuple[Any, ...]) -> None:
    """A hook before a step of message passing: note the edges that it takes."""
    edges, size = inputs[0], inputs[1]
    found: _Edges | NotUnderstood
    try:
        index = _plain(edges)
        if index.layout is not torch.strided or index.ndim != 2 or len(index) != 2:
            raise TypeError(f"got edges of layout {index.layout} and shape {tuple(index.shape)}")
        known = size if size is not None and None not in size else _RUNNING.pairs.get(id(layer))
        first = 1 if layer.flow == TARGET_TO_SOURCE else 0
        pairs = index.flip(0) if first else index
        found = _Edges(pairs.detach(), None if known is None else int(known[first]))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        kind = getattr(edges, "layout", type(edges).__name__)
        found = NotUnderstood(f"its edges are {kind}, not a dense tensor edge_index of dims 2 e")
    _RUNNING.edges[id(layer)] = found


def _forget_edges(layer: nn.Module, inputs: Any, out: Any) -> None:
    """A hook after a step of message passing: a softmax outside it has other groups."""
    _RUNNING.edges.pop(id(layer), None)


def _note_messages(layer: Any, inputs: Any, out: Any) -> None:
    """A hook after the messages of a layer."""
    for proofs in tuple(_PROOFS):
        proofs.note_messages(layer, out)


def _prove_sums(layer: Any, inputs: Any, out: Any) -> None:
    """A hook after the messages of a layer were summed."""
    edges = _RUNNING.edges.get(id(layer))
    pairs = edges.pairs if isinstance(edges, _Edges) else None
    for proofs in tuple(_PROOFS):
        proofs.prove(layer, pairs, layer.node_dim, out)


def _plain(x: Any) -> Tensor:
    """Return the tensor of edges; `EdgeIndex` and `Index` of torch_geometric wrap one."""
    plain: Tensor = x.as_tensor() if hasattr(x, "as_tensor") else x
    return plain.long()


def _functions(name: str, *modules: str) -> list[tuple[Callable[..., Any], tuple[ModuleType, ...]]]:
    """Return the functions of this name in modules that are imported already, each with these modules."""
    homes = tuple(module for each in modules if (module := sys.modules.get(each)) is not None)
    found = [original_function(vars(home)[name]) for home in homes if callable(vars(home).get(name))]
    return [(function, homes) for function in {id(x): x for x in found}.values()]


def _kernel(
    function: Callable[..., Any],
    homes: tuple[ModuleType, ...],
    to_edge_weights: Callable[[KernelRun, nn.Module], EdgeWeights],
) -> Kernel:
    return Kernel(
        function=function,
        homes=homes,
        to_kernel_call=_no_kernel_call,
        layout=lambda run, out: HEADS_SECOND,
        mismatch="",
        to_edge_weights=partial(_read_weights, to_edge_weights),
    )


def _read_weights(
    to_edge_weights: Callable[[KernelRun, nn.Module], EdgeWeights], run: KernelRun, part: nn.Module
) -> EdgeWeights:
    """Return the weights; another version of a library may have other arguments, which must not stop the model."""
    try:
        return to_edge_weights(run, part)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NotUnderstood(f"the edge softmax has other arguments than the documented ones: {error}") from error


def _no_kernel_call(run: KernelRun) -> NoReturn:
    raise NotUnderstood("a softmax over edges has no queries and keys")
