"""The HTML document of a run page, and the data that it draws."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ...lens.monitoring.head_history import HeadHistory
from ..export import Page
from ..figures.curves import Curve, curve_panels
from ..heads_page.heads_document import heads_to_json
from ..heads_page.heads_document import read_asset as read_heads_asset
from ..inline_document import inline_document

MAX_POINTS = 2000  # per line; more are drawn as means


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of a run page: curves by name, settings by section, and the process that trains, if there is one."""

    name: str
    curves: Mapping[str, Curve]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: int | None = None  # total, None if unknown
    best: int | None = None  # step of the best checkpoint
    trainer: str | None = None  # the process that trains
    updated: float | None = None  # seconds since 1970 of the last row
    heads_version: str | None = None  # changes when a monitor writes; None if nothing was watched


def run_page(state: RunState, heads: HeadHistory | None = None) -> Page:
    """Return the page of a run as one file, with its curves, and the heads that a monitor watched, as they are now."""
    maps = None if heads is None or not len(heads) else heads_to_json(heads)
    return Page(inline_document(document(state.name), read_asset, {"run": to_json(state), "heads": maps}))


def document(name: str) -> str:
    """Return the HTML of the live page, which loads its scripts, its styles and its data from the server."""
    return read_asset("run_page.html").replace("TITLE", html.escape(name))


def to_json(state: RunState) -> dict[str, Any]:
    """Return the data of the page; a number that is not finite is null."""
    panels = [
        {
            "name": panel.name,
            "lines": [{"label": line.label, **_thin(line.steps, line.values)} for line in panel.lines],
        }
        for panel in curve_panels(state.curves)
    ]
    return {
        "name": state.name,
        "panels": panels,
        "settings": {name: _shown_settings(group) for name, group in state.settings.items()},
        "steps": state.steps,
        "best": state.best,
        "trainer": state.trainer,
        "updated": state.updated,
        "heads_version": state.heads_version,
    }


def read_asset(name: str) -> str:
    """Return a file of the page."""
    if name.startswith("head_maps."):
        return read_heads_asset(name)
    return files("regard.views.run_page").joinpath(name).read_text(encoding="utf8")


def _thin(steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return the points of a line; of a long one the means of `each` rows, at the step of the last."""
    each = -(-len(steps) // MAX_POINTS) or 1
    parts = range(0, len(steps), each)
    means = [sum(values[n : n + each]) / len(values[n : n + each]) for n in parts]
    return {
        "steps": [steps[min(n + each, len(steps)) - 1] for n in parts],
        "values": [value if math.isfinite(value) else None for value in means],
        "each": each,
    }


def _shown_settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a section as text, without those that are left out."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in group.items()}
    return {key: text for key, text in texts.items() if text != "null"}
