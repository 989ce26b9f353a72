"""Transformer: an encoder, and a decoder that attends to its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import (
    check_choice,
    check_flag,
    check_int,
    check_keys,
    check_number,
    check_probability,
    check_tied_vocabularies,
    check_token_id,
    check_token_rows,
)
from ..nn import Attention, DecoderBlock, EncoderBlock, FeedForward, PostNorm, PreNorm, SegmentMemory, TokenEmbedding
from ..nn.dropout import Dropout
from ..nn.losses import Loss, cross_entropy, shift_right
from ..ops.terms.masks import Causal
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.terms.parse import parse
from ..ops.terms.reach import depends_on_distance_only
from .decoder_state import Watched
from .named_choices import Activation, Positions, activation_named, added_positions, relative_positions
from .padding import check_lengths, counted_of
from .transformer_decoder import DecoderState, TransformerDecoder

Order = Literal["pre", "post"]
Tied = Literal["none", "output", "all"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a `Transformer`.

    `start` is the token the decoder reads before the first one it writes. `norm` places norms before ("pre") or after
    ("post") each sublayer. `longest` bounds learned positions, `reach` the distances that Shaw's biases distinguish;
    rotary positions rotate by a quarter turn and more for tokens farther apart than about `rotary_base`.
    `tied="output"` shares the embedding table of the target with the output, `tied="all"` with the source too.
    `embedding_scale` is sqrt(dim) by default. `smoothing` acts in training only.

    For long documents, `encoder_mask` is a mask as text, `"Window(128) | Global(4)"`. With `segment`, the encoder
    reads this number of tokens at a time, and in every layer attends to the last `memory` states of earlier segments
    too, without gradient (Dai et al. 2019).
    """

    source_vocabulary: int
    target_vocabulary: int
    start: int
    dim: int = 512
    heads: int = 8
    kv_heads: int | None = None
    hidden: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    norm: Order = "pre"
    positions: Positions = "sinusoidal"
    longest: int = 1024
    reach: int = 16
    rotary_base: float = 10_000.0
    activation: Activation = "relu"
    tied: Tied = "output"
    embedding_scale: float | None = None
    embedding_norm: bool = False
    output_bias: bool = False
    encoder_mask: str | None = None
    segment: int | None = None
    memory: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        for name in ("source_vocabulary", "target_vocabulary", "dim", "heads", "hidden", "decoder_layers", "longest"):
            check_int(name, getattr(self, name), least=1)
        for name in ("kv_heads", "segment"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, least=1)
        for name in ("encoder_layers", "memory", "reach"):
            check_int(name, getattr(self, name))
        for name, known in (("norm", Order), ("positions", Positions), ("activation", Activation), ("tied", Tied)):
            check_choice(name, getattr(self, name), known)
        for name in ("dropout", "attention_dropout", "smoothing"):
            check_probability(name, getattr(self, name))
        for name in ("embedding_norm", "output_bias"):
            check_flag(name, getattr(self, name))
        check_number("rotary_base", self.rotary_base, above=0)
        if self.embedding_scale is not None:
            check_number("embedding_scale", self.embedding_scale)
        check_token_id("start", self.start, self.target_vocabulary)
        check_tied_vocabularies(self.tied, self.source_vocabulary, self.target_vocabulary)
        mask = _encoder_mask(self)
        if self.memory and self.segment is None:
            raise ValueError(
                f"memory holds states of earlier segments, got memory={self.memory} without segment; pass segment="
            )
        if self.memory and mask is not None and not depends_on_distance_only(mask):
            raise ValueError(
                f"encoder_mask must depend on distance alone if segments have a memory, got {self.encoder_mask!r} and "
                f"memory={self.memory}: the first keys are other tokens in each segment; write 'Window(128)', "
                "or pass memory=0"
            )

    @classmethod
    def base(cls, *, source_vocabulary: int, target_vocabulary: int, start: int) -> Self:
        """The base model of Vaswani et al. 2017, table 3."""
        return cls(
            source_vocabulary=source_vocabulary,
            target_vocabulary=target_vocabulary,
            start=start,
            norm="post",
            tied="all" if source_vocabulary == target_vocabulary else "output",
        )

    @classmethod
    def big(cls, *, source_vocabulary: int, target_vocabulary: int, start: int) -> Self:
        """The big model of Vaswani et al. 2017, table 3."""
        base = cls.base(source_vocabulary=source_vocabulary, target_vocabulary=target_vocabulary, start=start)
        return replace(base, dim=1024, heads=16, hidden=4096, dropout=0.3)


class Transformer(nn.Module):
    """p(target | source) by attention alone (Vaswani et al. 2017).

    >>> config = TransformerConfig(source_vocabulary=90, target_vocabulary=70, start=2, dim=32, heads=4, hidden=64)
    >>> model = Transformer(config)
    >>> batch = {"source": torch.randint(4, 90, (2, 9)), "source_lengths": torch.tensor([9, 5])}
    >>> model(batch["source"], torch.tensor([[2, 5, 7]] * 2), source_lengths=batch["source_lengths"]).shape
    torch.Size([2, 3, 70])

    It is a stepper for `regard.decode`, with a batch as the source; `watched` records attention by layer:

    >>> from regard.decode import beam
    >>> best = beam(model.eval().watched("cross.5"), batch, [[2], [2]], width=3, end=3, max_length=8)[1][0]
    >>> best.attention["cross.5"].shape == (4, len(best.tokens), 9)
    True
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TransformerEncoder(config)
        self.decoder = decoder_of(config)
        if config.tied == "all":
            self.decoder.input.embedding = self.encoder.input.embedding

    def forward(
        self,
        source: Int[Tensor, "b n"],
        inputs: Int[Tensor, "b m"],
        *,
        source_lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b m vocabulary"]:
        """Return the logits of each next token after the inputs, which begin with the start."""
        states = self.encoder(source, source_lengths)
        return self.decoder(inputs, states, source_lengths)

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return the cross entropy of `target` (with the end, without the start) given `source`.

        `source_lengths` and `target_lengths` are the numbers of real tokens per row (default: all).
        """
        check_keys(batch, "source", "target")
        target, lengths = batch["target"], batch.get("target_lengths")
        check_token_rows("target", target)
        inputs = shift_right(target, start=self.config.start)
        logits = self(batch["source"], inputs, source_lengths=batch.get("source_lengths"))
        return cross_entropy(
            logits,
            target,
            counted=None if lengths is None else counted_of(lengths, target, name="target_lengths"),
            smoothing=self.config.smoothing if self.training else 0.0,
        )

    def start(self, batch: Mapping[str, Tensor]) -> DecoderState:
        """Return the state before the first token, from `source` and, if rows are padded, `source_lengths`."""
        check_keys(batch, "source")
        source, lengths = batch["source"], batch.get("source_lengths")
        if lengths is not None:
            check_token_rows("source", source)
            check_lengths("source_lengths", lengths, source)
            if bool((lengths == source.shape[1]).all()):
                lengths = None  # there is no padding, and attention without a mask is faster
        return self.decoder.start(self.encoder(source, lengths), lengths)

    def step(self, tokens: Int[Tensor, " rows *n"], state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        return self.decoder.step(tokens, state)

    def read(self, tokens: Int[Tensor, "rows n"], state: DecoderState) -> DecoderState:
        """Return the state after the tokens: a step without logits."""
        return self.decoder.read(tokens, state)

    def replay_steps(self, state: DecoderState, steps: int) -> Any:
        """Return a state whose next steps are CUDA graphs, for a search that uses no state twice; or as it is."""
        return self.decoder.replay_steps(state, steps)

    def replay_objection(self) -> str | None:
        """Return why steps of a search are no CUDA graphs, None if they are."""
        return self.decoder.replay_objection()

    def watched(self, *names: str) -> Watched:
        """Return a stepper that records attention: `"cross.5"`, `"self.0"`, or every cross-attention by default."""
        return self.decoder.watch_attention(self, names)


class TransformerEncoder(nn.Module):
    """Self-attention over the source, whole or segment by segment."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.segment, self.memory = config.segment, config.memory
        self.input = Input(config, config.source_vocabulary)
        self.blocks = nn.ModuleList(
            EncoderBlock(_self_attention(config, mask=_encoder_mask(config)), _feedforward(config), **_around(config))
            for _ in range(config.encoder_layers)
        )
        self.norm = _final_norm(config)

    def forward(self, source: Int[Tensor, "b n"], lengths: Int[Tensor, " b"] | None = None) -> Float[Tensor, "b n dim"]:
        check_token_rows("source", source)
        if lengths is not None:
            # Positions count from the first column, so padding must be on the right: lengths, not a keep.
            check_lengths("source_lengths", lengths, source)
        x = self.input(source)
        if self.segment is None:
            for block in self.blocks:
                x = block(x, keep=lengths)
            return self.norm(x)
        keep = None if lengths is None else counted_of(lengths, source, name="source_lengths")
        memories = [SegmentMemory(self.memory) for _ in self.blocks]
        segments = []
        for first in range(0, x.shape[1], self.segment):
            piece = x[:, first : first + self.segment]
            oldest, end = max(0, first - self.memory), first + piece.shape[1]
            for block, memory in zip(self.blocks, memories, strict=True):
                piece = block(piece, memory=memory, keep=None if keep is None else keep[:, oldest:end])
            segments.append(piece)
        return self.norm(torch.cat(segments, 1) if segments else x)


def decoder_of(config: TransformerConfig) -> TransformerDecoder:
    """Build the decoder of a config; it can attend to the states of any encoder of width `config.dim`."""
    blocks = [
        DecoderBlock(
            _self_attention(config, mask=Causal()),
            Attention(config.dim, config.heads, kv_heads=config.kv_heads, dropout=config.attention_dropout),
            _feedforward(config),
            **_around(config),
        )
        for _ in range(config.decoder_layers)
    ]
    input = Input(config, config.target_vocabulary)
    out = nn.Linear(config.dim, config.target_vocabulary, bias=False) if config.tied == "none" else None
    bias = nn.Parameter(torch.zeros(config.target_vocabulary)) if config.output_bias else None
    return TransformerDecoder(input, blocks, norm=_final_norm(config), out=out, bias=bias)


class Input(nn.Module):
    """dropout(norm(scale * table[id] + position)): from token ids to the input of the first block."""

    def __init__(self, config: TransformerConfig, vocabulary: int) -> None:
        super().__init__()
        scale = config.dim**0.5 if config.embedding_scale is None else config.embedding_scale
        self.embedding = TokenEmbedding(vocabulary, config.dim, scale=scale)
        self.positions = added_positions(config.positions, config.dim, longest=config.longest)
        self.norm = nn.LayerNorm(config.dim) if config.embedding_norm else None
        self.dropout = Dropout(config.dropout)

    def forward(self, ids: Int[Tensor, " b *n"], *, first: int | Int[Tensor, ""] = 0) -> Float[Tensor, " b *n dim"]:
        x = self.embedding(ids)
        if self.positions is not None:
            n = ids.shape[1] if ids.ndim > 1 else 1
            if isinstance(first, Tensor):  # a recorded step finds its position on the device
                positions = torch.arange(n, device=ids.device) + first
            else:
                positions = torch.arange(first, first + n, device=ids.device)
            x = x + self.positions(positions).to(x.dtype)
        x = x if self.norm is None else self.norm(x)
        return self.dropout(x) if self.training else x


def _self_attention(config: TransformerConfig, *, mask: Mask | None) -> Attention:
    positions = relative_positions(
        config.positions,
        config.heads,
        config.dim // config.heads,
        reach=config.reach,
        base=config.rotary_base,
        bidirectional=not isinstance(mask, Causal),
    )
    return Attention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        mask=mask,
        dropout=config.attention_dropout,
        **positions,
    )


def _encoder_mask(config: TransformerConfig) -> Mask | None:
    if config.encoder_mask is None:
        return None
    try:
        mask, why = parse(config.encoder_mask), ""
    except ValueError as error:
        mask, why = None, f" ({error})"
    if not isinstance(mask, Mask):
        raise ValueError(f"encoder_mask must be a mask as text, got {config.encoder_mask!r}{why}; write 'Window(128)'")
    return mask


def _feedforward(config: TransformerConfig) -> FeedForward:
    return FeedForward(config.dim, config.hidden, activation=activation_named(config.activation))


def _around(config: TransformerConfig) -> dict[str, Any]:
    return {"residual": PreNorm if config.norm == "pre" else PostNorm, "dropout": config.dropout}


def _final_norm(config: TransformerConfig) -> nn.Module:
    return nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
