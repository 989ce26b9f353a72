"""Handwritten digits that come with scikit-learn: 1,797 of 8 x 8 pixels."""

from __future__ import annotations

import numpy as np

from .images import Images


def digits(part: str = "train") -> Images:
    """Load grey 8 x 8 digits: every fifth is `"test"`, the others `"train"`.

    >>> len(digits("train")), len(digits("test")), digits("test").classes
    (1438, 359, ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9'))
    """
    if part not in ("train", "test"):
        raise ValueError(f"part must be 'train' or 'test', got {part!r}")
    # Imported here because it takes half a second.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    chosen = (np.arange(len(found.target)) % 5 == 4) == (part == "test")
    # Sixteen shades of grey, spread over a byte.
    images = np.rint(found.images[chosen] * (255 / 16)).astype(np.uint8)
    return Images(images, found.target[chosen])
