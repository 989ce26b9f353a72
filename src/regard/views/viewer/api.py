"""The viewer's API: a method for each resource, which returns the bytes of the response.

What takes long to compute becomes a background job; until it is done the answer is a preview, or `Pending` is raised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from ...lens.analysis.alignment import argmax_links, mutual_links
from ...lens.analysis.flow import reachable_product, rollout_per_layer
from ...lens.analysis.pair_steps import pair_steps
from ...lens.recording.reduced import WEIGHT_MEASURES, Reduced
from ...lens.tape.hidden_keys import KINDS
from ...lens.tape.overview import THUMBNAIL_CELLS
from ...ops.blocks.resample import shrink
from . import pyramid
from .captures import (
    MAX_BACKGROUND_WEIGHTS,
    MAX_IMMEDIATE_WEIGHTS,
    ApiError,
    CaptureId,
    Library,
    MatrixId,
    Pending,
    PlaceId,
    Variant,
    Which,
    check_below,
    check_same_shape,
    get_by_number,
    hides_keys,
    immediate_weights,
    no_summary_error,
)
from .describe import Capture, true_ranges
from .head_atlas import clusters_of_capture, clusters_work, roles_of_layer, roles_work
from .matrix_view import MatrixView
from .pyramid import TILE, CellSpan, CellValues, span
from .two_captures import aligned_runs, check_two, compared_weights, ranked_heads
from .wire_format import COARSE, EXACT, FINE, Certainty, Coded, coarse, error, fine, frame, plain
from .worker import ResponseCache, Worker

MAX_CACHED_BYTES = 128 * 2**20  # all cached responses together
RETRY_SECONDS = 0.4  # after which the browser repeats a request
MAX_ALIGNED_WORDS = 512  # on each side
CHUNK = 16384  # rows or columns of a long strip computed at a time
MAX_PART_WEIGHTS = 2**26  # weights that one background step of a strip computes, those for row statistics included


class ViewerApi:
    """The resources of one capture or two."""

    def __init__(self, captures: Sequence[Capture], worker: Worker, device: torch.device | None = None) -> None:
        self.library = Library(captures, worker, device)
        self._worker, self._responses = worker, ResponseCache(MAX_CACHED_BYTES)

    def session(self) -> bytes:
        """Describe the captures: layers, texts, groups and pictures."""
        described = [capture.describe() for capture in self.library.captures]
        for number, capture in enumerate(described):
            capture["layers"] = [
                {**layer, "counterpart": self.library.counterpart(number, n)}
                for n, layer in enumerate(capture["layers"])
            ]
        return _json({"format": 1, "live": True, "tile": TILE, "captures": described})

    def text(self, capture: int, text: int) -> bytes:
        """Return the tokens of a text."""
        return _json({"tokens": get_by_number("text", self.library.capture(capture).texts, text)})

    def group(self, capture: int, group: int) -> bytes:
        """Return the group of each token and the labels of the groups."""
        found = self.library.capture(capture)
        check_below("group", group, found.groups)
        groups = found.group(group)
        return _json({"ids": groups.ids.tolist(), "labels": list(groups.labels)})

    def picture(self, capture: int, picture: int) -> bytes:
        """Return a picture as PNG."""
        from PIL import Image

        pixels = get_by_number("picture", self.library.capture(capture).pictures, picture).pixels
        file = BytesIO()
        Image.fromarray(pixels.cpu().numpy()).save(file, "PNG")
        return file.getvalue()

    def hidden(self, capture: CaptureId, layer: int, batch: int) -> bytes:
        """Return the keys of a layer that each kind hides, as ranges; null for sinks that would take long to find."""
        found = self.library.capture(capture)
        self.library.entry(capture, layer, batch)
        ranges: dict[str, list[list[int]] | None] = {}
        for kind in KINDS:
            try:
                if kind == "sinks":
                    self.library.must_know_sinks(capture, layer)
                ranges[kind] = true_ranges(found.tape.hidden_keys(found.keys[layer], kind)[batch])
            except ApiError:
                ranges[kind] = None
        return _json(ranges)

    def overview(self, capture: CaptureId, layer: int, batch: int) -> bytes:
        """Return summary numbers and a thumbnail for each head."""
        return self.thumbnails(capture, layer, batch, THUMBNAIL_CELLS)

    def thumbnails(self, capture: CaptureId, layer: int, batch: int, max_side: int) -> bytes:
        """Return summary numbers and a thumbnail, at most `max_side` cells a side, for each head of a batch row."""
        self.library.entry(capture, layer, batch)
        found, certainty = self.library.overview(capture, layer)
        arrays = {name: plain(getattr(found, name)[batch]) for name in ("entropy", "distance", "max", "sink", "peak")}
        arrays["peak_key"] = plain(found.peak_key[batch], "u4")
        arrays["thumbs"] = coarse(shrink(found.thumbs[batch], max_side))
        return frame(arrays, certainty._replace(error=error(COARSE)))

    def difference(self, capture: CaptureId, layer: int, batch: int, minus: PlaceId) -> bytes:
        """Return thumbnails of a layer's heads less those of another layer, and the size of the difference."""
        return self.difference_of(PlaceId(capture, layer, batch), minus, THUMBNAIL_CELLS)

    def difference_of(self, place: PlaceId, minus: PlaceId, max_side: int) -> bytes:
        """Return thumbnails, at most `max_side` cells a side, of the difference of two layers, head by head.

        "difference" is the mean over cells of the size of their difference, and `cell` the queries and keys of a cell.
        Both are taken before anything is coded.
        """
        left, right = self.library.maps(place), self.library.maps(minus)
        heads = min(len(left.map), len(right.map))
        check_same_shape(*(tuple(axis.n for axis in stored.axes) for stored in (left, right)))
        if left.axes != right.axes:
            raise ApiError(400, "a difference needs maps with the same cells", "capture both with the same keep=[...]")
        less = left.map[:heads] - right.map[:heads]
        rows, cols = left.axes
        share = rows.edges().diff()[:, None] * cols.edges().diff() / max(1, rows.n * cols.n)
        arrays = {"difference": plain((less.abs() * share).sum((-1, -2)))}
        arrays["thumbs"] = fine(shrink(less, max_side, left.axes))
        cell = [-(-axis.n // axis.count) for axis in left.axes]
        return frame(arrays, Certainty(error=error(FINE)), cell=cell)

    def comparison(self) -> bytes:
        """Return the heads of two captures, ranked by how much they differ over the tokens that both texts have."""
        check_two(self.library)
        key = ("comparison",)
        known = self._responses.get(key)
        if known is not None:
            return known

        def steps() -> Iterator[float]:
            for found in ranked_heads(self.library):
                if isinstance(found, float):
                    yield found
                else:
                    self._responses.put(key, _json({"rows": found}))

        if compared_weights(self.library) > MAX_IMMEDIATE_WEIGHTS:
            raise Pending(self._worker.schedule(key, steps))
        for _ in steps():
            pass
        found = self._responses.get(key)
        assert found is not None
        return found

    def same_tokens(self, capture: int, layer: int, batch: int) -> bytes:
        """Return which queries and keys of a layer are which in the other capture, as runs of positions."""
        check_two(self.library)
        self.library.entry(capture, layer, batch)
        key = "same_tokens", capture, layer, batch
        known = self._responses.get(key)
        return known or self._responses.put(key, _json(aligned_runs(self.library, capture, layer, batch)))

    def predictions(self, capture: int, layer: int, batch: int) -> bytes:
        """Return the log-probability of each token, and the tokens that were expected, by the layer that has them.

        "top" numbers the names from 1 on, 0 is none.
        """
        self.library.entry(capture, layer, batch)
        found = self.library.capture(capture).predictions(layer)
        if found is None:
            raise ApiError(400, "the capture holds no predictions of its own for this layer", "call tape.predict(...)")
        arrays = {"log_probability": plain(found.log_probability[batch]), "top": plain(found.top[batch] + 1, "u4")}
        arrays["top_log_probability"] = plain(found.top_log_probability[batch])
        return frame(arrays, names=list(found.names))

    def roles(self, capture: int, layer: int) -> bytes:
        """Return the scores and the roles of each head of a layer, over all texts."""
        work = roles_work(self.library, capture, layer)
        return self._now_or_later(("roles", capture, layer), work, lambda: roles_of_layer(self.library, capture, layer))

    def clusters(self, capture: int) -> bytes:
        """Return clusters of a capture's heads that attend alike."""
        work = clusters_work(self.library, capture)
        return self._now_or_later(("clusters", capture), work, lambda: clusters_of_capture(self.library, capture))

    def measures(self, capture: CaptureId, layer: int, batch: int, head: Which, level: int) -> bytes:
        """Return the measures of queries and keys, averaged over cells of 2**level tokens."""
        found = self.pooled_measures(MatrixId(capture, layer, batch, head), level)
        return frame({name: plain(x) for name, x in found.items()})

    def pooled_measures(self, chosen: MatrixId, level: int) -> dict[str, Tensor]:
        """Compute entropy, max and distance per cell of queries, and received per cell of keys, over real tokens."""
        A = self.library.entry(*chosen[:3])
        self.library.heads(A, chosen.head)
        check_below("level", level, pyramid.levels(*A.shape[-2:]) + 8)
        if isinstance(A, Reduced):
            kept = {name: A[name] for name in WEIGHT_MEASURES if name in A.kept}
        else:
            summary = self.library.summary(chosen.capture, chosen.layer)
            kept = {name: getattr(summary, name) for name in WEIGHT_MEASURES}
        one = {name: x[chosen.batch] for name, x in kept.items()}
        rows = {name: x[chosen.head] if isinstance(chosen.head, int) else x.mean(0) for name, x in one.items()}
        tape, key = self.library.capture(chosen.capture).tape, self.library.capture(chosen.capture).keys[chosen.layer]
        queries, keys = tape.real_queries(key)[chosen.batch].cpu(), tape.real_keys(key)[chosen.batch].cpu()
        return {
            name: _means(x.float().cpu(), 2**level, keys if name == "received" else queries) for name, x in rows.items()
        }

    def tile(
        self,
        capture: CaptureId,
        layer: int,
        batch: int,
        head: Which,
        minus: MatrixId | None,
        level: int,
        row: int,
        col: int,
    ) -> bytes:
        """Return a tile of the map: exact, or a preview while the exact one is being computed."""
        return self._map_tile(MatrixId(capture, layer, batch, head), minus, level, row, col)

    def largest(
        self,
        capture: CaptureId,
        layer: int,
        batch: int,
        head: Which,
        minus: MatrixId | None,
        level: int,
        row: int,
        col: int,
    ) -> bytes:
        """Return a tile with the largest weight of each cell; the tile lacks it where a capture did not keep it."""
        return self._map_tile(MatrixId(capture, layer, batch, head), minus, level, row, col, needs_largest=True)

    def _map_tile(
        self,
        chosen: MatrixId,
        minus: MatrixId | None,
        level: int,
        row: int,
        col: int,
        *,
        needs_largest: bool = False,
    ) -> bytes:
        key = "tile", chosen, minus, level, row, col
        known = self._responses.get(key) or (None if needs_largest else self._responses.get(("mean", *key)))
        if known is not None:
            return known
        A = self.library.entry(*chosen[:3])
        n_i, n_j = A.shape[-2:]
        check_below("level", level, pyramid.levels(n_i, n_j))
        rows, cols = span(n_i, level, row), span(n_j, level, col)
        if not (rows.cells and cols.cells):
            across, down = (-(-n // (TILE << level)) for n in (n_j, n_i))
            raise ApiError(
                400,
                f"row and col must be within {down} by {across} tiles, got {row} and {col}",
                "the session lists the levels",
            )
        if any(isinstance(self.library.entry(*one[:3]), Reduced) for one in (chosen, minus) if one is not None):
            return self._tile_of_maps(chosen, minus, rows, cols)
        view = self.library.matrix_view(chosen, minus)
        shows_norms = isinstance(chosen.capture, Variant) and chosen.capture.by_values

        def tile(cells: CellValues, certainty: Certainty = EXACT) -> bytes:
            if certainty.state == "exact" and hides_keys(chosen.capture):
                cells = pyramid.without_empty_rows(view, rows, cells)
            if not level and certainty.state == "exact":
                return _weights(cells)
            return _tile(cells, certainty, codes=not shows_norms)

        if not level or view.work(slice(rows.start, rows.stop), slice(cols.start, cols.stop)) <= immediate_weights(
            view
        ):
            for cells in pyramid.exact(view, rows, cols):
                if cells is not None:
                    return self._responses.put(key, tile(cells))
        stored = view.stored_map()
        if stored is not None and stored.exact and pyramid.has_whole_cells(stored, rows, cols):
            if stored.peaks is not None:
                return self._responses.put(key, tile(pyramid.from_map(stored, rows, cols)))
            if not needs_largest:
                return self._responses.put(("mean", *key), tile(pyramid.from_map(stored, rows, cols)))

        def steps() -> Iterator[None]:
            for cells in pyramid.exact(view, rows, cols):
                if cells is not None:
                    self._responses.put(key, tile(cells))
                yield

        self._worker.schedule(key, steps)
        preview = pyramid.preview(view, rows, cols)
        of = None if preview.queries is None else (preview.queries, rows.stop - rows.start)
        return tile(preview, Certainty("pooled" if of is None else "sampled", retry=RETRY_SECONDS, of=of))

    def token(
        self, capture: CaptureId, layer: int, batch: int, head: Which, axis: str, first: int, last: int, top: int
    ) -> bytes:
        """Return the mean weight that queries give, or the total that keys receive, and the strongest links.

        `left` is how many of the queries count: those that are not padding and see a key that is not hidden.
        """
        view = self.library.matrix_view(MatrixId(capture, layer, batch, head))
        n_i, n_j = view.shape
        check_below("last", last, n_i if axis == "query" else n_j)
        if not first <= last < first + 512:
            raise ApiError(400, f"first to last must span 1 to 512 tokens, got {first} to {last}", "request fewer")
        if not 0 <= top <= 256:
            raise ApiError(400, f"top must be from 0 to 256, got {top}", "request fewer links")
        some = slice(first, last + 1)
        rows, cols = (some, slice(0, n_j)) if axis == "query" else (slice(0, n_i), some)
        key = "token", capture, layer, batch, head, axis, first, last, top

        def steps() -> Iterator[float | bytes]:
            left = last + 1 - first
            if axis == "query":
                of = self.library.capture(capture)
                hides = hides_keys(capture)
                counts = ~view.empty_rows(some) if hides else of.tape.real_queries(of.keys[layer])[batch][some]
                left = int(counts.sum())
                weight = mean_given(view, some, counts)
                if hides and not left:
                    weight = torch.full_like(weight, torch.nan)
            else:
                parts = []
                for part in received_in_parts(view, some):
                    parts.append(part)
                    yield sum(map(len, parts)) / n_i
                weight = torch.cat(parts) if parts else torch.zeros(0)
            best = strongest(weight, min(top, len(weight)))
            links = int((best.values > 0).sum())
            top_links = {"top": plain(best.indices[:links], "u4"), "top_weight": plain(best.values[:links])}
            yield frame({"weight": plain(weight), **top_links}, left=left)

        return self._now_or_later(key, view.work(rows, cols), steps)

    def block(self, capture: CaptureId, layer: int, batch: int, row: int, rows: int, col: int, cols: int) -> bytes:
        """Return the weights of all heads in a rectangle of queries by keys.

        "total" is the weight that each query gives to all keys, inside the rectangle or not; it is left out if it would
        take long.
        """
        A = self.library.weights(capture, layer, batch)
        for name, count, start, n in (("rows", rows, row, A.shape[-2]), ("cols", cols, col, A.shape[-1])):
            if not 1 <= count <= 128 or start + count > n:
                raise ApiError(400, f"{name} must be 1 to 128 within {n}, got {count} from {start}", "request fewer")
        heads = [self.library.matrix_view(MatrixId(capture, layer, batch, head)) for head in range(A.shape[1])]
        at = slice(row, row + rows), slice(col, col + cols)
        key = "block", capture, layer, batch, row, rows, col, cols

        def steps() -> Iterator[float | bytes]:
            weight = torch.stack([head.block(*at) for head in heads])
            if hides_keys(capture):
                empty = torch.stack([head.empty_rows(at[0]) for head in heads])
                weight = weight.masked_fill(empty.to(weight.device)[..., None], torch.nan)
            arrays = {"weight": plain(weight)}
            if rows * A.shape[-1] * len(heads) <= MAX_IMMEDIATE_WEIGHTS:
                arrays["total"] = plain(torch.stack([given_in_all(head, at[0]) for head in heads]))
            yield frame(arrays)

        return self._now_or_later(key, sum(head.work(*at) for head in heads), steps)

    def pair(self, capture: CaptureId, layer: int, batch: int, head: Which, row: int, col: int) -> bytes:
        """Return the steps from one query and one key to their weight."""
        A = self.library.weights(capture, layer, batch)
        if not isinstance(head, int):
            raise ApiError(400, f"the {head} over heads has no queries and keys of its own", "choose one head")
        self.library.heads(A, head)
        for name, value, n in (("row", row, A.shape[-2]), ("col", col, A.shape[-1])):
            check_below(name, value, n)
        found = pair_steps(A, row, col, head=head, batch=batch)
        steps = {name: _finite(x) for name, x in found._asdict().items() if name != "terms"}
        q, k = A.call.q[batch, head, row], A.call.k[batch, head * A.call.k.shape[1] // A.shape[1], col]
        vectors = {"terms": found.terms, "q": q, "k": k}
        numbers = {name: None if x is None else [_finite(y) for y in x.tolist()] for name, x in vectors.items()}
        slots = {name: repr(term) for name, term in A.call.slots.items() if term is not None}
        return _json({**steps, **numbers, "slots": slots})

    def flow(self, capture: CaptureId, layer: int, batch: int, token: int) -> bytes:
        """Return the rollout of a token from the output of a layer down to the input."""
        A = self.library.weights(capture, layer, batch)
        n, numbers = A.shape[-1], self.library.capture(capture).layers[layer]["stack"]
        if not numbers:
            raise ApiError(400, f"layer {layer} is not self-attention over all of its tokens", "choose another layer")
        check_below("token", token, n)
        key = "flow", capture, layer, batch, token
        known = self._responses.get(key)
        if known is not None:
            return known
        stack = [self.library.weights(capture, number, batch).select(batch=batch) for number in numbers]

        def steps() -> Iterator[None]:
            path = []
            for r in rollout_per_layer(stack, token=token):
                path.append(r[0].float().cpu())
                yield
            arrays = {"rollout": plain(torch.stack(path[::-1]))}
            self._responses.put(key, frame(arrays, layers=numbers, level=0))

        work = len(numbers) * A.shape[1:].numel()
        if work <= MAX_IMMEDIATE_WEIGHTS:
            for _ in steps():
                pass
            found = self._responses.get(key)
            assert found is not None
            return found
        soon = work <= MAX_BACKGROUND_WEIGHTS
        if soon:
            self._worker.schedule(key, steps)
        if not all(self.library.has_summary(capture, number) for number in numbers):
            raise Pending(None) if soon else no_summary_error()
        level = pyramid.levels(n, n) - 1
        maps = [self.library.map_at_level(MatrixId(capture, number, batch, "mean"), level) for number in numbers]
        arrays = {"rollout": plain(rollout_of_maps(maps, token >> level, level, n))}
        certainty = Certainty("pooled", retry=RETRY_SECONDS if soon else None)
        return frame(arrays, certainty, layers=numbers, level=level)

    def alignment(self, capture: CaptureId, layer: int, batch: int, head: Which) -> bytes:
        """Return weights and links between the words of two sentences."""
        A = self.library.weights(capture, layer, batch)
        chosen = self.library.capture(capture)
        pairs = chosen.layers[layer]["groups"].get("words")
        words = None if pairs is None else pairs[batch]
        if words is None or None in words or chosen.layers[layer]["self"]:
            raise ApiError(400, "an alignment needs two texts with known tokens", "choose a layer of cross-attention")
        target, source = (chosen.group(number) for number in words)
        if max(len(target), len(source)) > MAX_ALIGNED_WORDS or max(A.shape[-2:]) > 8 * MAX_ALIGNED_WORDS:
            raise ApiError(400, f"an alignment shows at most {MAX_ALIGNED_WORDS} words a side", "use the map instead")
        picked = self.library.heads(A, head)
        mass = A.select(batch=batch, heads=picked).mass(target.ids.to(A.device), source.ids.to(A.device))[0]
        weight = (mass.amax(0) if head == "max" else mass.mean(0)).float().cpu()
        links = {"links": argmax_links(weight), "mutual": mutual_links(weight)}
        shown = {name: sorted(map(list, found.possible)) for name, found in links.items()}
        labels = {"target": list(target.labels), "source": list(source.labels)}
        return frame({"weight": plain(weight)}, EXACT, **labels, **shown)

    def _tile_of_maps(self, chosen: MatrixId, minus: MatrixId | None, rows: CellSpan, cols: CellSpan) -> bytes:
        """Return a tile of a capture that kept only maps: means, exact if tile cells consist of whole map cells."""
        found, exact = [], True
        n_i, n_j = self.library.entry(*chosen[:3]).shape[-2:]
        for one in (chosen,) if minus is None else (chosen, minus):
            check_same_shape((n_i, n_j), tuple(self.library.entry(*one[:3]).shape[-2:]))
            if rows.size < 1 << self.library.capture(one.capture).layers[one.layer]["finest"]:
                raise ApiError(
                    400,
                    "this capture kept only a coarser map of the layer",
                    "request the layer's finest level or above",
                )
            stored = self.library.map(one)
            found.append(pyramid.from_map(stored, rows, cols))
            exact = exact and stored.exact and pyramid.has_whole_cells(stored, rows, cols)
        cells = found[0] if len(found) == 1 else CellValues(found[0].mean - found[1].mean, None)
        return _tile(cells, Certainty("exact" if exact else "pooled"))

    def _now_or_later(self, key: Hashable, work: int, steps: Callable[[], Iterator[float | bytes]]) -> bytes:
        """Return the response, the last of the steps, now, or schedule it and raise `Pending` if it takes long."""
        known = self._responses.get(key)
        if known is not None:
            return known
        if work <= 8 * MAX_IMMEDIATE_WEIGHTS:
            *_, response = steps()
            assert isinstance(response, bytes)
            return self._responses.put(key, response)
        if work > MAX_BACKGROUND_WEIGHTS:
            raise no_summary_error()

        def keep() -> Iterator[float | None]:
            for found in steps():
                yield found if isinstance(found, float) else None
                if isinstance(found, bytes):
                    self._responses.put(key, found)

        raise Pending(self._worker.schedule(key, keep))


def mean_given(view: MatrixView, rows: slice, real: Tensor) -> Tensor:
    """Return the weight that the mean of a range of queries gives to each key; only `real` queries of it count."""
    n, counted = view.shape[1], max(1, int(real.sum()))
    real = real.to(view.device)[:, None]
    parts = (view.block(rows, slice(x, min(x + CHUNK, n))) for x in range(0, n, CHUNK))
    return torch.cat([torch.where(real, part, 0.0).sum(0) / counted for part in parts]).float().cpu()


def given_in_all(view: MatrixView, rows: slice) -> Tensor:
    """Return the weight that each query of a range gives to all keys together."""
    n = view.shape[1]
    parts = [view.block(rows, slice(x, min(x + CHUNK, n))).float().cpu().sum(1) for x in range(0, n, CHUNK)]
    return torch.stack(parts).sum(0)


def received_in_parts(view: MatrixView, cols: slice) -> Iterator[Tensor]:
    """Compute the total weight that a range of keys receives from each query, a few queries at a time."""
    start, n = 0, view.shape[0]
    while start < n:
        rows = slice(start, min(start + CHUNK, n))
        while rows.stop - rows.start > TILE and view.work(rows, cols) > MAX_PART_WEIGHTS:
            rows = slice(start, start + (rows.stop - start) // 2)
        yield view.block(rows, cols).sum(1).float().cpu()
        start = rows.stop


def strongest(weight: Tensor, count: int) -> torch.return_types.topk:
    """Return the largest weights and their indices; NaN counts as -1."""
    return torch.where(weight.isnan(), -1.0, weight).topk(count)


def rollout_of_maps(maps: Sequence[Tensor], token: int, level: int, n: int) -> Tensor:
    """Compute the rollout of a cell of tokens through maps of means, as `lens.rollout` does for single tokens."""
    counts = CellSpan(0, n, 2**level).counts().float()
    r = torch.zeros(len(counts))
    r[token] = 1.0
    path = [r]
    for mean in reversed(maps):
        W = 0.5 * mean * counts + 0.5 * torch.eye(len(counts))
        r = reachable_product(r[None], W / W.sum(1, keepdim=True))[0]
        path.append(r)
    return torch.stack(path[::-1])


def _weights(cells: CellValues) -> bytes:
    return frame({"weight": plain(cells.mean)})


def _tile(cells: CellValues, certainty: Certainty = EXACT, *, codes: bool = True) -> bytes:
    """Return a tile as codes, which end at 1, or as floats."""
    code = fine if codes else plain
    arrays: dict[str, Coded] = {"mean": code(cells.mean)}
    if cells.max is not None:
        arrays["max"] = code(cells.max)
    return frame(arrays, certainty._replace(error=error(FINE) if codes else 0.0))


def _means(x: Tensor, size: int, real: Tensor) -> Tensor:
    """Average the real entries of runs of `size`, 0 if there are none; the last run may be shorter."""
    room = CellSpan(0, len(x), size).cells * size - len(x)
    total, count = (
        torch.nn.functional.pad(y, (0, room)).view(-1, size).sum(1) for y in (torch.where(real, x, 0.0), real)
    )
    return total / count.clamp(min=1)


def _finite(x: Any) -> Any:
    """Return a number as JSON can hold it: None for NaN and infinities."""
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
