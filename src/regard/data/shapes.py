"""Scenes of coloured shapes with a caption: images to describe, drawn on the fly."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
FORMS = ("circle", "square", "triangle", "cross")
SIZES = {"small": 0.55, "large": 0.9}
OVERSAMPLING = 4


class Shape(NamedTuple):
    """One shape of a scene and its box in pixels: left, top, right, bottom, the last two excluded."""

    size: str
    colour: str
    form: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        """The phrase of the caption."""
        return f"a {self.size} {self.colour} {self.form}"


class Scene(NamedTuple):
    """A picture (height, width, 3), its caption, and its shapes with their boxes."""

    image: np.ndarray[Any, np.dtype[np.uint8]]
    caption: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """One or two coloured shapes on a dark ground, each picture with exactly one right caption.

    >>> from regard.data import Generated
    >>> scene = Generated(Scenes(), size=100, seed=3)[0]
    >>> scene.image.shape, scene.caption
    ((32, 32, 3), 'a small white square above a large blue triangle')

    Two shapes stand side by side or one above the other: the caption begins with the left or the upper one. The
    boxes are the regions that a caption's words should attend to.
    """

    pixels: int = 32
    most: int = 2

    def __post_init__(self) -> None:
        if self.pixels < 16:
            raise ValueError(f"pixels must be at least 16 for shapes to be distinguishable, got {self.pixels}")
        if self.most not in (1, 2):
            raise ValueError(f"most must be 1 or 2 shapes per scene, got {self.most}")

    def __call__(self, rng: random.Random) -> Scene:
        ground = tuple(rng.randint(0, 50) for _ in range(3))
        canvas = Image.new("RGB", (self.pixels * OVERSAMPLING, self.pixels * OVERSAMPLING), ground)
        draw = ImageDraw.Draw(canvas)
        shapes = self._one(rng) if rng.randint(1, self.most) == 1 else self._two(rng)
        for shape in shapes:
            _draw(draw, shape)
        image = np.array(canvas.resize((self.pixels, self.pixels), Image.Resampling.BOX))
        return Scene(image, _caption(shapes), shapes)

    def _one(self, rng: random.Random) -> tuple[Shape, ...]:
        size, side = self._size(rng)
        return (_shape(rng, size, side, [rng.randint(0, self.pixels - side) for _ in range(2)]),)

    def _two(self, rng: random.Random) -> tuple[Shape, ...]:
        axis, half = rng.randint(0, 1), self.pixels // 2
        across = rng.uniform(0.25, 0.75) * self.pixels
        shapes = []
        for n in range(2):
            size, side = self._size(rng)
            place = [0, 0]
            place[axis] = n * half + rng.randint(0, half - side)
            # Nearly aligned on the other axis, otherwise "above" and "left of" would both be right.
            aside = across - side / 2 + rng.uniform(-0.05, 0.05) * self.pixels
            place[1 - axis] = min(max(round(aside), 0), self.pixels - side)
            shapes.append(_shape(rng, size, side, place))
        return tuple(shapes)

    def _size(self, rng: random.Random) -> tuple[str, int]:
        size = rng.choice(list(SIZES))
        return size, round(self.pixels // 2 * SIZES[size])


def _shape(rng: random.Random, size: str, side: int, place: list[int]) -> Shape:
    left, top = place
    return Shape(size, rng.choice(list(COLOURS)), rng.choice(FORMS), (left, top, left + side, top + side))


def _caption(shapes: tuple[Shape, ...]) -> str:
    if len(shapes) == 1:
        return shapes[0].name
    first, second = shapes
    across, down = (abs(first.box[n] + first.box[n + 2] - second.box[n] - second.box[n + 2]) for n in range(2))
    return f"{first.name} {'left of' if across > down else 'above'} {second.name}"


def _draw(draw: ImageDraw.ImageDraw, shape: Shape) -> None:
    left, top, right, bottom = (at * OVERSAMPLING for at in shape.box)
    right, bottom = right - 1, bottom - 1
    colour = COLOURS[shape.colour]
    if shape.form == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape.form == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    elif shape.form == "triangle":
        draw.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=colour)
    else:
        third = (right - left) // 3
        draw.rectangle((left + third, top, right - third, bottom), fill=colour)
        draw.rectangle((left, top + third, right, bottom - third), fill=colour)
