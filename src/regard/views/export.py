"""Export the viewer as one HTML file that holds its data, for a browser without a network or a server.

The file holds the responses of the server under the same names, compressed: the finest level of the pyramid that fits
into its megabytes, which for short inputs is every weight, and for longer ones also the strongest links of each token.
If there are few cells they are stored as floats, otherwise in a byte each together with the largest relative error.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic_files import atomic_path, check_parent_folder
from ..lens.tape.tape import Tape
from ..ops.memory_limit import format_size
from ..ops.weights import Weights
from .shared_script import DATA_MARK, FRAME_STYLE, RIGHTS, TITLE_MARK, shared_frame
from .viewer import pyramid
from .viewer.api import ViewerApi, strongest
from .viewer.captures import ApiError, Library, MatrixId, PlaceId, Which
from .viewer.describe import Capture
from .viewer.head_atlas import clusters_of_capture, roles_of_layer
from .viewer.matrix_view import MatrixView, runs
from .viewer.pyramid import STEP, TILE, CellValues, span
from .viewer.server import read_bundled
from .viewer.two_captures import ranked_heads
from .viewer.wire_format import COARSE, FINE, Certainty, Coded, coarse, error, fine, frame, linear, plain
from .viewer.worker import Worker

MEGABYTES = 4.7  # the default size of a page
PROGRAM_MEGABYTES = 0.42  # script and style, the same in every page
# Limits of a page of the default size; those of another page are in proportion to its megabytes of data.
MAX_CELLS = 3_000_000  # all maps of a page together
MAX_ROLE_WEIGHTS = 2**21  # roles and clusters read all weights of a head, so a page has those of short texts
MAX_FLOAT_CELLS = 500_000  # pages with more store a byte per cell
MAX_DATA_CHARACTERS = 4_300_000  # all data of a page; links fill what the maps leave
MAX_HEADS = 1_500  # with more, thumbnails and measures of a head are smaller than the next two limits
MAX_THUMBNAIL_CELLS = 32  # a side
MAX_MEASURE_POINTS = 128  # per measure along an axis
MAX_LINKS_PER_TOKEN = 8
MAX_EXACT_WEIGHTS = 2**31  # computed for a page; with more, its maps come from the stored ones
STYLE, SCRIPT = '<link rel="stylesheet" href="app.css">', '<script src="app.js" defer></script>'


class Page:
    """One offline HTML file: `save` writes it, a notebook displays it."""

    def __init__(self, text: str, *, data: str = "", title: str = "") -> None:
        self.text, self._data, self._title = text, data, title

    def save(self, path: str | Path) -> None:
        """Write the page to a file, atomically."""
        path = Path(path)
        check_parent_folder(path)
        with atomic_path(path) as temporary:
            temporary.write_bytes(self.text.encode())

    def __repr__(self) -> str:
        return f"Page({format_size(len(self.text))})"

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed iframe, which cannot access the notebook.

        Outputs of one notebook share the script of their pages.
        """
        return self.show_in_notebook("")

    def show_in_notebook(self, before: str) -> str:
        """Return the page in a frame, with HTML that stands there until the frame is made, such as a small picture."""
        if self._data and (output := shared_frame(_document(DATA_MARK, TITLE_MARK), self._data, self._title, before)):
            return output
        return f'<iframe sandbox="{RIGHTS}" style="{FRAME_STYLE}" srcdoc="{html.escape(self.text)}"></iframe>'


def page(
    tape: Tape,
    other: Tape | None = None,
    *,
    name: str | Sequence[str] = "capture",
    megabytes: float = MEGABYTES,
    layers: str | Sequence[int] = "*",
    heads: Sequence[int] | None = None,
) -> Page:
    """Export one tape, or two side by side, as one file of about `megabytes` at most.

    `name` is a list with a name for each tape, or one name for both, which are then numbered. `layers` and `heads`
    choose a part of the tapes, as in `Tape.select`: a part has finer cells in a page of the same size. The page says
    what it holds.
    """
    if not megabytes >= 1:
        raise ValueError(f"megabytes must be at least 1 (the script takes {PROGRAM_MEGABYTES}), got {megabytes}")
    tapes = [tape] if other is None else [tape, other]
    if isinstance(name, str):
        name = [name] if other is None else [f"{name} 1", f"{name} 2"]
    if len(name) != len(tapes):
        raise ValueError(
            f"name must be a string or a list of {len(tapes)}, one for each tape, got a list of {len(name)}"
        )
    is_whole = layers == "*" and heads is None
    parts = tapes if is_whole else [each.select(layers, heads=heads) for each in tapes]
    captures = [Capture(*pair) for pair in zip(parts, name, strict=True)]
    for capture in captures:
        capture.tape.summarize()
    with closing(Worker()) as worker:
        resources = PageBuilder(captures, worker, tapes, megabytes).build()
    data, title = _data(resources), " and ".join(capture.name for capture in captures)
    return Page(_document(data, title), data=data, title=title)


class PageBuilder:
    """Builds the resources of a page, compressed, within its limits of size."""

    def __init__(self, captures: list[Capture], worker: Worker, tapes: Sequence[Tape], megabytes: float) -> None:
        self._tapes = tapes
        self._scale = (megabytes - PROGRAM_MEGABYTES) / (MEGABYTES - PROGRAM_MEGABYTES)
        self._answers = ViewerApi(captures, worker)
        self._library: Library = self._answers.library
        layers = [layer for capture in captures for layer in capture.layers]
        maps = sum(layer["batch"] * (len(layer["heads"]) + 2) for layer in layers)
        compared = self._comparable_layers()
        maps += 2 * sum(layer["batch"] * (len(layer["heads"]) + 2) for layer in compared)  # in two bytes
        work = sum(layer["batch"] * len(layer["heads"]) * layer["n_i"] * layer["n_j"] for layer in layers)
        self._cells = int(MAX_CELLS * self._scale) // max(maps, 1)
        share = min(1.0, MAX_HEADS * self._scale / max(maps, 1))
        self._thumbnail = max(6, int(MAX_THUMBNAIL_CELLS * share**0.5))
        self._points = max(8, int(MAX_MEASURE_POINTS * share))
        self._exact = work <= MAX_EXACT_WEIGHTS
        self._plainly = False
        self._packed: dict[str, str] = {}

    def build(self) -> dict[str, str]:
        """Return every resource by name."""
        captures = self._library.captures
        described = [[self._describe_layer(n, layer) for layer in range(len(x.keys))] for n, x in enumerate(captures)]
        self._plainly = (
            sum(_all_cells(layer) for layers in described for layer in layers) <= MAX_FLOAT_CELLS * self._scale
        )
        for number, capture in enumerate(captures):
            for text in range(len(capture.texts)):
                self._add(f"text?capture={number}&text={text}", self._answers.text(number, text))
            for group in range(capture.groups):
                self._add(f"group?capture={number}&group={group}", self._answers.group(number, group))
            for picture in range(len(capture.pictures)):
                self._add(f"picture?capture={number}&picture={picture}", self._answers.picture(number, picture))
            if self._exact and all(map(_is_quick, described[number])):
                self._add_last(f"clusters?capture={number}", clusters_of_capture(self._library, number))
            for layer in range(len(capture.keys)):
                self._atlas(number, layer, described[number][layer])
                for batch in range(described[number][layer]["batch"]):
                    self._layer(number, layer, batch, described[number][layer])
                    if number == 0:
                        self._difference(layer, batch, described)
        if len(captures) == 2:
            self._compare()
        self._link(described)
        shown = [{**capture.describe(), "layers": described[number]} for number, capture in enumerate(captures)]
        holds = "; ".join(dict.fromkeys(map(self._holds, self._tapes, captures, described)))
        session = {"format": 1, "live": False, "tile": TILE, "holds": holds, "captures": shown}
        self._add("session?", json.dumps(session, separators=(",", ":")).encode())
        return self._packed

    def _compare(self) -> None:
        """Add the heads ranked by how much they differ, or why they cannot be compared."""
        try:
            *_, rows = ranked_heads(self._library)
            found: dict[str, Any] = {"rows": rows}
        except ApiError as error:
            found = {"error": error.error, "hint": error.hint}
        self._add("comparison?", json.dumps(found, separators=(",", ":")).encode())

    def _add(self, name: str, body: bytes) -> None:
        self._packed[name] = base64.b64encode(zlib.compress(body, 9)).decode()

    def _add_last(self, name: str, steps: Iterator[float | bytes]) -> None:
        """Add the response that a background job yields last."""
        *_, body = steps
        assert isinstance(body, bytes)
        self._add(name, body)

    def _describe_layer(self, capture: int, layer: int) -> dict[str, Any]:
        """Describe a layer with the levels that fit."""
        described = self._library.captures[capture].layers[layer]
        n_i, n_j = described["n_i"], described["n_j"]
        level = described["finest"]
        mapped = level < described["levels"]
        while mapped and _cells(n_i, n_j, level) > self._cells:
            level += 1
        if described["kind"] == "weights" and not self._exact and described["batch"] and n_i and n_j:
            stored = self._library.map(MatrixId(capture, layer, 0, 0))
            while not pyramid.is_finer(stored, span(n_i, level, 0), span(n_j, level, 0)):
                level += 1
        deepest = max(described["levels"], level + 1) if mapped else described["levels"]
        points = max(0, (-(-max(n_i, n_j, 1) // self._points) - 1).bit_length())
        counterpart = self._library.counterpart(capture, layer)
        return {
            **described,
            "counterpart": counterpart,
            "levels": deepest,
            "finest": level,
            "top": [0, 0],
            "measures_level": points,
        }

    def _holds(self, tape: Tape, capture: Capture, described: list[dict[str, Any]]) -> str:
        """Return what the page holds of a tape, in words."""
        parts = []
        if len(capture.keys) < len(tape):
            parts.append(f"{len(capture.keys)} of {len(tape)} layers")
        heads = sorted({head for layer in described for head in layer["heads"]})
        if any(len(layer["heads"]) < tape[key].shape[-3] for key, layer in zip(capture.keys, described, strict=True)):
            parts.append(f"heads {', '.join(map(str, heads))} alone, also in means over heads")
        mapped = [layer for layer in described if layer["finest"] < layer["levels"]]
        level = max((layer["finest"] for layer in mapped), default=0)
        if mapped:
            cells = "every weight" if level == 0 else f"means of {2**level} × {2**level} weights"
            parts.append(cells + ("" if self._plainly else f" to within {round(100 * error(COARSE))} %"))
        if level:
            links = min(max(layer["top"]) for layer in mapped)
            parts.append(f"the {links} strongest links of each token" if links else "no links between single tokens")
        return ", ".join(parts) or "measures alone"

    def _layer(self, capture: int, layer: int, batch: int, described: dict[str, Any]) -> None:
        at = f"capture={capture}&layer={layer}&batch={batch}"
        if not described["finest"]:
            self._add(f"hidden?{at}", self._answers.hidden(capture, layer, batch))
        self._add(f"overview?{at}", self._answers.thumbnails(capture, layer, batch, self._thumbnail))
        heads: list[Which] = [*range(len(described["heads"])), "mean", "max"]
        for head in heads:
            chosen, level = MatrixId(capture, layer, batch, head), described["measures_level"]
            code = plain if self._plainly else linear
            measures = {name: code(x) for name, x in self._answers.pooled_measures(chosen, level).items()}
            self._add(f"measures?{at}&head={head}&level={level}", frame(measures))
            if described["finest"] or isinstance(head, int):  # the browser aggregates single weights itself
                for name, tile in self._tiles(chosen, described):
                    self._add(f"tile?{at}&head={head}&{name}", tile)
            if self._has_alignment(chosen):
                self._add(f"alignment?{at}&head={head}", self._answers.alignment(capture, layer, batch, head))

    def _atlas(self, capture: int, layer: int, described: dict[str, Any]) -> None:
        """Add the roles of a layer's heads, and the predictions that it is the first to have."""
        if self._exact and _is_quick(described) and described["kind"] == "weights" and described["batch"]:
            self._add_last(f"roles?capture={capture}&layer={layer}", roles_of_layer(self._library, capture, layer))
        for batch in range(described["batch"] if described["predictions"] == layer else 0):
            at = f"capture={capture}&layer={layer}&batch={batch}"
            self._add(f"predictions?{at}", self._answers.predictions(capture, layer, batch))

    def _comparable_layers(self) -> list[dict[str, Any]]:
        """Return the layers of the first capture that can be subtracted from their counterparts in the second."""
        layers = self._library.captures[0].layers
        return [layer for n, layer in enumerate(layers) if self._library.can_subtract(n)]

    def _difference(self, layer: int, batch: int, described: list[list[dict[str, Any]]]) -> None:
        """Add the differences from the second capture, taken before they are coded; the browser subtracts floats."""
        own, other = described[0][layer], described[0][layer]["counterpart"]
        if other is None or batch >= described[1][other]["batch"]:
            return
        self._add(f"same_tokens?capture=0&layer={layer}&batch={batch}", self._answers.same_tokens(0, layer, batch))
        if own["finest"] >= own["levels"] or not self._library.can_subtract(layer):
            return
        theirs = described[1][other]
        at, minus = f"capture=0&layer={layer}&batch={batch}", PlaceId(1, other, batch)
        of_heads = self._answers.difference_of(PlaceId(0, layer, batch), minus, self._thumbnail)
        self._add(f"difference?{at}&minus=1.{other}.{batch}", of_heads)
        if self._plainly or own["finest"] != theirs["finest"]:
            return
        heads: list[Which] = [*range(min(len(own["heads"]), len(theirs["heads"]))), "mean", "max"]
        for head in heads:
            pair = MatrixId(0, layer, batch, head), MatrixId(*minus, head)
            for name, tile in self._tiles(pair[0], own, pair[1]):
                self._add(f"tile?{at}&head={head}&{name}", tile)

    def _link(self, described: list[list[dict[str, Any]]]) -> None:
        """Fill the rest of the page with the strongest links that fit."""
        linked = [
            (layer, MatrixId(capture, number, batch, head))
            for capture, layers in enumerate(described)
            for number, layer in enumerate(layers)
            if self._exact and layer["kind"] == "weights" and layer["finest"]
            for batch in range(layer["batch"])
            for head in range(len(layer["heads"]))
        ]
        one = sum((layer["n_i"] + layer["n_j"]) * 4 for layer, _ in linked)  # three bytes are four characters
        left = int(MAX_DATA_CHARACTERS * self._scale) - sum(len(body) for body in self._packed.values())
        count = min(MAX_LINKS_PER_TOKEN, max(0, left) // max(one, 1))
        for layer, chosen in linked if count else ():
            layer["top"] = [min(count, layer["n_j"]), min(count, layer["n_i"])]
            name = f"links?capture={chosen.capture}&layer={chosen.layer}&batch={chosen.batch}&head={chosen.head}"
            self._add(name, _links(self._library.matrix_view(chosen), *layer["top"]))

    def _tiles(
        self, chosen: MatrixId, described: dict[str, Any], minus: MatrixId | None = None
    ) -> Iterator[tuple[str, bytes]]:
        less = "none" if minus is None else ".".join(map(str, minus))
        level, n_i, n_j = described["finest"], described["n_i"], described["n_j"]
        if level >= described["levels"]:
            return
        for row in range(-(-n_i // (TILE << level))):
            for col in range(-(-n_j // (TILE << level))):
                rows, cols = span(n_i, level, row), span(n_j, level, col)
                name = f"minus={less}&level={level}&row={row}&col={col}"
                if described["kind"] == "weights" and self._exact:
                    *_, cells = pyramid.exact(self._library.matrix_view(chosen, minus), rows, cols)
                    assert cells is not None
                    yield name, self._tile(cells, level, Certainty(), signed=minus is not None)
                else:
                    stored = self._library.map(chosen)
                    exact = stored.exact and pyramid.has_whole_cells(stored, rows, cols)
                    cells = pyramid.from_map(stored, rows, cols)
                    if minus is not None:
                        other = self._library.map(minus)
                        exact = exact and other.exact and pyramid.has_whole_cells(other, rows, cols)
                        cells = CellValues(cells.mean - pyramid.from_map(other, rows, cols).mean, None)
                    yield (
                        name,
                        self._tile(
                            cells, max(level, 1), Certainty("exact" if exact else "pooled"), signed=minus is not None
                        ),
                    )

    def _tile(self, cells: CellValues, level: int, certainty: Certainty, *, signed: bool = False) -> bytes:
        """Return a tile: as floats or in codes, of one byte for weights and of two for differences."""
        code, steps = (fine, FINE) if signed else (coarse, COARSE)
        coded, off = (plain(cells.mean), 0.0) if self._plainly else (code(cells.mean), error(steps))
        return frame({"mean" if level else "weight": coded}, certainty._replace(error=off))

    def _has_alignment(self, chosen: MatrixId) -> bool:
        """Whether this is attention between two short texts."""
        A = self._library.entry(*chosen[:3])
        described = self._library.capture(chosen.capture).layers[chosen.layer]
        known = isinstance(A, Weights) and None not in described["texts"][chosen.batch]
        return known and not described["self"] and max(A.shape[-2:]) <= 128


def _links(view: MatrixView, given: int, received: int) -> bytes:
    """Return the frame of the strongest links of every query and every key."""
    keys, to = _strongest_links(view, given, 0)
    queries, of = _strongest_links(view, received, 1)
    arrays: dict[str, Coded] = {
        "given": plain(keys, "u2" if view.shape[1] <= 2**16 else "u4"),
        "given_weight": coarse(to),
        "received": plain(queries, "u2" if view.shape[0] <= 2**16 else "u4"),
        "received_weight": coarse(of),
    }
    return frame(arrays, Certainty("partial", error(COARSE)))


def _strongest_links(view: MatrixView, count: int, axis: int) -> tuple[Tensor, Tensor]:
    """Return the strongest links of each query (axis 0) or of each key (axis 1): indices and weights, both `n count`.

    The indices are of keys if axis is 0, of queries if axis is 1.
    """
    n, across = view.shape[axis], slice(0, view.shape[1 - axis])
    step = max(1, min(STEP[0], 2**22 // max(across.stop, 1)))
    found = []
    for start in range(0, n, step):
        some = slice(start, min(start + step, n))
        seen = view.visible_tiles(*((some, across) if axis == 0 else (across, some))).any(axis)
        if not seen[:-1].any():  # the last part may be shorter than count
            seen[:1] = True
        parts = runs(seen, across.start, across.stop)
        blocks = [view.block(some, part) if axis == 0 else view.block(part, some).T for part in parts]
        best = strongest(torch.cat(blocks, 1), count)
        ids = torch.cat([torch.arange(part.start, part.stop, device=view.device) for part in parts])
        found.append((ids[best.indices], best.values))
    whom, weight = (torch.cat(x).cpu() for x in zip(*found, strict=True))
    return whom, weight.clamp(min=0).float()


def _is_quick(described: dict[str, Any]) -> bool:
    """Whether the roles and clusters of a layer's heads are in the page."""
    weights: int = described["n_i"] * described["n_j"]
    return weights <= MAX_ROLE_WEIGHTS


def _cells(n_i: int, n_j: int, level: int) -> int:
    return -(-n_i // (1 << level)) * -(-n_j // (1 << level))


def _all_cells(described: dict[str, Any]) -> int:
    """Return the number of cells of all stored maps of a layer."""
    maps = len(described["heads"]) + (2 if described["finest"] else 0)
    return int(described["batch"] * maps * _cells(described["n_i"], described["n_j"], described["finest"]))


def _data(resources: dict[str, str]) -> str:
    """Return the resources as JSON in which no character can end a script."""
    data = json.dumps({"resources": resources}, separators=(",", ":"))
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return data


def _document(data: str, title: str) -> str:
    """Return the HTML with style, data and script inline; the content security policy allows only their digests."""
    text, css, script = (read_bundled(name).decode() for name in ("index.html", "app.css", "app.js"))
    script = re.sub(r"<(?=/script|script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
    if text.count(STYLE) != 1 or text.count(SCRIPT) != 1 or "</style" in css.lower():
        raise RuntimeError("the bundled front end does not have the tags that the export replaces; rebuild it")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(css)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    block = f'<script id="regard-data" type="application/json">{data}</script>\n<script>{script}</script>\n</body>'
    text = text.replace(SCRIPT, "").replace(STYLE, f"<style>{css}</style>")
    text = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", text, count=1)
    text = text.replace("<head>", f"<head>\n{meta}", 1)
    before, _, after = text.rpartition("</body>")
    return before + block + after


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
