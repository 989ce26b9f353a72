"""Fingerprints of the training data, so that a resumed run continues with the same data.

Each checkpoint holds them as `data.json`: for each flag the digest of the file or folder it names, or the value of the
flag if it says how the data is read. File names are not compared, so files may be moved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..data.image_files import ENDINGS
from ..tasks import run_folder
from ..train import training_state
from .flags import flags_of

T = TypeVar("T")
FILE = training_state.DATA
PREFIXES = {"data": "", "valid": "valid-"}
BLOCK_BYTES, MAX_BLOCKS = 2**20, 1024  # a digest reads at most this many blocks of this size

Fingerprints = dict[str, dict[str, str | None]]  # the settings by section and flag


def fingerprints(plan: Any) -> Fingerprints:
    """Compute the fingerprints of the training and validation data of a plan; None for a missing file."""
    groups = {section: getattr(plan, section) for section in PREFIXES}
    return {section: _section_fingerprints(section, group) for section, group in groups.items() if group is not None}


def check_matches(checkpoint: Path, plan: Any, now: Fingerprints, *, say: Callable[[str], None]) -> None:
    """Raise if the training data differs from that of the checkpoint; print a line if only the validation data does.

    Scores on different validation data are not compared, so `fit` starts a new search for the best checkpoint. A
    checkpoint without fingerprints accepts any data. A missing file is reported later, when it is read.
    """
    if not (checkpoint / FILE).exists():
        return
    before = json.loads(run_folder.read_text(checkpoint, FILE))
    if changes := _changed_flags("data", plan, before, now):
        raise ValueError(
            f"a resumed run must continue with the same training data, but this differs: {changes}; give the same "
            "data, or give --out a new folder to train another model"
        )
    if "valid" in before and (changes := _changed_flags("valid", plan, before, now)):
        say(f"the validation data differs from that of the checkpoint: {changes}")


def training_files(checkpoint: Path, given: Any) -> list[str]:
    """Return the flags of `given`, settings of data, whose files have the content of the training data's."""
    if not (checkpoint / FILE).exists():
        return []
    record = json.loads(run_folder.read_text(checkpoint, FILE)).get("data", {})
    prints = _section_fingerprints("data", given, only=record)
    default = {field.name: field.default for field in dataclasses.fields(given)}
    files = [flag for flag in flags_of("data", type(given)) if default[flag.field] is None and flag.name in prints]
    same = [flag for flag in files if prints[flag.name] == record[flag.name]]
    return [f"{flag.name} {_join_files(getattr(given, flag.field))}" for flag in same]


def digest(path: str) -> str | None:
    """Return the digest of a file, or of the images in a folder; None if the path does not exist.

    A file larger than 1 GiB is represented by its size and 1,024 evenly spaced blocks of 1 MiB; a folder by all names
    and sizes, and the first MiB of at most 1,024 files.
    """
    hashed = hashlib.sha256()
    if os.path.isfile(path):
        size = os.path.getsize(path)
        hashed.update(b"%d\n" % size)
        with open(path, "rb") as file:
            for start in _evenly_spaced(range(0, size, BLOCK_BYTES)):
                file.seek(start)
                hashed.update(file.read(BLOCK_BYTES))
    elif os.path.isdir(path):
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names if _is_data_file(name)]
        files = sorted(file for file in files if file.is_file())
        for name in files:
            hashed.update(os.fsencode(f"{name.relative_to(path).as_posix()}\n{name.stat().st_size}\n"))
        for name in _evenly_spaced(files):
            with name.open("rb") as file:
                hashed.update(file.read(BLOCK_BYTES))
    else:
        return None
    return hashed.hexdigest()


def _digest_files(files: Any) -> str | None:
    """Return the digest of a file or a folder, or of several in order; None if one does not exist."""
    if isinstance(files, str):
        return digest(files)
    digests = [digest(file) for file in files]
    return None if None in digests else hashlib.sha256("\n".join(map(str, digests)).encode()).hexdigest()


def _section_fingerprints(section: str, group: Any, *, only: Container[str] | None = None) -> dict[str, str | None]:
    """Fingerprint each flag, or those in `only`: fields whose default is None name files or folders, others say how
    these are read.
    """
    default = {field.name: field.default for field in dataclasses.fields(group)}
    prints: dict[str, str | None] = {}
    for flag in flags_of(section, type(group), prefix=PREFIXES[section]):
        value = getattr(group, flag.field)
        if value != default[flag.field] and (only is None or flag.name in only):
            prints[flag.name] = _digest_files(value) if default[flag.field] is None else value
    return prints


def _changed_flags(section: str, plan: Any, before: Mapping[str, Mapping[str, str]], now: Fingerprints) -> str:
    """Return the flags whose data has changed, with their new values, as text; empty if none has."""
    old, new, group = before[section], now.get(section, {}), getattr(plan, section)
    flags = [] if group is None else flags_of(section, type(group), prefix=PREFIXES[section])
    given = {flag.name: _join_files(getattr(group, flag.field)) for flag in flags}
    gone = [f"no {name}" for name in old if name not in new]
    different = [f"{name} {given[name]}" for name, x in new.items() if x is not None and x != old.get(name)]
    return ", ".join(gone + different)


def _join_files(value: Any) -> Any:
    return " ".join(value) if isinstance(value, tuple) else value


def _evenly_spaced(items: Sequence[T]) -> Sequence[T]:
    """Return at most `MAX_BLOCKS` items, evenly spaced, including the first and the last."""
    if len(items) <= MAX_BLOCKS:
        return items
    return [items[n * (len(items) - 1) // (MAX_BLOCKS - 1)] for n in range(MAX_BLOCKS)]


def _is_data_file(name: str) -> bool:
    return name.lower().endswith((*ENDINGS, ".bin"))
