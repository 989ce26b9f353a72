"""Adapter for PyTorch's `flex_attention`, compiled or not; `terms.flex_mods` interprets its functions."""

from __future__ import annotations

from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import flex_attention

from ..terms.flex_mods import UNSUPPORTED_MODS
from .intercepted import HEADS_SECOND
from .kernel_call import FlexArguments, KernelCall
from .patching import Kernel, KernelRun


def kernels() -> list[Kernel]:
    """Return the kernel of `flex_attention`."""
    return [
        Kernel(
            function=flex_attention,
            homes=(module,),
            to_kernel_call=to_kernel_call,
            layout=lambda run, out: HEADS_SECOND,
            mismatch=UNSUPPORTED_MODS,
            rows_to_compare=None,
            compare_only_if_ambiguous=True,
        )
    ]


def to_kernel_call(run: KernelRun) -> KernelCall:
    """Return a call of flex_attention."""
    given = run.arguments
    flex = FlexArguments(given["block_mask"], given["score_mod"], run.is_compiled)
    return KernelCall(q=given["query"], k=given["key"], v=given["value"], scale=given["scale"], flex=flex)
