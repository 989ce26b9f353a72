"""Fingerprints: what a run is trained on, so that one that is resumed goes on with the same.

Each checkpoint keeps them as `data.json`: by flag the digest of the file or folder it names, or its value where it says
how that is read. Names do not count, so files may be moved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..data.image_files import ENDINGS
from ..tasks import run_folder
from ..train import training_state
from .flags import flags_of

T = TypeVar("T")
FILE = training_state.DATA
PREFIXES = {"data": "", "valid": "valid-"}
BLOCK_BYTES, MAX_BLOCKS = 2**20, 1024  # the bytes that are read at once, and how often at most

Prints = dict[str, dict[str, str | None]]  # by section and flag


def fingerprints(plan: Any) -> Prints:
    """Those of the training and the validation data of a plan, None for a file that is not there."""
    groups = {section: getattr(plan, section) for section in PREFIXES}
    return {section: _section_fingerprints(section, group) for section, group in groups.items() if group is not None}


def check_matches(checkpoint: Path, plan: Any, now: Prints, *, say: Callable[[str], None]) -> None:
    """Raise unless a run goes on with the training data it began with; other data to validate by is only told.

    Scores are not compared across it, so the best checkpoint is sought anew (`fit`). A checkpoint that has no
    record goes on with any. A file that is not there is left to its reader to complain of.
    """
    if not (checkpoint / FILE).exists():
        return
    before = json.loads(run_folder.read_text(checkpoint, FILE))
    if other := _changed_flags("data", plan, before, now):
        raise ValueError(
            f"a resumed run keeps its data, and this is not what it began with: {other}; give it the same, or name "
            "another folder by --out to train anew"
        )
    if "valid" in before and (other := _changed_flags("valid", plan, before, now)):
        say(f"the data to validate by is not that of the checkpoint: {other}")


def digest(path: str) -> str | None:
    """The digest of a file, or of the images in a folder; None where there is neither.

    Of a file beyond 1 GiB its size and 1,024 stretches of 1 MiB count, evenly spaced; of a folder all names and sizes,
    and the first MiB of at most 1,024 files.
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
        inside = [Path(folder, name) for folder, _, names in os.walk(path) for name in names if _is_data_file(name)]
        inside = sorted(file for file in inside if file.is_file())
        for one in inside:
            hashed.update(os.fsencode(f"{one.relative_to(path).as_posix()}\n{one.stat().st_size}\n"))
        for one in _evenly_spaced(inside):
            with one.open("rb") as file:
                hashed.update(file.read(BLOCK_BYTES))
    else:
        return None
    return hashed.hexdigest()


def _section_fingerprints(section: str, group: Any) -> dict[str, str | None]:
    """A field without a default names a file or a folder, one with a default says how these are read."""
    default = {field.name: field.default for field in dataclasses.fields(group)}
    found: dict[str, str | None] = {}
    for flag in flags_of(section, type(group), prefix=PREFIXES[section]):
        value = getattr(group, flag.field)
        if value != default[flag.field]:
            found[flag.name] = digest(value) if default[flag.field] is None else value
    return found


def _changed_flags(section: str, plan: Any, before: Mapping[str, Mapping[str, str]], now: Prints) -> str:
    """The flags that no longer say what they did, with what they are given; nothing where all do."""
    old, new, group = before[section], now.get(section, {}), getattr(plan, section)
    flags = [] if group is None else flags_of(section, type(group), prefix=PREFIXES[section])
    given = {flag.name: getattr(group, flag.field) for flag in flags}
    gone = [f"no {name}" for name in old if name not in new]
    other = [f"{name} {given[name]}" for name, one in new.items() if one is not None and one != old.get(name)]
    return ", ".join(gone + other)


def _evenly_spaced(items: Sequence[T]) -> Sequence[T]:
    """At most so many, evenly spaced, the first and the last among them."""
    if len(items) <= MAX_BLOCKS:
        return items
    return [items[n * (len(items) - 1) // (MAX_BLOCKS - 1)] for n in range(MAX_BLOCKS)]


def _is_data_file(name: str) -> bool:
    return name.lower().endswith((*ENDINGS, ".bin"))
