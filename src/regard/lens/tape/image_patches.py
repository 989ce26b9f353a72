"""Images whose patches are the tokens of a layer."""

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
class PatchedImage:
    """An image cut into rows x cols patches. Its tokens are `special` tokens, then the patches in reading order."""

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
        """The number of tokens, special ones included."""
        return self.special + self.rows * self.cols


def patched_images(images: Image | Sequence[Image], patches: tuple[int, int], special: int) -> list[PatchedImage]:
    """Return one image for all batch rows, or one per row."""
    if not isinstance(patches, Sequence) or len(patches) != 2:
        raise ValueError(f"patches must be (rows, columns), e.g. (14, 14), got {patches!r}")
    if not isinstance(images, (Tensor, Sequence)):
        images = np.asarray(images)
    rows = list(images) if isinstance(images, Sequence) or images.ndim == 4 else [images]
    return [PatchedImage(_to_bytes(image), *patches, special) for image in rows]


def image_mismatch(images: Sequence[PatchedImage], shapes: Mapping[str, tuple[int, int, int]]) -> str | None:
    """Return a warning if the images fit no layer; `shapes` are (batch rows, queries, keys) by layer name."""
    if not images or not shapes:
        return None
    name, (b, i, j) = next(iter(shapes.items()))
    layer = shown_name(name)
    if len(images) > 1 and all(len(images) != rows for rows, _, _ in shapes.values()):
        return f"{len(images)} pictures were given, but {layer!r} has {b} batch rows; pass one for all, or one per row"
    first = images[0]
    if any(first.tokens in shape[1:] for shape in shapes.values()):
        return None
    return (
        f"a picture of {first.tokens} tokens was given ({first.special} special tokens and {first.rows} x {first.cols} "
        f"patches), but {layer!r} has {i} queries and {j} keys; check patches and special"
    )


def _to_bytes(image: Image) -> Tensor:
    """Convert an image `y x`, `y x c` or `c y x`, c of 1 or 3, to bytes `y x 3`.

    Numbers outside 0 to 1 (a normalized image) are stretched: the lowest becomes 0 and the highest 255.
    """
    x = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[-1] not in (1, 3):
        x = x.movedim(0, -1)  # c y x -> y x c
    x = x[..., None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[-1] not in (1, 3) or not x.numel():
        raise ValueError(f"an image must have dims y x, y x c or c y x, c of 1 or 3, got shape {tuple(x.shape)}")
    if x.dtype != torch.uint8:
        x = x.float()
        if not bool(x.isfinite().all()):
            raise ValueError("an image must hold finite numbers, got NaN or Inf among its pixels")
        low, high = x.min(), x.max()
        if low < 0 or high > 1:
            x = (x - low) / (high - low).clamp(min=1e-12)
        x = (x * 255).round().to(torch.uint8)
    return x.expand(*x.shape[:2], 3).contiguous()
