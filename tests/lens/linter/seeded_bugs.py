"""Attention code as people write it, each with one bug, and code that looks alike and is right.

`BUGS` has three bugs for each check, in unlike code; `RIGHT` has one look-alike. Both map a name to what makes the
module and the arguments of `check`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

DIM, HEADS, VOCAB = 24, 4, 40


class Tutorial(nn.Module):
    """Self-attention with four linear layers, view and transpose; `mask` is 1 where a token may be seen."""

    fill = float("-inf")

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(DIM, DIM) for _ in range(4))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def hide(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask == 0, self.fill)

    def normalize(self, scores):
        return scores.softmax(-1)

    def forward(self, x, mask=None):
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        A = self.normalize(self.hide(self.scores(q, k), mask))
        return self.w_o(self.merge(A @ v))


class Causal(Tutorial):
    """The same with a causal mask of its own."""

    diagonal = 0

    def visible(self, n):
        return torch.ones(n, n).tril(self.diagonal).bool()

    def forward(self, x):
        return super().forward(x, self.visible(x.shape[1]))


class Fused(nn.Module):
    """One projection for q, k and v, and PyTorch's kernel."""

    p = 0.0

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def qkv_of(self, x):
        b, n, _ = x.shape
        return self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)

    def options(self):
        return {"is_causal": True, "dropout_p": self.p if self.training else 0.0}

    def forward(self, x):
        out = F.scaled_dot_product_attention(*self.qkv_of(x), **self.options())
        return self.proj(out.transpose(1, 2).flatten(2))


def make(base, **methods):
    """A class with other methods, and an instance of it."""
    return lambda: type(base.__name__, (base,), methods)()


def shifted(length, diagonal):
    """Additive -inf from a diagonal on."""
    return torch.full((length, length), float("-inf")).triu(diagonal)


# leaks from the future


class OneHeadLooksAhead(Fused):
    def forward(self, x):
        q, k, v = self.qkv_of(x)
        behind = F.scaled_dot_product_attention(q[:, :3], k[:, :3], v[:, :3], is_causal=True)
        ahead = F.scaled_dot_product_attention(q[:, 3:], k[:, 3:], v[:, 3:])
        return self.proj(torch.cat([behind, ahead], 1).transpose(1, 2).flatten(2))


class MergedByView(Causal):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class MeanAdded(Fused):
    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


# tokens that never meet


class SplitAndMergedByView(Tutorial):
    def split(self, x):
        return x.view(x.shape[0], self.heads, x.shape[1], -1)

    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class TokenAlone(nn.Module):
    """Each token is a text of its own: the reshape moves tokens to the batch."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        flat = x.reshape(-1, 1, DIM)
        return self.attention(flat, flat, flat)[0].view_as(x)


def cut_along_tokens(q, k, v, num_heads):
    """Heads are pieces of the text, and what is left over is dropped."""
    size = q.shape[1] // num_heads
    pieces = [
        F.scaled_dot_product_attention(*(x[:, h * size : (h + 1) * size] for x in (q, k, v))) for h in range(num_heads)
    ]
    return torch.cat(pieces, 1)


class ChunksOfFour(nn.Module):
    """Right: tokens meet within chunks of 4, whatever the length of the text."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        chunk = torch.arange(x.shape[1]) // 4
        return self.attention(x, x, x, attn_mask=chunk[:, None] != chunk[None])[0]


# heads that attend to heads


class NeverTransposed(Tutorial):
    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1)

    def merge(self, x):
        return x.transpose(1, 2).contiguous().view(x.shape[0], -1, DIM)


class EinsumOverHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.to_qkv = nn.Linear(DIM, 3 * DIM, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)) for part in self.to_qkv(x).chunk(3, -1))
        A = torch.einsum("bnhd,bnkd->bnhk", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bnhk,bnkd->bnhd", A, v).flatten(2)


class KernelOverHeads(Fused):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)  # b n h d
        return self.proj(F.scaled_dot_product_attention(q, k, v).flatten(2))


class TokensThenHeads(Fused):
    """Right: tokens attend to tokens, then the heads of a token mix."""

    def forward(self, x):
        q, k, v = self.qkv_of(x)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # b n h d
        return self.proj((out + F.scaled_dot_product_attention(out, out, out)).flatten(2))


# padding that changes results


class MaskNotPassedOn(Tutorial):
    def hide(self, scores, mask):
        return scores


class MaskedAfterSoftmax(Tutorial):
    """Hidden keys have taken their share of the softmax before they are zeroed."""

    def forward(self, x, mask=None):
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        A = self.scores(q, k).softmax(-1)
        return self.w_o(self.merge((A if mask is None else A * mask) @ v))


class MaskOfAnotherText(nn.Module):
    """The mask is repeated in the order (h, b), the scores are in the order (b, h)."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x, attention_mask=None):
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None].expand(-1, x.shape[1], -1)
            attention_mask = hidden.repeat(HEADS, 1, 1)
        return self.attention(x, x, x, attn_mask=attention_mask)[0]


class MaskOfEachText(nn.Module):
    """Right: the same with the mask in the order (b, h)."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x, attention_mask=None):
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None].expand(-1, x.shape[1], -1)
            attention_mask = hidden.repeat_interleave(HEADS, 0)
        return self.attention(x, x, x, attn_mask=attention_mask)[0]


# rows that see nothing


class TwoBack(Causal):
    """A token sees those at least two before it, so the first two see nothing: NaN."""

    diagonal = -2


class TwoBackFilled(TwoBack):
    """The same with a finite number: the first two are uniform over all tokens, the later ones too."""

    fill = -1e9


class ZeroForEmptyRows(Tutorial):
    """Right: rows with nothing to see are zeros."""

    def normalize(self, scores):
        return super().normalize(scores).nan_to_num(0.0)


# softmax over the wrong axis


class BatchAttends(nn.Module):
    """nn.MultiheadAttention reads n b d unless batch_first=True is passed."""

    def __init__(self):
        super().__init__()
        self.mixer = nn.MultiheadAttention(DIM, HEADS)

    def forward(self, x):
        return self.mixer(x, x, x)[0]


class KeysByQueries(Tutorial):
    """Right: scores are keys by queries, so the softmax over keys is over dim -2."""

    def forward(self, x):
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        A = self.scores(k, q).softmax(-2)  # b h j i
        return self.w_o(self.merge(A.transpose(-2, -1) @ v))


# scale of the wrong width


class ScaledQueries(Fused):
    """The scale of the model's width is multiplied into the queries."""

    def forward(self, x):
        q, k, v = self.qkv_of(x)
        A = (q * DIM**-0.5 @ k.mT).softmax(-1)
        return self.proj((A @ v).transpose(1, 2).flatten(2))


def divided_by_width(query, key, value):
    """b h n d; d in place of its square root."""
    return torch.softmax(torch.einsum("bhid,bhjd->bhij", query, key) / query.size(-1), -1) @ value


class Unscaled(Tutorial):
    """Right: T5 and Luong et al. do not scale."""

    def scores(self, q, k):
        return q @ k.mT


# a mask with its meaning reversed


class HandedOnAsItIs(nn.Module):
    """attention_mask is 1 for real tokens; nn.MultiheadAttention takes True = padding."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x, attention_mask=None):
        padding = None if attention_mask is None else attention_mask.bool()
        return self.attention(x, x, x, key_padding_mask=padding)[0]


class PaddingToKernel(Fused):
    """key_padding_mask is True for padding; the kernel takes True = may attend."""

    def forward(self, x, key_padding_mask=None):
        mask = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None]
        return self.proj(F.scaled_dot_product_attention(*self.qkv_of(x), attn_mask=mask).transpose(1, 2).flatten(2))


class HidesThePast(Causal):
    """masked_fill takes True = hidden, and tril is what may be seen."""

    def hide(self, scores, mask):
        return scores.masked_fill(mask.tril(-1), self.fill)


class PaddingTurnedRound(Fused):
    """Right: key_padding_mask is inverted before the kernel."""

    def forward(self, x, key_padding_mask=None):
        mask = None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None]
        return self.proj(F.scaled_dot_product_attention(*self.qkv_of(x), attn_mask=mask).transpose(1, 2).flatten(2))


# positions off by one, and caches


class Decoder(nn.Module):
    """A small GPT with learned positions and a cache of tuples (k, v)."""

    first = 0  # added to the positions of cached steps

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.n_head = HEADS

    def positions(self, past, n):
        return torch.arange(past, past + n) + (self.first if past else 0)

    def join(self, past, new):
        return torch.cat([past, new], 2)

    def attend(self, q, k, v):
        i, j = q.shape[2], k.shape[2]
        mask = torch.ones(i, j).tril(j - i).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, ids, past=None, use_cache=False):
        n, length = ids.shape[1], 0 if past is None else past[0].shape[2]
        x = self.tokens(ids) + self.places(self.positions(length, n))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = self.join(past[0], k), self.join(past[1], v)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return (self.head(x), (k, v)) if use_cache else self.head(x)


class Buffers(nn.Module):
    """Attention with its cache in buffers, called with the position of the first new token."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.register_buffer("cache_k", torch.zeros(8, 64, HEADS, DIM // HEADS), persistent=False)
        self.register_buffer("cache_v", torch.zeros(8, 64, HEADS, DIM // HEADS), persistent=False)

    def store(self, cache, new, start_pos):
        cache[: len(new), start_pos : start_pos + new.shape[1]] = new

    def forward(self, x, start_pos=0):
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, HEADS, -1) for w in (self.wq, self.wk, self.wv))
        self.store(self.cache_k, k, start_pos)
        self.store(self.cache_v, v, start_pos)
        k, v = self.cache_k[:b, : start_pos + n], self.cache_v[:b, : start_pos + n]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores + shifted(start_pos + n, 1)[start_pos:]
        return self.wo(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


# dropout in evaluation


class AlwaysDrops(Tutorial):
    def normalize(self, scores):
        return F.dropout(super().normalize(scores), 0.2)


class DropsByHand(Tutorial):
    def forward(self, x, mask=None):
        kept = torch.rand_like(x) > 0.1
        return super().forward(x * kept, mask)


class DropsInTraining(Tutorial):
    """Right: the same, in training only."""

    def normalize(self, scores):
        return F.dropout(super().normalize(scores), 0.2, self.training)


BUGS = {
    "future-leak": [
        (OneHeadLooksAhead, {"causal": True}),
        (MergedByView, {}),
        (MeanAdded, {"causal": True}),
    ],
    "unmet-tokens": [
        (SplitAndMergedByView, {}),
        (TokenAlone, {}),
        (lambda: cut_along_tokens, {}),
    ],
    "heads-to-heads": [(NeverTransposed, {}), (EinsumOverHeads, {}), (KernelOverHeads, {})],
    "padding": [(MaskNotPassedOn, {}), (MaskedAfterSoftmax, {}), (MaskOfAnotherText, {})],
    "empty-rows": [
        (TwoBack, {}),
        (TwoBackFilled, {}),
        (make(Tutorial, fill=-1e9), {}),
    ],
    "softmax-axis": [
        (make(Tutorial, normalize=lambda self, scores: scores.softmax(-2)), {}),
        (make(Tutorial, normalize=lambda self, scores: F.softmax(scores, dim=1)), {}),
        (BatchAttends, {}),
    ],
    "scale": [
        (make(Tutorial, scores=lambda self, q, k: q @ k.mT / math.sqrt(DIM)), {}),
        (ScaledQueries, {}),
        (lambda: divided_by_width, {}),
    ],
    "reversed-mask": [(HandedOnAsItIs, {}), (PaddingToKernel, {}), (HidesThePast, {})],
    "positions": [
        (make(Causal, diagonal=1), {}),
        (make(Decoder, first=1), {}),
        (make(Fused, options=lambda self: {"attn_mask": torch.ones(7, 7).tril(-1).bool()}), {}),
    ],
    "cache": [
        (make(Decoder, attend=lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), {}),
        (make(Decoder, join=lambda self, past, new: torch.cat([past.flip(1), new], 2)), {}),
        (
            make(Buffers, store=lambda self, cache, new, start: Buffers.store(self, cache, new, max(start - 1, 0))),
            {},
        ),
    ],
    "dropout": [
        (AlwaysDrops, {}),
        (make(Fused, options=lambda self: {"is_causal": True, "dropout_p": 0.1}), {}),
        (DropsByHand, {}),
    ],
}
RIGHT = {
    "future-leak": (Fused, {}),
    "unmet-tokens": (ChunksOfFour, {}),
    "heads-to-heads": (TokensThenHeads, {}),
    "padding": (MaskOfEachText, {}),
    "empty-rows": (ZeroForEmptyRows, {}),
    "softmax-axis": (KeysByQueries, {}),
    "scale": (Unscaled, {}),
    "reversed-mask": (PaddingTurnedRound, {}),
    "positions": (Decoder, {}),
    "cache": (Buffers, {}),
    "dropout": (DropsInTraining, {}),
}
