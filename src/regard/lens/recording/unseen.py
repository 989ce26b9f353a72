"""Unseen: a layer that looks like attention and has no entry on the tape, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..layer_names import shown_name

LISTED = 3  # layers that a message names for each reason
EXPERT_GATE = "expert gate"  # kind of a softmax over experts or branches


class Unseen(NamedTuple):
    """One layer, or one kind of call in it, that `capture` knows of and could not record.

    >>> print(Unseen("layers.0.mixer", "state space", "Mamba has no attention weights"))
    layers.0.mixer (state space): Mamba has no attention weights
    """

    layer: str  # name of the module
    kind: str  # such as "attention", "softmax", "linear attention" or "state space"
    reason: str

    @property
    def mixes_positions(self) -> bool:
        """Whether the layer averages positions; the gate of a mixture of experts does not."""
        return self.kind != EXPERT_GATE

    def __str__(self) -> str:
        return f"{shown_name(self.layer)} ({self.kind}): {self.reason}"


def describe(unseen: Iterable[Unseen]) -> str:
    """Return one message for all of them, with one clause per reason."""
    layers: dict[str, list[str]] = {}
    for each in unseen:
        layers.setdefault(each.reason, []).append(shown_name(each.layer))
    return "; ".join(f"{_list_layers(names)} not recorded: {reason}" for reason, names in layers.items())


def _list_layers(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    left = len(names) - LISTED
    rest = f" and {left} more layer{'s' * (left > 1)}" if left > 0 else ""
    return f"{', '.join(names[:LISTED])}{rest} {'was' if len(names) == 1 else 'were'}"


def failure_reason(action: str, error: Exception) -> str:
    """Return the reason to note for a layer if an action of the lens failed on it."""
    return f"{action} failed ({type(error).__name__}: {error}); please report this as a bug"
