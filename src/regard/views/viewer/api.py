"""Answers: every question a viewer may ask of its captures, each a method that returns the bytes to send.

What takes long is begun behind and answered with a preview, or with `Pending`, until it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from ...lens.analysis.alignment import argmax_links, mutual_links
from ...lens.analysis.flow import descent, product
from ...lens.recording.reduced import ROWS, Reduced
from ...lens.tape.overview import THUMBNAIL_CELLS
from ...ops.blocks.resample import shrink
from . import pyramid
from .captures import (
    AT_ONCE,
    Chosen,
    Library,
    Pending,
    Refused,
    Which,
    at_once,
    check_below,
    check_same_kind,
    one_of,
    unsummarized,
)
from .describe import Capture
from .matrix_view import Sheet
from .pyramid import TILE, Cells, Span, span
from .wire_format import COARSE, FINE, Coded, coarse, error, fine, frame, plain
from .worker import Desk, Shelf

BEHIND = 2**31  # weights worth finding behind
HELD = 128 * 2**20  # bytes of answers kept
RETRY = 0.4  # seconds after which to ask again
WORDS = 512  # of a sentence that is aligned
CHUNK = 16384  # rows or columns of a long strip taken at once


class Answers:
    """The questions, over one capture or two."""

    def __init__(self, captures: Sequence[Capture], desk: Desk, device: torch.device | None = None) -> None:
        self.library = Library(captures, desk, device)
        self._desk, self._shelf = desk, Shelf(HELD)

    def session(self) -> bytes:
        """What there is to look at."""
        described = [capture.describe() for capture in self.library.captures]
        return _json({"format": 1, "live": True, "tile": TILE, "captures": described})

    def text(self, capture: int, text: int) -> bytes:
        """The tokens of a text."""
        return _json({"tokens": one_of("text", self.library.capture(capture).texts, text)})

    def group(self, capture: int, group: int) -> bytes:
        """Which group each token is in, and what the groups are called."""
        found = self.library.capture(capture)
        check_below("group", group, found.groups)
        groups = found.group(group)
        return _json({"ids": groups.ids.tolist(), "labels": list(groups.labels)})

    def picture(self, capture: int, picture: int) -> bytes:
        """A picture as PNG."""
        from PIL import Image

        pixels = one_of("picture", self.library.capture(capture).pictures, picture).pixels
        file = BytesIO()
        Image.fromarray(pixels.cpu().numpy()).save(file, "PNG")
        return file.getvalue()

    def overview(self, capture: int, layer: int, batch: int) -> bytes:
        """A few numbers and a small map for each head."""
        return self.thumbnails(capture, layer, batch, THUMBNAIL_CELLS)

    def thumbnails(self, capture: int, layer: int, batch: int, most: int) -> bytes:
        """The overview with maps of at most so many cells a side."""
        self.library.entry(capture, layer, batch)
        found, exact = self.library.overview(capture, layer)
        arrays = {name: plain(getattr(found, name)[batch]) for name in ("entropy", "distance", "max", "sink", "peak")}
        arrays["peak_key"] = plain(found.peak_key[batch], "u4")
        arrays["thumbs"] = coarse(shrink(found.thumbs[batch], most))
        return frame(arrays, state="exact" if exact else "preview", retry=None, error=error(COARSE))

    def measures(self, capture: int, layer: int, batch: int, head: Which, level: int) -> bytes:
        """The measures of queries and keys, means over cells."""
        found = self.measured(Chosen(capture, layer, batch, head), level)
        return frame({name: plain(x) for name, x in found.items()}, state="exact")

    def measured(self, chosen: Chosen, level: int) -> dict[str, Tensor]:
        """Entropy, max and distance of cells of queries, received of cells of keys."""
        A = self.library.entry(*chosen[:3])
        self.library.heads(A, chosen.head)
        check_below("level", level, pyramid.levels(*A.shape[-2:]) + 8)
        if isinstance(A, Reduced):
            kept = {name: A[name] for name in ROWS if name in A.kept}
        else:
            summary = self.library.summary(chosen.capture, chosen.layer)
            kept = {name: getattr(summary, name) for name in ROWS}
        one = {name: x[chosen.batch] for name, x in kept.items()}
        rows = {name: x[chosen.head] if isinstance(chosen.head, int) else x.mean(0) for name, x in one.items()}
        return {name: _means(x.float().cpu(), 2**level) for name, x in rows.items()}

    def tile(
        self,
        capture: int,
        layer: int,
        batch: int,
        head: Which,
        minus: Chosen | None,
        level: int,
        row: int,
        col: int,
    ) -> bytes:
        """A tile of the map: exact, or a preview while it is being made."""
        chosen = Chosen(capture, layer, batch, head)
        key = "tile", chosen, minus, level, row, col
        known = self._shelf.get(key)
        if known is not None:
            return known
        A = self.library.entry(capture, layer, batch)
        n_i, n_j = A.shape[-2:]
        check_below("level", level, pyramid.levels(n_i, n_j))
        rows, cols = span(n_i, level, row), span(n_j, level, col)
        if not (rows.cells and cols.cells):
            across, down = (-(-n // (TILE << level)) for n in (n_j, n_i))
            raise Refused(400, f"row and col must be of {down} by {across} tiles, got {row} and {col}", "see levels")
        if any(isinstance(self.library.entry(*one[:3]), Reduced) for one in (chosen, minus) if one is not None):
            return self._tile_of_maps(chosen, minus, rows, cols)
        sheet = self.library.sheet(chosen, minus)
        if not level or sheet.work(slice(rows.start, rows.stop), slice(cols.start, cols.stop)) <= at_once(sheet):
            for cells in pyramid.exact(sheet, rows, cols):
                if cells is not None:
                    return self._shelf.put(key, _tile(cells) if level else _weights(cells))
        stored = sheet.stored()
        if stored is not None and stored.exact and pyramid.aligned(stored, rows, cols):
            return self._shelf.put(key, _tile(pyramid.from_map(stored, rows, cols)))

        def steps() -> Iterator[None]:
            for cells in pyramid.exact(sheet, rows, cols):
                if cells is not None:
                    self._shelf.put(key, _tile(cells))
                yield

        self._desk.later(key, steps)
        return _tile(pyramid.preview(sheet, rows, cols), state="preview", retry=RETRY)

    def token(
        self, capture: int, layer: int, batch: int, head: Which, axis: str, first: int, last: int, top: int
    ) -> bytes:
        """What some queries give, on the mean, or some keys receive, in sum; and the strongest links."""
        sheet = self.library.sheet(Chosen(capture, layer, batch, head))
        n_i, n_j = sheet.shape
        check_below("last", last, n_i if axis == "query" else n_j)
        if not first <= last < first + 512:
            raise Refused(400, f"first and last must be at most 512 tokens, got {first} and {last}", "ask for fewer")
        if not 0 <= top <= 256:
            raise Refused(400, f"top must be at most 256, got {top}", "ask for fewer")
        some = slice(first, last + 1)
        rows, cols = (some, slice(0, n_j)) if axis == "query" else (slice(0, n_i), some)
        key = "token", capture, layer, batch, head, axis, first, last, top

        def found() -> bytes:
            weight = given(sheet, some) if axis == "query" else received(sheet, some)
            best = strongest(weight, min(top, len(weight)))
            links = int((best.values > 0).sum())
            top_links = {"top": plain(best.indices[:links], "u4"), "top_weight": plain(best.values[:links])}
            return frame({"weight": plain(weight), **top_links}, state="exact")

        return self._found(key, sheet.work(rows, cols), found)

    def block(self, capture: int, layer: int, batch: int, row: int, rows: int, col: int, cols: int) -> bytes:
        """The weights of all heads where some queries and some keys cross."""
        A = self.library.weights(capture, layer, batch)
        for name, count, start, n in (("rows", rows, row, A.shape[-2]), ("cols", cols, col, A.shape[-1])):
            if not 1 <= count <= 128 or start + count > n:
                raise Refused(400, f"{name} must be 1 to 128 within {n}, got {count} from {start}", "ask for fewer")
        heads = [self.library.sheet(Chosen(capture, layer, batch, head)) for head in range(A.shape[1])]
        at = slice(row, row + rows), slice(col, col + cols)
        key = "block", capture, layer, batch, row, rows, col, cols

        def found() -> bytes:
            return frame({"weight": plain(torch.stack([head.block(*at) for head in heads]))}, state="exact")

        return self._found(key, sum(head.work(*at) for head in heads), found)

    def flow(self, capture: int, layer: int, batch: int, token: int) -> bytes:
        """The rollout of a token from the output of a layer down to the input."""
        A = self.library.weights(capture, layer, batch)
        n, numbers = A.shape[-1], self.library.captures[capture].layers[layer]["stack"]
        if not numbers:
            raise Refused(400, f"layer {layer} is no self-attention over all its tokens", "choose another layer")
        check_below("token", token, n)
        key = "flow", capture, layer, batch, token
        known = self._shelf.get(key)
        if known is not None:
            return known

        def steps() -> Iterator[None]:
            path = []
            stack = [self.library.weights(capture, number, batch).select(batch=batch) for number in numbers]
            for r in descent(stack, token=token):
                path.append(r[0].float().cpu())
                yield
            arrays = {"rollout": plain(torch.stack(path[::-1]))}
            self._shelf.put(key, frame(arrays, state="exact", layers=numbers, level=0, retry=None))

        work = len(numbers) * A.shape[1:].numel()
        if work <= AT_ONCE:
            for _ in steps():
                pass
            found = self._shelf.get(key)
            assert found is not None
            return found
        soon = work <= BEHIND
        if soon:
            self._desk.later(key, steps)
        if not all(self.library.summarized(capture, number) for number in numbers):
            raise Pending(None) if soon else unsummarized()
        level = pyramid.levels(n, n) - 1
        maps = [self.library.pooled(Chosen(capture, number, batch, "mean"), level) for number in numbers]
        arrays = {"rollout": plain(rollout_of_maps(maps, token >> level, level, n))}
        return frame(arrays, state="preview", layers=numbers, level=level, retry=RETRY if soon else None)

    def alignment(self, capture: int, layer: int, batch: int, head: Which) -> bytes:
        """Weights and links between the words of two sentences."""
        A = self.library.weights(capture, layer, batch)
        chosen = self.library.captures[capture]
        pairs = chosen.layers[layer]["groups"].get("words")
        words = None if pairs is None else pairs[batch]
        if words is None or None in words or chosen.layers[layer]["self"]:
            raise Refused(400, "an alignment is of two texts with known tokens", "choose a layer of cross-attention")
        target, source = (chosen.group(number) for number in words)
        if max(len(target), len(source)) > WORDS or max(A.shape[-2:]) > 8 * WORDS:
            raise Refused(400, f"an alignment is of at most {WORDS} words a side", "look at the map")
        picked = self.library.heads(A, head)
        mass = A.select(batch=batch, heads=picked).mass(target.ids.to(A.device), source.ids.to(A.device))[0]
        weight = (mass.amax(0) if head == "max" else mass.mean(0)).float().cpu()
        links = {"links": argmax_links(weight), "mutual": mutual_links(weight)}
        shown = {name: sorted(map(list, found.possible)) for name, found in links.items()}
        labels = {"target": list(target.labels), "source": list(source.labels)}
        return frame({"weight": plain(weight)}, state="exact", **labels, **shown)

    def _tile_of_maps(self, chosen: Chosen, minus: Chosen | None, rows: Span, cols: Span) -> bytes:
        """A tile where only maps were kept: means, exact where cells are whole cells of the map."""
        found, exact = [], True
        n_i, n_j = self.library.entry(*chosen[:3]).shape[-2:]
        for one in (chosen,) if minus is None else (chosen, minus):
            check_same_kind((n_i, n_j), tuple(self.library.entry(*one[:3]).shape[-2:]))
            if rows.size < 1 << self.library.captures[one.capture].layers[one.layer]["finest"]:
                raise Refused(400, "of this layer only a coarser map was kept", "stay above the layer's finest level")
            stored = self.library.map(one)
            found.append(pyramid.from_map(stored, rows, cols).mean)
            exact = exact and stored.exact and pyramid.aligned(stored, rows, cols)
        mean = found[0] if len(found) == 1 else found[0] - found[1]
        return _tile(Cells(mean, None), state="exact" if exact else "preview")

    def _found(self, key: Hashable, work: int, make: Callable[[], bytes]) -> bytes:
        """An answer now, or behind where it takes long."""
        known = self._shelf.get(key)
        if known is not None:
            return known
        if work <= 8 * AT_ONCE:
            return self._shelf.put(key, make())
        if work > BEHIND:
            raise unsummarized()

        def steps() -> Iterator[None]:
            self._shelf.put(key, make())
            yield

        raise Pending(self._desk.later(key, steps))


def given(sheet: Sheet, rows: slice) -> Tensor:
    """What the mean of some queries gives to each key."""
    n = sheet.shape[1]
    starts = range(0, n, CHUNK)
    return torch.cat([sheet.block(rows, slice(x, min(x + CHUNK, n))).mean(0) for x in starts]).float().cpu()


def received(sheet: Sheet, cols: slice) -> Tensor:
    """What some keys together receive from each query."""
    n = sheet.shape[0]
    starts = range(0, n, CHUNK)
    return torch.cat([sheet.block(slice(x, min(x + CHUNK, n)), cols).sum(1) for x in starts]).float().cpu()


def strongest(weight: Tensor, count: int) -> torch.return_types.topk:
    """The largest weights and where they are; what is no number counts as -1."""
    return torch.where(weight.isnan(), -1.0, weight).topk(count)


def rollout_of_maps(maps: Sequence[Tensor], token: int, level: int, n: int) -> Tensor:
    """The rollout of a cell of tokens through maps of means, as `lens.rollout` has it of single tokens."""
    counts = Span(0, n, 2**level).counts().float()
    r = torch.zeros(len(counts))
    r[token] = 1.0
    path = [r]
    for mean in reversed(maps):
        W = 0.5 * mean * counts + 0.5 * torch.eye(len(counts))
        r = product(r[None], W / W.sum(1, keepdim=True))[0]
        path.append(r)
    return torch.stack(path[::-1])


def _weights(cells: Cells) -> bytes:
    return frame({"weight": plain(cells.mean)}, state="exact", retry=None)


def _tile(cells: Cells, *, state: str = "exact", retry: float | None = None) -> bytes:
    arrays: dict[str, Coded] = {"mean": fine(cells.mean)}
    if cells.max is not None:
        arrays["max"] = fine(cells.max)
    return frame(arrays, state=state, retry=retry, error=error(FINE))


def _means(x: Tensor, size: int) -> Tensor:
    """Means of runs of `size`; the last one may be shorter."""
    axis = Span(0, len(x), size)
    pad = torch.nn.functional.pad(x, (0, axis.cells * size - len(x)))
    return pad.view(-1, size).sum(1) / axis.counts()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
