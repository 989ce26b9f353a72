"""Adapter for the functions of `flash_attn` (Dao 2023), of its third version, `flash_attn_interface`, and of the
fourth, `flash_attn.cute`.

They take `b i h d`, or packed sequences `i h d` with cu_seqlens. Causal masks and windows align the last query of a
sequence with its last key. An interpretation is accepted only if it reproduces the output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ops.terms.normalizers import SinkSoftmax
from ..terms.varlen import VarlenSequences, packed_call
from .external import check_float_dtypes, imported_kernels
from .intercepted import HEADS_THIRD, OutputLayout
from .kernel_call import KernelCall, NotUnderstood
from .patching import Kernel

HOMES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn_interface",
    "flash_attn.cute",
    "flash_attn.cute.interface",
)
CACHED = "flash_attn_with_kvcache"
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    CACHED,
)
READ = {
    *("q", "k", "v", "kv", "qkv", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
    "learnable_sink",
}
STARTS = {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}
CACHE = {"k_cache", "v_cache", "cache_seqlens"}
IGNORED = {  # do not change the weights
    *("deterministic", "return_attn_probs", "return_softmax_lse", "return_softmax", "num_splits", "pack_gqa"),
    *("return_lse", "min_seqlen_k", "score_mod_bwd", "m_block_size", "n_block_size", "num_threads"),
    *("sm_margin", "scheduler_metadata", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "rotary_interleaved"),
}
PACKED = OutputLayout(lambda out: out.transpose(0, 1)[None], lambda heads: heads[0].transpose(0, 1).contiguous())


def kernels() -> list[Kernel]:
    """Return the kernels of the versions that are imported already."""
    return imported_kernels(HOMES, FUNCTIONS, to_kernel_call, _layout, "dropout_p")


def to_kernel_call(name: str, given: dict[str, Any]) -> KernelCall:
    """Return a call of the function `name`; raise `NotUnderstood` if it has an unsupported argument."""
    known = READ | IGNORED | (CACHE if name == CACHED else STARTS)
    if others := [x for x, value in given.items() if x not in known and not _is_absent(value)]:
        arguments = f"argument{'s' * (len(others) > 1)} {', '.join(others)}"
        raise NotUnderstood(f"{name} {arguments} {'are' if len(others) > 1 else 'is'} not supported")
    q, k, v, sequences = _cached_inputs(name, given) if name == CACHED else _tokens(name, given)
    check_float_dtypes(name, q, k, v)
    before, after = (None if x is None or x < 0 else int(x) for x in given.get("window_size") or (None, None))
    sink = given.get("learnable_sink")
    call = packed_call(
        q,
        k,
        v,
        sequences,
        before=before,
        after=0 if given.get("causal") else after,
        slopes=given.get("alibi_slopes"),
        scale=given.get("softmax_scale"),
        cap=given.get("softcap") or None,
        dropout=given.get("dropout_p") or 0.0,
    )
    return call if sink is None else replace(call, normalize=SinkSoftmax(sink.detach().to(q.dtype)))


def _tokens(name: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, VarlenSequences]:
    """Return q, k and v as `b h i d`, and the sequences that they belong to."""
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
    else:
        q, k, v = (given["q"], *given["kv"].unbind(-3)) if "kv" in given else (given[x] for x in "qkv")
    of_queries = given.get("cu_seqlens", given.get("cu_seqlens_q"))
    if of_queries is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return q, k, v, VarlenSequences(q.shape[2], k.shape[2])
    starts = [x.tolist() for x in (of_queries, given.get("cu_seqlens_k", of_queries))]
    for each, x in zip(starts, (q, k), strict=True):
        if each != sorted(each) or (each[0], each[-1]) != (0, len(x)):
            raise NotUnderstood(f"{name} got cu_seqlens {each}, which do not cover its {len(x)} tokens in order")
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return q, k, v, VarlenSequences.from_starts(*starts, device=q.device)


def _cached_inputs(name: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, VarlenSequences]:
    """Return the same for a KV cache; keys and values are copied, because later calls write to the cache."""
    q, k, v = (given[x].transpose(1, 2) for x in ("q", "k_cache", "v_cache"))
    new, room = 0 if given["k"] is None else given["k"].shape[1], k.shape[2]
    before = given["cache_seqlens"]
    lengths = (torch.as_tensor(room if before is None else before).expand(len(q)) + new).tolist()
    sequences = VarlenSequences.from_cache(lengths, q.shape[2], device=q.device)
    if len(k) != len(q) or sequences.keys > room:
        raise NotUnderstood(
            f"{name} got a cache for {len(k)} sequences of {room} keys, and queries of {len(q)} sequences of up to "
            f"{sequences.keys} keys"
        )
    k, v = (x[:, :, : sequences.keys].clone() for x in (k, v))
    return q, k, v, sequences


def _layout(out: Tensor) -> OutputLayout:
    return HEADS_THIRD if out.ndim == 4 else PACKED


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not value)
