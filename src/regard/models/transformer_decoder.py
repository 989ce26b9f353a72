"""TransformerDecoder: the decoder of a Transformer, over whole targets or one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import check_token_rows
from ..nn import DecoderBlock, KeyValues, KVCache
from ..nn.fast_decode import FastSteps, Step, has_hooks
from ..nn.linear import linear, project
from .decoder_state import CachedState, Watched, step, watch_attention
from .step_graphs import ReplayedState, graphs_of


class TransformerDecoder(nn.Module):
    """Decoder blocks between an input module (tokens to vectors) and an output (vectors to logits).

    `input(tokens, first=n)` embeds tokens, the first one at position n. Without `out`, the output shares the table of
    `input.embedding`. The blocks attend to `states` of an encoder. A step returns the logits of the whole pass:

    >>> from regard.models.transformer import TransformerConfig, decoder_of
    >>> decoder = decoder_of(TransformerConfig(source_vocabulary=9, target_vocabulary=9, start=2, dim=16)).eval()
    >>> inputs, states = torch.randint(9, (2, 5)), torch.randn(2, 7, 16)
    >>> with torch.no_grad():
    ...     logits, state = decoder.step(inputs, decoder.start(states))
    >>> torch.allclose(logits, decoder(inputs, states), atol=1e-5)
    True
    """

    def __init__(
        self,
        input: nn.Module,
        blocks: Sequence[DecoderBlock],
        *,
        norm: nn.Module,
        out: nn.Module | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.input: Any = input
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = norm
        self.out = out
        self.bias = bias

    def forward(
        self, inputs: Int[Tensor, "b m"], states: Float[Tensor, "b n dim"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b m vocabulary"]:
        """Return the logits of each next token after the inputs; lengths are the numbers of real states per row."""
        check_token_rows("inputs", inputs)
        x = self.input(inputs)
        for block in self.blocks:
            x = block(x, states, context_keep=lengths)
        return self.logits(x)

    def logits(self, x: Float[Tensor, "b m dim"]) -> Float[Tensor, "b m vocabulary"]:
        """Return the logits from the output of the last block."""
        x = self.norm(x)
        if self.out is None:
            return linear(x, self.input.embedding.table.weight, self.bias)
        logits: Tensor = project(self.out, x)
        return logits if self.bias is None else logits + self.bias

    def start(self, states: Float[Tensor, "b n dim"], lengths: Int[Tensor, " b"] | None = None) -> DecoderState:
        """Return the state before the first token; it projects the keys and values of the source once for all steps."""
        source = tuple(block.remember(states, context_keep=lengths) for block in self.blocks)
        caches = tuple(block.attention.new_cache() for block in self.blocks)
        return DecoderState(source=source, caches=caches, fast=FastSteps(self.blocks))

    def step(self, tokens: Int[Tensor, " rows *n"], state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read tokens `(rows,)` or `(rows, n)`; return the logits of each next token, and the state after the last."""
        if isinstance(state, ReplayedState):
            return state.step(tokens)
        return step(tokens, state, advance=self._advance, logits=self.logits)

    def replay_steps(self, state: DecoderState, steps: int) -> Any:
        """Return a state whose next steps are CUDA graphs, for a search that uses no state twice; or as it is."""
        return graphs_of(self).begin(state, steps)

    def replay_objection(self) -> str | None:
        """Return why steps of a search are no CUDA graphs, None if they are."""
        return graphs_of(self).objection()

    def read(self, tokens: Int[Tensor, "rows n"], state: DecoderState) -> DecoderState:
        """Return the state after the tokens: a step without logits."""
        return self._advance(tokens, state)[1]

    def watch_attention(self, stepper: Any, names: Sequence[str]) -> Watched:
        """Return a stepper that records the attention named, or every cross-attention if none is named."""
        known = [f"{kind}.{n}" for kind in ("cross", "self") for n in range(len(self.blocks))]
        return watch_attention(stepper, names or known[: len(self.blocks)], known=known)

    def _advance(
        self, tokens: Int[Tensor, "rows n"], state: DecoderState, blocks: Sequence[Step] | None = None
    ) -> tuple[Float[Tensor, "rows n dim"], DecoderState]:
        """Read tokens; return their hidden states, and the state after the last.

        `blocks` are functions that compute what the blocks do, as `FastSteps` returns for a step of one token per row.
        """
        caches = tuple(cache.fork() for cache in state.caches)  # the caller may step from its state again
        attention: dict[str, Tensor] = {}
        if blocks is None:
            blocks = [partial(self._run_block, n, state=state, attention=attention) for n in range(len(caches))]
        x = self.input(tokens, first=caches[0].length)  # rows n dim
        for block, source, cache in zip(blocks, state.source, caches, strict=True):
            x = block(x, source, cache=cache)
        return x, replace(state, caches=caches, attention=attention)

    def _run_block(
        self, n: int, x: Tensor, source: KeyValues, *, cache: KVCache, state: DecoderState, attention: dict[str, Tensor]
    ) -> Tensor:
        """Run block n; the hypotheses of one source are queries side by side, so that its keys are stored once."""
        block = self.blocks[n]

        def attend_self(x: Tensor) -> Tensor:
            if f"self.{n}" in state.watch:
                attention[f"self.{n}"] = block.attention.weights(x, cache=cache)[...]
            return block.attention(x, cache=cache)

        def attend_source(x: Tensor) -> Tensor:
            b, each, i = source.k.shape[0], state.each, x.shape[1]
            queries = x.reshape(b, each * i, x.shape[2])  # (b each) i dim -> b (each i) dim
            if f"cross.{n}" in state.watch:
                A = block.cross.weights(queries, source)[...]  # b h (each i) j
                attention[f"cross.{n}"] = A.unflatten(2, (each, i)).transpose(1, 2).flatten(0, 1)  # (b each) h i j
            if each > 1 and has_hooks(block.cross):  # a hook gets a batch row per hypothesis
                rows = torch.arange(len(x), device=x.device).div(each, rounding_mode="floor")
                return block.cross(x, source.select(rows))
            return block.cross(queries, source).view_as(x)

        x = block.around_attention(x, attend_self)
        x = block.around_cross(x, attend_source)
        return block.around_feedforward(x, block.feedforward)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderState(CachedState):
    """The state of a decoder, one row per hypothesis; each source has `each` hypotheses, in consecutive rows."""

    @property
    def rows(self) -> int:
        """Number of hypotheses."""
        return self.each * len(self.source[0].k)

    def select(self, rows: Int[Tensor, " chosen"]) -> DecoderState:
        """Return the state of the given rows, in their order; a row may repeat."""
        owners = rows.div(self.each, rounding_mode="floor")
        sources, counts = owners.unique_consecutive(return_counts=True)
        even = len(counts) > 0 and bool((counts == counts[0]).all())
        sources, each = (sources, int(counts[0])) if even else (owners, 1)
        source = self.source
        if not torch.equal(sources, torch.arange(len(source[0].k), device=rows.device)):
            source = tuple(one.select(sources) for one in source)
        caches = tuple(cache.select(rows) for cache in self.caches)
        return replace(self, source=source, caches=caches, each=each, attention={})
