"""Images as models take them: one size, optional augmentation, and batches."""

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
DEFAULT_PIXELS = 64  # per side, for images of different sizes
IMAGES_PER_BATCH = 256  # in inference
MAX_CACHED_BYTES = 2**30  # images that fit are kept on the device
ANNOUNCED_IMAGES = 1000  # reading more than this prints a line, since it takes a while


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Crops an image to its central square and scales it to `size` pixels per side, grey or colour.

    >>> ImageTransform(size=8, channels=1)(np.zeros((20, 30, 3), np.uint8)).shape
    torch.Size([1, 8, 8])
    """

    stored_name: ClassVar[str] = "Sight"

    size: int
    channels: int

    def __call__(self, image: Image) -> Tensor:
        return pixels(image, size=self.size, channels=self.channels)

    def batches(self, images: Sequence[Image], device: torch.device) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield the numbers and the batch of every image once, in order."""
        if isinstance(images, np.ndarray) and images.ndim == 3 and images.shape[-1] == 3:
            raise TypeError(f"images must be a sequence of images, got one image of shape {images.shape}; pass [image]")
        for first in range(0, len(images), IMAGES_PER_BATCH):
            rows = list(range(first, min(first + IMAGES_PER_BATCH, len(images))))
            yield rows, self.batch([images[row] for row in rows], device)

    def batch(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        """Return images as one batch, `image` with dims b c y x."""
        return {"image": torch.stack([self(image) for image in images]).to(device)}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings of image size, batches and augmentation."""

    size: Annotated[
        int | None,
        "Side in pixels that images are scaled to. Default: their image_numbers size, or 64 if sizes may differ.",
    ] = None
    channels: Annotated[int | None, "Number of channels: 1 for grey, 3 for colour. Default: as the images are."] = None
    rows: Annotated[int, "Number of images in a batch.", "--batch"] = 64
    shift: Annotated[int, "Shift training images at random by at most this number of pixels."] = 0
    flip: Annotated[bool, "Mirror half of the training images left to right, chosen at random."] = False
    workers: Annotated[int, "Number of processes that read images which do not fit into 1 GiB of memory."] = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("size", 1), ("rows", 1), ("shift", 0), ("workers", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {self.channels}")

    def transform_for(self, examples: Any) -> ImageTransform:
        """Return the transform for examples: the settings, or else the size and channels of images in one array."""
        image = examples[0].image
        is_array = hasattr(examples, "images")
        height, width = image.shape[:2]
        if self.size is None and is_array and height != width:
            raise DataError(
                f"the images have {height} x {width} pixels, but models need square images",
                hint=f"pass size={min(height, width)} to use the central square",
            )
        grey = is_array and image.ndim == 2
        return ImageTransform(
            size=self.size or (height if is_array else DEFAULT_PIXELS), channels=self.channels or (1 if grey else 3)
        )

    def check_kept(self, sight: ImageTransform) -> None:
        """Raise if size or channels differ from those of a run that is fine-tuned."""
        for name in ("size", "channels"):
            given, kept = getattr(self, name), getattr(sight, name)
            if given is not None and given != kept:
                raise ValueError(f"a fine-tuned run keeps the {name} of its images, {kept}, got {given}; leave it out")

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
        """Return the batches of a training run for this process: the fields of each example, and its `image`.

        Example n has the image `owners[n]`, by default n. Images that fit into 1 GiB as bytes are read once and stay on
        the device; others are read again in each epoch, by `workers` processes.
        """
        if not len(examples):
            raise DataError("there are no examples", hint="expected at least one")
        image_numbers = np.arange(len(examples)) if owners is None else np.asarray(owners)
        fits = len(images) * sight.channels * sight.size**2 <= MAX_CACHED_BYTES
        shuffled = Batches(
            examples if fits else ImageExamples(examples, images, sight, image_numbers),
            rows=self.rows,
            pad=pad,
            seed=seed,
            shard=(start.group.rank, start.group.size),
            workers=0 if fits else self.workers,
        )
        batches: Epochs = shuffled
        if fits:
            if len(images) > ANNOUNCED_IMAGES:
                start.say(f"reading {len(images):,} images")
            batches = MappedBatches(shuffled, ImageCache(images, sight, image_numbers, start.group.device))
        return MappedBatches(batches, self._augment) if self.shift or self.flip else batches

    def _augment(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = batch["image"]
        if self.shift:
            image = shift_images(image, torch.randint(-self.shift, self.shift + 1, (len(image), 2)))
        if self.flip:
            mirrored = torch.rand(len(image), 1, 1, 1) < 0.5
            image = torch.where(mirrored.to(image.device), image.flip(-1), image)
        return {**batch, "image": image}


class ImageCache:
    """Transformed images, read once and kept as bytes on a device; calling it adds them to a batch by `index`."""

    def __init__(self, images: Sequence[Image], sight: ImageTransform, owners: Numbers, device: torch.device) -> None:
        bytes_of = ((sight(images[n]) * 255).round().to(torch.uint8) for n in range(len(images)))
        self.images = torch.stack(list(bytes_of)).to(device)
        self.owners = torch.from_numpy(owners)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        chosen = self.owners[batch["index"]].to(self.images.device)
        return {**batch, "image": self.images[chosen].float() / 255}


@dataclass(frozen=True)
class ImageExamples:
    """Examples with their images, each read when it is indexed."""

    examples: Sequence[Mapping[str, Any]]
    images: Sequence[Image]
    sight: ImageTransform
    owners: Numbers

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.examples[number], "image": self.sight(self.images[int(self.owners[number])])}


class MappedBatches:
    """Batches with a function applied to each; the state is that of the wrapped batches."""

    def __init__(self, batches: Epochs, change: Callable[[Any], Any]) -> None:
        self.batches, self.change = batches, change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.batches)

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the wrapped batches, None if they have none."""
        own = getattr(self.batches, "fingerprint", None)
        return None if own is None else own()

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return self.batches.state()

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Continue from a position that `state` returned."""
        self.batches.restore(state)


def shift_images(image: Tensor, by: Tensor) -> Tensor:
    """Shift each image down and right by its row of `by`, (b, 2) integers, and fill with black.

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
