"""The file of a tape: one `.safetensors` file whose metadata holds everything but tensors and tokens, as JSON.

Terms are written by class name and rebuilt through a table of names, so a file can hold numbers but never code. Each
tensor has a SHA-256 digest, and one more digest covers the JSON text and the tensor digests. `load` checks all digests
first. `load_unchecked` checks only the text and maps the tensors, which are read from the disk when they are used;
`check` verifies the tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...atomic_files import atomic_path, check_parent_folder, save_tensors
from ...ops.blocks.pool_bins import Axis
from ...ops.call import SLOTS
from ...ops.operator import weights
from ...ops.weights import MAX_MAP_CELLS, Summary, Weights
from ..layer_names import shown_name
from ..real_tokens import RealTokens
from ..recording.edge_weights import EdgeWeights
from ..recording.observed import weights_of_observed
from ..recording.record import Extras
from ..recording.recorder import Key
from ..recording.reduced import MEASURE_NAMES, WEIGHT_MEASURES, Reduced
from ..recording.sampled_weights import SampledWeights, SparseWeights
from ..recording.store import TensorInMemory
from ..recording.unseen import Unseen
from .groups import Groups
from .head_effects import Effects, from_lists
from .image_patches import PatchedImage
from .overview import Overview
from .predictions import Predictions
from .string_tensors import StringBox, StringReader
from .term_json import (
    MAX_TERM_DEPTH,
    TensorBox,
    check_fields,
    check_size,
    evaluate_functions,
    from_json,
    tensor_named,
    to_json,
)

FORMAT = 5
FORMAT_WITH_TOKENS_IN_TEXT = 4  # tokens and labels of groups were part of the JSON text
FORMAT_WITHOUT_UNSEEN = 3  # its summaries counted padding queries: they are dropped, and computed anew when needed
FORMAT_WITH_EVEN_MAPS = 2  # its summaries had maps with other cells
FORMATS = (FORMAT_WITH_EVEN_MAPS, FORMAT_WITHOUT_UNSEEN, FORMAT_WITH_TOKENS_IN_TEXT, FORMAT)
METADATA_KEY = "regard.tape"
PREDICTION_TENSORS = "log_probability", "top", "top_log_probability"
MAX_HEADER_BYTES = 10_000_000
OVERVIEW_FIELDS = tuple(field.name for field in dataclasses.fields(Overview))
DIGEST_CHUNK_BYTES = 2**22  # `check` yields its progress after each chunk


@dataclass(frozen=True)
class TapeContents:
    """The arguments of a `Tape` as read from a file; labels are tuples (layer pattern, queries, keys)."""

    entries: dict[Key, Weights | Reduced | SparseWeights]
    extras: dict[Key, Extras]
    tokens: list[tuple[str, list[list[str]], list[list[str]]]]
    groups: dict[str, list[tuple[str, list[Groups], list[Groups]]]]
    pictures: list[tuple[str, list[PatchedImage]]]
    facts: dict[str, str]
    summaries: dict[Key, tuple[Summary, Overview]]
    unseen: list[Unseen]
    changed: dict[str, str]
    guessed: dict[str, str]
    real: dict[Key, RealTokens]
    effects: Effects
    predictions: list[tuple[str, Predictions]]


def save(
    path: Path,
    entries: Mapping[Key, tuple[Weights | Reduced | SparseWeights, Extras]],
    *,
    tokens: Sequence[Any],
    groups: Mapping[str, Sequence[Any]],
    pictures: Sequence[Any],
    facts: Mapping[str, str],
    summaries: Mapping[Key, tuple[Summary, Overview]],
    unseen: Sequence[Unseen] = (),
    changed: Mapping[str, str] | None = None,
    real: Mapping[Key, RealTokens] | None = None,
    guessed: Mapping[str, str] | None = None,
    effects: Effects | None = None,
    predictions: Sequence[tuple[str, Predictions]] = (),
) -> None:
    """Write a tape to a temporary file, sync it to the disk, then rename it: `path` is never a partial file."""
    check_parent_folder(path)
    box = TensorBox()
    strings = StringBox(box)
    described = [_entry_json(key, A, extras, summaries.get(key), box) for key, (A, extras) in entries.items()]
    for key, entry in zip(entries, described, strict=True):
        A = entries[key][0]
        known = (real or {}).get(key, A.real if isinstance(A, Reduced) else None)
        if known is not None:  # for other entries the mask shows it
            entry["real"] = _real_json(known, box)
    text = json.dumps(
        {
            "format": FORMAT,
            "entries": described,
            "tokens": [[x.layers, strings.add(x.queries), strings.add(x.keys)] for x in tokens],
            "groups": {
                name: [
                    [x.layers, *([_groups_json(y, box, strings) for y in axis] for axis in (x.queries, x.keys))]
                    for x in labels
                ]
                for name, labels in groups.items()
            },
            "pictures": [[x.layers, [_image_json(image, box) for image in x.queries]] for x in pictures],
            "facts": {name: str(value) for name, value in facts.items()},
            "unseen": [list(each) for each in unseen],
            "changed": dict(changed or {}),
            "guessed": dict(guessed or {}),
            "effects": {
                name: {layer: x.tolist() for layer, x in scores.items()} for name, scores in (effects or {}).items()
            },
            "predictions": [[layers, _predictions_json(x, box, strings)] for layers, x in predictions],
        },
        ensure_ascii=False,
    )
    # A lone UTF-16 surrogate cannot be encoded in UTF-8: write it as its JSON escape.
    text = text.encode("utf8", "backslashreplace").decode()
    if (size := len(text.encode())) > MAX_HEADER_BYTES * 0.9:
        raise ValueError(
            f"the description of the tape (layers, terms, facts) takes {size / 1e6:.1f} MB, more than the 9 MB that a "
            "file may hold; save fewer layers, or shorter facts"
        )
    with atomic_path(path) as temporary:
        save_tensors(temporary, box.tensors, checksummed_metadata(text, box.tensors))


def load(path: Path) -> TapeContents:
    """Read a tape and check all digests; `ValueError` names the file and what is wrong with it."""
    for _ in check(path):
        pass
    return load_unchecked(path)


def load_unchecked(path: Path) -> TapeContents:
    """Read a tape whose tensors are mapped into memory: each is read from the disk when it is used, unchecked."""
    text, _, tensors = read_unchecked(path)
    try:
        described = _from_text(text)
        if isinstance(described, dict) and described.get("format") not in FORMATS:
            raise ValueError(_unsupported_format(described.get("format")))
        if isinstance(described, dict) and described["format"] <= FORMAT_WITHOUT_UNSEEN:
            described.setdefault("unseen", [])
        if isinstance(described, dict):
            # tapes of earlier versions do not have them
            described = {"changed": {}, "guessed": {}, "effects": {}, "predictions": [], **described}
        fields = "format", "entries", "tokens", "groups", "pictures", "facts", "unseen", "changed", "guessed"
        check_fields("the tape", described, *fields, "effects", "predictions")
        if described["format"] <= FORMAT_WITHOUT_UNSEEN:
            for entry in described["entries"]:
                if isinstance(entry, dict) and "summary" in entry:
                    entry["summary"] = None
        entries: dict[Key, Weights | Reduced | SparseWeights] = {}
        extras: dict[Key, Extras] = {}
        summaries: dict[Key, tuple[Summary, Overview]] = {}
        real: dict[Key, RealTokens] = {}
        for entry in described["entries"]:
            tokens_of_entry = entry.pop("real", None) if isinstance(entry, dict) else None
            key, A, extra, summary = _read_entry(entry, tensors)
            if tokens_of_entry is not None:
                real[key] = _read_real(tokens_of_entry, A, tensors)
                if isinstance(A, Reduced):
                    A.real = real[key]
            entries[key], extras[key] = A, extra
            if summary is not None:
                summaries[key] = summary
        read = StringReader(tensors).read if described["format"] > FORMAT_WITH_TOKENS_IN_TEXT else _texts
        tokens = [(str(layers), read(queries), read(keys)) for layers, queries, keys in described["tokens"]]
        groups = {
            name: [
                (str(layers), _read_groups(queries, tensors, read), _read_groups(keys, tensors, read))
                for layers, queries, keys in labels
            ]
            for name, labels in described["groups"].items()
        }
        pictures = [
            (str(layers), [_read_image(x, tensors) for x in images]) for layers, images in described["pictures"]
        ]
        facts, changed = (
            {str(name): str(value) for name, value in described[field].items()} for field in ("facts", "changed")
        )
        unseen = [Unseen(str(layer), str(kind), str(reason)) for layer, kind, reason in described["unseen"]]
        guessed = {str(layer): str(reason) for layer, reason in described["guessed"].items()}
        effects = from_lists(described["effects"])
        predictions = [(str(layers), _read_predictions(x, tensors, read)) for layers, x in described["predictions"]]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot read {path} as a tape: {error}") from None
    return TapeContents(
        entries=entries,
        extras=extras,
        tokens=tokens,
        groups=groups,
        pictures=pictures,
        facts=facts,
        summaries=summaries,
        unseen=unseen,
        changed=changed,
        guessed=guessed,
        real=real,
        effects=effects,
        predictions=predictions,
    )


def is_tape(path: Path) -> bool:
    """Return whether the file's metadata says that it is a tape."""
    try:
        if not path.is_file():
            return False
        with safe_open(path, "pt") as opened:
            return METADATA_KEY in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False


def check(path: Path) -> Iterator[float]:
    """Read the whole file and raise `ValueError` if a checksum differs; yields the fraction that is done."""
    _, digests, tensors = read_unchecked(path)
    total, done = max(1, sum(x.nbytes for x in tensors.values())), 0
    for name, x in tensors.items():
        digest = _start_digest(x)
        for part in x.reshape(-1).view(torch.uint8).split(DIGEST_CHUNK_BYTES):
            digest.update(part.numpy().data)
            done += len(part)
            yield done / total
        if digest.hexdigest() != digests[name]:
            raise ValueError(f"{path} is corrupted: checksum mismatch")


def fingerprint(path: Path) -> str:
    """Return the digest of a tape's file: two files with the same fingerprint hold the same tape."""
    read_unchecked(path)
    with safe_open(path, "pt") as opened:
        return str(opened.metadata()["sha256"])


def checksummed_metadata(text: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata of a file: the text, the digest of each tensor, and a digest of both."""
    digest_by_name = {}
    for name, x in tensors.items():
        digest = _start_digest(x)
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
        digest_by_name[name] = digest.hexdigest()
    digests = json.dumps(digest_by_name)
    return {METADATA_KEY: text, "digests": digests, "sha256": hashlib.sha256((text + digests).encode()).hexdigest()}


def _entry_json(
    key: Key,
    A: Weights | Reduced | SparseWeights,
    extras: Extras,
    summary: tuple[Summary, Overview] | None,
    box: TensorBox,
) -> dict[str, Any]:
    """Describe one call of a layer; its tensors go into the box."""
    named: dict[str, Any] = {"layer": key[0], "call": key[1]}
    if isinstance(A, Reduced):
        measures = {name: box.add(A[name]) for name in A.names}
        return {**named, "shape": list(A.shape), "measures": measures}
    if isinstance(A, EdgeWeights):
        return {**named, "nodes": list(A.shape[2:]), "edges": box.add(A.edge_index), "weights": box.add(A.weights)}
    if isinstance(A, SampledWeights):
        maps = {"levels": list(A.levels), "maps": [list(size) for size in A.maps]}
        return {**named, **maps, "locations": box.add(A.locations), "weights": box.add(A.weights)}
    call = A.call
    if call.batch_ids is not None or call.row_ids is not None:
        raise ValueError(f"{shown_name(key[0])!r} holds selected rows; save the tape it was selected from")
    tensors = {"q": call.q, "k": call.k, "statistic": A.known_statistic}
    tensors |= {field.name: getattr(extras, field.name) for field in dataclasses.fields(Extras)}
    return {
        **named,
        "heads": None if call.head_ids is None else call.head_ids.tolist(),
        "offset": call.first_position,
        "tensors": {name: box.add(x) for name, x in tensors.items() if x is not None},
        "terms": {slot: to_json(evaluate_functions(getattr(call, slot), A), box) for slot in SLOTS},
        "summary": None if summary is None else {name: box.add(x) for name, x in summary_tensors(*summary).items()},
    }


def summary_tensors(summary: Summary, overview: Overview) -> dict[str, Tensor]:
    """Return the tensors of a summary by name, without the row statistic, which is stored with the weights."""
    measures = {name: x for name in (*MEASURE_NAMES, "map", "peaks") if (x := getattr(summary, name)) is not None}
    return measures | {f"overview.{name}": getattr(overview, name) for name in OVERVIEW_FIELDS}


def _read_entry(
    entry: Any, tensors: Mapping[str, Tensor]
) -> tuple[Key, Weights | Reduced | SparseWeights, Extras, tuple[Summary, Overview] | None]:
    if isinstance(entry, dict) and "measures" in entry:
        check_fields("an entry", entry, "layer", "call", "shape", "measures")
        measures = {name: TensorInMemory(tensor_named(at, tensors)) for name, at in entry["measures"].items()}
        shape = torch.Size(_check_int(n) for n in entry["shape"])
        for name, measure in measures.items():
            _check_measure_shape(name, measure.get(), shape)
        return _key(entry), Reduced(shape, measures), Extras(), None
    if isinstance(entry, dict) and "edges" in entry:
        check_fields("an entry", entry, "layer", "call", "nodes", "edges", "weights")
        targets, sources = map(_check_int, entry["nodes"])
        edges, of_edges = (tensor_named(entry[name], tensors) for name in ("edges", "weights"))
        return _key(entry), EdgeWeights(edges, of_edges, (targets, sources)), Extras(), None
    if isinstance(entry, dict) and "locations" in entry:
        check_fields("an entry", entry, "layer", "call", "levels", "maps", "locations", "weights")
        locations, of_points = (tensor_named(entry[name], tensors) for name in ("locations", "weights"))
        maps = [(_check_int(height, least=1), _check_int(width, least=1)) for height, width in entry["maps"]]
        levels = [_check_int(level) for level in entry["levels"]]
        return _key(entry), SampledWeights(locations, of_points, levels, maps), Extras(), None
    check_fields("an entry", entry, "layer", "call", "heads", "offset", "tensors", "terms", "summary")
    check_fields("the terms", entry["terms"], *SLOTS)
    named = {name: tensor_named(at, tensors) for name, at in entry["tensors"].items()}
    extras = Extras(**{field.name: named.pop(field.name, None) for field in dataclasses.fields(Extras)})
    if missing := {"q", "k"} - named.keys():
        raise ValueError(f"an entry has no tensor {', '.join(sorted(missing))}")
    q, k, statistic = named.pop("q"), named.pop("k"), named.pop("statistic", None)
    if named:
        raise ValueError(f"an entry has unknown tensors {', '.join(named)}")
    terms: Any = {slot: from_json(entry["terms"][slot], tensors) for slot in SLOTS}
    if entry["heads"] is None:
        A = weights(q, k, **terms, offset=_check_int(entry["offset"], least=None))
    else:
        heads = [_check_int(head) for head in entry["heads"]]
        A = weights_of_observed(q, k, heads, **terms, offset=_check_int(entry["offset"], least=None))
        # Evaluating one entry raises if a term has parameters for another number of heads.
        weights_of_observed(q[:, :, :1], k[:, :, :1], heads, **terms, offset=entry["offset"])[..., :1, :1]
    if statistic is not None and statistic.shape != (*q.shape[:3], 1):
        raise ValueError(f"the statistic must have shape {(*q.shape[:3], 1)}, got {tuple(statistic.shape)}")
    if statistic is not None:
        A = Weights(A.call, statistic)
    summary = None if entry["summary"] is None else read_summary(entry["summary"], A, tensors)
    return _key(entry), A, extras, summary


def read_summary(source: Any, A: Weights, tensors: Mapping[str, Tensor]) -> tuple[Summary, Overview]:
    """Return the summary whose tensors `source` names; `ValueError` unless they have the shapes of the weights."""
    names = [*WEIGHT_MEASURES, "map"]
    names += [name for name in ("logit", "peaks") if isinstance(source, dict) and name in source]  # later additions
    check_fields("a summary", source, *names, *(f"overview.{name}" for name in OVERVIEW_FIELDS))
    measures = {name: tensor_named(at, tensors) for name, at in source.items()}
    for name in names:
        _check_measure_shape(name, measures[name], A.shape)
    for name in OVERVIEW_FIELDS:
        x = measures[f"overview.{name}"]
        if x.shape[:2] != A.shape[:2] or x.ndim != (4 if name == "thumbs" else 2):
            raise ValueError(f"{name} of a summary must begin with dims {tuple(A.shape[:2])}, got {tuple(x.shape)}")
    statistic = None if A.known_statistic is None else A.known_statistic.squeeze(-1)
    summary = Summary(**{name: measures[name] for name in names}, statistic=statistic)
    return summary, Overview(**{name: measures[f"overview.{name}"] for name in OVERVIEW_FIELDS})


def _key(entry: Mapping[str, Any]) -> Key:
    return str(entry["layer"]), _check_int(entry["call"])


def _real_json(real: RealTokens, box: TensorBox) -> dict[str, Any]:
    return {"queries": box.add(real.queries), "keys": box.add(real.keys), "causal": real.is_causal}


def _read_real(source: Any, A: Weights | Reduced | SparseWeights, tensors: Mapping[str, Tensor]) -> RealTokens:
    check_fields("real tokens", source, "queries", "keys", "causal")
    *lead, _, i, j = A.shape
    for name, n in (("queries", i), ("keys", j)):
        x = tensor_named(source[name], tensors)
        if x.dtype != torch.bool or x.shape != (math.prod(lead), n):
            raise ValueError(
                f"real {name} must be bool of shape {(math.prod(lead), n)}, got {x.dtype} {tuple(x.shape)}"
            )
    queries, keys = (tensor_named(source[name], tensors) for name in ("queries", "keys"))
    return RealTokens(queries, keys, source["causal"] is True)


def _groups_json(groups: Groups, box: TensorBox, strings: StringBox) -> dict[str, Any]:
    return {"ids": box.add(groups.ids), "labels": strings.add([groups.labels])}


def _read_groups(source: Any, tensors: Mapping[str, Tensor], read: Callable[[Any], list[list[str]]]) -> list[Groups]:
    """Return the groups of each batch row, or those for all rows, which earlier files hold without a list."""
    return [_read_grouping(x, tensors, read) for x in (source if isinstance(source, list) else [source])]


def _read_grouping(source: Any, tensors: Mapping[str, Tensor], read: Callable[[Any], list[list[str]]]) -> Groups:
    check_fields("groups", source, "ids", "labels")
    [labels] = read([source["labels"]] if isinstance(source["labels"], list) else source["labels"])
    return Groups(tensor_named(source["ids"], tensors), tuple(labels))


def _image_json(image: PatchedImage, box: TensorBox) -> dict[str, Any]:
    return {"pixels": box.add(image.pixels), "rows": image.rows, "cols": image.cols, "special": image.special}


def _read_image(source: Any, tensors: Mapping[str, Tensor]) -> PatchedImage:
    check_fields("a picture", source, "pixels", "rows", "cols", "special")
    return PatchedImage(**{**source, "pixels": tensor_named(source["pixels"], tensors)})


def _predictions_json(predictions: Predictions, box: TensorBox, strings: StringBox) -> dict[str, Any]:
    tensors = {name: box.add(getattr(predictions, name)) for name in PREDICTION_TENSORS}
    return {**tensors, "names": strings.add([predictions.names])}


def _read_predictions(
    source: Any, tensors: Mapping[str, Tensor], read: Callable[[Any], list[list[str]]]
) -> Predictions:
    check_fields("predictions", source, *PREDICTION_TENSORS, "names")
    own, top, values = (tensor_named(source[name], tensors) for name in PREDICTION_TENSORS)
    (names,) = read(source["names"])
    if own.ndim != 2 or top.ndim != 3 or top.shape != values.shape or top.shape[:2] != own.shape or not own.shape[1]:
        shapes = [tuple(x.shape) for x in (own, top, values)]
        raise ValueError(f"predictions must have shapes b n, b n k and b n k, got {shapes}")
    if top.dtype != torch.int32 or (top.numel() and not -1 <= int(top.min()) <= int(top.max()) < len(names)):
        raise ValueError(f"the tokens of predictions must be int32 from -1 to {len(names) - 1}")
    if not (own.is_floating_point() and values.is_floating_point()):
        raise ValueError(f"log-probabilities must be floats, got {own.dtype} and {values.dtype}")
    return Predictions(own, top, values, tuple(names))


def _unsupported_format(number: Any) -> str:
    """Return the message for a file of another format."""
    newer = isinstance(number, int) and number > FORMAT
    step = "upgrade regard" if newer else "create it again with capture(model) and tape.save(...), or regard look"
    return f"it has format {number!r}, but this version of regard reads format {FORMAT}; {step}"


def read_unchecked(path: Path) -> tuple[str, dict[str, str], dict[str, Tensor]]:
    """Return the text, whose digest is checked, the digests of the tensors, and the mapped tensors."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # reading a pipe or a device may never end
        raise ValueError(f"{path} is not a capture: it is a pipe or a device, not a file; copy its content to a file")
    try:
        with path.open("rb") as file:
            header_bytes, first_byte = int.from_bytes(file.read(8), "little"), file.read(1)
        if first_byte != b"{":
            raise ValueError(
                f"{path} is not a capture: it is not a safetensors file; regard look and tape.save write captures"
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.keys() == {METADATA_KEY, "sha256"}:
            raise ValueError(f"cannot read {path} as a tape: {_unsupported_format(1)}")
        if metadata.keys() != {METADATA_KEY, "digests", "sha256"}:
            raise ValueError(f"{path} is a safetensors file but not a tape; Tape.save writes tapes")
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as safetensors: {error}") from None
    text, digests = metadata[METADATA_KEY], metadata["digests"]
    if hashlib.sha256((text + digests).encode()).hexdigest() != metadata["sha256"]:
        raise ValueError(f"{path} is corrupted: checksum mismatch")
    try:
        digest_by_name = _from_text(digests)
    except ValueError as error:
        raise ValueError(f"cannot read {path} as a tape: {error}") from None
    if not isinstance(digest_by_name, dict) or digest_by_name.keys() != tensors.keys():
        raise ValueError(f"{path} is corrupted: its tensors are not those in its list of checksums")
    return text, digest_by_name, tensors


def _from_text(text: str) -> Any:
    """Parse JSON; raises `ValueError` also if it is nested too deep for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"terms may be nested up to {MAX_TERM_DEPTH} deep in a tape file") from None


def _start_digest(x: Tensor) -> Any:
    """Return a tensor's digest that covers its dtype and shape; the caller adds its bytes."""
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}\n".encode())


def _check_int(value: Any, least: int | None = 0) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"expected a whole number{'' if least is None else f' of at least {least}'}, got {value!r}")
    return check_size(value)


def _texts(rows: Any) -> list[list[str]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("tokens must be lists of strings")
    return [[str(token) for token in row] for row in rows]


def _check_measure_shape(name: str, x: Tensor, shape: torch.Size) -> None:
    """Raise unless a measure has the shape that a matrix of this shape gives."""
    *lead, i, j = shape
    if name.startswith(("pool:", "peaks:")):
        n = int(name.partition(":")[2])
        expected = [*lead, max(1, min(n, i)), max(1, min(n, j))]
    elif name in ("map", "peaks"):
        counts = zip((i, j), x.shape[-2:], strict=True) if x.ndim == len(lead) + 2 else ()
        expected = [*lead, *(Axis.cells(n, min(max(count, 1), MAX_MAP_CELLS)).count for n, count in counts)]
    elif name in MEASURE_NAMES:
        expected = [*lead, j if name == "received" else i]
    else:
        raise ValueError(f"unknown measure {name!r}")
    if list(x.shape) != expected:
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")
