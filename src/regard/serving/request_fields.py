"""Fields: what a request may contain. Requests are checked by them, and the API page and OpenAPI are made of them."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..data import DataError
from ..data.image_files import read_image

MAX_EXAMPLES = 256  # texts, questions or images of one request
MAX_CHARACTERS = 100_000  # a text may have
Kind = Literal["texts", "images", "text", "whole number", "number", "yes or no"]
REQUIRED = object()


class BadRequest(ValueError):
    """A request that cannot be answered, in words for its sender."""


@dataclass(frozen=True)
class Field:
    """One field of a request; without a default it is required. `least` and `most` bound a number."""

    name: str
    kind: Kind
    help: str
    default: Any = REQUIRED
    least: float | None = None
    most: float | None = None

    @property
    def is_required(self) -> bool:
        """Whether every request must contain the field."""
        return self.default is REQUIRED

    def parse(self, value: Any) -> Any:
        """Return the value of the field; texts and images as a tuple."""
        if value is None and self.default is None:
            return None
        match self.kind:
            case "texts":
                return tuple(self._text(one) for one in self._some(value))
            case "images":
                return tuple(self._image(one) for one in self._some(value))
            case "text":
                return self._text(value)
            case "yes or no":
                if not isinstance(value, bool):
                    raise BadRequest(f"{self.name} must be true or false, got {_quote(value)}")
                return value
            case _:
                return self._number(value)

    def schema(self) -> dict[str, Any]:
        """Return the field as JSON Schema."""
        text = {"type": "string", "maxLength": MAX_CHARACTERS}
        if self.kind == "images":
            text = {"type": "string", "contentEncoding": "base64"}
        kinds: dict[str, dict[str, Any]] = {
            "texts": {"oneOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_EXAMPLES}]},
            "text": text,
            "whole number": {"type": "integer"},
            "number": {"type": "number"},
            "yes or no": {"type": "boolean"},
        }
        found = {"description": self.help, **kinds["texts" if self.kind == "images" else self.kind]}
        if self.least is not None:
            found["minimum"] = self.least
        if self.most is not None:
            found["maximum"] = self.most
        if not self.is_required and self.default is not None:
            found["default"] = self.default
        return found

    def _some(self, value: Any) -> list[Any]:
        values = value if isinstance(value, list) else [value]
        if not 1 <= len(values) <= MAX_EXAMPLES:
            raise BadRequest(f"{self.name} must hold 1 to {MAX_EXAMPLES} items, got {len(values)}")
        return values

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            several = " or a list of texts" if self.kind == "texts" else ""
            raise BadRequest(f"{self.name} must be a text{several}, got {_quote(value)}")
        if len(value) > MAX_CHARACTERS:
            raise BadRequest(f"{self.name} must have at most {MAX_CHARACTERS:,} characters, got {len(value):,}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise BadRequest(f"{self.name} must be Unicode, got half of a surrogate pair")
        return value

    def _image(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise BadRequest(f"{self.name} must be an image file in base64, got {_quote(value)}")
        try:
            return read_image(io.BytesIO(base64.b64decode(value, validate=True)), name=self.name)
        except binascii.Error:
            raise BadRequest(f"{self.name} must be base64, got {_quote(value[:40])}") from None
        except DataError as error:
            raise BadRequest(str(error)) from None

    def _number(self, value: Any) -> float:
        whole = self.kind == "whole number"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not math.isfinite(value):
            raise BadRequest(f"{self.name} must be a {self.kind}, got {_quote(value)}")
        if (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            raise BadRequest(f"{self.name} must be from {self.least} to {self.most}, got {value}")
        return value if whole else float(value)


def parse_request(body: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the value of every field of a request in JSON."""
    try:
        given = json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, BadRequest) else "the body is not JSON"
        raise BadRequest(reason) from None
    if not isinstance(given, Mapping):
        raise BadRequest(f"the body must be a JSON object, got {_quote(given)}")
    names = [field.name for field in fields]
    if unknown := [name for name in given if name not in names]:
        raise BadRequest(f"unknown field {_quote(unknown[0])}; known are {', '.join(names)}")
    if missing := [field.name for field in fields if field.is_required and field.name not in given]:
        raise BadRequest(f"{missing[0]} is missing")
    return {field.name: field.parse(given[field.name]) if field.name in given else field.default for field in fields}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadRequest("a field occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise BadRequest(f"{name} is not a number of JSON")


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:60]}..."
