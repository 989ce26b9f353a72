"""Dataclasses as JSON: a closed schema that names what is unknown, missing or of another type."""

import json
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from regard.train import Recipe
from regard.train.dataclass_json import check_left_at_default, check_types, from_json, stored_name, to_json


@dataclass(frozen=True)
class Square:
    stored_name: ClassVar[str] = "Box"
    side: float


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Drawing:
    shape: Square | Circle
    name: str | None = None
    colour: tuple[int, ...] = ()
    fill: Literal["none", "solid"] = "none"

    def __post_init__(self):
        check_types(self)


def test_nested_dataclasses_come_back_by_their_stored_names():
    assert (stored_name(Square), stored_name(Circle)) == ("Box", "Circle")
    drawing = Drawing(Square(2), "x", (1, 2, 3), "solid")
    plain = to_json(drawing)
    assert plain == {"shape": {"kind": "Box", "side": 2}, "name": "x", "colour": [1, 2, 3], "fill": "solid"}
    assert from_json(Drawing, json.dumps(plain), source="file") == drawing


def test_annotations_are_checked_and_spelled_out():
    with pytest.raises(TypeError, match=r"^shape must be Box or Circle, got 3$"):
        Drawing(3)
    with pytest.raises(TypeError, match=r"^colour must be \(a whole number, \.\.\.\), got \(1, 2.5\)$"):
        Drawing(Circle(1.0), colour=(1, 2.5))
    with pytest.raises(TypeError, match=r"^fill must be 'none' or 'solid', got 'dots'$"):
        Drawing(Circle(1.0), fill="dots")


def test_a_field_without_effect_must_stay_at_its_default():
    check_left_at_default(Drawing(Circle(1.0), fill="solid"), "name", whose="prints", got="a plot")
    with pytest.raises(ValueError, match=r"^fill is only for prints, got a plot; leave it out$"):
        check_left_at_default(Drawing(Circle(1.0), fill="solid"), "name", "fill", whose="prints", got="a plot")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stpes": 3}, "file: unknown key 'stpes'; did you mean 'steps'?"),
        ({"xyzzy": 3}, "file: unknown key 'xyzzy'; known: 'steps', 'epochs'"),
        (
            {"rate": {"kind": "Cosin", "peak": 1.0}},
            "file: rate.kind must name a class, got 'Cosin'; did you",
        ),
        ({"rate": {"peak": 1.0}}, "file: rate.kind must name a class, got ''; known: 'Constant'"),
        ({"rate": {"kind": "Cosine", "peak": 1.0, "step": 4}}, "unknown key 'rate.step'; did you mean 'steps'?"),
        ({"rate": {"kind": "Cosine", "peak": 1.0}}, "file: key 'rate.steps' is missing"),
        ({"rate": 0.1}, "file: rate must be Constant or InverseSquareRoot or Cosine or Plateau, got 0.1"),
        ({"steps": "many"}, "file: steps must be a whole number or None, got 'many'"),
        ({"steps": True}, "file: steps must be a whole number or None, got True"),
        ({"steps": 1.5}, "file: steps must be a whole number or None, got 1.5"),
        ({"betas": [0.9]}, "file: betas must be (a number, a number), got (0.9,)"),
        ({"precision": "float16"}, "file: precision must be 'auto' or 'float32' or 'bfloat16', got 'float16'"),
        ({"compile": "yes"}, "file: compile must be true or false, got 'yes'"),
        ({"metric": 3}, "file: metric must be text, got 3"),
    ],
)
def test_malformed_fields_are_answered(change, message):
    text = json.dumps(json.loads(Recipe(steps=3).to_json()) | change)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Recipe.from_json(text, source="file")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"steps": NaN}', '{"steps": 1e999}', "[" * 100_000])
def test_text_that_is_no_object_is_answered(text):
    with pytest.raises(ValueError, match=r"^file: "):
        Recipe.from_json(text, source="file")
