"""The row statistic of a model's own attention: PyTorch's kernels find it on their way and drop it; here it is kept.

With it a summary of what was captured takes one pass over q and k, not two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, has_torch_function

from ..ops.backends.kernels import choice, fused
from ..ops.tracing import followed

DEVICES = ("cpu", "cuda")


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
    if attn_mask is None and not dropout_p and _plain(q, k, v, enable_gqa):
        kernel = choice(q, k, v, added=None, causal=is_causal, dropout=0.0)
        if kernel.fused:
            scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
            return fused(q, k, v, scale=scale, added=None, causal=is_causal, dropout=0.0)
    given: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return F.scaled_dot_product_attention(q, k, v, **given, enable_gqa=enable_gqa), None


class Listening(TorchFunctionMode):
    """Within the block, keeps the statistic of the one call of `F.scaled_dot_product_attention` there is."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor | None] = []

    @property
    def statistic(self) -> Tensor | None:
        """The statistic; None where there was none, and where several calls make the whole."""
        return self._found[0] if len(self._found) == 1 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        out, statistic = attended(*args, **(kwargs or {}))
        self._found.append(statistic)
        return out


def _plain(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    """Would PyTorch hand these tensors to its kernels as they are?"""
    return (
        not has_torch_function((q, k, v))
        and q.device.type in DEVICES
        and q.ndim == k.ndim == v.ndim == 4
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and k.shape == v.shape
        and not q.is_nested
        and q.numel() > 0
        and k.numel() > 0
        and grouped == (q.shape[1] != k.shape[1])
        and not (torch.is_autocast_enabled(q.device.type) or followed())
    )
