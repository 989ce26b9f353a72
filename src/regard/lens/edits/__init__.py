"""Edits of attention: what queries may see, how much they look at a token, and which heads are on."""

from .edit import edit
from .edit_values import Boost, Cut, Edit, Only, Scale, Temperature
from .patterns import Freeze, From
from .prune import load_pruned, prune
from .sweep import Sweep, knockouts, sweep
from .token_selection import generated

__all__ = [
    "Boost",
    "Cut",
    "Edit",
    "Freeze",
    "From",
    "Only",
    "Scale",
    "Sweep",
    "Temperature",
    "edit",
    "generated",
    "knockouts",
    "load_pruned",
    "prune",
    "sweep",
]
