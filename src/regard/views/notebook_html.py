"""A tape as the output of a notebook cell: its text, a small picture of each head, and the page."""

from __future__ import annotations

import html
from itertools import islice

import torch
from torch import Tensor

from ..lens.recording.reduced import Reduced
from ..lens.tape.overview import THUMBNAIL_CELLS
from ..lens.tape.tape import Tape
from ..ops.map_image import image_of_maps
from ..ops.weights import Weights
from .export import page

MAX_WEIGHTS = 2**24  # in all layers together; the page of a larger tape takes seconds
PAGE_MEGABYTES = 1.5
PICTURED_LAYERS, PICTURED_HEADS = 12, 16
ON_DEMAND = "<code>tape.view()</code> opens the viewer, <code>tape.page()</code> shows it here without a server"


def tape_html(tape: Tape) -> str:
    """Return a tape as HTML: its page if that is quick to make, else a picture if its summaries are known."""
    text = f"<pre>{html.escape(repr(tape))}</pre>"
    entries = list(tape.values())
    if not entries or not all(isinstance(A, Weights | Reduced) and A.shape.numel() for A in entries):
        return text
    is_small = sum(A.shape.numel() for A in entries if isinstance(A, Weights)) <= MAX_WEIGHTS
    if not is_small and not all(tape.summarized(key) for key in tape if isinstance(tape[key], Weights)):
        return f"{text}<p>{ON_DEMAND}</p>"
    picture = _thumbnails(tape)
    return text + (
        page(tape, megabytes=PAGE_MEGABYTES).show_in_notebook(picture) if is_small else f"{picture}<p>{ON_DEMAND}</p>"
    )


def _thumbnails(tape: Tape) -> str:
    """Return a picture of the first layers: a row for each layer, a column for each head of the first text."""
    layers = [tape.overview(key).thumbs[0, :PICTURED_HEADS] for key in islice(tape, PICTURED_LAYERS)]
    heads = max(len(thumbs) for thumbs in layers)
    maps = torch.stack([torch.cat([_square(x), x.new_zeros(heads - len(x), *[THUMBNAIL_CELLS] * 2)]) for x in layers])
    alt = f"attention of {heads} heads in {len(layers)} layers, each to its own largest weight"
    return image_of_maps(maps, cell_pixels=1, alt=alt)


def _square(thumbs: Tensor) -> Tensor:
    """Stretch thumbnails `h rows cols` to the same size, each cell repeated."""
    rows, cols = (torch.arange(THUMBNAIL_CELLS) * n // THUMBNAIL_CELLS for n in thumbs.shape[1:])
    return thumbs[:, rows][:, :, cols] if thumbs.numel() else thumbs.new_zeros(len(thumbs), *[THUMBNAIL_CELLS] * 2)
