"""Data: the files of each set as the commands take them, unpacked into a folder of their own."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

PAIRS = 60_000  # of Europarl, for alignments
FIRST = 2_000  # pairs of Multi30k, a small data set to fine-tune on
WORD = re.compile(r"\w+(?:[-']\w+)*|[^\w\s]")


def prepare(source: Path, to: Path, folders: Collection[str], *, few: int | None = None) -> None:
    """Unpack these folders of `source` into `to`; with `few`, so many examples of each file. What is there stays."""
    for folder in sorted(folders):
        if not (source / folder).is_dir():
            raise SystemExit(f"error: {source / folder} is no folder; expected the data set {folder!r}")
        if (to / folder).exists():
            continue
        (to / folder).mkdir(parents=True)
        for path in sorted((source / folder).iterdir()):
            HANDLED.get(path.name.removesuffix(".gz"), _plain)(path, to / folder, few)


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _plain(path: Path, to: Path, few: int | None) -> None:
    """A text file, or an IDX file, by its name."""
    content = _content(path)
    if "idx" in path.name:
        content = _idx(content, few)
    elif few is not None:
        content = b"".join(content.splitlines(keepends=True)[: few + 1])
    (to / path.name.removesuffix(".gz")).write_bytes(content)


def _idx(content: bytes, few: int | None) -> bytes:
    """An IDX file of bytes, of which the first `few` items are kept."""
    dims = content[3]
    count, *sizes = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    item = 1
    for size in sizes:
        item *= size
    kept = min(few or count, count)
    first = 4 + 4 * dims
    return content[:4] + struct.pack(f">{dims}I", kept, *sizes) + content[first : first + kept * item]


def _play(path: Path, to: Path, few: int | None) -> None:
    """Nine tenths to train on and the last to validate."""
    text = _content(path).decode("utf8")[: None if few is None else 200 * few]
    cut = len(text) * 9 // 10
    (to / "train.txt").write_text(text[:cut], encoding="utf8")
    (to / "valid.txt").write_text(text[cut:], encoding="utf8")


def _questions(path: Path, to: Path, few: int | None) -> None:
    tree: dict[str, Any] = json.loads(_content(path))
    if few is not None:
        tree["data"] = [{**article, "paragraphs": article["paragraphs"][:2]} for article in tree["data"][:2]]
    (to / path.name.removesuffix(".gz")).write_text(json.dumps(tree, ensure_ascii=False), encoding="utf8")


def _captions(path: Path, to: Path, few: int | None) -> None:
    """A file for each split, of `split/image <tab> caption`."""
    rows = [line.split("\t") for line in _content(path).decode("utf8").splitlines()]
    for split in ("train", "dev", "test"):
        lines = [f"{split}/{name}\t{caption}\n" for own, name, caption in rows if own == split]
        (to / f"{split}.tsv").write_text("".join(lines[: None if few is None else 5 * few]), encoding="utf8")


def _pairs(path: Path, to: Path, few: int | None) -> None:
    """One side of a parallel text, and the file that a recipe makes of it.

    `tokenized.*` holds sentences of Europarl, cut and lower-cased as those with gold links are; `first.*` holds the
    first pairs of Multi30k.
    """
    _plain(path, to, few)
    language = path.name.split(".")[1]
    lines = _content(path).decode("utf8").splitlines()
    if to.name == "europarl":
        tokenized = (" ".join(WORD.findall(line.lower())) + "\n" for line in lines[: few or PAIRS])
        (to / f"tokenized.{language}").write_text("".join(tokenized), encoding="utf8")
    elif to.name == "multi30k":
        (to / f"first.{language}").write_text("\n".join(lines[: few or FIRST]) + "\n", encoding="utf8")


def _archive(path: Path, to: Path, few: int | None) -> None:
    if few is None:
        (to / path.name).symlink_to(path.resolve())
        return
    # The captions come first, in alphabetical order.
    splits = ("train", "dev", "test")
    wanted = {line.split("\t")[0] for split in splits for line in (to / f"{split}.tsv").read_text().splitlines()}
    with tarfile.open(path) as all_of_them, tarfile.open(to / path.name, "w") as some:
        for member in all_of_them:
            if member.name in wanted and (content := all_of_them.extractfile(member)) is not None:
                some.addfile(member, io.BytesIO(content.read()))


HANDLED: dict[str, Callable[[Path, Path, int | None], None]] = {
    "input.txt": _play,
    "train-v1.1.json": _questions,
    "dev-v1.1.json": _questions,
    "captions.tsv": _captions,
    "images.tar": _archive,
    "train.de": _pairs,
    "train.en": _pairs,
}
