"""Images of a coloured square in one of four corners, with captions."""

from __future__ import annotations

import numpy as np

from regard.data import Captioned

COLOURS = {"red": (220, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 220)}


def scenes():
    """A coloured square in one of four corners, and the one or two ways to say so."""
    found = []
    for colour, rgb in COLOURS.items():
        for corner in range(4):
            image = np.zeros((16, 16, 3), np.uint8)
            y, x = (8 * n for n in divmod(corner, 2))
            image[y : y + 8, x : x + 8] = rgb
            place = f"{'bottom' if y else 'top'} {'right' if x else 'left'}"
            captions = (f"{colour} at the {place}",) + ((f"a {colour} square",) if corner == 3 else ())
            found.append(Captioned(image, captions, ""))
    return found


SCENES = scenes()
