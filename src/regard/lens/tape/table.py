"""table: a row for each layer, call, batch row and head, and a column for each measure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...ops.weights import Weights
from ..layer_names import shown_name
from ..recording.recorder import Key
from ..recording.reduced import ROWS, Reduced


def table(entries: Iterable[tuple[Key, Weights | Reduced]]) -> Any:
    """Tidy columns, as a pandas data frame where there is pandas."""
    rows: list[dict[str, Any]] = []
    for (layer, call), A in entries:
        measures = {name: x.tolist() for name, x in _measures(A).items()}
        b, h = A.shape[:2]
        for batch, head in ((batch, head) for batch in range(b) for head in range(h) if measures):
            numbers = {name: x[batch][head] for name, x in measures.items()}
            rows.append({"layer": shown_name(layer), "call": call, "batch": batch, "head": head, **numbers})
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return columns if find_spec("pandas") is None else import_module("pandas").DataFrame(columns)


def _measures(A: Weights | Reduced) -> dict[str, Tensor]:
    """`b h` of each measure, in float64 on the CPU."""
    if isinstance(A, Reduced):
        found = {name: A[name] for name in ROWS if name in A.kept}
    else:
        summary = A.summary()
        found = {name: getattr(summary, name) for name in ROWS}
    found = {name: x.double().cpu() for name, x in found.items()}
    seeing = found["max"] != 0 if "max" in found else torch.ones(A.shape[:-1], dtype=torch.bool)

    def one(name: str, x: Tensor) -> Tensor:
        if name == "received":
            most = x.amax(-1) if x.shape[-1] else x.sum(-1)  # nothing, of no keys
            return most / seeing.sum(-1).clamp(min=1)
        return (x * seeing).sum(-1) / seeing.sum(-1).clamp(min=1)

    return {name: one(name, x) for name, x in found.items()}
