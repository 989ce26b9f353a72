"""The row statistic of a model's own attention: PyTorch's kernels find it on their way and drop it; here it is kept.

With it a summary of what was captured takes one pass over q and k, not two.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from ..ops.backends.kernels import Kernel, fused
from ..ops.tracing import followed

SDPA = torch._C._nn.scaled_dot_product_attention  # PyTorch's own, whatever its name in `F` stands for


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.scaled_dot_product_attention`, by the kernel it takes, and the log-sum-exp of each row, `b h i`.

    The second is None where there is a mask or dropout, where PyTorch has no fused kernel, and where somebody else
    waits for a call of the function by its name.
    """
    q, k, v = query, key, value
    if attn_mask is None and not dropout_p and _plain(q, k, v):
        # The question the function itself asks, so that the answer is the kernel it takes.
        kernel = torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if kernel > Kernel.MATH:
            scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
            return fused(q, k, v, scale=scale, added=None, causal=is_causal, dropout=0.0, kernel=kernel)
    given: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return SDPA(q, k, v, **given, enable_gqa=enable_gqa), None


def tell() -> None:
    """From now on `F.scaled_dot_product_attention`, called by its name, tells its statistic to whoever is `Listening`.

    A function mode would see it too, and every other function with it: that takes as long as a short attention. Where
    the name stands for something else already, it stays so, and nothing is told.
    """
    if F.scaled_dot_product_attention is SDPA:
        F.scaled_dot_product_attention = _telling


def tell_no_more() -> None:
    """Let the name stand for PyTorch's own function again."""
    if F.scaled_dot_product_attention is _telling:
        F.scaled_dot_product_attention = SDPA


class Listening:
    """Within the block, after `tell()`, keeps the statistic of the one call of the function in this thread."""

    def __init__(self) -> None:
        self._found: list[Tensor | None] = []

    @property
    def statistic(self) -> Tensor | None:
        """The statistic; None where there was none, and where several calls make the whole."""
        return self._found[0] if len(self._found) == 1 else None

    def __enter__(self) -> Listening:
        self._outer, _EAR.found = _EAR.found, self._found
        return self

    def __exit__(self, *_: object) -> None:
        _EAR.found = self._outer


class _Ear(threading.local):
    found: list[Tensor | None] | None = None


_EAR = _Ear()


def _telling(*args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or _EAR.found is None:
        return SDPA(*args, **kwargs)
    out, statistic = attended(*args, **kwargs)
    _EAR.found.append(statistic)
    return out


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Would PyTorch hand these tensors as they are to a kernel it chooses?"""
    return (
        not has_torch_function((q, k, v))
        and (q.is_cuda or q.is_cpu)
        and not torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")
        and not followed()
    )
