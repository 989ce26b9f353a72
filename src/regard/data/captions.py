"""Images with captions: pictures of a folder or archive, with captions in a tab-separated or JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import DataError
from .image_files import Array, Pictures
from .json_files import read_json
from .lines import Lines
from .text import check_text


class Captioned(NamedTuple):
    """A picture (height, width[, 3]), its captions, and its name."""

    image: Array
    captions: tuple[str, ...]
    name: str


class Captions:
    """Pictures with all their captions: `len`, index, iteration. Pictures are read on access.

    Train on `each()`, which has an example per caption; evaluate on the set itself, against all references.
    """

    def __init__(self, pictures: Pictures, captions: Mapping[str, tuple[str, ...]]) -> None:
        self.pictures = pictures
        self._listed = list(captions.items())

    def each(self) -> Captions:
        """Return the same pictures, once for each caption."""
        one = Captions(self.pictures, {})
        one._listed = [(name, (caption,)) for name, captions in self._listed for caption in captions]
        return one

    def digests(self) -> Iterator[str]:
        """Iterate over a digest of the file of each picture."""
        return (self.pictures.digest(name) for name, _ in self._listed)

    def texts(self) -> Iterator[str]:
        """Iterate over all captions, without opening a picture: for training a tokenizer."""
        return (caption for _, captions in self._listed for caption in captions)

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, number: int) -> Captioned:
        name, captions = self._listed[number]
        return Captioned(self.pictures[name], captions, name)

    def __iter__(self) -> Iterator[Captioned]:
        return (self[number] for number in range(len(self)))

    def where(self, number: int) -> str:
        """Return the file of a picture."""
        return f"{self.pictures.path}/{self._listed[number][0]}"


def captions_tsv(
    path: str | Path,
    images: str | Path,
    *,
    name: int | tuple[int, ...] = 0,
    caption: int = 1,
    where: Mapping[int, str] | None = None,
) -> Captions:
    """Read tab-separated lines of image name and caption; an image may have several lines.

    A name may be joined from columns: `name=(0, 1)` reads `train <tab> 1.jpg` as `train/1.jpg`. `where={0: "train"}`
    keeps the lines whose first column is `train`. Every image must exist.
    """
    parts = (name,) if isinstance(name, int) else tuple(name)
    most = max(*parts, caption, *(where or {}))
    pictures, found = Pictures(images), _CaptionFile(path)
    for number, line in enumerate(Lines(path), 1):
        cells = line.split("\t")
        if len(cells) <= most:
            raise DataError(f"expected at least {most + 1} columns, got {len(cells)}", file=path, line=number)
        if all(cells[place] == value for place, value in (where or {}).items()):
            named = "/".join(cells[place] for place in parts)
            found.add(pictures, named, cells[caption], line=number, column=parts[0])
    return found.captions(pictures)


def captions_json(path: str | Path, images: str | Path) -> Captions:
    """Read a JSON list of `{"image": name, "caption": text or list of texts}`, or the format of COCO captions."""
    tree = read_json(path)
    pictures, found = Pictures(images), _CaptionFile(path)
    for place, name, captions in _iterate_coco(tree, path) if isinstance(tree, dict) else _iterate_list(tree, path):
        for caption in captions if isinstance(captions, list) else [captions]:
            if not isinstance(name, str) or not isinstance(caption, str):
                raise DataError(f"{place}: expected the text of a name and of a caption", file=path)
            try:
                check_text(caption, "a caption")
            except ValueError as error:
                raise DataError(f"{place}: {error}", file=path) from error
            found.add(pictures, name, caption, place=f"{place}: ")
    return found.captions(pictures)


class _CaptionFile:
    """Captions by image, in the order of the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.by_name: dict[str, tuple[str, ...]] = {}

    def add(
        self,
        pictures: Pictures,
        name: str,
        caption: str,
        *,
        line: int | None = None,
        place: str = "",
        column: int | None = None,
    ) -> None:
        if name not in self.by_name and name not in pictures:
            raise DataError(
                f"{place}no image {name!r} in {pictures.path}",
                file=self.path,
                line=line,
                hint=None
                if column is None
                else f"column {column} was read as its name; name=1 (--image-column 1) reads another",
            )
        if not caption.strip():
            raise DataError(
                f"{place}the caption of {name!r} is empty",
                file=self.path,
                line=line,
                hint="write a caption, or remove the entry",
            )
        self.by_name[name] = (*self.by_name.get(name, ()), caption)

    def captions(self, pictures: Pictures) -> Captions:
        if not self.by_name:
            raise DataError("holds no captions", file=self.path, hint="expected an image and a caption each")
        return Captions(pictures, self.by_name)


def _iterate_list(tree: Any, path: str | Path) -> Iterator[tuple[str, Any, Any]]:
    for n, record in enumerate(tree if isinstance(tree, list) else [tree]):
        if not isinstance(record, dict):
            raise DataError(f"[{n}]: expected an object with image and caption", file=path)
        yield f"[{n}]", record.get("image"), record.get("caption")


def _iterate_coco(tree: dict[str, Any], path: str | Path) -> Iterator[tuple[str, Any, Any]]:
    images, notes = tree.get("images"), tree.get("annotations")
    if not isinstance(images, list) or not isinstance(notes, list):
        raise DataError("expected the lists 'images' and 'annotations'", file=path, hint="or one list of objects")
    # Ids may be numbers or texts; repr makes keys of them that are hashable whatever the file holds.
    names = {repr(image.get("id")): image.get("file_name") for image in images if isinstance(image, dict)}
    for n, note in enumerate(notes):
        if not isinstance(note, dict) or "image_id" not in note or repr(note["image_id"]) not in names:
            raise DataError(f"annotations[{n}]: expected an object with the id of an image", file=path)
        yield f"annotations[{n}]", names[repr(note["image_id"])], note.get("caption")
