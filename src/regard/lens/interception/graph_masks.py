"""Find out which attention calls of a compiled graph take the same mask, and which masks are the same in every run.

To read a mask of n by n entries as terms makes the host wait for the device several times. A graph shows more than its
tensors do: two calls take the same mask if it is computed by the same functions of the same nodes, and a mask that
depends on no input of the graph, as a causal one over known lengths, has the same entries in every run. So a mask is
read once in a run, and one without inputs once and for all; the graph need not even compute it for us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

WRITING = frozenset(
    "setitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()  # noqa: SIM905
)
PURE = frozenset(("and_", "or_", "not_", "is_"))  # functions of `operator` that end as those that write in place
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "empty")  # parts of names of functions


class GraphMask:
    """A mask that calls of a running graph share."""

    def __init__(self, values: Callable[[], Tensor]) -> None:
        self.values = values
        self.terms: dict[Any, Any] = {}  # sizes of a call -> the terms that its reader found
        self._rows: Tensor | None = None

    @property
    def rows_with_keys(self) -> Tensor:
        """True for each row that sees a key, `b|1 h|1 i|1`."""
        if self._rows is None:
            values = self.values()
            self._rows = (values if values.dtype == torch.bool else values > -torch.inf).any(-1)
        return self._rows


class MaskNode(NamedTuple):
    """The mask of a call in a graph."""

    number: int  # equal for calls that take the same mask
    constant: Callable[[], Tensor] | None  # computes the mask if it depends on no input of the graph


class GraphMasks:
    """The masks of the calls of a graph, `calls` being the nodes that attend."""

    def __init__(self, graph: fx.GraphModule, calls: Collection[fx.Node]) -> None:
        self._graph, self._calls = graph, frozenset(calls)
        self._order = {node: n for n, node in enumerate(graph.graph.nodes)}
        self._expressions: dict[Any, int] = {}
        self._numbers: dict[fx.Node, int] = {}
        for node in graph.graph.nodes:
            key = node if _is_random(node) or node.op == "placeholder" else self._expression(node)
            self._numbers[node] = self._expressions.setdefault(key, len(self._expressions))

    def of(self, node: fx.Node) -> MaskNode:
        """Return the mask that a node computes."""
        sources = self._sources(node)
        if self._may_be_written(sources):
            return MaskNode(len(self._expressions) + self._order[node], None)
        is_constant = not any(each.op == "placeholder" or _is_random(each) or _is_private(each) for each in sources)
        return MaskNode(self._numbers[node], self._function(node, sources) if is_constant else None)

    def _expression(self, node: fx.Node) -> str:
        """Return a text that is equal for nodes that compute the same."""
        args = fx.map_arg((node.args, node.kwargs), lambda each: f"%{self._numbers[each]}")
        target = node.target if isinstance(node.target, str) else id(node.target)
        return f"{node.op} {target} {args}"

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """Return a node, and all that it depends on."""
        found, waiting = set[fx.Node](), [node]
        while waiting:
            if (each := waiting.pop()) not in found:
                found.add(each)
                waiting.extend(each.all_input_nodes)
        return found

    def _may_be_written(self, sources: set[fx.Node]) -> bool:
        """True if a function in the graph may write to a source or to a view of it."""
        found, waiting = set[fx.Node](), [node for node in sources if node.op != "placeholder"]
        while waiting:
            if (each := waiting.pop()) not in found and each not in self._calls:
                found.add(each)
                waiting.extend(each.users)
        return any(_writes(each) for each in found)

    def _function(self, node: fx.Node, sources: set[fx.Node]) -> Callable[[], Tensor]:
        """Return a function that computes a node."""
        copy, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        for each in sorted(sources, key=self._order.__getitem__):
            nodes[each] = copy.node_copy(each, nodes.__getitem__)
        copy.output(nodes[node])
        function: Callable[[], Tensor] = torch.no_grad()(fx.GraphModule(self._graph, copy).forward)
        return function


class HeadCopies(NamedTuple):
    """How a graph repeats the heads of keys or values `b h n d`."""

    number: int  # adjacent copies of each head; 1 as far as the graph shows none
    source: fx.Node | None = None  # the tensor with one copy of each, or one with the copies in dim 2 of five
    is_expanded: bool = False

    @classmethod
    def of(cls, node: Any) -> HeadCopies:
        """Read them from `k[:, :, None].expand(b, g, r, n, d).reshape(b, g * r, n, d)`, or `repeat_interleave`."""
        while isinstance(node, fx.Node) and node.target in ("contiguous", "clone"):
            node = node.args[0]
        if not isinstance(node, fx.Node) or not node.all_input_nodes:
            return NO_COPIES
        source = node.all_input_nodes[0]
        if node.target in ("repeat_interleave", torch.repeat_interleave):
            given = {**dict(zip(("input", "repeats", "dim"), node.args, strict=False)), **node.kwargs}
            number = given.get("repeats")
            return cls(number, source) if isinstance(number, int) and given.get("dim") in (1, -3) else NO_COPIES
        before, after = source.meta.get("example_value"), node.meta.get("example_value")
        if node.target not in ("reshape", "view", "flatten", torch.reshape, torch.flatten):
            return NO_COPIES
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return NO_COPIES
        if before.ndim != 5 or after.ndim != 4 or before.stride(2) != 0:
            return NO_COPIES
        b, g, number, n, d = before.shape
        is_plain = isinstance(number, int) and after.shape == (b, g * number, n, d)
        return cls(number, source, is_expanded=True) if is_plain else NO_COPIES


NO_COPIES = HeadCopies(1)


def _is_random(node: fx.Node) -> bool:
    return any(word in _name(node) for word in RANDOM)


def _is_private(node: fx.Node) -> bool:
    """True for functions such as those of vmap, which depend on others that are no inputs of theirs."""
    return node.op not in ("get_attr", "output") and _name(node).startswith("_") and not _name(node).endswith("__")


def _writes(node: fx.Node) -> bool:
    """True if a node may write to one of its inputs."""
    name = _name(node)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (is_in_place and name not in PURE) or name in WRITING or "out" in node.kwargs


def _name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target)).lower()
