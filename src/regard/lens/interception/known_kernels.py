"""The kernels that are seen where the code of a layer calls them: flex_attention, and those of other libraries.

These are looked for where they have been imported; nothing of theirs is imported here.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from . import flash_attn as flash
from . import flex, xformers
from .call_sites import may_lead_somewhere
from .patching import Watcher, exchanging

NOTHING = nullcontext()


def watching(watch: Watcher, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
    """Show the calls of kernels within the block; nothing to do where no layer's code makes any."""
    if not may_lead_somewhere(frozenset(map(type, parts))):
        return NOTHING
    return exchanging(watch, parts, [*flex.kernels(), *flash.kernels(), *xformers.kernels()])
