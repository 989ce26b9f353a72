"""Adapter for `memory_efficient_attention` of xformers.

It takes `b i h d`, `b i g h d` for grouped heads, or `b i d` for one head. A bias is a tensor that is added to the
scores, or an object of one of its classes: known classes are interpreted by their fields, others by the matrix that
they materialize. An interpretation is accepted only if it reproduces the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..terms.varlen import VarlenSequences, packed_call
from .external import check_float_dtypes, imported_kernels
from .intercepted import HEADS_THIRD, OutputLayout
from .kernel_call import KernelCall, NotUnderstood
from .patching import Kernel

HOMES = ("xformers.ops", "xformers.ops.fmha")
WHOLE = (
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
)
PART = "memory_efficient_attention_partial"
MAX_BIAS_ENTRIES = 2**26  # larger matrices are not materialized
ONE_HEAD = OutputLayout(lambda out: out[:, None], lambda heads: heads[:, 0])  # b i e


class Band(NamedTuple):
    """The mask that a class of xformers stands for."""

    at_end: bool = True  # the last query is aligned with the last key
    causal: bool = False
    packed: bool = False


BANDS = {
    "LowerTriangularMask": Band(at_end=False, causal=True),
    "LowerTriangularFromBottomRightMask": Band(causal=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": Band(causal=True),
    "LocalAttentionFromBottomRightMask": Band(),
    "BlockDiagonalMask": Band(packed=True),
    "BlockDiagonalCausalMask": Band(at_end=False, causal=True, packed=True),
    "BlockDiagonalCausalFromBottomRightMask": Band(causal=True, packed=True),
    "BlockDiagonalCausalLocalAttentionMask": Band(at_end=False, causal=True, packed=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": Band(causal=True, packed=True),
}


def kernels() -> list[Kernel]:
    """Return the functions, if xformers is imported already."""
    return imported_kernels(HOMES, (*WHOLE, PART), to_kernel_call, _layout, "p")


def to_kernel_call(name: str, given: dict[str, Any]) -> KernelCall:
    """Return a call of the function `name`; raise `NotUnderstood` if its bias cannot be interpreted."""
    if name == PART:
        raise NotUnderstood(f"the output of {name} is one part of an attention, which the model merges with others")
    q, k, v = (given[x] for x in ("query", "key", "value"))
    check_float_dtypes(name, q, k, v)
    q, k, v = (_layout(x).heads(x) for x in (q, k, v))
    bias, scale, dropout = given["attn_bias"], given["scale"], given["p"]
    if isinstance(bias, Tensor):
        mask = bias[:, None] if given["query"].ndim == 3 else bias.flatten(1, 2) if bias.ndim == 5 else bias
        return KernelCall(q=q, k=k, v=v, mask=mask, scale=scale, dropout=dropout)
    if bias is None:
        return packed_call(q, k, v, VarlenSequences(q.shape[2], k.shape[2]), scale=scale, dropout=dropout)
    if (band := BANDS.get(type(bias).__name__)) is not None:
        before, after = _reach(band, bias)
        sequences = _sequences(band, bias, q, k)
        return packed_call(q, k, v, sequences, before=before, after=after, scale=scale, dropout=dropout)
    return KernelCall(q=q, k=k, v=v, mask=_matrix(bias, q, k), scale=scale, dropout=dropout)


def _sequences(band: Band, bias: Any, q: Tensor, k: Tensor) -> VarlenSequences:
    if not band.packed:
        return VarlenSequences(q.shape[2], k.shape[2], offset=None if band.at_end else 0)
    starts = (info.seqstart_py for info in (bias.q_seqinfo, bias.k_seqinfo))
    return VarlenSequences.from_starts(*starts, at_end=band.at_end, device=q.device)


def _reach(band: Band, bias: Any) -> tuple[int | None, int | None]:
    """Return the number of keys before and after its position that a query sees; None for all."""
    if not band.causal:
        return getattr(bias, "window_left", None), getattr(bias, "window_right", None)
    width = getattr(bias, "_window_size", None)
    return None if width is None else width - 1, 0


def _matrix(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return the matrix that an object of an unknown class adds to the scores."""
    name, (i, j) = type(bias).__name__, (q.shape[2], k.shape[2])
    if i * j > MAX_BIAS_ENTRIES:
        raise NotUnderstood(f"the matrix of its {name} bias, {i} x {j}, has more than {MAX_BIAS_ENTRIES} entries")
    try:
        matrix: Tensor = bias.materialize((i, j), torch.float32, q.device)
    except Exception as error:
        raise NotUnderstood(f"its {name} bias could not be materialized as {i} x {j}: {error}") from error
    return matrix


def _layout(out: Tensor) -> OutputLayout:
    if out.ndim == 3:
        return ONE_HEAD
    if out.ndim == 4:
        return HEADS_THIRD
    groups = out.shape[2:4]  # b i g h e
    return OutputLayout(
        lambda x: x.flatten(2, 3).transpose(1, 2),
        lambda heads: heads.transpose(1, 2).unflatten(2, groups).contiguous(),
    )
