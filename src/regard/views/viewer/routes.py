"""Routes: the resources of the viewer by name, with parsers for their query parameters, which are all required."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ...lens.tape.hidden_keys import KINDS
from .api import ViewerApi
from .captures import ApiError, CaptureId, MatrixId, PlaceId, Variant

JSON, FRAME, PNG = "application/json", "application/octet-stream", "image/png"
MAX_HIDDEN_KEYS = 512  # chosen by number
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


class Resource(NamedTuple):
    """The method that answers a resource, the media type, and a parser for each parameter."""

    answer: Callable[..., bytes]
    type: str
    parameters: Mapping[str, Callable[[str], Any]]


def parse_int(value: str) -> int:
    """Parse a decimal whole number without sign or leading zeros."""
    if not NUMBER.fullmatch(value):
        raise ValueError("a whole number of up to nine digits")
    return int(value)


def parse_capture(value: str) -> CaptureId:
    """Parse the number of a capture, and behind `~` hidden keys, or norms in place of weights: `0~sinks~3-5~values`."""
    number, *changes = value.split("~")
    hide: list[str | int] = []
    for part in changes:
        if part in KINDS:
            hide.append(part)
            continue
        if part == "values":
            continue
        first, _, last = part.partition("-")
        keys = range(parse_int(first), parse_int(last or first) + 1)
        if len(hide) + len(keys) > MAX_HIDDEN_KEYS:
            raise ValueError(f"at most {MAX_HIDDEN_KEYS} hidden keys")
        hide.extend(keys)
    return Variant(parse_int(number), tuple(hide), "values" in changes) if changes else parse_int(number)


def parse_head(value: str) -> Any:
    """Parse the number of a head, or mean or max over all heads."""
    if value in ("mean", "max"):
        return value
    try:
        return parse_int(value)
    except ValueError:
        raise ValueError("the number of a head, mean or max") from None


def parse_other_matrix(value: str) -> MatrixId | None:
    """Parse another matrix, written `capture.layer.batch.head`, or none."""
    if value == "none":
        return None
    parts = value.split(".")
    if len(parts) != 4:
        raise ValueError("none, or capture.layer.batch.head")
    return MatrixId(parse_capture(parts[0]), parse_int(parts[1]), parse_int(parts[2]), parse_head(parts[3]))


def parse_place(value: str) -> PlaceId:
    """Parse a layer over one batch row, written `capture.layer.batch`."""
    parts = value.split(".")
    if len(parts) != 3:
        raise ValueError("capture.layer.batch")
    return PlaceId(parse_capture(parts[0]), *map(parse_int, parts[1:]))


def parse_axis(value: str) -> str:
    """Parse one of the two axes."""
    if value not in ("query", "key"):
        raise ValueError("query or key")
    return value


LAYER: dict[str, Callable[[str], Any]] = {"capture": parse_capture, "layer": parse_int, "batch": parse_int}
LAYER_AS_CAPTURED: dict[str, Callable[[str], Any]] = {**LAYER, "capture": parse_int}
HEAD = {**LAYER, "head": parse_head}
TILE = {**HEAD, "minus": parse_other_matrix, "level": parse_int, "row": parse_int, "col": parse_int}
RESOURCES = {
    "session": Resource(ViewerApi.session, JSON, {}),
    "text": Resource(ViewerApi.text, JSON, {"capture": parse_int, "text": parse_int}),
    "group": Resource(ViewerApi.group, JSON, {"capture": parse_int, "group": parse_int}),
    "picture": Resource(ViewerApi.picture, PNG, {"capture": parse_int, "picture": parse_int}),
    "hidden": Resource(ViewerApi.hidden, JSON, LAYER),
    "overview": Resource(ViewerApi.overview, FRAME, LAYER),
    "predictions": Resource(ViewerApi.predictions, FRAME, LAYER_AS_CAPTURED),
    "roles": Resource(ViewerApi.roles, JSON, {"capture": parse_int, "layer": parse_int}),
    "clusters": Resource(ViewerApi.clusters, JSON, {"capture": parse_int}),
    "difference": Resource(ViewerApi.difference, FRAME, {**LAYER, "minus": parse_place}),
    "comparison": Resource(ViewerApi.comparison, JSON, {}),
    "same_tokens": Resource(ViewerApi.same_tokens, JSON, {**LAYER, "capture": parse_int}),
    "measures": Resource(ViewerApi.measures, FRAME, {**HEAD, "level": parse_int}),
    "tile": Resource(ViewerApi.tile, FRAME, TILE),
    "largest": Resource(ViewerApi.largest, FRAME, TILE),
    "token": Resource(
        ViewerApi.token, FRAME, {**HEAD, "axis": parse_axis, "first": parse_int, "last": parse_int, "top": parse_int}
    ),
    "block": Resource(
        ViewerApi.block, FRAME, {**LAYER, "row": parse_int, "rows": parse_int, "col": parse_int, "cols": parse_int}
    ),
    "pair": Resource(ViewerApi.pair, JSON, {**HEAD, "row": parse_int, "col": parse_int}),
    "flow": Resource(ViewerApi.flow, FRAME, {**LAYER, "token": parse_int}),
    "alignment": Resource(ViewerApi.alignment, FRAME, HEAD),
}


def parse_query(name: str, query: str) -> dict[str, Any]:
    """Return the parameters of a resource; raises `ApiError` unless each occurs once and can be parsed."""
    parameters = RESOURCES[name].parameters
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=16) if query else []
    except ValueError:
        raise ApiError(400, "the query cannot be read", _usage_hint(name)) from None
    names = [key for key, _ in given]
    if sorted(names) != sorted(parameters):
        shown = f"{', '.join(parameters)}, each once" if parameters else "no parameters"
        raise ApiError(400, f"{name} takes {shown}", _usage_hint(name))
    found = {}
    for key, value in given:
        try:
            found[key] = parameters[key](value)
        except ValueError as expected:
            raise ApiError(400, f"{key} must be {expected}", _usage_hint(name)) from None
    return found


def _usage_hint(name: str) -> str:
    values = {"minus": "0.0.0" if name == "difference" else "none", "axis": "query"}
    query = "&".join(f"{key}={values.get(key, 0)}" for key in RESOURCES[name].parameters)
    return f"write {name}?{query}" if query else f"write {name}"
