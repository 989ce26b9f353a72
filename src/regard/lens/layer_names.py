"""Names of layers: as the model has them, as patterns ask for them, and as they are shown.

A model that is itself one layer has the name "", where there would be nothing to see: it is shown as "(model)".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

WHOLE = "(model)"


def shown_name(layer: str) -> str:
    """The name a layer is shown by."""
    return layer or WHOLE


def shown_calls(keys: Iterable[tuple[str, int]]) -> list[str]:
    """The names that calls are shown by, numbered where their layer has several."""
    keys = list(keys)
    calls = Counter(layer for layer, _ in keys)
    return [shown_name(layer) + (f", {call}" if calls[layer] > 1 else "") for layer, call in keys]


def own_name(layer: str) -> str:
    """The name, or the pattern of names, that may be given as it is shown."""
    return "" if layer == WHOLE else layer


def matches(layer: str, pattern: str) -> bool:
    """Does a layer's name match a pattern, as file names do?"""
    return fnmatchcase(layer, own_name(pattern))


def within(layer: str, part: str) -> bool:
    """Is it the layer itself, or a part of it?"""
    return part == layer or not layer or part.startswith(f"{layer}.")


def listed(layers: Iterable[str]) -> str:
    """Layers as they are told, each once."""
    return ", ".join(shown_name(layer) for layer in dict.fromkeys(layers)) or "none"
