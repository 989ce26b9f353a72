"""Pictures: the images whose patches some layers attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...checks import check_int
from ..layer_names import shown_name

Image = Tensor | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Picture:
    """An image cut into patches, in reading order behind `special` tokens."""

    pixels: Tensor  # y x 3, uint8
    rows: int
    cols: int
    special: int

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("cols", self.cols, 1), ("special", self.special, 0)):
            check_int(name, value, least)
            object.__setattr__(self, name, int(value))
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 3 or self.pixels.shape[-1] != 3:
            raise ValueError(f"pixels must be uint8 y x 3, got {self.pixels.dtype} of {tuple(self.pixels.shape)}")

    @property
    def tokens(self) -> int:
        """How many tokens it is to a model."""
        return self.special + self.rows * self.cols


def pictures(images: Image | Sequence[Image], patches: tuple[int, int], special: int) -> list[Picture]:
    """A picture for all batch rows, or one for each."""
    if not isinstance(patches, Sequence) or len(patches) != 2:
        raise ValueError(f"patches must be how many rows and columns of them there are, as (14, 14), got {patches!r}")
    if not isinstance(images, (Tensor, Sequence)):
        images = np.asarray(images)
    given = list(images) if isinstance(images, Sequence) or images.ndim == 4 else [images]
    return [Picture(_pixels(image), *patches, special) for image in given]


def misfit(given: Sequence[Picture], shapes: Mapping[str, tuple[int, int, int]]) -> str | None:
    """What is to be said of pictures that fit no layer, by how many batch rows, queries and keys each has."""
    if not given or not shapes:
        return None
    name, (b, i, j) = next(iter(shapes.items()))
    layer = shown_name(name)
    if len(given) > 1 and all(len(given) != rows for rows, _, _ in shapes.values()):
        return f"{len(given)} pictures were given, and {layer!r} has a batch of {b}; give one for all, or one for each"
    if any(given[0].tokens in shape[1:] for shape in shapes.values()):
        return None
    return (
        f"a picture of {given[0].tokens} tokens was given, {given[0].special} before {given[0].rows} x {given[0].cols} "
        f"patches, and {layer!r} has {i} queries and {j} keys; check patches and special"
    )


def _pixels(image: Image) -> Tensor:
    """Bytes `y x 3` of an image `y x`, `y x c` or `c y x`, c of 1 or 3; others than bytes and 0 to 1 are stretched."""
    x = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[-1] not in (1, 3):
        x = x.movedim(0, -1)
    x = x[..., None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[-1] not in (1, 3) or not x.numel():
        raise ValueError(f"an image must have dims y x, y x c or c y x, c of 1 or 3, got shape {tuple(x.shape)}")
    if x.dtype != torch.uint8:
        x = x.float()
        if not bool(x.isfinite().all()):
            raise ValueError("an image must hold numbers, got NaN or Inf among its pixels")
        low, high = x.min(), x.max()
        if low < 0 or high > 1:
            x = (x - low) / (high - low).clamp(min=1e-12)  # back from where a model wants it
        x = (x * 255).round().to(torch.uint8)
    return x.expand(*x.shape[:2], 3).contiguous()
