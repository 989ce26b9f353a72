"""Seeing: images as models take them, of one size, and the batches they are trained in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Batches, DataError, pixels
from ..train import Epochs
from ..train.dataclass_json import check_types
from .setup import Start

Image = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
DEFAULT_PIXELS = 64  # of images that come in many sizes
IMAGES_PER_BATCH = 256  # of a batch that is only looked at
MAX_CACHED_BYTES = 2**30  # bytes of images that stay on the device
ANNOUNCED_IMAGES = 1000  # images that take a moment to read


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """What a model sees of an image: its middle square, so many pixels a side, in grey or in colour.

    >>> Sight(size=8, channels=1)(np.zeros((20, 30, 3), np.uint8)).shape
    torch.Size([1, 8, 8])
    """

    stored_name: ClassVar[str] = "Sight"

    size: int
    channels: int

    def __call__(self, image: Image) -> Tensor:
        return pixels(image, size=self.size, channels=self.channels)

    def batches(self, images: Sequence[Image], device: torch.device) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Every image once, in order: their numbers, and the batch on a device."""
        if isinstance(images, np.ndarray) and images.ndim == 3 and images.shape[-1] == 3:
            raise TypeError(f"images must be many, got one of shape {images.shape}; pass [image]")
        for first in range(0, len(images), IMAGES_PER_BATCH):
            rows = list(range(first, min(first + IMAGES_PER_BATCH, len(images))))
            yield rows, self.batch([images[row] for row in rows], device)

    def batch(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        """These as one batch, `image` of dims b c y x."""
        return {"image": torch.stack([self(image) for image in images]).to(device)}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How images are read, and how they are varied while a model learns from them."""

    size: Annotated[int | None, "pixels a side that images are scaled to (their own, or 64 where they differ)"] = None
    channels: Annotated[int | None, "1 for grey, 3 for colour (as the images are)"] = None
    rows: Annotated[int, "the images of a batch", "--batch"] = 64
    shift: Annotated[int, "in training, move images by up to so many pixels"] = 0
    flip: Annotated[bool, "in training, mirror every other image, left and right"] = False
    workers: Annotated[int, "processes that read images too many to be held"] = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("size", 1), ("rows", 1), ("shift", 0), ("workers", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1, grey, or 3, colour, got {self.channels}")

    def transform_for(self, examples: Any) -> ImageTransform:
        """What there is to see in examples with an `image` each: as they are, where all are alike in an array."""
        image = examples[0].image
        alike = hasattr(examples, "images")
        height, width = image.shape[:2]
        if self.size is None and alike and height != width:
            raise DataError(
                f"the images have {height} x {width} pixels, and models see squares",
                hint=f"pass size={min(height, width)} to keep the middle of each",
            )
        grey = alike and image.ndim == 2
        return ImageTransform(
            size=self.size or (height if alike else DEFAULT_PIXELS), channels=self.channels or (1 if grey else 3)
        )

    def batches(
        self,
        examples: Sequence[Mapping[str, Any]],
        images: Sequence[Image],
        sight: ImageTransform,
        *,
        owners: Sequence[int] | None = None,
        pad: int = 0,
        seed: int,
        start: Start,
    ) -> Epochs:
        """The batches of a training run for this process: the fields of each example, and its `image`.

        Example n shows the image `owners[n]`, its own number unless given. Images that fit into a gigabyte as bytes are
        read once and stay on the device; others are read at each turn, by `workers`.
        """
        if not len(examples):
            raise DataError("there are no examples", hint="expected at least one")
        own = np.arange(len(examples)) if owners is None else np.asarray(owners)
        held = len(images) * sight.channels * sight.size**2 <= MAX_CACHED_BYTES
        dealt = Batches(
            examples if held else ImageExamples(examples, images, sight, own),
            rows=self.rows,
            pad=pad,
            seed=seed,
            shard=(start.group.rank, start.group.size),
            workers=0 if held else self.workers,
        )
        batches: Epochs = dealt
        if held:
            if len(images) > ANNOUNCED_IMAGES:
                start.say(f"reading {len(images):,} images")
            batches = MappedBatches(dealt, ImageCache(images, sight, own, start.group.device))
        return MappedBatches(batches, self._varied) if self.shift or self.flip else batches

    def _varied(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = batch["image"]
        if self.shift:
            image = shift_images(image, torch.randint(-self.shift, self.shift + 1, (len(image), 2)))
        if self.flip:
            turned = torch.rand(len(image), 1, 1, 1) < 0.5
            image = torch.where(turned.to(image.device), image.flip(-1), image)
        return {**batch, "image": image}


class ImageCache:
    """Images as a model sees them, read once and kept as bytes on a device; added to batches by their `index`."""

    def __init__(self, images: Sequence[Image], sight: ImageTransform, owners: Numbers, device: torch.device) -> None:
        bytes_of = ((sight(images[n]) * 255).round().to(torch.uint8) for n in range(len(images)))
        self.images = torch.stack(list(bytes_of)).to(device)
        self.owners = torch.from_numpy(owners)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        chosen = self.owners[batch["index"]].to(self.images.device)
        return {**batch, "image": self.images[chosen].float() / 255}


@dataclass(frozen=True)
class ImageExamples:
    """Examples with their images, read when asked for."""

    examples: Sequence[Mapping[str, Any]]
    images: Sequence[Image]
    sight: ImageTransform
    owners: Numbers

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.examples[number], "image": self.sight(self.images[int(self.owners[number])])}


class MappedBatches:
    """Batches that pass a function before the model has them; where they stand is as it was."""

    def __init__(self, batches: Epochs, change: Callable[[Any], Any]) -> None:
        self.batches, self.change = batches, change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.batches)

    def state(self) -> dict[str, Any]:
        """The place behind the last batch."""
        return self.batches.state()

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go to a place that `state` gave."""
        self.batches.restore(state)


def shift_images(image: Tensor, by: Tensor) -> Tensor:
    """Each image moved down and right by its row of `by`, (b, 2) whole numbers; what comes in is black.

    >>> shift_images(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[0, 1]])).tolist()
    [[[[0.0, 1.0], [0.0, 3.0]]]]
    """
    most = int(by.abs().max())
    if not most:
        return image
    padded = F.pad(image, (most, most, most, most))
    y, x = image.shape[2:]
    down = (torch.arange(y) + most - by[:, :1]).to(image.device)
    across = (torch.arange(x) + most - by[:, 1:]).to(image.device)
    rows = torch.arange(len(image), device=image.device)
    return padded[rows[:, None, None], :, down[:, :, None], across[:, None]].permute(0, 3, 1, 2)
