"""Queries, keys, values and one mask from the arguments of `F.multi_head_attention_forward`."""

from __future__ import annotations

from functools import reduce
from operator import add, or_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def project_inputs(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, `b h i d`, as `F.multi_head_attention_forward` computes them."""
    inputs = [given[name] if given[name].ndim == 3 else given[name][:, None] for name in ("query", "key", "value")]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{x}_proj_weight"] for x in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))  # i b (h d)
    if given["bias_k"] is not None:
        k, v = (torch.cat((x, given[f"bias_{s}"].expand(1, x.shape[1], -1))) for s, x in (("k", k), ("v", v)))
    q, k, v = (x.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    static = [given[f"static_{s}"] for s in "kv"]
    k, v = (x if fixed is None else fixed.unflatten(0, (len(q), -1)) for x, fixed in zip((k, v), static, strict=True))
    return (q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))) if given["add_zero_attn"] else (q, k, v)


def merged_mask(given: dict[str, Any], keys: int) -> Tensor | None:
    """Return attn_mask and key_padding_mask as one mask, `b|1 h|1 i|1 j`; keys of bias_k and zero_attn are visible."""
    attention, padding = given["attn_mask"], given["key_padding_mask"]
    parts = []
    if attention is not None:
        attention = attention if attention.ndim == 3 else attention[None]
        parts.append(attention.unflatten(0, (-1, given["num_heads"])) if len(attention) > 1 else attention[None])
    if padding is not None:
        parts.append((padding if padding.ndim == 2 else padding[None])[:, None, None])
    if not parts:
        return None
    if all(x.dtype == torch.bool for x in parts):  # True = hidden: the opposite of SDPA
        visible = ~reduce(or_, parts)
        return F.pad(visible, (0, keys - visible.shape[-1]), value=True)
    added = [x if x.is_floating_point() else torch.where(x, -torch.inf, 0.0) for x in parts]
    total = reduce(add, added)
    return F.pad(total, (0, keys - total.shape[-1]))
