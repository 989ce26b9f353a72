"""intercept: hand every attention call of a model to one consumer; `capture`, `ablate` and `importance` are consumers.

Because all of them use this one interception, what can be captured can be ablated.

Every way in has a proof. "Known" means that the arguments reach PyTorch's or regard's own kernel, which computes what
they say; all others are compared with what the model computed, and left out if they differ:

    F.scaled_dot_product_attention  known: the mode sees the arguments of PyTorch's function, also below a replacement
    regard.attend                   known
    F.multi_head_attention_forward  known; 64 rows of the output if other code has replaced SDPA
    transformers, own functions     known
    transformers, all others        at least 8 rows of the output, all of short texts; with dropout the returned weights
    flex_attention                  known; the whole output if its functions have several readings
    flash_attn, xformers            64 rows of the output
    torch_geometric                 all weights, computed once more from the logits; the edges; the sums of the messages
    dgl                             all weights, computed once more from the logits; the edges
    register_kernel                 64 rows of the output
    written out by hand             8 rows of the weights, all if they were changed after the softmax
    F.grid_sample, weighted sums    8 queries of the output of each text and head, in float64
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from ...torch_internals import original_module
from ..terms.interpret import Interpreter
from . import edge_softmax, flash_attn, flex, transformers, xformers
from .call_sites import has_searchable_code
from .compiled_models import compiled_modules_seen
from .function_mode import AttentionMode
from .intercepted import Consumer
from .patching import KernelMode, patched
from .registered import registered_kernels
from .scripted_functions import scripts_observed

NOTHING_TO_PATCH = nullcontext()


@contextmanager
def intercept(
    model: nn.Module,
    consumer: Consumer,
    interpreter: Interpreter | None = None,
    layout: str | Mapping[str, str] | None = None,
) -> Iterator[AttentionMode]:
    """Hand every attention call of the model to the consumer within the block."""
    original = original_module(model)
    mode = AttentionMode(original, consumer, interpreter, layout)
    is_compiled = original is not model or model._compiled_call_impl is not None
    compiled = [model, *mode.compiled_parts] if is_compiled else mode.compiled_parts
    with (
        compiled_modules_seen(mode, compiled) if compiled else NOTHING_TO_PATCH,
        mode.install_hooks(),
        transformers.patched_interfaces(mode),
        patched_kernels(mode, mode.parts),
        scripts_observed(mode),
        edge_softmax.edges_noted(mode.parts, mode.edges),
    ):
        yield mode


def patched_kernels(mode: KernelMode, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
    """Report calls of kernels within the block; does nothing if the layers have no code that may call one."""
    if not has_searchable_code(frozenset(map(type, parts))):
        return NOTHING_TO_PATCH
    known = flex, flash_attn, xformers, edge_softmax
    kernels = [*(kernel for library in known for kernel in library.kernels()), *registered_kernels()]
    return patched(mode, parts, kernels)
