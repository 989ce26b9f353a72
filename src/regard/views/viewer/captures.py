"""The captures of a viewer, one or two: their layers, matrices, summaries and maps by number.

A number that is out of range raises `ApiError`; a summary that is still being computed raises `Pending`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...lens.analysis.flow import value_norms
from ...lens.real_tokens import without_queries
from ...lens.recording.reduced import Reduced, peaks_of
from ...lens.tape.overview import Overview
from ...lens.tape.tape import Tape
from ...ops.weights import Summary, Weights
from . import pyramid
from .describe import Capture
from .device_cache import DeviceCache
from .matrix_view import (
    Difference,
    HeadsAggregate,
    HeadView,
    MatrixView,
    StoredMap,
    ValueWeighted,
    aggregate_maps,
    map_of_summary,
)
from .pyramid import span
from .wire_format import EXACT, Certainty
from .worker import Worker

MAX_IMMEDIATE_WEIGHTS = 4096**2  # computed for an answer while the browser waits
MAX_IMMEDIATE_WEIGHTS_GPU = 131072**2  # the same on a GPU
MAX_BACKGROUND_WEIGHTS = 2**31  # computed by one background job
MAX_STEP_WEIGHTS = 2**29  # measured in one background step, while requests wait
SAMPLED_QUERIES = 16  # queries per head for an overview while, or if, all take too long
MAX_VARIANTS = 64  # layers with hidden keys, with their summaries
SAMPLE_RETRY_SECONDS = 1.0  # after which the browser asks whether all queries are measured

Which = int | Literal["mean", "max"]


class Variant(NamedTuple):
    """A capture with some keys hidden, as `Tape.without` hides them, or with norms in place of weights.

    Hidden keys are numbers, or names of kinds. The norms are those of `ValueWeighted`.
    """

    capture: int
    hide: tuple[str | int, ...] = ()
    by_values: bool = False


CaptureId = int | Variant


class MatrixId(NamedTuple):
    """The numbers of a matrix: capture, layer, batch row, and head or an aggregate over all heads."""

    capture: CaptureId
    layer: int
    batch: int
    head: Which


class PlaceId(NamedTuple):
    """The numbers of a layer over one batch row: capture, layer, batch row."""

    capture: CaptureId
    layer: int
    batch: int


class ApiError(Exception):
    """A request that cannot be answered: the HTTP status, what is wrong and what to do."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


class Pending(Exception):
    """The answer is being computed; `done` is the share computed so far, None if unknown."""

    def __init__(self, done: float | None) -> None:
        super().__init__("pending")
        self.done = done


class Library:
    """The captures of a viewer, with a cache of heads on the computing device."""

    def __init__(self, captures: Sequence[Capture], worker: Worker, device: torch.device | None = None) -> None:
        self.captures = list(captures)
        self._worker = worker
        self._device_cache = DeviceCache(device)
        self._without_padding: dict[tuple[CaptureId, int], tuple[Weights, Weights]] = {}
        self._variants: OrderedDict[tuple[Variant, int], Tape] = OrderedDict()

    def capture(self, capture: CaptureId) -> Capture:
        """Return a capture by number; that of a variant is the capture it was made of."""
        return get_by_number("capture", self.captures, capture.capture if isinstance(capture, Variant) else capture)

    def tape(self, capture: CaptureId, layer: int) -> Tape:
        """Return the tape that a layer is on: that of the capture or, for a variant, one of this layer alone."""
        of = self.capture(capture)
        check_below("layer", layer, len(of.keys))
        if not isinstance(capture, Variant) or not capture.hide:
            return of.tape
        capture = capture._replace(by_values=False)
        if (capture, layer) not in self._variants:
            if "sinks" in capture.hide:
                self.must_know_sinks(capture, layer)
            try:
                self._variants[capture, layer] = of.tape.select([layer]).without(*capture.hide)
            except (ValueError, IndexError) as error:
                raise ApiError(400, str(error), "hide other keys, or choose another layer") from None
            if len(self._variants) > MAX_VARIANTS:
                self._variants.popitem(last=False)
        self._variants.move_to_end((capture, layer))
        return self._variants[capture, layer]

    def counterpart(self, capture: int, layer: int) -> int | None:
        """Return the layer of the other capture that a layer is compared with; None if there is none.

        It has the same name and call, or else the same number and size.
        """
        if len(self.captures) != 2:
            return None
        own, others = self.captures[capture].layers[layer], self.captures[1 - capture].layers
        named = [n for n, other in enumerate(others) if (other["name"], other["call"]) == (own["name"], own["call"])]
        if named:
            return named[0]
        return layer if layer < len(others) and _size(others[layer]) == _size(own) else None

    def can_subtract(self, layer: int) -> bool:
        """Whether a layer of the first capture and its counterpart have the same size."""
        found = self.counterpart(0, layer)
        return found is not None and _size(self.captures[0].layers[layer]) == _size(self.captures[1].layers[found])

    def must_know_sinks(self, capture: CaptureId, layer: int) -> None:
        """Measure a layer as it was captured, as `summary` does."""
        capture = capture.capture if isinstance(capture, Variant) else capture
        self.weights(capture, layer, 0)
        self.summary(capture, layer)

    def entry(self, capture: CaptureId, layer: int, batch: int) -> Weights | Reduced:
        """Return the weights, or the kept measures, of a layer; raises `ApiError` if it lacks the batch row."""
        A = self._entry(capture, layer)
        check_below("batch", batch, A.shape[0])
        return A

    def _entry(self, capture: CaptureId, layer: int) -> Weights | Reduced:
        tape = self.tape(capture, layer)
        if hides_keys(capture):
            A = tape[0]
            assert isinstance(A, Weights)
            return A
        return self.capture(capture).entry(layer)

    def weights(self, capture: CaptureId, layer: int, batch: int) -> Weights:
        """Return the weights of a layer; raises `ApiError` if only measures were kept."""
        A = self.entry(capture, layer, batch)
        if isinstance(A, Reduced):
            raise ApiError(
                400, "this capture kept only measures of the layer, not its weights", "capture without keep=[...]"
            )
        return A

    def heads(self, A: Weights | Reduced, head: Which) -> list[int]:
        """Return the numbers of the heads: one, or all for an aggregate."""
        if isinstance(head, int):
            check_below("head", head, A.shape[1])
            return [head]
        return list(range(A.shape[1]))

    def matrix_view(self, chosen: MatrixId, minus: MatrixId | None = None) -> MatrixView:
        """Return the view of a matrix, or of its difference from another one."""
        A = self.weights(*chosen[:3])
        heads: list[MatrixView] = [self._head(*chosen[:3], head) for head in self.heads(A, chosen.head)]
        if isinstance(chosen.capture, Variant) and chosen.capture.by_values:
            norms = self._value_norms(*chosen[:3])
            heads = [ValueWeighted(head, norms[n]) for head, n in zip(heads, self.heads(A, chosen.head), strict=True)]
        view = heads[0] if isinstance(chosen.head, int) else HeadsAggregate(heads, chosen.head)
        if minus is None:
            return view
        other = self.matrix_view(minus)
        check_same_shape(view.shape, other.shape)
        return Difference(view, other)

    def _value_norms(self, capture: CaptureId, layer: int, batch: int) -> Tensor:
        """Return `h j`: the norm of what each key adds to the output with a weight of 1."""
        of = self.capture(capture)
        extras = of.tape.extras(of.keys[layer])
        if extras.v is None:
            raise ApiError(400, "this capture kept no values", "capture with capture(model, values=True)")
        heads = self.weights(capture, layer, batch).shape[1]
        v = extras.v[batch : batch + 1]
        if extras.projection is None:
            return v[0].float().norm(dim=-1).repeat_interleave(heads // v.shape[1], 0)
        return value_norms(v, extras.projection)[0]

    def map(self, chosen: MatrixId) -> StoredMap:
        """Return the stored map of a matrix."""
        place = PlaceId(*chosen[:3])
        heads = self.heads(self.entry(*place), chosen.head)
        stored = self.maps(place)
        if not isinstance(chosen.head, int):
            return aggregate_maps(stored, chosen.head)
        return stored._replace(map=stored.map[heads[0]], peaks=None if stored.peaks is None else stored.peaks[heads[0]])

    def maps(self, place: PlaceId) -> StoredMap:
        """Return the stored maps of all heads of a layer over one batch row, `h rows cols`."""
        A = self.entry(*place)
        every = list(range(A.shape[1]))
        if isinstance(A, Weights):
            return map_of_summary(self.summary(place.capture, place.layer), place.batch, every)
        if not A.maps:
            raise ApiError(400, "this capture kept no map of the layer", "capture with keep=['pool:512', ...]")
        finest = max(A.maps, key=lambda name: A[name].shape[-1])
        maps, peaks = (
            A[name][place.batch].float().cpu() if name in A.names else None for name in (finest, peaks_of(finest))
        )
        assert maps is not None
        return StoredMap(maps, A.axes(finest), True, peaks)

    def map_at_level(self, chosen: MatrixId, level: int) -> Tensor:
        """Resample the stored map of a matrix to the cells of a level."""
        n_i, n_j = self.entry(*chosen[:3]).shape[-2:]
        return pyramid.from_map(self.map(chosen), span(n_i, level, 0), span(n_j, level, 0)).mean

    def has_summary(self, capture: CaptureId, layer: int) -> bool:
        """Whether the summary of a layer is stored."""
        A, of = self._entry(capture, layer), self.capture(capture)
        if not isinstance(A, Weights):
            return False
        if of.kept is not None and not hides_keys(capture):
            of.kept.restore(of.tape, of.keys[layer])
        return self.tape(capture, layer).summarized(of.keys[layer])

    def _measure(self, capture: CaptureId, layer: int) -> float | None:
        """Measure a layer in the background, and keep the summary of a layer without hidden keys beside its file."""
        of, tape = self.capture(capture), self.tape(capture, layer)
        kept, key = None if hides_keys(capture) else of.kept, of.keys[layer]
        steps = tape.summarizing if kept is None else partial(kept.measuring, tape)
        return self._worker.schedule(("measure", capture, layer), lambda: steps(key))

    def summary(self, capture: CaptureId, layer: int) -> Summary:
        """Return the stored summary of a layer, or compute it; raises `Pending` if that takes a while."""
        A, tape, key = self._entry(capture, layer), self.tape(capture, layer), self.capture(capture).keys[layer]
        if not self.has_summary(capture, layer):
            if not is_quick_to_measure(A):
                raise no_summary_error()
            if A.shape.numel() > MAX_IMMEDIATE_WEIGHTS:
                raise Pending(self._measure(capture, layer))
        return tape.summary(key)

    def overview(self, capture: CaptureId, layer: int) -> tuple[Overview, Certainty]:
        """Return the overview of a layer: from a sample of its queries if all take long, until they are measured."""
        A, tape, key = self._entry(capture, layer), self.tape(capture, layer), self.capture(capture).keys[layer]
        if isinstance(A, Weights) and not self.has_summary(capture, layer):
            if not is_quick_to_measure(A):
                soon = A.shape[-2:].numel() <= MAX_STEP_WEIGHTS and A.shape.numel() <= MAX_BACKGROUND_WEIGHTS
                if soon:
                    self._measure(capture, layer)
                retry = SAMPLE_RETRY_SECONDS if soon else None
                certainty = Certainty("sampled", retry=retry, of=(SAMPLED_QUERIES, A.shape[-2]))
                return _sample_overview(A, tape.real_queries(key)), certainty
            self.summary(capture, layer)
        return tape.overview(key), EXACT

    def _head(self, capture: CaptureId, layer: int, batch: int, head: int) -> HeadView:
        key, summarized = (capture, layer, batch, head), self.has_summary(capture, layer)
        known = self._device_cache.get(key)
        if known is None or (summarized and known.stored_map() is None):
            A = self._real_weights(capture, layer, batch)
            stored = map_of_summary(self.summary(capture, layer), batch, head) if summarized else None
            known = self._device_cache.add(key, A, batch, head, stored)
        return known

    def _real_weights(self, capture: CaptureId, layer: int, batch: int) -> Weights:
        """Return the weights of a layer with zeros in the rows of padding queries."""
        A, key = self.weights(capture, layer, batch), self.capture(capture).keys[layer]
        real = self.tape(capture, layer).real_queries(key)
        if bool(real.all()):
            return A
        if self._without_padding.get((capture, layer), (None, None))[0] is not A:
            self._without_padding[capture, layer] = A, without_queries(A, real)
        return self._without_padding[capture, layer][1]


def _size(described: dict[str, Any]) -> tuple[int, int]:
    return described["n_i"], described["n_j"]


def hides_keys(capture: CaptureId) -> bool:
    """Whether keys of a capture are hidden."""
    return isinstance(capture, Variant) and bool(capture.hide)


def immediate_weights(view: MatrixView) -> int:
    """Return how many weights of a matrix may be computed while the browser waits."""
    return MAX_IMMEDIATE_WEIGHTS if view.device.type == "cpu" else MAX_IMMEDIATE_WEIGHTS_GPU


def is_quick_to_measure(A: Weights | Reduced) -> bool:
    """Whether a head can be measured in seconds."""
    return A.shape[-2:].numel() <= _measured_at_once(A)


def _measured_at_once(A: Weights | Reduced) -> int:
    """Return how many weights of a head may be measured while the browser waits."""
    on_gpu = isinstance(A, Weights) and A.device.type != "cpu"
    return MAX_IMMEDIATE_WEIGHTS_GPU if on_gpu else 8 * MAX_IMMEDIATE_WEIGHTS


def no_summary_error() -> ApiError:
    """Return the error for a request that would take minutes."""
    return ApiError(
        409,
        "the capture has no summary, and without one this takes too long",
        "capture it with regard look --summarize, or call tape.summarize() before tape.save(...)",
    )


def get_by_number(name: str, values: Sequence[Any], number: int) -> Any:
    """Return a value by number; raises `ApiError` if it is out of range."""
    check_below(name, number, len(values))
    return values[number]


def check_below(name: str, value: int, n: int) -> None:
    """Raise `ApiError` unless the number is from 0 to n - 1."""
    if not 0 <= value < n:
        problem = f"{name} must be from 0 to {n - 1}, got {value}" if n else f"there is no {name}, got number {value}"
        raise ApiError(400, problem, "GET /api/session lists the valid numbers")


def check_same_shape(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """Raise `ApiError` for the difference of matrices of different shapes."""
    if ours != theirs:
        raise ApiError(
            400, f"a difference needs matrices of one shape, got {ours} and {theirs}", "choose another layer"
        )


def _sample_overview(A: Weights, real: Tensor) -> Overview:
    """Compute an overview from a sample of queries of each head; `real`, `b i`, are those that are not padding."""
    heads, n = A.shape[1], A.shape[-2]
    A = A if bool(real.all()) else without_queries(A, real)
    rows = (torch.arange(SAMPLED_QUERIES) * (n // SAMPLED_QUERIES) + n // (2 * SAMPLED_QUERIES)).to(A.device)
    calls = [A.call.select(heads=slice(head, head + 1), rows=rows) for head in range(heads)]
    counted = real[:, rows.to(real.device)].to(A.device)
    parts = [Overview.of(Weights(call).summary(), counted) for call in calls]
    return Overview(*(torch.cat([getattr(part, x.name) for part in parts], 1) for x in dataclasses.fields(Overview)))
