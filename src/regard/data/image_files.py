"""Image files of a folder or a tar archive by name, and as tensors for models."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
READERS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
MAX_PIXELS = 2**26
GREY = ("1", "L", "LA")
WHOLE_DIGEST_BYTES, PART_BYTES = 2**20, 2**16
UNSCALED = "scale them to 0 to 255 and save it as an 8-bit PNG"

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Pictures:
    """The image files of a folder or of a tar archive: `"a/1.png" in pictures`, `pictures["a/1.png"]`, iteration.

    Names are relative, with forward slashes, in sorted order. A picture is an array (height, width, 3), or (height,
    width) if it is grey; a picture of more than 64 million pixels raises before it is decoded.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[int, int]] = {}
        if self.path.is_dir():
            return
        if not self.path.is_file():
            raise DataError("no such folder or archive", file=path, hint="check the path")
        try:
            with tarfile.open(self.path, "r:") as archive:
                self._places = {
                    str(PurePosixPath(member.name)): (member.offset_data, member.size)
                    for member in archive
                    if member.isreg() and _is_image(member.name)
                }
        except tarfile.TarError as error:
            raise DataError(f"not a tar archive ({error})", file=path, hint="expected a folder or a .tar") from error

    def __iter__(self) -> Iterator[str]:
        if self.path.is_file():
            yield from sorted(self._places)
            return
        found = []
        for folder, _, files in os.walk(self.path):
            inside = Path(folder).relative_to(self.path)
            found += [(inside / file).as_posix() for file in files if _is_image(file)]
        yield from sorted(found)

    def __contains__(self, name: str) -> bool:
        if self.path.is_file():
            return name in self._places
        return ".." not in PurePosixPath(name).parts and not os.path.isabs(name) and (self.path / name).is_file()

    def __getitem__(self, name: str) -> Array:
        if name not in self:
            raise DataError(f"no image {name!r}", file=self.path)
        if self.path.is_dir():
            return read_image(self.path / name)
        start, size = self._places[name]
        with self.path.open("rb") as file:
            file.seek(start)
            return read_image(io.BytesIO(file.read(size)), name=f"{self.path}: {name}")

    def digest(self, name: str) -> str:
        """Return a digest of an image file: of all its bytes, or of three parts of a file larger than 1 MiB."""
        place = self._places.get(name)
        path, start, size = self.path, *(place or (0, 0))
        if place is None:
            path = self.path / name
            size = path.stat().st_size
        hashed = hashlib.sha256(b"%d\n" % size)
        whole = size <= WHOLE_DIGEST_BYTES
        parts = [(0, size)] if whole else [(at, PART_BYTES) for at in (0, size // 2, size - PART_BYTES)]
        with path.open("rb") as file:
            for at, length in parts:
                file.seek(start + at)
                hashed.update(file.read(length))
        return hashed.hexdigest()

    def __repr__(self) -> str:
        return f"Pictures({str(self.path)!r})"


def read_image(file: str | Path | io.BytesIO, *, name: str | None = None) -> Array:
    """Read an image file as an upright array (height, width, 3), or (height, width) if grey; 16 bits become 8."""
    name = name or str(file)
    try:
        # Our own limit is lower than the one Pillow warns at.
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image = Image.open(file, formats=READERS)
        with image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"{image.width} x {image.height} pixels exceed the limit of {MAX_PIXELS:,}",
                    file=name,
                    hint="scale it down",
                )
            deep = _has_16_bits(image)
            if image.mode in ("I", "F") and not deep:
                raise DataError(
                    f"pixels of mode {image.mode} have no fixed range from black to white", file=name, hint=UNSCALED
                )
            upright = ImageOps.exif_transpose(image)
            if deep:
                return ((np.array(upright).astype(np.uint32) + 128) // 257).astype(np.uint8)
            return np.array(upright.convert("L" if image.mode in GREY else "RGB"))
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError("no such image", file=name, hint="check the path") from error
    except Exception as error:  # damaged images raise whatever their decoder does
        raise DataError(f"not an image that can be read ({error})", file=name, hint="convert it to PNG") from error


def pixels(image: Array, *, size: int | None = None, channels: int = 3) -> Tensor:
    """Convert an array (height, width[, 3]) to a tensor (channels, height, width) between 0 and 1.

    >>> pixels(np.full((40, 60, 3), 255, np.uint8), size=32).shape
    torch.Size([3, 32, 32])

    With `size` the shorter side is scaled to it and the center square is cropped; 1 channel is grey.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if not isinstance(image, np.ndarray):
        raise TypeError(f"an image must be an array (height, width[, 3]), got {type(image).__name__}; see read_image")
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
        raise ValueError(
            f"an image must be bytes (height, width[, 3]), got {image.dtype} {image.shape}; use read_image, "
            "or for numbers from 0 to 1 write (image * 255).astype('uint8')"
        )
    grey = image.ndim == 2
    if size is not None and image.shape[:2] != (size, size):
        picture = ImageOps.fit(Image.fromarray(image), (size, size), Image.Resampling.BILINEAR)
        image = np.array(picture)
    if grey and channels == 3:
        image = np.repeat(image[..., None], 3, axis=2)
    elif not grey and channels == 1:
        image = np.array(Image.fromarray(image).convert("L"))
    values = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1).contiguous()


def _has_16_bits(image: Image.Image) -> bool:
    """Whether a picture has 16-bit grey values; for PNG and PPM Pillow may report 32 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS)
