"""Layer names: the module names of the model, matched by patterns and shown in messages.

A model that is itself one attention layer has the module name "", which is shown as "(model)".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from ..torch_internals import ORIGINAL_MODULE, original_module

MODEL_ITSELF = "(model)"


def shown_name(layer: str) -> str:
    """Return the name of a layer for messages and tables."""
    return layer or MODEL_ITSELF


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name; what torch.compile made of a module has its name, and is left out."""
    found = {}
    for name, module in model.named_modules():
        if original_module(module) is module:
            found[".".join(part for part in name.split(".") if part != ORIGINAL_MODULE)] = module
    return found


def shown_calls(keys: Iterable[tuple[str, int]]) -> list[str]:
    """Return the names of calls for messages, with the number of the call if the layer has several."""
    keys = list(keys)
    calls = Counter(layer for layer, _ in keys)
    return [shown_name(layer) + (f", {call}" if calls[layer] > 1 else "") for layer, call in keys]


def own_name(layer: str) -> str:
    """Return the module name for a shown name or pattern: "(model)" becomes ""."""
    return "" if layer == MODEL_ITSELF else layer


def matches(layer: str, pattern: str) -> bool:
    """Whether a layer's name matches a pattern, as file names do."""
    return fnmatchcase(layer, own_name(pattern))


def within(layer: str, part: str) -> bool:
    """Whether `part` is the layer itself or a submodule of it."""
    return part == layer or not layer or part.startswith(f"{layer}.")


def list_names(layers: Iterable[str]) -> str:
    """Return the layers, each once, as text for a message."""
    return ", ".join(shown_name(layer) for layer in dict.fromkeys(layers)) or "none"
