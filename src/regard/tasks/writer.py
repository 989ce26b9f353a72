"""Writer: encoder-decoders with their tokenizers, which read lines and write lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import decode
from ..decode import Ensemble, Gnmt, Hypothesis
from ..lens import Tape
from . import aligning
from .encoded import Encoded, in_batches
from .pairs import Paired, Tokenizers

TOKENS = 4096  # of a batch
MOST = 500  # pairs on one tape
Shown = Callable[[int, int], None]  # is told how many are done, and of how many


@dataclass(frozen=True, kw_only=True)
class Written:
    """A line that was written, and what the writer thought of it; `finished` is False where it was cut off."""

    text: str
    score: float
    log_probability: float
    finished: bool


class Writer:
    """One encoder-decoder, or several over the same vocabularies that decode as one.

    `longest` is the longest target of the training, in tokens: what is written is at most half as long again. Lines
    are read in batches of like length, and each is written as if it were alone. `show(done, all)` hears of progress.
    """

    def __init__(self, models: Sequence[nn.Module], tokenizers: Tokenizers, *, longest: int) -> None:
        self.models, self.tokenizers, self.longest = list(models), tokenizers, longest
        self.device = next(models[0].parameters()).device
        steppers: Any = self.models
        self._stepper = steppers[0] if len(steppers) == 1 else Ensemble(steppers)

    def write(
        self,
        lines: Sequence[str],
        *,
        beam: int = 5,
        alpha: float = 0.6,
        min_length: int = 0,
        no_repeat: int | None = None,
        show: Shown | None = None,
    ) -> list[Written]:
        """The best that beam search finds for each line; a beam of 1 is greedy."""
        found = self.n_best(lines, n=1, beam=beam, alpha=alpha, min_length=min_length, no_repeat=no_repeat, show=show)
        return [best[0] for best in found]

    def n_best(
        self,
        lines: Sequence[str],
        *,
        n: int,
        beam: int = 5,
        alpha: float = 0.6,
        min_length: int = 0,
        no_repeat: int | None = None,
        show: Shown | None = None,
    ) -> list[list[Written]]:
        """The n best for each line, best first; `alpha` is that of the length penalty of Wu et al. 2016.

        None is shorter than `min_length` tokens, and none has the same `no_repeat` tokens in a row twice.
        """
        found: list[list[Written]] = [[] for _ in lines]
        limits: dict[str, Any] = {
            "end": self.tokenizers.target.eos,
            "max_length": max(self.longest * 3 // 2 + 10, min_length),
            "min_length": min_length,
            "no_repeat": no_repeat,
            "forbid": self.tokenizers.target.unwritten,
        }
        for rows, batch in self._batches(self.tokenizers.sources(lines), show):
            prefix = self._starts(len(rows))
            if beam == n == 1:
                best = [[one] for one in decode.greedy(self._stepper, batch, prefix, **limits)]
            else:
                penalty = Gnmt(alpha)
                best = decode.beam(self._stepper, batch, prefix, width=beam, n_best=n, length=penalty, **limits)
            for row, hypotheses in zip(rows, best, strict=True):
                found[row] = [self._written(one, lines[row]) for one in hypotheses]
        return found

    def score(self, pairs: Sequence[Paired], *, show: Shown | None = None) -> list[float]:
        """log p(target | source) of each pair, the end included."""
        found = [0.0] * len(pairs)
        examples = self.tokenizers.encode(pairs)
        for rows, batch in self._batches(examples, show):
            targets = [[examples[row]["target"].tolist()] for row in rows]
            scored = decode.score(self._stepper, batch, self._starts(len(rows)), targets)
            for row, [one] in zip(rows, scored, strict=True):
                found[row] = one.log_probability
        return found

    def tape(self, pairs: Sequence[Paired]) -> Tape:
        """Every attention of the model over these pairs, a batch row each, to be measured, saved and viewed."""
        if len(self.models) > 1:
            raise ValueError(f"a tape is of one model, got {len(self.models)}; load one of them")
        if not 0 < len(pairs) <= MOST:
            raise ValueError(f"a tape holds the attention of 1 to {MOST} pairs, got {len(pairs)}")
        batch = self.tokenizers.encode(pairs).batch(range(len(pairs)), pad=self.tokenizers.pad, device=self.device)
        return aligning.tape_of(self.models[0], self.tokenizers, pairs, batch)

    def _batches(self, examples: Encoded, show: Shown | None) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        done = 0
        for rows, batch in in_batches(examples, tokens=TOKENS, pad=self.tokenizers.pad, device=self.device):
            yield rows, batch
            done += len(rows)
            if show is not None:
                show(done, len(examples))

    def _starts(self, rows: int) -> Tensor:
        return torch.full((rows, 1), self.tokenizers.target.bos, device=self.device)

    def _written(self, one: Hypothesis, line: str) -> Written:
        text = self.tokenizers.text(one.tokens, line)
        return Written(text=text, score=one.score, log_probability=one.log_probability, finished=one.finished)
