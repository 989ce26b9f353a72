"""intercept: hand every attention call of a model to one consumer; `capture`, `ablate` and `importance` are consumers.

Because all of them use this one interception, what can be captured can be ablated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from ..terms.interpret import Interpreter
from . import flash_attn, flex, transformers, xformers
from .call_sites import has_searchable_code
from .function_mode import AttentionMode
from .intercepted import Consumer
from .patching import KernelMode, patched
from .registered import registered_kernels

NOTHING_TO_PATCH = nullcontext()


@contextmanager
def intercept(model: nn.Module, consumer: Consumer, interpreter: Interpreter | None = None) -> Iterator[AttentionMode]:
    """Hand every attention call of the model to the consumer within the block."""
    mode = AttentionMode(model, consumer, interpreter)
    with mode.install_hooks(), transformers.patched_interfaces(mode), patched_kernels(mode, mode.parts):
        yield mode


def patched_kernels(mode: KernelMode, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
    """Report calls of kernels within the block; does nothing if the layers have no code that may call one."""
    if not has_searchable_code(frozenset(map(type, parts))):
        return NOTHING_TO_PATCH
    kernels = [*flex.kernels(), *flash_attn.kernels(), *xformers.kernels(), *registered_kernels()]
    return patched(mode, parts, kernels)
