"""The HTML document of a run page, and the data that it draws."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ..export import Page
from ..figures.curves import Curve, curve_panels

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


def run_page(state: RunState) -> Page:
    """Return the page of a run as one file, with its curves as they are now."""
    data = json.dumps(to_json(state), ensure_ascii=False).replace("<", "\\u003c")
    script, style = read_asset("run_page.js"), read_asset("run_page.css")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    text = (
        document(state.name)
        .replace('<meta name="policy">', f'<meta http-equiv="content-security-policy" content="{policy}">')
        .replace('<link rel="stylesheet" href="run_page.css">', f"<style>{style}</style>")
        .replace('<script src="run_page.js" defer></script>', "")
        .replace(
            "</body>", f'<script type="application/json" id="data">{data}</script><script>{script}</script></body>'
        )
    )
    return Page(text)


def document(name: str) -> str:
    """Return the HTML of the live page, which loads its script, its style and its data from the server."""
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
    }


def read_asset(name: str) -> str:
    """Return a file of the page."""
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


def _hash(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
