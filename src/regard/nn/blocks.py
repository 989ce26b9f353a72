"""Transformer blocks: attention and feed-forward, each with a residual connection and a norm."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, KEEP, with_argument_hints
from ..ops.terms.masks.mask_algebra import Mask
from .attention import Attention
from .cache import KeyValues, KVCache, SegmentMemory
from .norms import Norm, PreNorm, Residual


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward (Vaswani et al. 2017, fig. 1, left); with a causal mask, a GPT block.

    >>> import torch
    >>> from regard.nn import FeedForward, PostNorm
    >>> block = EncoderBlock(Attention(64, heads=8), FeedForward(64, 256), residual=PostNorm, dropout=0.1)
    >>> block(torch.randn(2, 7, 64), keep=torch.tensor([7, 4])).shape
    torch.Size([2, 7, 64])

    `residual` (`PreNorm` or `PostNorm`) places the `norm`, `dropout` acts on the output of each sublayer. Dropout on
    attention weights is an argument of `Attention`, dropout on hidden units one of `FeedForward`. A final norm belongs
    to the model.
    """

    def __init__(
        self,
        attention: Attention,
        feedforward: nn.Module,
        *,
        residual: Residual = PreNorm,
        norm: Norm = nn.LayerNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feedforward = feedforward
        self.around_attention = residual(attention.dim, norm=norm, dropout=dropout)
        self.around_feedforward = residual(attention.dim, norm=norm, dropout=dropout)

    @with_argument_hints(CALLS, renamed=KEEP)
    def forward(
        self,
        x: Float[Tensor, "b n dim"],
        *,
        mask: Mask | None = None,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
        cache: KVCache | None = None,
        memory: SegmentMemory | None = None,
    ) -> Float[Tensor, "b n dim"]:
        """Take the arguments of `Attention.forward`; `memory` adds the states of earlier segments to the keys."""
        options = {"mask": mask, "keep": keep, "positions": positions, "cache": cache}
        x = self.around_attention(x, lambda x: self.attention(x, _keys(x, memory), **options))
        return self.around_feedforward(x, self.feedforward)


class DecoderBlock(nn.Module):
    """Self-attention, attention to another sequence, feed-forward (Vaswani et al. 2017, fig. 1, right).

    >>> import torch
    >>> from regard import Causal
    >>> from regard.nn import FeedForward
    >>> block = DecoderBlock(Attention(64, heads=8, mask=Causal()), Attention(64, heads=8), FeedForward(64, 256))
    >>> block(torch.randn(2, 7, 64), torch.randn(2, 9, 64), context_keep=torch.tensor([9, 4])).shape
    torch.Size([2, 7, 64])

    To decode step by step, project the other sequence once with `block.remember(context)` and pass that instead.
    """

    def __init__(
        self,
        attention: Attention,
        cross: Attention,
        feedforward: nn.Module,
        *,
        residual: Residual = PreNorm,
        norm: Norm = nn.LayerNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.cross = cross
        self.feedforward = feedforward
        self.around_attention = residual(attention.dim, norm=norm, dropout=dropout)
        self.around_cross = residual(attention.dim, norm=norm, dropout=dropout)
        self.around_feedforward = residual(attention.dim, norm=norm, dropout=dropout)

    @with_argument_hints(CALLS, renamed={**KEEP, "context_padding": "context_keep"})
    def forward(
        self,
        x: Float[Tensor, "b n dim"],
        context: Float[Tensor, "b s width"] | KeyValues,
        *,
        mask: Mask | None = None,
        keep: Bool[Tensor, "b j"] | Int[Tensor, " b"] | None = None,
        context_mask: Mask | None = None,
        context_keep: Bool[Tensor, "b s"] | Int[Tensor, " b"] | None = None,
        positions: Int[Tensor, "*b new"] | None = None,
        cache: KVCache | None = None,
        memory: SegmentMemory | None = None,
    ) -> Float[Tensor, "b n dim"]:
        """Take the arguments of `EncoderBlock.forward`; `context_mask` and `context_keep` hide context keys."""
        options = {"mask": mask, "keep": keep, "positions": positions, "cache": cache}
        x = self.around_attention(x, lambda x: self.attention(x, _keys(x, memory), **options))
        x = self.around_cross(x, lambda x: self.cross(x, context, mask=context_mask, keep=context_keep))
        return self.around_feedforward(x, self.feedforward)

    @with_argument_hints(CALLS, renamed={"context_padding": "context_keep"})
    def remember(
        self,
        context: Float[Tensor, "b s width"],
        *,
        context_keep: Bool[Tensor, "b s"] | Int[Tensor, " b"] | None = None,
    ) -> KeyValues:
        """Project the keys and values of the other sequence, once for all steps, and keep its padding with them."""
        return self.cross.remember(context, keep=context_keep)


def _keys(x: Tensor, memory: SegmentMemory | None) -> Tensor | None:
    """Return x behind the states of earlier segments; None, the default of `Attention`, without a memory."""
    return None if memory is None else memory.extend(x)
