"""The file of a tape: one `.safetensors`, tensors as they are and everything else as JSON in its metadata.

Terms are written by name and rebuilt through a table of names, so a file can hold numbers but never code. Each tensor
has a digest, and the text with these has one more. `load` checks all of them before anything is believed; `mapped`
checks the text, reads no tensor before it is looked at, and leaves the tensors to `check`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...atomic_files import atomic_path, check_parent_folder, save_tensors
from ...ops.call import SLOTS
from ...ops.operator import weights
from ...ops.weights import Summary, Weights, map_axes
from ..layer_names import shown_name
from ..recording.observed import weights_of_observed
from ..recording.record import Extras
from ..recording.recorder import Key
from ..recording.reduced import ROWS, Reduced
from ..recording.store import Held
from .groups import Groups
from .image_patches import Picture
from .overview import Overview
from .term_json import Box, check_fields, read, saveable, tensor_of, written

FORMAT = 3
EVEN_MAPS = 2  # the format whose summaries had other cells: they are left out, and made again when somebody asks
NAME = "regard.tape"
LARGEST_HEADER = 10_000_000
OVERVIEW = tuple(field.name for field in dataclasses.fields(Overview))
CHUNK = 2**22  # bytes of a tensor digested between two looks at what else there is to do


@dataclass(frozen=True)
class Found:
    """What a file holds."""

    entries: dict[Key, Weights | Reduced]
    extras: dict[Key, Extras]
    tokens: list[tuple[str, list[list[str]], list[list[str]]]]
    groups: dict[str, list[tuple[str, Groups, Groups]]]
    pictures: list[tuple[str, list[Picture]]]
    facts: dict[str, str]
    summaries: dict[Key, tuple[Summary, Overview]]


def save(
    path: Path,
    entries: Mapping[Key, tuple[Weights | Reduced, Extras]],
    *,
    tokens: Sequence[Any],
    groups: Mapping[str, Sequence[Any]],
    pictures: Sequence[Any],
    facts: Mapping[str, str],
    summaries: Mapping[Key, tuple[Summary, Overview]],
) -> None:
    """Write a tape under a temporary name, force it to the disk, rename it."""
    check_parent_folder(path)
    box = Box()
    described = [_entry(key, A, extras, summaries.get(key), box) for key, (A, extras) in entries.items()]
    text = json.dumps(
        {
            "format": FORMAT,
            "entries": described,
            "tokens": [[x.layers, x.queries, x.keys] for x in tokens],
            "groups": {
                name: [[x.layers, _groups(x.queries, box), _groups(x.keys, box)] for x in given]
                for name, given in groups.items()
            },
            "pictures": [[x.layers, [_picture(picture, box) for picture in x.queries]] for x in pictures],
            "facts": {name: str(value) for name, value in facts.items()},
        },
        ensure_ascii=False,
    )
    # Half of a pair of UTF-16, which no UTF-8 can hold, stands in JSON by its number.
    text = text.encode("utf8", "backslashreplace").decode()
    if len(text.encode()) > LARGEST_HEADER * 0.9:
        raise ValueError(
            f"tokens and labels take {len(text) / 1e6:.1f} MB, a tape holds up to 9; save fewer layers or tokens"
        )
    with atomic_path(path) as temporary:
        save_tensors(temporary, box.tensors, sealed(text, box.tensors))


def load(path: Path) -> Found:
    """Read a tape; `ValueError` names the file and what is wrong with it."""
    for _ in check(path):
        pass
    return mapped(path)


def mapped(path: Path) -> Found:
    """The tape of a file whose tensors are read, from the disk, only where they are looked at."""
    text, _, tensors = _read(path)
    try:
        described = json.loads(text)
        if isinstance(described, dict) and described.get("format") not in (EVEN_MAPS, FORMAT):
            raise ValueError(_other_format(described.get("format")))
        check_fields("the tape", described, "format entries tokens groups pictures facts")
        if described["format"] == EVEN_MAPS:
            for entry in described["entries"]:
                if isinstance(entry, dict) and "summary" in entry:
                    entry["summary"] = None
        entries: dict[Key, Weights | Reduced] = {}
        extras: dict[Key, Extras] = {}
        summaries: dict[Key, tuple[Summary, Overview]] = {}
        for entry in described["entries"]:
            key, A, extra, summary = _rebuilt(entry, tensors)
            entries[key], extras[key] = A, extra
            if summary is not None:
                summaries[key] = summary
        tokens = [(str(layers), _texts(queries), _texts(keys)) for layers, queries, keys in described["tokens"]]
        groups = {
            name: [(str(layers), _regrouped(q, tensors), _regrouped(k, tensors)) for layers, q, k in given]
            for name, given in described["groups"].items()
        }
        pictures = [(str(layers), [_redrawn(x, tensors) for x in given]) for layers, given in described["pictures"]]
        facts = {str(name): str(value) for name, value in described["facts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no tape that can be read: {error}") from None
    return Found(entries, extras, tokens, groups, pictures, facts, summaries)


def is_tape(path: Path) -> bool:
    """Does the file say that it is a tape?"""
    try:
        with safe_open(path, "pt") as opened:
            return NAME in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False


def check(path: Path) -> Iterator[float]:
    """Read all of a file and raise `ValueError` unless it is what was written; yields the share that is done."""
    _, digests, tensors = _read(path)
    total, done = max(1, sum(x.nbytes for x in tensors.values())), 0
    for name, x in tensors.items():
        digest = _digest_of_kind(x)
        for part in x.reshape(-1).view(torch.uint8).split(CHUNK):
            digest.update(part.numpy().data)
            done += len(part)
            yield done / total
        if digest.hexdigest() != digests[name]:
            raise ValueError(f"{path} is damaged: it is not what was written")


def sealed(text: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a file: the text, the digest of each tensor, and one over all of these."""
    found = {}
    for name, x in tensors.items():
        digest = _digest_of_kind(x)
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    digests = json.dumps(found)
    return {NAME: text, "digests": digests, "sha256": hashlib.sha256((text + digests).encode()).hexdigest()}


def _entry(
    key: Key, A: Weights | Reduced, extras: Extras, summary: tuple[Summary, Overview] | None, box: Box
) -> dict[str, Any]:
    named: dict[str, Any] = {"layer": key[0], "call": key[1]}
    if isinstance(A, Reduced):
        measures = {name: box.add(A[name]) for name in A.kept}
        return {**named, "shape": list(A.shape), "measures": measures}
    call = A.call
    if call.batch_ids is not None or call.row_ids is not None:
        raise ValueError(f"{shown_name(key[0])!r} holds selected rows; save the tape it was selected from")
    tensors = {"q": call.q, "k": call.k, "statistic": A.known_statistic}
    tensors |= {field.name: getattr(extras, field.name) for field in dataclasses.fields(Extras)}
    return {
        **named,
        "heads": None if call.head_ids is None else call.head_ids.tolist(),
        "offset": call.offset,
        "tensors": {name: box.add(x) for name, x in tensors.items() if x is not None},
        "terms": {slot: written(saveable(getattr(call, slot), A), box) for slot in SLOTS},
        "summary": None if summary is None else {name: box.add(x) for name, x in _measures(*summary).items()},
    }


def _measures(summary: Summary, overview: Overview) -> dict[str, Tensor]:
    measures = {name: getattr(summary, name) for name in (*ROWS, "map")}
    return measures | {f"overview.{name}": getattr(overview, name) for name in OVERVIEW}


def _rebuilt(
    entry: Any, tensors: Mapping[str, Tensor]
) -> tuple[Key, Weights | Reduced, Extras, tuple[Summary, Overview] | None]:
    if isinstance(entry, dict) and "measures" in entry:
        check_fields("an entry", entry, "layer call shape measures")
        measures = {name: Held(tensor_of(at, tensors)) for name, at in entry["measures"].items()}
        shape = torch.Size(_whole(n) for n in entry["shape"])
        for name, kept in measures.items():
            _fits(name, kept.get(), shape)
        return _key(entry), Reduced(shape, measures), Extras(), None
    check_fields("an entry", entry, "layer call heads offset tensors terms summary")
    check_fields("the terms", entry["terms"], " ".join(SLOTS))
    named = {name: tensor_of(at, tensors) for name, at in entry["tensors"].items()}
    extras = Extras(**{field.name: named.pop(field.name, None) for field in dataclasses.fields(Extras)})
    q, k, statistic = named.pop("q"), named.pop("k"), named.pop("statistic", None)
    if named:
        raise ValueError(f"an entry has unknown tensors {', '.join(named)}")
    terms: Any = {slot: read(entry["terms"][slot], tensors) for slot in SLOTS}
    if entry["heads"] is None:
        A = weights(q, k, **terms, offset=_whole(entry["offset"], least=None))
    else:
        heads = [_whole(head) for head in entry["heads"]]
        A = weights_of_observed(q, k, heads, **terms, offset=_whole(entry["offset"], least=None))
        # Terms that number more or fewer heads raise here.
        weights_of_observed(q[:, :, :1], k[:, :, :1], heads, **terms, offset=entry["offset"])[..., :1, :1]
    if statistic is not None and statistic.shape != (*q.shape[:3], 1):
        raise ValueError(f"the statistic must have shape {(*q.shape[:3], 1)}, got {tuple(statistic.shape)}")
    if statistic is not None:
        A = Weights(A.call, statistic)
    summary = None if entry["summary"] is None else _summarized(entry["summary"], A, tensors)
    return _key(entry), A, extras, summary


def _summarized(written: Any, A: Weights, tensors: Mapping[str, Tensor]) -> tuple[Summary, Overview]:
    check_fields("a summary", written, " ".join((*ROWS, "map", *(f"overview.{name}" for name in OVERVIEW))))
    found = {name: tensor_of(at, tensors) for name, at in written.items()}
    for name in (*ROWS, "map"):
        _fits(name, found[name], A.shape)
    for name in OVERVIEW:
        x = found[f"overview.{name}"]
        if x.shape[:2] != A.shape[:2] or x.ndim != (4 if name == "thumbs" else 2):
            raise ValueError(f"{name} of a summary must be of {tuple(A.shape[:2])} heads, got {tuple(x.shape)}")
    statistic = None if A.known_statistic is None else A.known_statistic.squeeze(-1)
    summary = Summary(**{name: found[name] for name in (*ROWS, "map")}, statistic=statistic)
    return summary, Overview(**{name: found[f"overview.{name}"] for name in OVERVIEW})


def _key(entry: Mapping[str, Any]) -> Key:
    return str(entry["layer"]), _whole(entry["call"])


def _groups(groups: Groups, box: Box) -> dict[str, Any]:
    return {"ids": box.add(groups.ids), "labels": list(groups.labels)}


def _regrouped(written: Any, tensors: Mapping[str, Tensor]) -> Groups:
    check_fields("groups", written, "ids labels")
    return Groups(tensor_of(written["ids"], tensors), tuple(str(label) for label in written["labels"]))


def _picture(picture: Picture, box: Box) -> dict[str, Any]:
    shape = {"rows": picture.rows, "cols": picture.cols, "special": picture.special}
    return {"pixels": box.add(picture.pixels), **shape}


def _redrawn(written: Any, tensors: Mapping[str, Tensor]) -> Picture:
    check_fields("a picture", written, "pixels rows cols special")
    return Picture(**{**written, "pixels": tensor_of(written["pixels"], tensors)})


def _other_format(found: Any) -> str:
    """What is said of a file of another layout."""
    newer = isinstance(found, int) and found > FORMAT
    step = "upgrade regard" if newer else "make it again: capture(model) and tape.save(...), or regard look"
    return f"it is of format {found!r}, and this version of regard reads {FORMAT}; {step}"


def _read(path: Path) -> tuple[str, dict[str, str], dict[str, Tensor]]:
    """The text, which is what was written, with the digests of the tensors, and the tensors, not yet read."""
    try:
        with path.open("rb") as file:
            header, begun = int.from_bytes(file.read(8), "little"), file.read(1)
        if begun != b"{":
            raise ValueError(
                f"{path} is no capture, for it is no safetensors file; regard look and tape.save write them"
            )
        if header > LARGEST_HEADER:
            raise ValueError(f"{path} has a header of {header} bytes; at most {LARGEST_HEADER} are believed")
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.keys() == {NAME, "sha256"}:
            raise ValueError(f"{path} is no tape that can be read: {_other_format(1)}")
        if metadata.keys() != {NAME, "digests", "sha256"}:
            raise ValueError(f"{path} is a safetensors file but no tape; tapes are written by Tape.save")
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read: {error}") from None
    text, digests = metadata[NAME], metadata["digests"]
    if hashlib.sha256((text + digests).encode()).hexdigest() != metadata["sha256"]:
        raise ValueError(f"{path} is damaged: it is not what was written")
    found = json.loads(digests)
    if not isinstance(found, dict) or found.keys() != tensors.keys():
        raise ValueError(f"{path} is damaged: it does not hold the tensors that were written")
    return text, found, tensors


def _digest_of_kind(x: Tensor) -> Any:
    """The beginning of a tensor's digest: its dtype and shape."""
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}\n".encode())


def _whole(value: Any, least: int | None = 0) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"expected a whole number{'' if least is None else f' of at least {least}'}, got {value!r}")
    return value


def _texts(rows: Any) -> list[list[str]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("tokens must be lists of strings")
    return [[str(token) for token in row] for row in rows]


def _fits(name: str, x: Tensor, shape: torch.Size) -> None:
    """Raise unless a measure has the dims of the matrix it is a measure of."""
    *lead, i, j = shape
    if name.startswith("pool:"):
        n = int(name.removeprefix("pool:"))
        expected = [*lead, max(1, min(n, i)), max(1, min(n, j))]
    elif name == "map":
        expected = [*lead, *(axis.count for axis in map_axes(i, j))]
    elif name in ROWS:
        expected = [*lead, j if name == "received" else i]
    else:
        raise ValueError(f"unknown measure {name!r}")
    if list(x.shape) != expected:
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")
