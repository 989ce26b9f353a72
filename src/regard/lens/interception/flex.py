"""PyTorch's `flex_attention` in terms, compiled or as it is; what its functions mean see in `meanings`."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import flex_attention

from ..terms.flex_mods import meanings
from ..terms.interpret import Reader
from .output_check import explains
from .patching import Kernel, Layout, Unread

AS_THEY_ARE = Layout(lambda out: out, lambda heads: heads)
OTHERWISE = (
    "its score_mod or its block mask does more than hide pairs, add numbers to their scores, or bound these by a tanh"
)


def kernels() -> list[Kernel]:
    """flex_attention."""
    return [
        Kernel(
            function=flex_attention,
            homes=(module,),
            told=told,
            layout=lambda out: AS_THEY_ARE,
            explained=lambda seen, out, readings: readings == 1 or explains(seen, out),
            otherwise=OTHERWISE,
        )
    ]


def told(given: dict[str, Any], compiled: bool, reader: Reader) -> list[dict[str, Any]]:
    """What a reader is to be told of a call; `Unread` if there are no terms for what its functions do."""
    q, k, v, blocks, score_mod = (given[name] for name in ("query", "key", "value", "block_mask", "score_mod"))
    asked = blocks, blocks and blocks.mask_mod, score_mod, (*q.shape[:3], k.shape[2]), q.dtype, q.device, compiled
    found = reader.in_this_pass(asked, lambda: meanings(blocks, score_mod, *asked[3:]))
    if not found:
        raise Unread(OTHERWISE)
    return [{"q": q, "k": k, "v": v, "scale": given["scale"], **meaning} for meaning in found]
