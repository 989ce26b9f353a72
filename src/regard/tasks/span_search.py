"""Find the best answer spans of documents over all their windows."""

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

TOKENS_PER_BATCH = 8192
Span = tuple[int, int]  # start and end characters in a document


@dataclass(frozen=True, eq=False)
class SpanFinder:
    """Searches spans of at most `longest` tokens; scores are log-odds against no answer."""

    model: nn.Module
    layout: InputLayout
    longest: int

    def spans(
        self, window_examples: WindowExamples, n: int, show: ShowProgress | None = None
    ) -> list[dict[Span, float]]:
        """Return the n best spans of each window, by question; a span in two windows has the better score."""
        found: list[dict[Span, float]] = [{} for _ in window_examples.questions]
        for number, scores, places in self._read(window_examples, n, show):
            window, best = window_examples.window(number), found[window_examples.owners[number]]
            for score, (first, last) in zip(scores, places, strict=True):
                if score > -math.inf:
                    span = int(window.starts[first]), int(window.ends[last])
                    best[span] = max(score, best.get(span, -math.inf))
        return found

    def windows(self, window_examples: WindowExamples) -> list[int]:
        """Return the number of the window with the best span, for each question."""
        best: dict[int, tuple[float, int]] = {}
        for number, [score], _ in self._read(window_examples, 1):
            owner = window_examples.owners[number]
            best[owner] = max(best.get(owner, (-math.inf, number)), (score, number))
        return [best[owner][1] for owner in sorted(best)]

    def tape(self, window_examples: WindowExamples, numbers: Sequence[int]) -> Tape:
        """Capture all attention while the model reads these windows, one batch row per window."""
        batch = window_examples.batch(numbers, self._device)
        with capture(self.model, self.layout.labels_by_layer(batch)) as tape, torch.no_grad():
            self.layout.logits(self.model, batch)
        return tape

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _read(
        self, window_examples: WindowExamples, n: int, show: ShowProgress | None = None
    ) -> Iterator[tuple[int, list[float], list[tuple[int, int]]]]:
        """Yield for each window its number, the scores of its n best spans, and their first and last tokens."""
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
        positions = torch.arange(start.shape[1], device=start.device)
        candidates = (positions >= batch["first"][:, None]) & (positions < batch["behind"][:, None])
        scores, spans = top_spans(start, end, k=n, among=candidates, longest=self.longest)
        return scores - (start + end)[:, :1], spans - batch["first"][:, None, None]
