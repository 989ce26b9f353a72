"""The functions of `flash_attn` (Dao 2023), and of its third version, `flash_attn_interface`, in terms.

They take b i h d, or texts side by side, i h d, with where each begins. Causal and windows count from the last key of a
text: its last query stands there. What is read of a call is believed where the output agrees with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..terms.varlen import Texts, told_of
from .external import BY_TOKEN, check_plain_numbers, imported
from .patching import Kernel, Layout, Unread

HOMES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
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
READ = {"q", "k", "v", "kv", "qkv", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"}
STARTS = {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}
CACHE = {"k_cache", "v_cache", "cache_seqlens"}
IDLE = {  # change nothing about who attends to whom
    *("deterministic", "return_attn_probs", "return_softmax_lse", "return_softmax", "num_splits", "pack_gqa"),
    *("sm_margin", "scheduler_metadata", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "rotary_interleaved"),
}
SIDE_BY_SIDE = Layout(lambda out: out.transpose(0, 1)[None], lambda heads: heads[0].transpose(0, 1).contiguous())


def kernels() -> list[Kernel]:
    """Those that have been imported."""
    return imported(HOMES, FUNCTIONS, told, _layout, "dropout_p")


def told(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What a `Reader` is to be told of a call; `Unread` if there is an argument that is not understood."""
    known = READ | IDLE | (CACHE if name == CACHED else STARTS)
    if others := [x for x, value in given.items() if x not in known and not _is_absent(value)]:
        raise Unread(f"it calls {name} with {', '.join(others)}, which is not understood")
    q, k, v, texts = _cached(name, given) if name == CACHED else _tokens(name, given)
    check_plain_numbers(name, q, k, v)
    before, after = (None if x is None or x < 0 else int(x) for x in given.get("window_size") or (None, None))
    call = told_of(
        q,
        k,
        v,
        texts,
        before=before,
        after=0 if given.get("causal") else after,
        slopes=given.get("alibi_slopes"),
        scale=given.get("softmax_scale"),
        cap=given.get("softcap") or None,
    )
    return [call]


def _tokens(name: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Texts]:
    """b h i d of what is attended to, and the texts it is of."""
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
    else:
        q, k, v = (given["q"], *given["kv"].unbind(-3)) if "kv" in given else (given[x] for x in "qkv")
    of_queries = given.get("cu_seqlens", given.get("cu_seqlens_q"))
    if of_queries is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return q, k, v, Texts(q.shape[2], k.shape[2])
    starts = [x.tolist() for x in (of_queries, given.get("cu_seqlens_k", of_queries))]
    for each, x in zip(starts, (q, k), strict=True):
        if each != sorted(each) or (each[0], each[-1]) != (0, len(x)):
            raise Unread(f"it calls {name} with texts that are not all of the {len(x)} tokens, one after the other")
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return q, k, v, Texts.packed(*starts, device=q.device)


def _cached(name: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Texts]:
    """The same where keys have been written to a cache, which is written to again later."""
    q, k, v = (given[x].transpose(1, 2) for x in ("q", "k_cache", "v_cache"))
    new, room = 0 if given["k"] is None else given["k"].shape[1], k.shape[2]
    before = given["cache_seqlens"]
    lengths = (torch.as_tensor(room if before is None else before).expand(len(q)) + new).tolist()
    texts = Texts.cached(lengths, q.shape[2], device=q.device)
    if len(k) != len(q) or texts.keys > room:
        raise Unread(f"it calls {name} with a cache for {len(k)} texts of {room} keys, and asks for others")
    k, v = (x[:, :, : texts.keys].clone() for x in (k, v))
    return q, k, v, texts


def _layout(out: Tensor) -> Layout:
    return BY_TOKEN if out.ndim == 4 else SIDE_BY_SIDE


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not value)
