"""What a request may contain, and what is said about one that may not."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from regard.serving import request_fields
from regard.serving.request_fields import BadRequest, Field, parse_request

FIELDS = (
    Field("text", "texts", "Texts."),
    Field("document", "text", "A text.", ""),
    Field("beam", "whole number", "Beam.", 5, 1, 64),
    Field("penalty", "number", "Penalty.", 0.6, -10, 10),
    Field("longest", "whole number", "Longest.", None, 1, 99),
    Field("links", "yes or no", "Links.", False),
)


def parse(**given):
    return parse_request(json.dumps(given).encode(), FIELDS)


def test_a_text_is_a_list_of_one_and_the_rest_has_defaults():
    found = {"text": ("ah",), "document": "", "beam": 5, "penalty": 0.6, "longest": None, "links": False}
    assert parse(text="ah") == parse(text=["ah"]) == found
    assert parse(text=["a", "b"], beam=64, penalty=1, longest=None, links=True) == {
        **found,
        "text": ("a", "b"),
        "beam": 64,
        "penalty": 1.0,
        "links": True,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "text is missing"),
        ({"text": []}, "text must hold 1 to 256 items, got 0"),
        ({"text": ["x"] * 257}, "got 257"),
        ({"text": [3]}, "text must be a text or a list of texts, got 3"),
        ({"text": None}, "got null"),
        ({"text": "x" * 100_001}, "at most 100,000 characters, got 100,001"),
        ({"text": "\ud83d"}, "half of a surrogate pair"),
        ({"text": "x", "beam": 0}, "beam must be from 1 to 64, got 0"),
        ({"text": "x", "beam": 2.0}, "beam must be a whole number, got 2.0"),
        ({"text": "x", "beam": True}, "beam must be a whole number, got true"),
        ({"text": "x", "beam": None}, "beam must be a whole number, got null"),
        ({"text": "x", "penalty": "1"}, 'penalty must be a number, got "1"'),
        ({"text": "x", "penalty": 11}, "penalty must be from -10 to 10"),
        ({"text": "x", "links": 1}, "links must be true or false, got 1"),
        ({"text": "x", "document": ["y"]}, r'document must be a text, got \["y"\]'),
        ({"text": "x", "size": 1}, 'unknown field "size"; known are text, document, beam'),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(BadRequest, match=message):
        parse(**given)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "x", "beam": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'["x"]', 'must be a JSON object, got \\["x"\\]'),
        (b'{"text": "x", "text": "y"}', "a field occurs twice"),
        (b'{"text": "x", "penalty": NaN}', "NaN is not a number of JSON"),
        (b'{"text": "x", "penalty": 1e999}', "penalty must be a number"),
    ],
)
def test_other_bodies_are_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        parse_request(body, FIELDS)


def test_images_come_in_base64():
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6), 7, np.uint8)).save(file, "png")
    field = Field("image", "images", "Images.")
    [image] = field.parse(base64.b64encode(file.getvalue()).decode())
    assert image.shape == (4, 6)
    for wrong, message in (("?", "must be base64"), (base64.b64encode(b"text").decode(), "image"), (3, "in base64")):
        with pytest.raises(BadRequest, match=message):
            field.parse(wrong)


def test_the_schema_says_the_same():
    assert FIELDS[2].schema() == {
        "description": "Beam.",
        "type": "integer",
        "minimum": 1,
        "maximum": 64,
        "default": 5,
    }
    assert FIELDS[0].schema()["oneOf"][1]["maxItems"] == request_fields.MAX_EXAMPLES
    assert "default" not in FIELDS[4].schema()
