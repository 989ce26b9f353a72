"""Scenes of shapes: pictures that show what their captions say."""

from collections import Counter

import numpy as np
import pytest

from regard.data import Generated, Scenes
from regard.data.shapes import COLOURS, FORMS


@pytest.mark.parametrize("pixels", [16, 32, 49])
def test_scenes_show_what_their_captions_say(pixels):
    words = Counter()
    for scene in Generated(Scenes(pixels=pixels), size=300):
        assert scene.image.shape == (pixels, pixels, 3)
        assert scene.image.dtype == np.uint8
        assert scene.caption.startswith(scene.shapes[0].name)
        assert scene.caption.endswith(scene.shapes[-1].name)
        words.update(scene.caption.split())
        for shape in scene.shapes:
            left, top, right, bottom = shape.box
            assert 0 <= left < right <= pixels
            assert 0 <= top < bottom <= pixels
            # The middle of every form is filled with its colour.
            middle = scene.image[(top + bottom) // 2, (left + right) // 2].astype(int)
            assert np.abs(middle - COLOURS[shape.colour]).max() <= 16
        outside = np.ones((pixels, pixels), bool)
        for left, top, right, bottom in (shape.box for shape in scene.shapes):
            outside[top:bottom, left:right] = False
        assert scene.image[outside].max() <= 50
    assert set(words) == {"a", "small", "large", "left", "of", "above", *COLOURS, *FORMS}


def test_captions_of_scenes_are_beyond_doubt():
    for scene in Generated(Scenes(), size=500):
        if len(scene.shapes) == 1:
            continue
        first, second = (np.array(shape.box).reshape(2, 2) for shape in scene.shapes)
        across, down = second.mean(0) - first.mean(0)
        beside = " left of " in scene.caption
        assert (across if beside else down) > 2 * abs(down if beside else across)
        # Boxes do not overlap.
        assert (first[1] <= second[0]).any()


def test_the_four_forms_look_different():
    filled = {}
    for scene in Generated(Scenes(most=1), size=200, seed=5):
        (shape,) = scene.shapes
        left, top, right, bottom = shape.box
        part = scene.image[top:bottom, left:right].astype(int)
        own = np.abs(part - COLOURS[shape.colour]).max(-1) < 40
        filled.setdefault((shape.size, shape.form), []).append(own.mean())
    for size in ("small", "large"):
        triangle, cross, circle, square = (
            np.mean(filled[size, form]) for form in ("triangle", "cross", "circle", "square")
        )
        assert triangle < cross < circle < square == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Scenes(pixels=8), "pixels must be at least 16 for shapes to be distinguishable, got 8"),
        (lambda: Scenes(most=3), "most must be 1 or 2 shapes per scene, got 3"),
    ],
)
def test_scenes_that_cannot_be_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
