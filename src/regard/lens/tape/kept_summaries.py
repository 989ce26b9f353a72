"""Summaries that were computed while a saved tape was open, kept in a folder beside its file.

`look.safetensors` has `look.safetensors.summaries/`, with one file for each layer and call. Each holds the fingerprint
of the tape it was computed from, and one of another tape is never used. Whatever cannot be read is computed anew, and
what cannot be written is not kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...atomic_files import atomic_path, save_tensors
from ...ops.weights import Weights
from ..recording.recorder import Key
from . import archive
from .tape import Tape
from .term_json import TensorBox, check_fields, tensor_named

FORMAT = "summary 1"  # another number for summaries that are computed in another way
FIELDS = "format", "of", "layer", "call", "summary", "statistic"


class KeptSummaries:
    """The summaries beside the file of a tape."""

    def __init__(self, path: Path) -> None:
        self._path, self._fingerprint = path, archive.fingerprint(path)
        self.folder = path.with_name(f"{path.name}.summaries")
        self._tried: set[Key] = set()
        self._intact: bool | None = None  # whether the tensors of the tape's file are those it was written with

    def restore(self, tape: Tape, key: Key) -> None:
        """Give a layer of the tape its summary, if one is kept."""
        if key in self._tried or tape.summarized(key):
            return
        self._tried.add(key)
        with suppress(ValueError, TypeError, AttributeError, OSError):
            self._read(tape, key)

    def measuring(self, tape: Tape, key: Key) -> Iterator[float]:
        """Measure a layer as `tape.summarizing` does, then keep its summary; before the first one check the tape."""
        if self._intact is None:
            self._intact = False
            with suppress(ValueError, OSError):
                for _ in archive.check(self._path):  # a summary of damaged tensors is not kept
                    yield 0.0
                self._intact = archive.fingerprint(self._path) == self._fingerprint
        yield from tape.summarizing(key)
        if self._intact:
            with suppress(OSError):
                self._write(tape, key)

    def _file(self, tape: Tape, key: Key) -> Path:
        return self.folder / f"{list(tape).index(key)}.safetensors"

    def _write(self, tape: Tape, key: Key) -> None:
        self.folder.mkdir(exist_ok=True)
        box, summary = TensorBox(), tape.summary(key)
        tensors = archive.summary_tensors(summary, tape.overview(key))
        described = {
            "format": FORMAT,
            "of": self._fingerprint,
            "layer": key[0],
            "call": key[1],
            "summary": {name: box.add(x) for name, x in tensors.items()},
            "statistic": None if summary.statistic is None else box.add(summary.statistic),
        }
        with atomic_path(self._file(tape, key)) as temporary:
            save_tensors(temporary, box.tensors, archive.checksummed_metadata(json.dumps(described), box.tensors))

    def _read(self, tape: Tape, key: Key) -> None:
        path, A = self._file(tape, key), tape[key]
        assert isinstance(A, Weights)
        text, _, tensors = archive.read_unchecked(path)
        described: dict[str, Any] = json.loads(text)
        check_fields("a kept summary", described, *FIELDS)
        if (described["format"], described["of"]) != (FORMAT, self._fingerprint):
            raise ValueError(f"{path} is of another tape")
        if (described["layer"], described["call"]) != key:
            raise ValueError(f"{path} is of another layer")
        summary, overview = archive.read_summary(described["summary"], A, tensors)
        if described["statistic"] is not None:
            statistic = tensor_named(described["statistic"], tensors)
            if statistic.shape != A.shape[:-1]:
                raise ValueError(f"the statistic must have shape {tuple(A.shape[:-1])}, got {tuple(statistic.shape)}")
            summary = dataclasses.replace(summary, statistic=statistic)
        for _ in archive.check(path):
            pass
        tape.keep_summary(key, summary, overview)
