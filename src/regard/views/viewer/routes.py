"""Resources: the names a viewer asks by, each with its parameters and all of them; nothing else is understood."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from .api import Answers
from .captures import Chosen, Refused

JSON, FRAME, PNG = "application/json", "application/octet-stream", "image/png"
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


class Resource(NamedTuple):
    """How a resource is answered, in what type, and what its parameters are."""

    answer: Callable[..., bytes]
    type: str
    parameters: Mapping[str, Callable[[str], Any]]


def whole(value: str) -> int:
    """A whole number as everybody writes it."""
    if not NUMBER.fullmatch(value):
        raise ValueError("a whole number of up to nine digits")
    return int(value)


def which(value: str) -> Any:
    """A head, or all of them together."""
    if value in ("mean", "max"):
        return value
    try:
        return whole(value)
    except ValueError:
        raise ValueError("the number of a head, mean or max") from None


def other(value: str) -> Chosen | None:
    """Another matrix, as `capture.layer.batch.head`, or none."""
    if value == "none":
        return None
    parts = value.split(".")
    if len(parts) != 4:
        raise ValueError("none, or capture.layer.batch.head")
    return Chosen(whole(parts[0]), whole(parts[1]), whole(parts[2]), which(parts[3]))


def side(value: str) -> str:
    """One of the two axes."""
    if value not in ("query", "key"):
        raise ValueError("query or key")
    return value


LAYER = {"capture": whole, "layer": whole, "batch": whole}
HEAD = {**LAYER, "head": which}
RESOURCES = {
    "session": Resource(Answers.session, JSON, {}),
    "text": Resource(Answers.text, JSON, {"capture": whole, "text": whole}),
    "group": Resource(Answers.group, JSON, {"capture": whole, "group": whole}),
    "picture": Resource(Answers.picture, PNG, {"capture": whole, "picture": whole}),
    "overview": Resource(Answers.overview, FRAME, LAYER),
    "measures": Resource(Answers.measures, FRAME, {**HEAD, "level": whole}),
    "tile": Resource(Answers.tile, FRAME, {**HEAD, "minus": other, "level": whole, "row": whole, "col": whole}),
    "token": Resource(Answers.token, FRAME, {**HEAD, "axis": side, "first": whole, "last": whole, "top": whole}),
    "block": Resource(Answers.block, FRAME, {**LAYER, "row": whole, "rows": whole, "col": whole, "cols": whole}),
    "flow": Resource(Answers.flow, FRAME, {**LAYER, "token": whole}),
    "alignment": Resource(Answers.alignment, FRAME, HEAD),
}


def understood(name: str, query: str) -> dict[str, Any]:
    """The parameters of a resource; `Refused` unless each is there once and of its kind."""
    parameters = RESOURCES[name].parameters
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=16) if query else []
    except ValueError:
        raise Refused(400, "the query cannot be read", _spelled(name)) from None
    names = [key for key, _ in given]
    if sorted(names) != sorted(parameters):
        shown = ", ".join(parameters) or "no parameters"
        raise Refused(400, f"{name} takes {shown}, each once", _spelled(name))
    found = {}
    for key, value in given:
        try:
            found[key] = parameters[key](value)
        except ValueError as expected:
            raise Refused(400, f"{key} must be {expected}", _spelled(name)) from None
    return found


def _spelled(name: str) -> str:
    values = {"minus": "none", "axis": "query"}
    return f"write {name}?" + "&".join(f"{key}={values.get(key, 0)}" for key in RESOURCES[name].parameters)
