"""Pointer: a recurrent encoder-decoder that generates words of a vocabulary or copies words of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import check_keys, check_token_id
from ..nn.losses import Loss, shift_right
from .padding import counted_of, counted_targets
from .recurrent_decoder import RecurrentState, choose_fed_tokens
from .seq2seq import Seq2Seq, Seq2SeqConfig, coverage_overlap

POINTING = ("bahdanau", "dot", "general", "concat", "location")  # attention with weights that sum to 1 at every step

GENERATE_LOGIT = 1e4  # a gate logit whose sigmoid is 1; infinity would have no gradient


@dataclass(frozen=True, kw_only=True)
class PointerConfig(Seq2SeqConfig):
    """A `Seq2SeqConfig` over one vocabulary; `unknown` is the id the decoder reads for a word outside of it."""

    unknown: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token_id("unknown", self.unknown, self.target_vocabulary)
        if self.source_vocabulary != self.target_vocabulary:
            raise ValueError(
                f"words are copied within one vocabulary, got source_vocabulary={self.source_vocabulary} and "
                f"target_vocabulary={self.target_vocabulary}"
            )
        if self.attention not in POINTING:
            raise ValueError(
                f"attention must be one of {', '.join(POINTING)} to point with, got {self.attention!r}; "
                "the weights of other kinds need not sum to 1"
            )
        if self.smoothing:
            raise ValueError(f"smoothing must be 0 where words are copied, got {self.smoothing}")


class Pointer(nn.Module):
    """p(word) = g p_vocabulary(word) + (1 - g) * attention to its positions in the source (See et al. 2017).

    >>> config = PointerConfig(source_vocabulary=90, target_vocabulary=90, start=2, unknown=1, dim=16, hidden=32)
    >>> model = Pointer(config).eval()
    >>> source = torch.tensor([[5, 1, 7, 1, 3]])  # whose second and fourth word are not in the vocabulary

    `copies` holds the ids of source words: the id in the vocabulary, or, for a word outside of it (of 90 words here),
    an id from 90 on, counted per row. So a word has the same id at each occurrence, and every word has a probability:

    >>> copies = torch.tensor([[5, 90, 7, 91, 3]])
    >>> log_p = model(source, torch.tensor([[2, 5, 90]]), copies)
    >>> log_p.shape, torch.allclose(log_p.exp().sum(-1), torch.ones(1, 3))
    (torch.Size([1, 3, 92]), True)

    For a source without words, g is 1.

    It is a stepper for `regard.decode`, with a batch as the source, over the vocabulary and the words of the row:

    >>> from regard.decode import beam
    >>> batch = {"source": source, "copies": copies}
    >>> [[best]] = beam(model, batch, [[2]], width=3, end=3, max_length=8)
    >>> best.attention["source"].shape == (1, len(best.tokens), 5)
    True
    """

    def __init__(self, config: PointerConfig) -> None:
        super().__init__()
        self.config = config
        writer = Seq2Seq(config)
        self.encoder, self.decoder = writer.encoder, writer.decoder
        self.gate = nn.Linear(2 * config.hidden + config.dim, 1)

    def forward(
        self,
        source: Int[Tensor, "b n"],
        inputs: Int[Tensor, "b m"],
        copies: Int[Tensor, "b n"],
        *,
        source_lengths: Int[Tensor, " b"] | None = None,
        forcing: float = 1.0,
    ) -> Float[Tensor, "b m words"]:
        """Return log p of each next word after the inputs, which begin with the start; `forcing` is that of `loss`."""
        state = self._start(source, copies, source_lengths)
        mixture, _ = self._write(inputs, state.inner, state.copies, state.words, forcing)
        return mixture.log_p(state.words)

    def loss(self, batch: Mapping[str, Tensor], *, forcing: float = 1.0) -> Loss:
        """Return -log p of `target` (with the end, without the start) given `source` and `copies`, plus coverage loss.

        Targets have the ids of `copies`. A target outside of the vocabulary that the source does not hold, because the
        source was cut off, counts as unknown. Lengths and `forcing` are those of `Seq2Seq.loss`.
        """
        if not 0 <= forcing <= 1:
            raise ValueError(f"forcing must be a probability, got {forcing}")
        check_keys(batch, "source", "copies", "target")
        target, counted = counted_targets(batch)
        state = self.start(batch)
        in_source = (target[:, :, None] == state.copies[:, None]).any(-1)
        target = target.masked_fill((target >= self.config.target_vocabulary) & ~in_source, self.config.unknown)
        inputs = shift_right(target, start=self.config.start)
        mixture, _ = self._write(inputs, state.inner, state.copies, state.words, forcing)
        each = -mixture.log_p_of(target)
        if self.config.coverage is not None:
            each = each + self.config.coverage * coverage_overlap(mixture.A)
        return Loss(each.masked_fill(~counted, 0).sum(), counted.sum())

    def start(self, batch: Mapping[str, Tensor]) -> PointerState:
        """Return the state before the first token, from `source`, `copies` and, if given, `source_lengths`."""
        check_keys(batch, "source", "copies")
        return self._start(batch["source"], batch["copies"], batch.get("source_lengths"))

    def step(
        self, tokens: Int[Tensor, " rows *n"], state: PointerState
    ) -> tuple[Float[Tensor, " rows *n words"], PointerState]:
        """Read tokens `(rows,)` or `(rows, n)`; return log p of each next word, and the state after the last."""
        copies = state.copies[state.inner.sources]
        mixture, inner = self._write(tokens.view(len(tokens), -1), state.inner, copies, state.words)
        seen = mixture.A if tokens.ndim == 1 else mixture.A[:, None]
        return mixture.log_p(state.words).view(*tokens.shape, -1), replace(
            state, inner=inner, attention={"source": seen}
        )

    def _start(self, source: Tensor, copies: Tensor, lengths: Tensor | None) -> PointerState:
        if copies.shape != source.shape:
            raise ValueError(f"copies must have the shape of source, {tuple(source.shape)}, got {tuple(copies.shape)}")
        if lengths is not None:
            copies = copies.masked_fill(~counted_of(lengths, copies, name="source_lengths"), self.config.unknown)
        states, hidden = self.encoder(source, lengths)
        words = max(self.config.target_vocabulary, int(copies.max()) + 1 if copies.numel() else 0)
        return PointerState(inner=self.decoder.start(hidden, states, lengths), copies=copies, words=words)

    def _write(
        self, inputs: Tensor, state: RecurrentState, copies: Tensor, words: int, forcing: float = 1.0
    ) -> tuple[Mixture, RecurrentState]:
        """Return the distributions after each of the inputs, all at once if no step depends on the one before."""
        if self.decoder.stepwise:
            mixture, state, _ = self._one_by_one(inputs, state, copies, words, forcing)
            return mixture, state
        if forcing < 1:
            # As in `RecurrentDecoder`: the tokens to read are decided first.
            with torch.no_grad():
                inputs = self._one_by_one(inputs, state, copies, words, forcing)[2]
        return self._advance(inputs, state, copies)

    def _one_by_one(
        self, inputs: Tensor, state: RecurrentState, copies: Tensor, words: int, forcing: float
    ) -> tuple[Mixture, RecurrentState, Tensor]:
        """Return the distributions, the state, and the tokens that were read."""
        parts: list[Mixture] = []
        read: list[Tensor] = []
        for tokens in inputs.split(1, 1):
            if parts and forcing < 1:
                tokens = choose_fed_tokens(tokens, parts[-1].log_p(words).argmax(-1), forcing)
            part, state = self._advance(tokens, state, copies)
            parts.append(part)
            read.append(tokens)
        return Mixture.concat(parts), state, torch.cat(read, 1)

    def _advance(self, inputs: Tensor, state: RecurrentState, copies: Tensor) -> tuple[Mixture, RecurrentState]:
        known = inputs.masked_fill(inputs >= self.config.target_vocabulary, self.config.unknown)
        h, state = self.decoder.read(known, state)
        context, A = self.decoder.look(h, state)
        seen, memory = A[:, 0], state.memory
        assert memory is not None
        if memory.coverage is not None:
            memory = replace(memory, coverage=memory.coverage + seen.sum(1))
        logits, state = self.decoder.write(h, context, replace(state, memory=memory))
        gate = self.gate(torch.cat((context, h, self.decoder.embedding(known)), -1))  # eq. 8, before its sigmoid
        gate = gate[..., 0].to(seen.dtype).masked_fill(seen.sum(-1) == 0, GENERATE_LOGIT)
        return Mixture(logits.to(seen.dtype), gate, seen, copies), state


class Mixture(NamedTuple):
    """A distribution over the vocabulary, one over source words, and the gate between them (See et al. 2017, eq. 9)."""

    logits: Float[Tensor, "b t vocabulary"]
    gate: Float[Tensor, "b t"]
    A: Float[Tensor, "b t n"]
    copies: Int[Tensor, "b n"]

    @classmethod
    def concat(cls, parts: Sequence[Mixture]) -> Mixture:
        """Concatenate the mixtures of successive steps."""
        logits, gate, A, copies = zip(*parts, strict=True)
        return cls(torch.cat(logits, 1), torch.cat(gate, 1), torch.cat(A, 1), copies[0])

    def log_p(self, words: int) -> Float[Tensor, "b t words"]:
        """Return log p of every word; -inf for a word in neither the vocabulary nor the source."""
        generated = self.logits.log_softmax(-1) + F.logsigmoid(self.gate)[..., None]
        generated = F.pad(generated, (0, words - generated.shape[-1]), value=-torch.inf)
        places = self.copies[:, None].expand(self.A.shape)
        copied = self.A.new_zeros(generated.shape).scatter_add(2, places, self.A)
        both = torch.logaddexp(generated, self._log_copied(copied, self.gate[..., None]))
        return both.masked_fill((generated == -torch.inf) & (copied == 0), -torch.inf)

    def log_p_of(self, words: Int[Tensor, "b t"]) -> Float[Tensor, "b t"]:
        """Return log p of one word per step, with memory b t n rather than b t words."""
        outside = words >= self.logits.shape[-1]
        generated = self.logits.log_softmax(-1).gather(2, words.masked_fill(outside, 0)[..., None])[..., 0]
        generated = (generated + F.logsigmoid(self.gate)).masked_fill(outside, -torch.inf)
        copied = (self.A * (self.copies[:, None] == words[..., None])).sum(-1)
        return torch.logaddexp(generated, self._log_copied(copied, self.gate))

    def _log_copied(self, p: Tensor, gate: Tensor) -> Tensor:
        """log (1 - g) p, with p clamped to the smallest positive number, since log 0 has no gradient."""
        return p.clamp(min=torch.finfo(p.dtype).tiny).log() + F.logsigmoid(-gate)


@dataclass(frozen=True, kw_only=True, eq=False)
class PointerState:
    """The state of the decoder, and the ids of the source words, stored once per source row."""

    inner: RecurrentState
    copies: Int[Tensor, "b n"]
    words: int  # size of the vocabulary plus the largest number of other words in a row
    attention: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of hypotheses."""
        return self.inner.rows

    def select(self, rows: Int[Tensor, " chosen"]) -> PointerState:
        """Return the state of the given rows, in their order; a row may repeat."""
        return PointerState(inner=self.inner.select(rows), copies=self.copies, words=self.words)
