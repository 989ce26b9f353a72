"""The file of a tape: one `.safetensors`, tensors as they are and everything else as JSON in its metadata.

Terms are written by name and rebuilt through a table of names, so a file can hold numbers but never code. A digest
over all of it is checked before anything is believed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..ops.lazy import Weights
from ..ops.operator import weights
from .groups import Groups
from .record import Extras, chosen_heads
from .recorder import Key
from .reduced import ROWS, Reduced
from .storage import Held
from .terms import Box, must_have, read, saveable, tensor_of, written

FORMAT = 1
NAME = "regard.tape"
LARGEST_HEADER = 10_000_000
SLOTS = ("score", "mask", "bias", "normalize")


@dataclass(frozen=True)
class Found:
    """What a file holds."""

    entries: dict[Key, Weights | Reduced]
    extras: dict[Key, Extras]
    tokens: list[tuple[str, list[list[str]], list[list[str]]]]
    groups: dict[str, list[tuple[str, Groups, Groups]]]
    facts: dict[str, str]


def save(
    path: Path,
    entries: Mapping[Key, tuple[Weights | Reduced, Extras]],
    *,
    tokens: Sequence[Any],
    groups: Mapping[str, Sequence[Any]],
    facts: Mapping[str, str],
) -> None:
    """Write a tape under a temporary name, force it to the disk, rename it."""
    box = Box()
    described = [_entry(key, A, extras, box) for key, (A, extras) in entries.items()]
    text = json.dumps(
        {
            "format": FORMAT,
            "entries": described,
            "tokens": [[x.layers, x.queries, x.keys] for x in tokens],
            "groups": {
                name: [[x.layers, _groups(x.queries, box), _groups(x.keys, box)] for x in given]
                for name, given in groups.items()
            },
            "facts": dict(facts),
        },
        ensure_ascii=False,
    )
    if len(text.encode()) > LARGEST_HEADER * 0.9:
        raise ValueError(
            f"tokens and labels take {len(text) / 1e6:.1f} MB, a tape holds up to 9; save fewer layers or tokens"
        )
    metadata = {NAME: text, "sha256": _digest(text, box.tensors)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        safetensors.torch.save_file(box.tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> Found:
    """Read a tape; `ValueError` names the file and what is wrong with it."""
    text, tensors = _read(path)
    try:
        described = json.loads(text)
        must_have("the tape", described, "format entries tokens groups facts")
        if described["format"] != FORMAT:
            raise ValueError(f"it is of format {described['format']}, this version reads {FORMAT}")
        entries: dict[Key, Weights | Reduced] = {}
        extras: dict[Key, Extras] = {}
        for entry in described["entries"]:
            key, A, extra = _rebuilt(entry, tensors)
            entries[key], extras[key] = A, extra
        tokens = [(str(layers), _texts(queries), _texts(keys)) for layers, queries, keys in described["tokens"]]
        groups = {
            name: [(str(layers), _regrouped(q, tensors), _regrouped(k, tensors)) for layers, q, k in given]
            for name, given in described["groups"].items()
        }
        facts = {str(name): str(value) for name, value in described["facts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no tape that can be read: {error}") from None
    return Found(entries, extras, tokens, groups, facts)


def _entry(key: Key, A: Weights | Reduced, extras: Extras, box: Box) -> dict[str, Any]:
    named: dict[str, Any] = {"layer": key[0], "call": key[1]}
    if isinstance(A, Reduced):
        measures = {name: box.add(A[name]) for name in A.kept}
        return {**named, "shape": list(A.shape), "measures": measures}
    call = A._call
    if call.batch_ids is not None or call.row_ids is not None:
        raise ValueError(f"{key[0]!r} holds selected rows; save the tape it was selected from")
    tensors = {"q": call.q, "k": call.k, "statistic": A._statistic}
    tensors |= {field.name: getattr(extras, field.name) for field in dataclasses.fields(Extras)}
    return {
        **named,
        "heads": None if call.head_ids is None else call.head_ids.tolist(),
        "offset": call.offset,
        "tensors": {name: box.add(x) for name, x in tensors.items() if x is not None},
        "terms": {slot: written(saveable(getattr(call, slot), A), box) for slot in SLOTS},
    }


def _rebuilt(entry: Any, tensors: Mapping[str, Tensor]) -> tuple[Key, Weights | Reduced, Extras]:
    if isinstance(entry, dict) and "measures" in entry:
        must_have("an entry", entry, "layer call shape measures")
        measures = {name: Held(tensor_of(at, tensors)) for name, at in entry["measures"].items()}
        shape = torch.Size(_whole(n) for n in entry["shape"])
        for name, kept in measures.items():
            _fits(name, kept.get(), shape)
        return _key(entry), Reduced(shape, measures), Extras()
    must_have("an entry", entry, "layer call heads offset tensors terms")
    must_have("the terms", entry["terms"], " ".join(SLOTS))
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
        A = chosen_heads(q, k, heads, **terms, offset=_whole(entry["offset"], least=None))
        A[..., :1, :1]  # terms that number more or fewer heads raise here
    if statistic is not None and statistic.shape != (*q.shape[:3], 1):
        raise ValueError(f"the statistic must have shape {(*q.shape[:3], 1)}, got {tuple(statistic.shape)}")
    return _key(entry), A if statistic is None else Weights(A._call, statistic), extras


def _key(entry: Mapping[str, Any]) -> Key:
    return str(entry["layer"]), _whole(entry["call"])


def _groups(groups: Groups, box: Box) -> dict[str, Any]:
    return {"ids": box.add(groups.ids), "labels": list(groups.labels)}


def _regrouped(written: Any, tensors: Mapping[str, Tensor]) -> Groups:
    must_have("groups", written, "ids labels")
    return Groups(tensor_of(written["ids"], tensors), tuple(str(label) for label in written["labels"]))


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors of a file that is whole."""
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST_HEADER:
            raise ValueError(f"{path} has a header of {header} bytes; at most {LARGEST_HEADER} are believed")
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.keys() != {NAME, "sha256"}:
            raise ValueError(f"{path} is a safetensors file but no tape; tapes are written by Tape.save")
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read: {error}") from None
    if _digest(metadata[NAME], tensors) != metadata["sha256"]:
        raise ValueError(f"{path} is damaged: it is not what was written")
    return metadata[NAME], tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    elif name in ROWS:
        expected = [*lead, j if name == "received" else i]
    else:
        raise ValueError(f"unknown measure {name!r}")
    if list(x.shape) != expected:
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")
