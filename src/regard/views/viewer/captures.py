"""Library: one capture or two, and what an answer needs of them by number: matrices, summaries, maps.

What is not there is `Refused`; what is being measured is `Pending`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...lens.recording.reduced import Reduced
from ...lens.tape.overview import Overview
from ...ops.weights import Summary, Weights, map_axes
from . import pyramid
from .describe import Capture
from .device_cache import Stage
from .matrix_view import Difference, Head, Sheet, Stored, Together, together
from .pyramid import span
from .worker import Desk

AT_ONCE = 4096**2  # weights an answer may take while somebody waits
ON_GPU = 131072**2  # as many where a GPU finds them
SAMPLED = 16  # queries an overview is made of where there is no time for all

Which = int | Literal["mean", "max"]


class Chosen(NamedTuple):
    """One matrix: of which capture, layer, batch row and head, or of all heads together."""

    capture: int
    layer: int
    batch: int
    head: Which


class Refused(Exception):
    """A question that has no answer: the status to send, what is wrong and what to do."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


class Pending(Exception):
    """An answer that is being made; the share that is done, where that is known."""

    def __init__(self, done: float | None) -> None:
        super().__init__("pending")
        self.done = done


class Library:
    """The captures of a viewer."""

    def __init__(self, captures: Sequence[Capture], desk: Desk, device: torch.device | None = None) -> None:
        self.captures = list(captures)
        self._desk = desk
        self._stage = Stage(device)

    def capture(self, capture: int) -> Capture:
        """A capture by number."""
        return one_of("capture", self.captures, capture)

    def entry(self, capture: int, layer: int, batch: int) -> Weights | Reduced:
        """The weights of a layer that has such a batch row, or what was kept of them."""
        of = self.capture(capture)
        check_below("layer", layer, len(of.keys))
        A = of.entry(layer)
        check_below("batch", batch, A.shape[0])
        return A

    def weights(self, capture: int, layer: int, batch: int) -> Weights:
        """The weights of a layer."""
        A = self.entry(capture, layer, batch)
        if isinstance(A, Reduced):
            raise Refused(400, "of this layer only measures were kept", "capture it without keep=[...]")
        return A

    def heads(self, A: Weights | Reduced, head: Which) -> list[int]:
        """The heads that are meant."""
        if isinstance(head, int):
            check_below("head", head, A.shape[1])
            return [head]
        return list(range(A.shape[1]))

    def sheet(self, chosen: Chosen, minus: Chosen | None = None) -> Sheet:
        """The matrix that was chosen, or what is left when another is taken away."""
        A = self.weights(*chosen[:3])
        heads = [self._head(*chosen[:3], head) for head in self.heads(A, chosen.head)]
        sheet = heads[0] if isinstance(chosen.head, int) else Together(heads, chosen.head)
        if minus is None:
            return sheet
        other = self.sheet(minus)
        check_same_kind(sheet.shape, other.shape)
        return Difference(sheet, other)

    def map(self, chosen: Chosen) -> Stored:
        """The stored map."""
        A = self.entry(*chosen[:3])
        heads = self.heads(A, chosen.head)
        if isinstance(A, Weights):
            maps, axes = self.summary(chosen.capture, chosen.layer).map, map_axes(*A.call.shape[2:])
        elif A.maps:
            finest = max(A.maps, key=lambda name: A[name].shape[-1])
            maps, axes = A[finest], A.axes(finest)
        else:
            raise Refused(400, "of this layer no map was kept", "capture with keep=['pool:512', ...]")
        return together(maps[chosen.batch, heads].float().cpu(), axes, "max" if chosen.head == "max" else "mean")

    def pooled(self, chosen: Chosen, level: int) -> Tensor:
        """The whole map in the cells of a level, from the stored one."""
        n_i, n_j = self.entry(*chosen[:3]).shape[-2:]
        return pyramid.from_map(self.map(chosen), span(n_i, level, 0), span(n_j, level, 0)).mean

    def summarized(self, capture: int, layer: int) -> bool:
        """Is the summary of a layer there?"""
        of = self.captures[capture]
        return isinstance(of.entry(layer), Weights) and of.tape.summarized(of.keys[layer])

    def summary(self, capture: int, layer: int) -> Summary:
        """The summary of a layer, stored or made now; `Pending` where that takes a while."""
        of = self.captures[capture]
        A = of.entry(layer)
        if not self.summarized(capture, layer):
            if not worth_measuring(A):
                raise unsummarized()
            if A.shape.numel() > AT_ONCE:
                key = of.keys[layer]
                raise Pending(self._desk.later(("measure", capture, layer), lambda: of.tape.summarizing(key)))
        return of.tape.summary(of.keys[layer])

    def overview(self, capture: int, layer: int) -> tuple[Overview, bool]:
        """The overview of a layer, and whether it is of all queries or only of some."""
        of = self.captures[capture]
        A = of.entry(layer)
        if isinstance(A, Weights) and not self.summarized(capture, layer):
            if not worth_measuring(A):
                return _sampled(A), False
            self.summary(capture, layer)
        return of.tape.overview(of.keys[layer]), True

    def _head(self, capture: int, layer: int, batch: int, head: int) -> Head:
        key, summarized = (capture, layer, batch, head), self.summarized(capture, layer)
        known = self._stage.get(key)
        if known is None or (summarized and known.stored() is None):
            map = self.summary(capture, layer).map[batch, head] if summarized else None
            known = self._stage.bring(key, self.weights(capture, layer, batch), batch, head, map)
        return known


def at_once(sheet: Sheet) -> int:
    """How many weights of a matrix an answer may take while somebody waits."""
    return AT_ONCE if sheet.device.type == "cpu" else ON_GPU


def worth_measuring(A: Weights | Reduced) -> bool:
    """Can a head be measured in seconds?"""
    return A.shape[-2:].numel() <= 8 * AT_ONCE


def unsummarized() -> Refused:
    """The answer to what would take minutes."""
    return Refused(
        409,
        "this takes too long without a summary, and the capture holds none",
        "write tape.summarize() before tape.save(...)",
    )


def one_of(name: str, values: Sequence[Any], number: int) -> Any:
    """A value by number."""
    check_below(name, number, len(values))
    return values[number]


def check_below(name: str, value: int, n: int) -> None:
    """Refuse a number that names nothing."""
    if not 0 <= value < n:
        between = f"from 0 to {n - 1}" if n else "of something, and there is none"
        raise Refused(400, f"{name} must be {between}, got {value}", "the session lists what there is")


def check_same_kind(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """Refuse the difference of matrices of different shapes."""
    if ours != theirs:
        raise Refused(400, f"a difference is of matrices of one shape, got {ours} and {theirs}", "choose another")


def _sampled(A: Weights) -> Overview:
    """An overview from some queries of each head."""
    heads, n = A.shape[1], A.shape[-2]
    rows = (torch.arange(SAMPLED) * (n // SAMPLED) + n // (2 * SAMPLED)).to(A.device)
    calls = [A.call.select(heads=slice(head, head + 1), rows=rows) for head in range(heads)]
    parts = [Overview.of(Weights(call).summary()) for call in calls]
    return Overview(*(torch.cat([getattr(part, x.name) for part in parts], 1) for x in dataclasses.fields(Overview)))
