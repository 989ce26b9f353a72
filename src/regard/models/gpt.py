"""Gpt: a causal language model; its config covers GPT-2 and the Llama family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..argument_hints import CALLS, PADDING, with_argument_hints
from ..checks import (
    check_choice,
    check_eps,
    check_flag,
    check_int,
    check_keys,
    check_letters,
    check_probability,
    check_token_rows,
)
from ..nn import (
    Attention,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    KVCache,
    LearnedPositions,
    PackedLengths,
    PreNorm,
    Rotary,
    TokenEmbedding,
    positions_of,
)
from ..nn.cache import PackedPrompts
from ..nn.dropout import Dropout
from ..nn.fast_decode import FastSteps, Step
from ..nn.linear import linear, project
from ..nn.losses import Loss, cross_entropy
from ..ops.terms.masks import Causal, Window
from .decoder_state import CachedState, Watched, step, watch_attention
from .initialization import initialize, initialize_residual
from .named_choices import Activation, NormName, activation_named, norm_named
from .padding import Padded, counted_of, keep_of
from .rope_scaling import RopeScaling
from .step_graphs import ReplayedState, graphs_of

Positions = Literal["learned", "rotary"]
RotaryLayout = Literal["halves", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes and choices of a `Gpt`; the defaults are GPT-2.

    >>> GptConfig.small().dim, GptConfig.llama(vocabulary=32000, dim=512, depth=8, heads=8, kv_heads=2).norm
    (768, 'rms')

    `hidden` is the width inside the feed-forward (default: 4 dim, or 8/3 dim if `gated`). `biased` names the parts with
    a bias: q, k, v, o, and f for the feed-forward. `length` bounds learned positions; rotary ones have no bound.
    `stretch` rescales rotary frequencies for longer contexts, and `rotary_layout` says which features rotate together.
    `window` is the number of tokens, its own included, that a token sees. `dropout` acts on the embedding and the
    output of each sublayer, `attention_dropout` on the weights.
    """

    vocabulary: int
    length: int = 1024
    dim: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    activation: Activation = "gelu_tanh"
    gated: bool = False
    norm: NormName = "layer"
    eps: float = 1e-5
    biased: str = "qkvof"
    positions: Positions = "learned"
    base: float = 10_000.0
    stretch: RopeScaling | None = None
    rotary_layout: RotaryLayout = "halves"
    qk_norm: bool = False
    window: int | None = None
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "dim", "depth", "heads"):
            check_int(name, getattr(self, name), least=1)
        for name in ("kv_heads", "head_dim", "hidden", "window"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, least=1)
        choices = {"activation": Activation, "norm": NormName, "positions": Positions, "rotary_layout": RotaryLayout}
        for name, known in choices.items():
            check_choice(name, getattr(self, name), known)
        for name in ("gated", "qk_norm", "tied"):
            check_flag(name, getattr(self, name))
        for name in ("dropout", "attention_dropout"):
            check_probability(name, getattr(self, name))
        check_letters("biased", self.biased, "qkvof")
        check_eps(self.eps)
        pair = 2 * self.heads
        if self.positions == "rotary" and self.head_dim is None and self.dim % pair:
            raise ValueError(
                f"rotary positions rotate features in pairs: dim must be a multiple of 2 * heads, got dim={self.dim} "
                f"and heads={self.heads}; pass dim={-(-self.dim // pair) * pair}"
            )
        if not isinstance(self.stretch, RopeScaling | None):
            raise TypeError(
                "stretch must be a Stretch, LinearStretch, DynamicStretch, YarnStretch or None, "
                f"got {self.stretch!r}; write Stretch(factor=8.0)"
            )

    def with_sizes(self) -> Self:
        """Return the same config with all default sizes as numbers."""
        return replace(
            self,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.dim // self.heads if self.head_dim is None else self.head_dim,
            hidden=self.hidden or (8 * self.dim // 3 if self.gated else 4 * self.dim),
        )

    @classmethod
    def small(cls, *, vocabulary: int = 50257) -> Self:
        """GPT-2 of 12 layers, 124 million parameters (Radford et al. 2019, table 2)."""
        return cls(vocabulary=vocabulary)

    @classmethod
    def medium(cls, *, vocabulary: int = 50257) -> Self:
        """GPT-2 of 24 layers, 355 million parameters."""
        return cls(vocabulary=vocabulary, dim=1024, depth=24, heads=16)

    @classmethod
    def large(cls, *, vocabulary: int = 50257) -> Self:
        """GPT-2 of 36 layers, 774 million parameters."""
        return cls(vocabulary=vocabulary, dim=1280, depth=36, heads=20)

    @classmethod
    def llama(
        cls,
        *,
        vocabulary: int,
        dim: int,
        depth: int,
        heads: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        length: int = 4096,
        window: int | None = None,
    ) -> Self:
        """A model of the Llama family: rotary positions, RMSNorm, SwiGLU, no biases (Touvron et al. 2023, sec. 2.2)."""
        return cls(
            vocabulary=vocabulary,
            length=length,
            dim=dim,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            activation="silu",
            gated=True,
            norm="rms",
            biased="",
            positions="rotary",
            window=window,
            tied=False,
            dropout=0.0,
            attention_dropout=0.0,
        )


class Gpt(nn.Module):
    """A causal language model: the logits of the token after each token (Radford et al. 2019).

    >>> from regard.decode import greedy
    >>> model = Gpt(GptConfig.llama(vocabulary=50, dim=32, depth=2, heads=4, kv_heads=2)).eval()
    >>> ids = torch.randint(0, 50, (2, 7))
    >>> model(ids).shape, model(ids, keep=torch.tensor([7, 4])).shape
    (torch.Size([2, 7, 50]), torch.Size([2, 7, 50]))
    >>> len(greedy(model, None, ids, end=None, max_length=5)[0].tokens)
    5

    `keep` is lengths `(b,)` or keep `(b, n)`, True = a real token, on either side: positions count real tokens only.

    A stepper for `regard.decode`. Either the prompts are the prefix, of any lengths, and the source is None; or the
    source is all but their last tokens: ids, or (ids, keep). Padding is not computed.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config.vocabulary, config.dim)
        self.positions = LearnedPositions(config.length, config.dim) if config.positions == "learned" else None
        self.dropout = Dropout(config.dropout)
        self.blocks = cast(Sequence[EncoderBlock], nn.ModuleList(_block(config) for _ in range(config.depth)))
        self.norm = norm_named(config.norm, eps=config.eps)(config.dim)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        initialize(self)
        initialize_residual(self.blocks)

    @with_argument_hints(CALLS, renamed=PADDING)
    def forward(self, ids: Int[Tensor, "b n"], *, keep: Padded | None = None) -> Float[Tensor, "b n vocabulary"]:
        return self.logits(self.hidden(ids, keep=keep))

    @with_argument_hints(CALLS, renamed=PADDING)
    def hidden(self, ids: Int[Tensor, "b n"], *, keep: Padded | None = None) -> Float[Tensor, "b n dim"]:
        """Return the normalized states of the last layer, the input of `logits`."""
        check_token_rows("ids", ids)
        return self._read(ids, None if keep is None else keep_of(keep, ids))[0]

    def logits(self, hidden: Float[Tensor, "*b dim"]) -> Float[Tensor, "*b vocabulary"]:
        """Return the logits of the next token from hidden states."""
        return linear(hidden, self.tokens.table.weight) if self.head is None else project(self.head, hidden)

    def loss(self, batch: Mapping[str, Tensor]) -> Loss:
        """Return -log p of each token of `ids` (b, n) but the first, given those before it, within `ids_lengths`."""
        check_keys(batch, "ids")
        ids, lengths = batch["ids"], batch.get("ids_lengths")
        check_token_rows("ids", ids)
        # Padding on the right comes after all real tokens, which a causal mask hides from them anyway.
        counted = None if lengths is None else counted_of(lengths, ids, name="ids_lengths")[:, 1:]
        return cross_entropy(self(ids[:, :-1]), ids[:, 1:], counted=counted)

    def start(self, source: Tensor | tuple[Tensor, Padded] | None = None) -> GptState:
        """Return the state before the first token, after reading the prompts of `source` if any."""
        caches = tuple(block.attention.new_cache() for block in self.blocks)
        rows = None
        if source is not None:
            ids, given = source if isinstance(source, tuple) else (source, None)
            check_token_rows("source", ids)
            rows = len(ids)
            keep = None if given is None else keep_of(given, ids)
            if keep is not None and not bool(keep.all()):
                if bool(keep.any()):
                    self._read_packed(ids[keep], keep.sum(1), caches, width=ids.shape[1])
            elif ids.shape[1]:
                self._read(ids, None, caches)
        return GptState(caches=caches, fast=FastSteps(self.blocks), rows=rows)

    def read_rows(self, rows: Sequence[Int[Tensor, " n"]], state: GptState) -> GptState:
        """Return the state after a different number of tokens for each row, of a state that has read none."""
        caches = tuple(cache.fork() for cache in state.caches)
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
        self._read_packed(torch.cat(tuple(rows)), lengths, caches)
        return replace(state, caches=caches, rows=len(rows))

    def step(
        self, tokens: Int[Tensor, " rows *n"], state: GptState
    ) -> tuple[Float[Tensor, " rows *n vocabulary"], GptState]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        if isinstance(state, ReplayedState):
            return state.step(tokens)
        return step(tokens, state, advance=self._advance, logits=self.logits)

    def replay_steps(self, state: GptState, steps: int) -> Any:
        """Return a state whose next steps are CUDA graphs, for a search that uses no state twice; or as it is."""
        return graphs_of(self).begin(state, steps)

    def replay_objection(self) -> str | None:
        """Return why steps of a search are no CUDA graphs, None if they are."""
        return graphs_of(self).objection()

    def read(self, tokens: Int[Tensor, "rows n"], state: GptState) -> GptState:
        """Return the state after the tokens: a step without logits."""
        return self._advance(tokens, state)[1]

    def watched(self, *names: str) -> Watched:
        """Return a stepper that records attention: `"self.0"`, or every layer if none is named."""
        known = tuple(f"self.{n}" for n in range(len(self.blocks)))
        return watch_attention(self, names or known, known=known)

    def _advance(
        self, tokens: Int[Tensor, "rows n"], state: GptState, blocks: Sequence[Step] | None = None
    ) -> tuple[Float[Tensor, "rows n dim"], GptState]:
        """Read tokens; return their hidden states, and the state after the last."""
        caches = tuple(cache.fork() for cache in state.caches)  # the caller may step from its state again
        x, attention = self._read(tokens, None, caches, watch=state.watch, blocks=blocks)
        return x, replace(state, caches=caches, attention=attention)

    def _read_packed(
        self,
        ids: Int[Tensor, " tokens"],
        lengths: Int[Tensor, " b"],
        caches: Sequence[KVCache],
        *,
        width: int | None = None,
    ) -> None:
        """Read texts of given lengths, which follow each other, as the first tokens of the rows of the caches."""
        packed = PackedLengths(lengths, width=width)
        self._read(ids[None], None, [cache.prompts(packed) for cache in caches])

    def _read(
        self,
        ids: Int[Tensor, "b n"],
        keep: Bool[Tensor, "b n"] | None,
        caches: Sequence[KVCache | PackedPrompts] = (),
        *,
        watch: Sequence[str] = (),
        blocks: Sequence[Step] | None = None,
    ) -> tuple[Float[Tensor, "b n dim"], dict[str, Tensor]]:
        """Return the hidden states of ids that follow what the caches hold, and the attention of the `watch`ed layers.

        `keep` is True for real tokens, for texts that are read at once. `blocks` are functions that compute what the
        blocks do, as `FastSteps` returns for a step of decoding; the blocks themselves unless given.
        """
        n = ids.shape[1]
        attention: dict[str, Tensor] = {}
        # i: the new tokens; j: all tokens so far; h heads of width d, dim = h * d unless head_dim says otherwise
        if caches:
            positions = caches[0].positions(n, ids.device)
        else:
            positions = torch.arange(n, device=ids.device) if keep is None else positions_of(keep)
        x = self.tokens(ids)  # b i dim
        if self.positions is not None:
            x = x + self.positions(positions)  # (b) i dim
        x = self.dropout(x)
        steps: Sequence[Step] = blocks or self.blocks
        for layer, block in enumerate(steps):
            options: dict[str, Any] = {"positions": positions}  # (b) i
            options |= {"cache": caches[layer]} if caches else {"keep": keep}
            if f"self.{layer}" in watch:
                normed = cast(PreNorm, self.blocks[layer].around_attention).norm(x)
                A = self.blocks[layer].attention.weights(normed, **options)[...]  # b h i j
                end = caches[layer].length + n
                attention[f"self.{layer}"] = F.pad(A, (end - A.shape[-1], 0))  # keys outside of a window get 0
            # x + attention: q b h i d, k and v b h j d, softmax(q k^T / sqrt(d)) b h i j, back to b i dim;
            # then x + feed-forward: b i dim -> b i hidden -> b i dim
            x = block(x, **options)
        return self.norm(x), attention  # b i dim


@dataclass(frozen=True, kw_only=True, eq=False)
class GptState(CachedState):
    """The state of a `Gpt`, one row per hypothesis.

    `rows` is the number of prompts read, or of rows selected since; None if there were no prompts.
    """

    rows: int | None = None

    def select(self, rows: Int[Tensor, " chosen"]) -> GptState:
        """Return the state of the given rows, in their order; a row may repeat."""
        caches = tuple(cache.select(rows) for cache in self.caches)
        return replace(self, caches=caches, rows=len(rows), attention={})


def _block(config: GptConfig) -> EncoderBlock:
    sizes = config.with_sizes()
    assert sizes.head_dim is not None
    assert sizes.hidden is not None
    rotary = None
    if config.positions == "rotary":
        rotary = Rotary(sizes.head_dim, base=config.base, scaling=config.stretch, layout=config.rotary_layout)
    norm = norm_named(config.norm, eps=config.eps)
    attention = Attention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        biased=config.biased.replace("f", ""),
        mask=Causal() if config.window is None else Causal() & Window(config.window),
        rotary=rotary,
        qk_norm=norm if config.qk_norm else None,
        dropout=config.attention_dropout,
    )
    kind = GatedFeedForward if config.gated else FeedForward
    feedforward = kind(
        config.dim, sizes.hidden, activation=activation_named(config.activation), bias="f" in config.biased
    )
    return EncoderBlock(attention, feedforward, norm=norm, dropout=config.dropout)
