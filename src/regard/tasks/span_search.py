"""Finding: the stretches of documents that a model points at, over every window it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.buckets import buckets
from ..lens import Tape, capture
from ..models import top_spans
from .document_windows import InputLayout, WindowExamples
from .seq2seq_task import ShowProgress

TOKENS_PER_BATCH = 8192  # of a batch
Span = tuple[int, int]  # characters of a document, from the first to behind the last


@dataclass(frozen=True, eq=False)
class SpanFinder:
    """A model over windows, and the most tokens of what it may find; scores are log-odds against finding nothing."""

    model: nn.Module
    layout: InputLayout
    longest: int

    def spans(
        self, window_examples: WindowExamples, n: int, show: ShowProgress | None = None
    ) -> list[dict[Span, float]]:
        """What is found for each question, the n best of each window; of what windows share, the better score."""
        found: list[dict[Span, float]] = [{} for _ in window_examples.questions]
        for number, scores, places in self._read(window_examples, n, show):
            window, best = window_examples.window(number), found[window_examples.owners[number]]
            for score, (first, last) in zip(scores, places, strict=True):
                if score > -math.inf:
                    span = int(window.starts[first]), int(window.ends[last])
                    best[span] = max(score, best.get(span, -math.inf))
        return found

    def windows(self, window_examples: WindowExamples) -> list[int]:
        """For each question the window with the best find, by number."""
        best: dict[int, tuple[float, int]] = {}
        for number, [score], _ in self._read(window_examples, 1):
            owner = window_examples.owners[number]
            best[owner] = max(best.get(owner, (-math.inf, number)), (score, number))
        return [best[owner][1] for owner in sorted(best)]

    def tape(self, window_examples: WindowExamples, numbers: Sequence[int]) -> Tape:
        """Every attention of the model while it reads these windows, a batch row each."""
        batch = window_examples.batch(numbers, self._device)
        with capture(self.model, self.layout.named(batch)) as tape, torch.no_grad():
            self.layout.logits(self.model, batch)
        return tape

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _read(
        self, window_examples: WindowExamples, n: int, show: ShowProgress | None = None
    ) -> Iterator[tuple[int, list[float], list[tuple[int, int]]]]:
        """Every window, by its number: the scores of its n best spans, and their first and last tokens in it."""
        done = 0
        for rows in buckets([(length,) for length in window_examples.lengths], tokens=TOKENS_PER_BATCH):
            scores, places = self._best(window_examples.batch(rows, self._device), n)
            yield from zip(rows, scores.tolist(), places.tolist(), strict=True)
            done += len(rows)
            if show is not None:
                show(done, len(window_examples))

    def _best(self, batch: Mapping[str, Tensor], n: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            start, end = (x.float() for x in self.layout.logits(self.model, batch))
        places = torch.arange(start.shape[1], device=start.device)
        among = (places >= batch["first"][:, None]) & (places < batch["behind"][:, None])
        scores, spans = top_spans(start, end, k=n, among=among, longest=self.longest)
        return scores - (start + end)[:, :1], spans - batch["first"][:, None, None]
