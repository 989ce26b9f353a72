"""Tape: what a model attended to, layer by layer, to be asked, measured, saved and looked at again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..ops.lazy import Weights
from . import archive
from .groups import Groups
from .labels import Labels, Tokens, TokensByLayer, fitting, meant_for, tokens_by_layer
from .record import Extras, Record
from .recorder import Key, Recorder
from .reduced import Reduced
from .table import table


class Tape(Mapping[Key, Weights | Reduced]):
    """An ordered map from (layer, call) to the layer's weights.

    `tape["decoder.0.attention"]` serves where the layer was called once, `tape["decoder.0.attention", 2]` always,
    `tape[-1]` counts entries, and `tape.select("decoder.*")` is the tape of some layers. Its `values()` are the stack
    of layers that the flow functions take, in the order in which they ran.
    """

    def __init__(
        self,
        entries: Mapping[Key, Weights | Reduced],
        *,
        extras: Mapping[Key, Extras] | None = None,
        tokens: Sequence[Labels] = (),
        groups: Mapping[str, Sequence[Labels]] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._entries: Mapping[Key, Weights | Reduced | Record] = dict(entries)
        self._extras = dict(extras or {})
        self._tokens = list(tokens)
        self._groups = {name: list(labels) for name, labels in (groups or {}).items()}
        self.facts = dict(facts or {})
        self._recorder: Recorder | None = None
        self._made: dict[Key, tuple[int, Weights]] = {}

    @classmethod
    def live(cls, recorder: Recorder, tokens: Tokens | TokensByLayer | None, model: nn.Module) -> Self:
        """The tape of a capture under way."""
        kind = type(model)
        tape = cls({}, facts={"model": f"{kind.__module__}.{kind.__qualname__}", "torch": str(torch.__version__)})
        tape._recorder, tape._entries = recorder, recorder.entries
        if tokens is not None:
            tape.tokens = tokens
        return tape

    def __getitem__(self, key: str | int | Key) -> Weights | Reduced:
        key = self._key(key)
        entry = self._entries[key]
        if not isinstance(entry, Record):
            return entry
        assert self._recorder is not None
        rows, made = self._made.get(key, (0, None))
        if made is None or rows != entry.rows:
            made = entry.weights(self._recorder.memo)
            if entry.store.folder is None:  # what lies in files is read again, not held
                self._made[key] = entry.rows, made
        return made

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        calls = Counter(name for name, _ in self)
        shown = {key: key[0] if calls[key[0]] == 1 else f"{key[0]}, {key[1]}" for key in self}
        width = max(map(len, shown.values()), default=0)
        counted = f"{len(calls)} layers" + (f", {len(self)} calls" if len(self) > len(calls) else "")
        return "\n".join([f"Tape({counted})", *(f"{shown[key]:{width}}  {self[key]!r}" for key in self)])

    @property
    def layers(self) -> list[str]:
        """The names of the layers, each once."""
        return list(dict.fromkeys(name for name, _ in self))

    def calls(self, layer: str) -> list[Weights | Reduced]:
        """Every call of a layer, in order."""
        return [self[key] for key in self if key[0] == layer]

    def select(self, pattern: str) -> Tape:
        """The tape of the layers whose names match, as file names do: `tape.select("decoder.*.self_attn")`."""
        chosen = [key for key in self if fnmatchcase(key[0], pattern)]
        if not chosen:
            raise KeyError(f"no layer matches {pattern!r}; there are {', '.join(self.layers)}")
        extras = {key: self.extras(key) for key in chosen}
        entries = {key: self[key] for key in chosen}
        return Tape(entries, extras=extras, tokens=self._tokens, groups=self._groups, facts=self.facts)

    def extras(self, key: str | int | Key) -> Extras:
        """Values, output projection and gradient of a layer, where they were kept."""
        key = self._key(key)
        entry = self._entries[key]
        return entry.extras() if isinstance(entry, Record) else self._extras.get(key, Extras())

    @property
    def tokens(self) -> list[Labels]:
        """What was said of tokens; set it to one text's tokens, to a list of such a batch row, or to a map of either.

        The map goes from layer patterns to tokens, or to a pair where queries and keys are of different texts:
        `tape.tokens = {"encoder.*": source, "decoder.*": target, "*.cross": (target, source)}`; the last that matches
        a layer counts.
        """
        return list(self._tokens)

    @tokens.setter
    def tokens(self, tokens: Tokens | TokensByLayer) -> None:
        self._tokens = tokens_by_layer(tokens)

    def tokens_of(self, key: str | int | Key, *, batch: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """The tokens of a layer's queries and of its keys in one batch row; None for an axis of another length."""
        key = self._key(key)
        found = meant_for(key[0], self._tokens)
        if found is None:
            return None, None
        i, j = self._shape(key)
        return fitting(found.queries, i, batch), fitting(found.keys, j, batch)

    def group(self, name: str, queries: Groups, keys: Groups | None = None, *, layers: str = "*") -> None:
        """Give the layers that match groups of tokens: `tape.group("words", words(tokens))`."""
        self._groups.setdefault(name, []).append(Labels(layers, queries, queries if keys is None else keys))

    def groups_of(self, key: str | int | Key, name: str) -> tuple[Groups, Groups]:
        """The groups of a layer's queries and of its keys."""
        key = self._key(key)
        found = meant_for(key[0], self._groups.get(name, []))
        if found is None:
            raise KeyError(f"{key[0]!r} has no groups {name!r}; give it some with tape.group({name!r}, ...)")
        for groups, n, axis in zip((found.queries, found.keys), self._shape(key), ("queries", "keys"), strict=True):
            if groups.ids.numel() != n:
                raise ValueError(f"groups {name!r} are of {groups.ids.numel()} tokens, {key[0]!r} has {n} {axis}")
        return found.queries, found.keys

    def mass(self, key: str | int | Key, name: str) -> Tensor:
        """Attention between groups, summed over keys and averaged over queries: b h query-groups key-groups."""
        queries, keys = self.groups_of(key, name)
        A = self[key]
        if isinstance(A, Reduced):
            raise ValueError(f"attention between groups needs queries and keys, and of {A!r} only measures were kept")
        return A.mass(queries.ids.to(A.device), keys.ids.to(A.device))

    def table(self) -> Any:
        """A row for each layer, call, batch row and head, and a column for each measure.

        Entropy, largest weight and distance are means over the queries that see something; received is the largest
        share of the attention that one key has. A pandas data frame where pandas is installed, else a dictionary of
        columns.
        """
        return table(self.items())

    def save(self, path: str | Path) -> None:
        """Write everything to one `.safetensors` file, whole or not at all."""
        entries = {key: (self[key], self.extras(key)) for key in self}
        archive.save(Path(path), entries, tokens=self._tokens, groups=self._groups, facts=self.facts)

    @classmethod
    def load(cls, path: str | Path) -> Tape:
        """The tape of a file that `save` wrote; a file that is damaged or something else raises `ValueError`."""
        found = archive.load(Path(path))
        tokens = [Labels(*labels) for labels in found.tokens]
        groups = {name: [Labels(*labels) for labels in given] for name, given in found.groups.items()}
        return cls(found.entries, extras=found.extras, tokens=tokens, groups=groups, facts=found.facts)

    def _key(self, key: str | int | Key) -> Key:
        if isinstance(key, int):
            keys = list(self)
            if not -len(keys) <= key < len(keys):
                raise IndexError(f"the tape has {len(keys)} entries, got index {key}")
            return keys[key]
        name = key[0] if isinstance(key, tuple) else key
        calls = [known for known in self if known[0] == name]
        if key in calls or (key == name and len(calls) == 1):
            return key if isinstance(key, tuple) else calls[0]
        if calls:
            shown = ", ".join(f"tape[{name!r}, {call}]" for name, call in calls)
            times = "once" if len(calls) == 1 else f"{len(calls)} times"
            raise KeyError(f"{name!r} was called {times}; write {shown}")
        raise KeyError(f"no layer {name!r} on the tape; there are {', '.join(self.layers) or 'none'}")

    def _shape(self, key: Key) -> tuple[int, int]:
        i, j = self[key].shape[-2:]
        return i, j
