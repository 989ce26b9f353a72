"""Labelled images: folders of pictures, and the array files of MNIST and CIFAR."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from .compression import open_file, read_at_most, read_content
from .errors import DataError
from .image_files import Array, Pictures
from .lines import Lines
from .text import check_class_names

MAX_ARRAY_BYTES = 2**33
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Picture(NamedTuple):
    """An image (height, width[, 3]) and the number of its class."""

    image: Array
    label: int


class Images:
    """Images of one size in an array (count, height, width[, 3]), their labels, and the names of the classes."""

    def __init__(self, images: Array, labels: Any, *, classes: Sequence[str] | None = None) -> None:
        self.images, self.labels = images, np.asarray(labels, dtype=np.int64)
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
            raise ValueError(
                f"images must be uint8 of dims (count, height, width) or (count, height, width, 3), "
                f"got {images.dtype} {images.shape}"
            )
        if self.labels.shape != images.shape[:1]:
            raise ValueError(f"expected one label for each of {len(images)} images, got {self.labels.shape}")
        if len(images) == 0:
            raise ValueError("expected at least one image, got none")
        count = len(classes) if classes is not None else int(self.labels.max()) + 1
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= count:
            raise ValueError(f"labels must lie in 0 to {count - 1}, got {self.labels.min()} to {self.labels.max()}")
        self.classes = tuple(classes) if classes is not None else tuple(str(n) for n in range(count))
        check_class_names(classes)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Picture:
        return Picture(np.array(self.images[number]), int(self.labels[number]))

    def digests(self) -> Iterator[str]:
        """Iterate over a digest of the pixels of each image."""
        return (hashlib.sha256(image.tobytes()).hexdigest() for image in self.images)

    def __iter__(self) -> Iterator[Picture]:
        return (self[number] for number in range(len(self)))


class ImageFolder:
    """Pictures of any size in a folder per class, `root/cat/1.jpg`, or in a tar archive of such folders.

    Pass `classes` of the training set for the test set; a folder not among them is an error.
    """

    def __init__(self, root: str | Path, *, classes: Sequence[str] | None = None) -> None:
        self.pictures = Pictures(root)
        self.names = list(self.pictures)
        if not self.names:
            raise DataError("holds no images", file=root, hint="expected a folder for each class with images inside")
        for name in self.names:
            if "/" not in name:
                raise DataError(
                    f"the image {name!r} is in no class", file=root, hint="move it into the folder of its class"
                )
        found = [name.split("/")[0] for name in self.names]
        self.classes = tuple(sorted(set(found)) if classes is None else classes)
        check_class_names(classes)
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(f"unknown class {unknown[0]!r}", file=root, hint=f"expected {', '.join(self.classes[:8])}")
        self.labels = np.array([self.classes.index(name) for name in found], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Picture:
        return Picture(self.pictures[self.names[number]], int(self.labels[number]))

    def digests(self) -> Iterator[str]:
        """Iterate over a digest of the file of each image."""
        return map(self.pictures.digest, self.names)

    def __iter__(self) -> Iterator[Picture]:
        return (self[number] for number in range(len(self)))

    def where(self, number: int) -> str:
        """Return the file of an example."""
        return f"{self.pictures.path}/{self.names[number]}"


def idx_images(images: str | Path, labels: str | Path, *, classes: Sequence[str] | None = None) -> Images:
    """Load IDX files, as of MNIST, plain or gzip."""
    pictures, numbers = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or numbers.ndim != 1:
        problem = f"expected images of 3 dims and labels of 1, got {pictures.ndim} and {numbers.ndim}"
        raise DataError(problem, file=images, hint=f"is {labels} the labels file?")
    return _images(pictures, numbers, classes, images)


def npz_images(
    path: str | Path, *, images: str = "images", labels: str = "labels", classes: Sequence[str] | None = None
) -> Images:
    """Load two arrays of a NumPy `.npz` file by name, such as `images="x_train", labels="y_train"`."""
    file = Lines(path).path
    try:
        with zipfile.ZipFile(file) as archive:
            pictures, numbers = (_member(archive, file, name) for name in (images, labels))
    except zipfile.BadZipFile as error:
        raise DataError(f"not an .npz file ({error})", file=path, hint="write it with numpy.savez") from error
    if pictures.ndim == 4 and pictures.shape[3] == 1:
        pictures = pictures[..., 0]
    return _images(pictures, numbers.reshape(-1), classes, path)


def cifar10(*paths: str | Path) -> Images:
    """Load the binary version of CIFAR-10: `data_batch_1.bin`, ... The Python version is a pickle and not supported."""
    return _cifar(paths, before=1, count=10, classes=CIFAR10)


def cifar100(*paths: str | Path, classes: Sequence[str] | None = None) -> Images:
    """Load the binary version of CIFAR-100 with its 100 fine labels; their names are in `fine_label_names.txt`."""
    return _cifar(paths, before=2, count=100, classes=classes)


def read_idx(path: str | Path) -> Array:
    """Read the array of an IDX file of bytes; raises unless its size matches its header."""
    with open_file(Lines(path).path) as file:
        head = file.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise DataError(f"not an IDX file of bytes, it begins with {head!r}", file=path)
        sizes = file.read(4 * head[3])
        if len(sizes) < 4 * head[3]:
            raise DataError("the header is truncated", file=path, hint="download it again")
        shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
        data = read_at_most(file, prod(shape) + 1)
    if len(data) != prod(shape):
        there = f"{len(data)}" if len(data) < prod(shape) else "more"
        problem = f"the header says {' x '.join(map(str, shape))} bytes, the file has {there}"
        raise DataError(problem, file=path, hint="download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _member(archive: zipfile.ZipFile, file: Path, name: str) -> np.ndarray[Any, Any]:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        there = ", ".join(entry.removesuffix(".npy") for entry in archive.namelist()[:8]) or "nothing"
        raise DataError(f"no array {name!r}", file=file, hint=f"it has {there}") from None
    if info.file_size > MAX_ARRAY_BYTES:
        raise DataError(
            f"the array {name!r} takes {info.file_size:,} bytes, more than the limit of {MAX_ARRAY_BYTES:,}",
            file=file,
            hint="split it",
        )
    try:
        with archive.open(info) as stream:
            version = npy.read_magic(stream)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            # NumPy allocates what the header says before it reads, so the header is checked first.
            if dtype.hasobject or dtype.kind not in "ui":
                raise DataError(
                    f"the array {name!r} holds {dtype}, expected whole numbers",
                    file=file,
                    hint="save pixels as uint8 from 0 to 255, and labels as integers",
                )
            size, expected = info.file_size - stream.tell(), prod(shape) * dtype.itemsize
            if size != expected:
                raise DataError(
                    f"the array {name!r} holds {size:,} bytes, but its header says {expected:,}",
                    file=file,
                    hint="write the file again with numpy.savez, or download it again",
                )
            values = np.frombuffer(stream.read(), dtype)
            return values.reshape(shape, order="F" if fortran else "C")
    except DataError:
        raise
    except (ValueError, OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"the array {name!r} cannot be read ({error})", file=file) from error


def _cifar(paths: Sequence[str | Path], *, before: int, count: int, classes: Sequence[str] | None) -> Images:
    if not paths:
        raise ValueError("expected the files to read, got none; pass data_batch_1.bin and so on")
    record = before + 3072
    images, labels = [], []
    for path in paths:
        data = np.frombuffer(read_content(Lines(path).path, MAX_ARRAY_BYTES), np.uint8)
        if len(data) == 0 or len(data) % record:
            hint = "this looks like the Python version" if data[:1].tolist() == [0x80] else "it may be truncated"
            raise DataError(
                f"expected records of {record} bytes, got {len(data):,} bytes",
                file=path,
                hint=f"{hint}; download the binary version",
            )
        rows = data.reshape(-1, record)
        if int(rows[:, before - 1].max()) >= count:
            at = int(rows[:, before - 1].argmax())
            raise DataError(f"record {at} has the label {rows[at, before - 1]}, expected 0 to {count - 1}", file=path)
        labels.append(rows[:, before - 1])
        images.append(rows[:, before:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    names = classes or [str(n) for n in range(count)]
    return Images(np.concatenate(images), np.concatenate(labels), classes=names)


def _images(images: Any, labels: Any, classes: Sequence[str] | None, path: str | Path) -> Images:
    try:
        return Images(images, labels, classes=classes)
    except ValueError as error:
        raise DataError(str(error), file=path) from error
