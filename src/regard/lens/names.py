"""Names of layers: as the model has them, as patterns ask for them, and as they are shown.

A model that is itself one layer has the name "", where there would be nothing to see: it is shown as "(model)".
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

WHOLE = "(model)"


def shown_name(layer: str) -> str:
    """The name a layer is shown by."""
    return layer or WHOLE


def own_name(layer: str) -> str:
    """The name, or the pattern of names, that may be given as it is shown."""
    return "" if layer == WHOLE else layer


def matches(layer: str, pattern: str) -> bool:
    """Does a layer's name match a pattern, as file names do?"""
    return fnmatchcase(layer, own_name(pattern))


def listed(layers: Iterable[str]) -> str:
    """Layers as they are told, each once."""
    return ", ".join(shown_name(layer) for layer in dict.fromkeys(layers)) or "none"
