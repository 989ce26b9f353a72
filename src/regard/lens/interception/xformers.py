"""`memory_efficient_attention` of xformers, in terms.

It takes b i h d, or b i g h d for grouped heads, or b i d for one. What hides keys is a tensor that is added, or an
object of one of its classes: those that say it by numbers are read by these, others by the matrix they make themselves.
What is read of a call is believed where the output agrees with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..terms.varlen import Texts, told_of
from .external import BY_TOKEN, check_plain_numbers, imported
from .patching import Kernel, Layout, Unread

HOMES = ("xformers.ops", "xformers.ops.fmha")
WHOLE = (
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
)
PART = "memory_efficient_attention_partial"
LARGE = 2**26  # entries of a matrix that is not made to be looked at
ONE_HEAD = Layout(lambda out: out[:, None], lambda heads: heads[:, 0])  # b i e


class Band(NamedTuple):
    """What the name of a class says."""

    at_end: bool = True  # does the last query stand at the last key?
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
    """Those that have been imported."""
    return imported(HOMES, (*WHOLE, PART), told, _layout, "p")


def told(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What a `Reader` is to be told of a call; `Unread` if what hides keys cannot be read."""
    if name == PART:
        raise Unread(f"it calls {name}, whose output is merged with that of others")
    q, k, v = (given[x] for x in ("query", "key", "value"))
    check_plain_numbers(name, q, k, v)
    q, k, v = (_layout(x).heads(x) for x in (q, k, v))
    bias, scale = given["attn_bias"], given["scale"]
    if isinstance(bias, Tensor):
        mask = bias[:, None] if given["query"].ndim == 3 else bias.flatten(1, 2) if bias.ndim == 5 else bias
        return [{"q": q, "k": k, "v": v, "mask": mask, "scale": scale}]
    if bias is None:
        return [told_of(q, k, v, Texts(q.shape[2], k.shape[2]), scale=scale)]
    if (band := BANDS.get(type(bias).__name__)) is not None:
        before, after = _reach(band, bias)
        return [told_of(q, k, v, _texts(band, bias, q, k), before=before, after=after, scale=scale)]
    return [{"q": q, "k": k, "v": v, "mask": _matrix(bias, q, k), "scale": scale}]


def _texts(band: Band, bias: Any, q: Tensor, k: Tensor) -> Texts:
    if not band.packed:
        return Texts(q.shape[2], k.shape[2], offset=None if band.at_end else 0)
    starts = (info.seqstart_py for info in (bias.q_seqinfo, bias.k_seqinfo))
    return Texts.packed(*starts, at_end=band.at_end, device=q.device)


def _reach(band: Band, bias: Any) -> tuple[int | None, int | None]:
    """How many keys before and after its place a query sees; None for all."""
    if not band.causal:
        return getattr(bias, "window_left", None), getattr(bias, "window_right", None)
    width = getattr(bias, "_window_size", None)
    return None if width is None else width - 1, 0


def _matrix(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    """The numbers that are added to the scores, as an object of another class makes them."""
    name, (i, j) = type(bias).__name__, (q.shape[2], k.shape[2])
    if i * j > LARGE:
        raise Unread(f"its {name} is read by the matrix it makes, of {i} x {j}, which is large")
    try:
        matrix: Tensor = bias.materialize((i, j), torch.float32, q.device)
    except Exception as error:
        raise Unread(f"its {name} makes no matrix of {i} x {j}: {error}") from error
    return matrix


def _layout(out: Tensor) -> Layout:
    if out.ndim == 3:
        return ONE_HEAD
    if out.ndim == 4:
        return BY_TOKEN
    groups = out.shape[2:4]  # b i g h e
    return Layout(
        lambda x: x.flatten(2, 3).transpose(1, 2),
        lambda heads: heads.transpose(1, 2).unflatten(2, groups).contiguous(),
    )
