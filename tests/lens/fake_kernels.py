"""Stand-ins for kernels of other libraries: their signatures over a loop, text by text and head by head.

Written from what flash_attn and xformers document, in plain PyTorch, and sharing nothing with the library. Beside the
output they return the weights, as flash_attn does where it is asked to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def attended(q, k, v, scale, seen, cap=0.0, slope=0.0, shift=0):
    """One head of one text: i d, j d, j e, and the keys seen, i j, -> i e, i j."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q[:, None] * k).sum(-1) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    query, key = torch.arange(len(q))[:, None], torch.arange(len(k))
    scores = (scores - slope * (query + shift - key).abs().to(q.dtype)).masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen, 0.0)  # also in a row that sees nothing
    return weights @ v, weights


def seen_keys(queries, keys, causal, window, shift):
    """True for the keys that each query of a text sees, i j: query i stands at key i + shift."""
    place, key = torch.arange(queries)[:, None] + shift, torch.arange(keys)
    left, right = window
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = seen & (key <= place)
    elif right >= 0:
        seen = seen & (key <= place + right)
    return seen & (key >= place - left) if left >= 0 else seen


def texts(q, k, v, bounds, causal, window, scale, cap, slopes, from_end=True):
    """Texts of `i h d` from and to where bounds say: the output, and h i j."""
    out, weights = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], len(q), len(k))
    weights = weights.to(q.dtype)
    for n, ((a, b), (c, d)) in enumerate(bounds):
        shift = (d - c) - (b - a) if from_end else 0
        seen = seen_keys(len(q[a:b]), len(k[c:d]), causal, window, shift)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            slope = 0.0 if slopes is None else float(slopes[h] if slopes.ndim == 1 else slopes[n, h])
            made, A = attended(q[a:b, h], k[c:d, g], v[c:d, g], scale, seen, cap, slope, shift)
            out[a:b, h], weights[h, a:b, c:d] = made, A
    return out, weights


def bounds_of(starts):
    return list(zip(starts.tolist(), starts.tolist()[1:], strict=False))


def dropped(out, p):
    """As if some weights were: only that it is another output matters, and that something is drawn for it."""
    return out * (torch.rand(out.shape, dtype=out.dtype) >= p) / (1 - p)


def batch(q, k, v, p, scale, causal, window, cap, slopes, probabilities, from_end=True):
    made = []
    for b in range(len(q)):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        whole = [((0, q.shape[1]), (0, k.shape[1]))]
        made.append(texts(q[b], k[b], v[b], whole, causal, window, scale, cap, own, from_end))
    out, weights = (torch.stack(x) for x in zip(*made, strict=True))
    out = dropped(out, p)
    return (out, weights.sum(-1), weights) if probabilities else out


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return batch(q, k, v, *given, return_attn_probs)


def from_the_top(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """As `flash_attn_func`, but its first query stands at its first key."""
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return batch(q, k, v, *given, return_attn_probs, from_end=False)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(*qkv.unbind(2), *rest)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, *kv.unbind(2), *rest)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    bounds = list(zip(bounds_of(cu_seqlens_q), bounds_of(cu_seqlens_k), strict=True))
    out, weights = texts(q, k, v, bounds, causal, window_size, softmax_scale, softcap, alibi_slopes)
    out = dropped(out, dropout_p)
    return (out, weights.sum(-1), weights[None]) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    out = torch.zeros_like(q)
    for b in range(len(q)):
        n = k_cache.shape[1] if cache_seqlens is None else int(torch.as_tensor(cache_seqlens).expand(len(q))[b])
        if k is not None:
            m = n + k.shape[1]
            k_cache.data[b, n:m], v_cache.data[b, n:m], n = k[b], v[b], m  # as a kernel: nobody counts it
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
        whole = [((0, q.shape[1]), (0, n))]
        out[b], _ = texts(
            q[b], k_cache[b, :n], v_cache[b, :n], whole, causal, window_size, softmax_scale, softcap, slopes
        )
    return out


def third_flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """That of the third version, which counts its arguments in another order."""
    out, lse, weights = flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, return_attn_probs=True
    )
    return (out, lse, weights) if return_attn_probs else out


def third_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    starts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = 0.0, softmax_scale, causal, window_size, softcap
    return flash_attn_varlen_func(q, k, v, *starts, *rest, return_attn_probs=return_attn_probs)


def cute_flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    mask_mod=None,
    score_mod=None,
    aux_tensors=None,
    return_lse=False,
):
    """That of the fourth version: None ends a window, and it returns the log-sum-exp too."""
    window = tuple(-1 if x is None else x for x in window_size)
    out, total, _ = flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window, softcap, return_attn_probs=True)
    if learnable_sink is not None:
        lse = _log_sum_exp(q, k, softmax_scale, causal, window, softcap)  # b h i
        share = torch.sigmoid(lse - learnable_sink[:, None])  # of the keys, beside the sink
        out = out * share.transpose(1, 2)[..., None]
    return out, (total if return_lse else None)


def _log_sum_exp(q, k, scale, causal, window, cap):
    """The log-sum-exp of each row, b h i, from the weights that values of 1 get beside a key of score 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros(len(q), q.shape[2], q.shape[1], dtype=q.dtype)
    shift = k.shape[1] - q.shape[1]
    for b in range(len(q)):
        for h in range(q.shape[2]):
            g = h // (q.shape[2] // k.shape[2])
            for i in range(q.shape[1]):
                at = i + shift
                seen = [
                    j
                    for j in range(k.shape[1])
                    if (not causal or j <= at)
                    and (window[0] < 0 or j >= at - window[0])
                    and (causal or window[1] < 0 or j <= at + window[1])
                ]
                s = k[b, seen, g] @ q[b, i, h] * scale
                found[b, h, i] = torch.logsumexp(cap * torch.tanh(s / cap) if cap else s, 0)
    return found


def cute_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    aux_tensors=None,
    return_lse=False,
):
    window = tuple(-1 if x is None else x for x in window_size)
    if cu_seqlens_q is None:
        return cute_flash_attn_func(q, k, v, softmax_scale, causal, window_size, learnable_sink, softcap)
    starts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *starts, 0.0, softmax_scale, causal, window, softcap), None


FLASH = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache,
)


class AttentionBias:
    """What xformers hides keys by: `rows(i, j)` tells whether each pair is seen."""

    def rows(self, i, j):
        raise NotImplementedError

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        i, j = shape[-2:]
        matrix = [[0.0 if self.rows(i, j)(a, b) else -math.inf for b in range(j)] for a in range(i)]
        return torch.tensor(matrix, dtype=dtype, device=device).expand(shape)


class LowerTriangularMask(AttentionBias):
    def rows(self, i, j):
        return lambda a, b: b <= a


class LowerTriangularFromBottomRightMask(AttentionBias):
    def rows(self, i, j):
        return lambda a, b: b <= a + j - i


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int

    def rows(self, i, j):
        return lambda a, b: a + j - i - self._window_size < b <= a + j - i


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int

    def rows(self, i, j):
        return lambda a, b: a + j - i - self.window_left <= b <= a + j - i + self.window_right


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias):
        self._bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self._bias


@dataclass
class SeqLenInfo:
    seqstart_py: list[int]


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: list[int] | None = None

    @classmethod
    def of(cls, queries, keys, **fields):
        infos = [SeqLenInfo([sum(lengths[:n]) for n in range(len(lengths) + 1)]) for lengths in (queries, keys)]
        return cls(*infos, **fields)

    def block(self, i, j):
        return lambda a, b: True

    def rows(self, i, j):
        starts, ends = self.q_seqinfo.seqstart_py, self.k_seqinfo.seqstart_py

        def seen(a, b):
            text = next(n for n, end in enumerate(starts[1:]) if a < end)
            a0, a1, b0, b1 = starts[text], starts[text + 1], ends[text], ends[text + 1]
            return b0 <= b < b1 and self.block(a1 - a0, b1 - b0)(a - a0, b - b0)

        return seen


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def block(self, i, j):
        return LowerTriangularMask().rows(i, j)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    def block(self, i, j):
        return LowerTriangularFromBottomRightMask().rows(i, j)


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    _window_size: int = 0

    def block(self, i, j):
        return lambda a, b: a - self._window_size < b <= a


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0

    def block(self, i, j):
        return LowerTriangularFromBottomRightLocalAttentionMask(self._window_size).rows(i, j)


class Checkered(AttentionBias):
    """One that nobody knows by its name."""

    def rows(self, i, j):
        return lambda a, b: (a + b) % 2 == 0


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    if query.ndim == 3:
        bias = attn_bias[:, None] if torch.is_tensor(attn_bias) else attn_bias
        one = (x[:, :, None] for x in (query, key, value))
        return memory_efficient_attention(*one, bias, p, scale)[:, :, 0]
    if query.ndim == 5:
        groups = query.shape[2]
        parts = [x.unbind(2) for x in (query, key, value)]
        biases = attn_bias.unbind(1) if torch.is_tensor(attn_bias) else [attn_bias] * groups
        made = [memory_efficient_attention(*x, bias, p, scale) for *x, bias in zip(*parts, biases, strict=True)]
        return torch.stack(made, 2)
    b, i, h, _ = query.shape
    j = key.shape[1]
    if attn_bias is None:
        added = torch.zeros(b, h, i, j)
    else:
        added = attn_bias if torch.is_tensor(attn_bias) else attn_bias.materialize((b, h, i, j))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale + added.to(query.dtype)
    return dropped(torch.einsum("bhij,bjhe->bihe", scores.softmax(-1).nan_to_num(0.0), value), p)


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p=0.0, scale=None):
    out = memory_efficient_attention(query, key, value, attn_bias, p, scale)
    return out, torch.zeros(out.shape[:-1])


def own_kernel(q, k, v):
    """A kernel of a user, `b i h d`, in NumPy, which PyTorch does not see."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Opaque.apply(q, k, v).transpose(1, 2).flatten(2)


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scores = torch.from_numpy(q.detach().numpy() @ k.detach().mT.numpy()) / q.shape[-1] ** 0.5
        return torch.from_numpy(scores.exp().numpy() / scores.exp().sum(-1, keepdim=True).numpy() @ v.detach().numpy())

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad
