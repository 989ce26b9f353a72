"""EdgeProofs: prove that a graph layer multiplies its values with the recorded weights of edges, and sums the products.

The softmax is recorded when it runs. Hooks then pass the messages of the layer and their sums here. If the layer
changed the weights after the softmax, the final weights take their place. If its messages are no product of weights and
values, or are not summed, the entry is withdrawn and the layer goes to `tape.unseen`. Dropout alone is no change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..eager.edge_messages import DROPPED, EdgeMessages, FinalEdgeWeights, sums_messages
from ..recording.edge_weights import EdgeWeights
from ..recording.recorder import Recorder

NO_PRODUCT = "its messages are not its values times the weights of its softmax"
OTHER_EDGES = "it passes messages along other edges than those of its softmax"
NO_SUM = "its messages are not summed into their targets"
NO_MESSAGES = "it passed no messages after its softmax"
WRITTEN = "written to"


@dataclass
class _Pending:
    """A recorded softmax over edges whose messages are still to come."""

    layer: str
    entry: EdgeWeights
    followed: EdgeMessages
    messages: Tensor | None = None
    final: FinalEdgeWeights | None = None


@dataclass
class EdgeProofs:
    """The recorded softmaxes over edges that are not proved yet, by thread and layer."""

    recorder: Recorder
    quiet: Callable[[], AbstractContextManager[None]]  # intercepts nothing in this thread
    _pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """True while a softmax is not proved."""
        return bool(self._pending)

    def begin(self, part: nn.Module, layer: str, entry: EdgeWeights, weights: Tensor) -> None:
        """Follow the weights that a softmax returned, which were recorded as this entry."""
        self._fail(_key(part), NO_MESSAGES)
        self._pending[_key(part)] = _Pending(layer, entry, EdgeMessages(weights))

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Process a call that ran in this thread."""
        for (thread, _), pending in self._pending.items():
            if thread == threading.get_ident():
                pending.followed.follow(func, args, kwargs, out)

    def note_messages(self, part: nn.Module, messages: Any) -> None:
        """Note the messages of a layer."""
        if (pending := self._pending.get(_key(part))) is not None:
            pending.messages, pending.final = messages, pending.followed.final_weights(messages)

    def prove(self, part: nn.Module, edges: Tensor | None, dim: int, out: Any) -> None:
        """Compare the sums of the messages, along edges of 2 e; correct or withdraw the entry of the layer."""
        if (pending := self._pending.get(_key(part))) is None:
            return
        final, messages = pending.final, pending.messages
        with self.quiet(), torch.no_grad():
            if final is None or messages is None:
                self._fail(_key(part), NO_PRODUCT)
            elif edges is None or not torch.equal(edges.to(pending.entry.edge_index), pending.entry.edge_index):
                self._fail(_key(part), OTHER_EDGES)
            elif not isinstance(out, Tensor) or not sums_messages(messages, edges[1], dim, out):
                self._fail(_key(part), NO_SUM)
            else:
                del self._pending[_key(part)]
                self._correct(pending, final)

    def finish(self) -> None:
        """Withdraw the entries of softmaxes that no messages followed."""
        for key in list(self._pending):
            self._fail(key, NO_MESSAGES)

    def _correct(self, pending: _Pending, final: FinalEdgeWeights) -> None:
        """Record the final weights if they are others than those of the softmax."""
        entry, recorder = pending.entry, self.recorder
        changes = tuple(change for change in final.changes if change != DROPPED)
        if final.changes and not changes:
            return
        found = EdgeWeights(entry.edge_index, final.weights.reshape(len(final.weights), -1), entry.nodes)
        chosen = found if recorder.heads is None else found.select_heads(recorder.heads)
        if not torch.equal(chosen.weights.to(entry.weights.device), entry.weights):
            recorder.withdraw(pending.layer, entry)
            recorder.record_sparse(pending.layer, found)
            recorder.note_changed(pending.layer, changes or (WRITTEN,))

    def _fail(self, key: tuple[int, int], reason: str) -> None:
        if (pending := self._pending.pop(key, None)) is not None:
            self.recorder.withdraw(pending.layer, pending.entry)
            self.recorder.note_unseen(pending.layer, "graph attention", reason)


def passes_messages(part: nn.Module) -> bool:
    """True for a `MessagePassing` layer of torch_geometric."""
    return isinstance(part, getattr(sys.modules.get("torch_geometric.nn"), "MessagePassing", ()))


def _key(part: nn.Module) -> tuple[int, int]:
    return threading.get_ident(), id(part)
