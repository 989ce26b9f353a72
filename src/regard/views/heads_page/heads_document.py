"""The HTML document of the heads of a training run, as one offline file."""

from __future__ import annotations

import html
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...lens.monitoring.head_history import HeadHistory
from ..export import Page
from ..figures.timeline import LABELS, WithHistory, as_history, panel_of_event, stack_heads
from ..inline_document import inline_document

MAX_STEPS = 1000  # columns of a map; of a longer history every n-th step is kept, and those with events
MAX_NUMBERS = 1_000_000  # the page holds about this many; a model with many heads has fewer columns
MIN_STEPS = 100  # columns that every page may have


def heads_page(history: HeadHistory | WithHistory | str | Path, *, title: str = "heads") -> Page:
    """Return the heads of a run over steps as one offline HTML file: `heads_page("runs/a").save("heads.html")`.

    >>> import torch
    >>> from regard.lens import HeadHistory
    >>> history = HeadHistory(("logit",))
    >>> history.add(1, {"layers.0": {"logit": torch.rand(4)}})
    >>> heads_page(history)
    Page(... kB)

    It has a heat map for each measure, as `timeline` draws them, and a list of the events. Pointing at a cell shows the
    numbers of that head and step, and a click those of all heads at the step.
    """
    history = as_history(history)
    if not len(history):
        raise ValueError("the history has no step yet; watch at least one, with monitor: ...")
    document = read_asset("heads_page.html").replace("TITLE", html.escape(title))
    return Page(inline_document(document, read_asset, heads_to_json(history)))


def heads_to_json(history: HeadHistory) -> dict[str, Any]:
    """Return the data of the maps; a number that is not finite is null."""
    numbers = len(history.measures) * sum(map(history.heads, history.layers))
    each = -(-len(history) // min(MAX_STEPS, max(MIN_STEPS, MAX_NUMBERS // numbers)))
    eventful = {event.step for event in history.events}
    kept = [n for n, step in enumerate(history.steps) if n % each == 0 or step in eventful]
    steps = [history.steps[n] for n in kept]
    place = {step: n for n, step in enumerate(steps)}
    first, rows = {}, 0
    for layer in history.layers:
        first[layer], rows = rows, rows + history.heads(layer)
    events = [
        {
            "step": event.step,
            "at": place[event.step],
            "row": first[event.layer] + ((history.heads(event.layer) - 1) / 2 if event.head is None else event.head),
            "kind": event.kind,
            "where": event.layer if event.head is None else f"{event.layer}, head {event.head}",
            "text": event.text,
            "panel": panel_of_event(event, history.measures),
        }
        for event in history.events
        if event.layer in first and event.step in place
    ]
    measures = [
        {
            "name": name,
            "label": LABELS.get(name, name).removesuffix(" (0 or less: white)"),
            "values": [[_number(x) for x in row] for row in stack_heads(history, name)[:, kept].tolist()],
        }
        for name in history.measures
    ]
    about = repr(history).removeprefix("HeadHistory(").removesuffix(")")
    drawn = f"; one in {each} is drawn, and those with events" if each > 1 else ""
    return {
        "about": about + drawn,
        "steps": steps,
        "layers": [{"name": layer, "heads": history.heads(layer)} for layer in history.layers],
        "measures": measures,
        "events": events,
    }


def _number(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None


def read_asset(name: str) -> str:
    """Return a file of the page."""
    return files("regard.views.heads_page").joinpath(name).read_text(encoding="utf8")
