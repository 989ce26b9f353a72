"""Page: the viewer as one file, with its data inside it, for a browser without a network or a server.

It holds what the server would answer, under the same names, compressed: one level of the pyramid, the finest that fits,
with every weight where inputs are short, and the strongest links of each token where they are not. Few cells
are held as they are, many coded in a byte; how far a number may then be off is told with it.
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
from ..ops.weights import Weights
from .viewer import pyramid
from .viewer.api import Answers, strongest
from .viewer.captures import Chosen, Library, Which
from .viewer.describe import Capture
from .viewer.matrix_view import Sheet, runs
from .viewer.pyramid import STEP, TILE, Cells, span
from .viewer.server import bundled
from .viewer.wire_format import COARSE, Coded, coarse, error, frame, linear, plain
from .viewer.worker import Desk

CELLS = 3_000_000  # of all maps of a page
FEW = 500_000  # cells up to which all are held as they are
DATA = 4_300_000  # characters of a page's data, filled up with links
THUMB = 32  # cells a side of the smallest maps
POINTS = 128  # of the measures of an axis
MOST = 8  # links a token
EXACT = 2**31  # weights found for a page; past that its maps come from the stored ones
STYLE, SCRIPT = '<link rel="stylesheet" href="/app.css">', '<script src="/app.js" defer></script>'


class Page:
    """One offline HTML file: `save` writes it, a notebook shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, path: str | Path) -> None:
        """Write the page, whole or not at all."""
        path = Path(path)
        check_parent_folder(path)
        with atomic_path(path) as temporary:
            temporary.write_bytes(self.text.encode())

    def __repr__(self) -> str:
        return f"Page({len(self.text) / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which can reach nothing of the notebook around it."""
        style = "width:100%;height:720px;border:0"
        rights = "allow-scripts allow-downloads"
        return f'<iframe sandbox="{rights}" style="{style}" srcdoc="{html.escape(self.text)}"></iframe>'


def page(tape: Tape, other: Tape | None = None, *, name: str | Sequence[str] = "capture") -> Page:
    """The views of one tape, or of two side by side, as one file of a few megabytes.

    `name` is that of both, which are then numbered, or a list of one for each.
    """
    tapes = [tape] if other is None else [tape, other]
    if isinstance(name, str):
        name = [name] if other is None else [f"{name} 1", f"{name} 2"]
    if len(name) != len(tapes):
        raise ValueError(f"name must be a string, or a list of {len(tapes)}, one for each tape, got {len(name)}")
    captures = [Capture(*pair) for pair in zip(tapes, name, strict=True)]
    for capture in captures:
        capture.tape.summarize()
    with closing(Desk()) as desk:
        resources = Press(captures, desk).printed()
    return Page(_document(resources, " and ".join(capture.name for capture in captures)))


class Press:
    """Makes the resources of a page, compressed, within its budgets."""

    def __init__(self, captures: list[Capture], desk: Desk) -> None:
        self._answers = Answers(captures, desk)
        self._library: Library = self._answers.library
        layers = [layer for capture in captures for layer in capture.layers]
        maps = sum(layer["batch"] * (len(layer["heads"]) + 2) for layer in layers)
        work = sum(layer["batch"] * len(layer["heads"]) * layer["n_i"] * layer["n_j"] for layer in layers)
        self._cells = CELLS // max(maps, 1)
        self._exact = work <= EXACT
        self._plainly = False
        self._packed: dict[str, str] = {}

    def printed(self) -> dict[str, str]:
        """Every resource under its name."""
        captures = self._library.captures
        told = [[self._bounded(n, layer) for layer in range(len(capture.keys))] for n, capture in enumerate(captures)]
        self._plainly = sum(_all_cells(layer) for layers in told for layer in layers) <= FEW
        for number, capture in enumerate(captures):
            for text in range(len(capture.texts)):
                self._add(f"text?capture={number}&text={text}", self._answers.text(number, text))
            for group in range(capture.groups):
                self._add(f"group?capture={number}&group={group}", self._answers.group(number, group))
            for picture in range(len(capture.pictures)):
                self._add(f"picture?capture={number}&picture={picture}", self._answers.picture(number, picture))
            for layer in range(len(capture.keys)):
                for batch in range(told[number][layer]["batch"]):
                    self._layer(number, layer, batch, told[number][layer])
        self._link(told)
        described = [{**capture.describe(), "layers": told[number]} for number, capture in enumerate(captures)]
        session = {"format": 1, "live": False, "tile": TILE, "captures": described}
        self._add("session?", json.dumps(session, separators=(",", ":")).encode())
        return self._packed

    def _add(self, name: str, body: bytes) -> None:
        self._packed[name] = base64.b64encode(zlib.compress(body, 9)).decode()

    def _bounded(self, capture: int, layer: int) -> dict[str, Any]:
        """What is told of a layer, with the levels there is room for."""
        told = self._library.captures[capture].layers[layer]
        n_i, n_j = told["n_i"], told["n_j"]
        level = told["finest"]
        mapped = level < told["levels"]
        while mapped and _cells(n_i, n_j, level) > self._cells:
            level += 1
        if told["kind"] == "weights" and not self._exact and told["batch"] and n_i and n_j:
            stored = self._library.map(Chosen(capture, layer, 0, 0))
            while not pyramid.finer(stored, span(n_i, level, 0), span(n_j, level, 0)):
                level += 1
        deepest = max(told["levels"], level + 1) if mapped else told["levels"]
        points = max(0, (-(-max(n_i, n_j, 1) // POINTS) - 1).bit_length())
        return {**told, "levels": deepest, "finest": level, "top": [0, 0], "measures_level": points}

    def _layer(self, capture: int, layer: int, batch: int, told: dict[str, Any]) -> None:
        at = f"capture={capture}&layer={layer}&batch={batch}"
        self._add(f"overview?{at}", self._answers.thumbnails(capture, layer, batch, THUMB))
        heads: list[Which] = [*range(len(told["heads"])), "mean", "max"]
        for head in heads:
            chosen, level = Chosen(capture, layer, batch, head), told["measures_level"]
            code = plain if self._plainly else linear
            measures = {name: code(x) for name, x in self._answers.measured(chosen, level).items()}
            self._add(f"measures?{at}&head={head}&level={level}", frame(measures, state="exact"))
            if told["finest"] or isinstance(head, int):  # of single weights, the mean and the largest follow
                for name, tile in self._tiles(chosen, told):
                    self._add(f"tile?{at}&head={head}&{name}", tile)
            if self._aligned(chosen):
                self._add(f"alignment?{at}&head={head}", self._answers.alignment(capture, layer, batch, head))

    def _link(self, told: list[list[dict[str, Any]]]) -> None:
        """Fill what is left of the page with the strongest links, as many a token as there is room for."""
        linked = [
            (layer, Chosen(capture, number, batch, head))
            for capture, layers in enumerate(told)
            for number, layer in enumerate(layers)
            if self._exact and layer["kind"] == "weights" and layer["finest"]
            for batch in range(layer["batch"])
            for head in range(len(layer["heads"]))
        ]
        one = sum((layer["n_i"] + layer["n_j"]) * 4 for layer, _ in linked)  # three bytes are four characters
        left = DATA - sum(len(body) for body in self._packed.values())
        count = min(MOST, max(0, left) // max(one, 1))
        for layer, chosen in linked if count else ():
            layer["top"] = [min(count, layer["n_j"]), min(count, layer["n_i"])]
            name = f"links?capture={chosen.capture}&layer={chosen.layer}&batch={chosen.batch}&head={chosen.head}"
            self._add(name, _links(self._library.sheet(chosen), *layer["top"]))

    def _tiles(self, chosen: Chosen, told: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        level, n_i, n_j = told["finest"], told["n_i"], told["n_j"]
        if level >= told["levels"]:
            return
        for row in range(-(-n_i // (TILE << level))):
            for col in range(-(-n_j // (TILE << level))):
                rows, cols = span(n_i, level, row), span(n_j, level, col)
                name = f"minus=none&level={level}&row={row}&col={col}"
                if told["kind"] == "weights" and self._exact:
                    *_, cells = pyramid.exact(self._library.sheet(chosen), rows, cols)
                    assert cells is not None
                    yield name, self._tile(cells, level, "exact")
                else:
                    stored = self._library.map(chosen)
                    exact = stored.exact and pyramid.aligned(stored, rows, cols)
                    cells = pyramid.from_map(stored, rows, cols)
                    yield name, self._tile(cells, max(level, 1), "exact" if exact else "preview")

    def _tile(self, cells: Cells, level: int, state: str) -> bytes:
        coded, off = (plain(cells.mean), 0.0) if self._plainly else (coarse(cells.mean), error(COARSE))
        return frame({"mean" if level else "weight": coded}, state=state, retry=None, error=off)

    def _aligned(self, chosen: Chosen) -> bool:
        """Is this attention between two short texts?"""
        A = self._library.entry(*chosen[:3])
        told = self._library.captures[chosen.capture].layers[chosen.layer]
        known = isinstance(A, Weights) and None not in told["texts"][chosen.batch]
        return known and not told["self"] and max(A.shape[-2:]) <= 128


def _links(sheet: Sheet, given: int, received: int) -> bytes:
    """The strongest links of every query and every key."""
    keys, to = _strongest(sheet, given, 0)
    queries, of = _strongest(sheet, received, 1)
    arrays: dict[str, Coded] = {
        "given": plain(keys, "u2" if sheet.shape[1] <= 2**16 else "u4"),
        "given_weight": coarse(to),
        "received": plain(queries, "u2" if sheet.shape[0] <= 2**16 else "u4"),
        "received_weight": coarse(of),
    }
    return frame(arrays, state="exact", error=error(COARSE))


def _strongest(sheet: Sheet, count: int, axis: int) -> tuple[Tensor, Tensor]:
    """For each query (axis 0) or key (axis 1), whom its largest weights are with, and these: `n count` twice."""
    n, across = sheet.shape[axis], slice(0, sheet.shape[1 - axis])
    step = max(1, min(STEP[0], 2**22 // max(across.stop, 1)))
    found = []
    for start in range(0, n, step):
        some = slice(start, min(start + step, n))
        seen = sheet.seen(*((some, across) if axis == 0 else (across, some))).any(axis)
        if not seen[:-1].any():  # the last part may be too short for as many
            seen[:1] = True
        parts = runs(seen, across.start, across.stop)
        blocks = [sheet.block(some, part) if axis == 0 else sheet.block(part, some).T for part in parts]
        best = strongest(torch.cat(blocks, 1), count)
        ids = torch.cat([torch.arange(part.start, part.stop, device=sheet.device) for part in parts])
        found.append((ids[best.indices], best.values))
    whom, weight = (torch.cat(x).cpu() for x in zip(*found, strict=True))
    return whom, weight.clamp(min=0).float()


def _cells(n_i: int, n_j: int, level: int) -> int:
    return -(-n_i // (1 << level)) * -(-n_j // (1 << level))


def _all_cells(told: dict[str, Any]) -> int:
    """The cells of all maps of a layer that are held."""
    maps = len(told["heads"]) + (2 if told["finest"] else 0)
    return int(told["batch"] * maps * _cells(told["n_i"], told["n_j"], told["finest"]))


def _document(resources: dict[str, str], title: str) -> str:
    """The front end's page with style, data and script inside, allowed by their digests and nothing else."""
    data = json.dumps({"resources": resources}, separators=(",", ":"))
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    text, css, script = (bundled(name).decode() for name in ("index.html", "app.css", "app.js"))
    script = re.sub(r"<(?=/script|script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
    if text.count(STYLE) != 1 or text.count(SCRIPT) != 1 or "</style" in css.lower():
        raise RuntimeError("the front end is not as the page expects it; build it again")
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
