"""Tape: what a model attended to, layer by layer, to be asked, measured, saved and looked at again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import regard

from ...ops.weights import Summary, Weights
from ..layer_names import listed, matches, own_name, shown_calls, shown_name
from ..recording.record import Extras, Record
from ..recording.recorder import Key, Recorder
from ..recording.reduced import Reduced
from . import archive
from .annotations import Labels, Tokens, TokensByLayer, fitting, meant_for, misplaced, tokens_by_layer, unplaced
from .groups import Groups, misgrouped
from .image_patches import Image, Picture, misfit, pictures
from .overview import Overview, joined
from .table import table

Shape = tuple[int, int, int]  # batch rows, queries, keys
ENTRIES = 2**24  # of the matrices measured in one go


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
        pictures: Sequence[Labels] = (),
        facts: Mapping[str, str] | None = None,
        summaries: Mapping[Key, tuple[Summary, Overview]] | None = None,
    ) -> None:
        self._stored: Mapping[Key, Weights | Reduced] = dict(entries)
        self._extras = dict(extras or {})
        self._tokens = list(tokens)
        self._groups = {name: list(labels) for name, labels in (groups or {}).items()}
        self._pictures = list(pictures)
        self.facts = dict(facts or {})
        self._summaries = {key: summary for key, (summary, _) in (summaries or {}).items()}
        self._overviews = {key: overview for key, (_, overview) in (summaries or {}).items()}
        self._recorder: Recorder | None = None
        self._made: dict[Key, tuple[int, Weights]] = {}

    @classmethod
    def live(cls, recorder: Recorder, tokens: Tokens | TokensByLayer | None, model: nn.Module) -> Self:
        """The tape of a capture under way."""
        kind = type(model)
        tape = cls({}, facts={"model": f"{kind.__module__}.{kind.__qualname__}", "torch": str(torch.__version__)})
        tape._recorder = recorder
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
            made = self._with_statistic(key, entry.weights(self._recorder.memo))
            self._remember(key, made)
        return made

    def __contains__(self, key: object) -> bool:
        with suppress(LookupError):
            return self._key(key) in self._entries  # type: ignore[arg-type]
        return False

    def get(self, key: str | int | Key, default: Any = None) -> Any:
        """The weights of a layer, or the default where there is none."""
        return self[key] if self.__contains__(key) else default

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shown, layers = shown_calls(self), len(self.layers)
        width = max(map(len, shown), default=0)
        counted = f"{layers} layer{'s' * (layers != 1)}" + (f", {len(self)} calls" if len(self) > layers else "")
        lines = (f"{name:{width}}  {A!r}" for name, A in zip(shown, self.values(), strict=True))
        return "\n".join([f"Tape({counted})", *lines])

    @property
    def layers(self) -> list[str]:
        """The names of the layers, each once."""
        return list(dict.fromkeys(name for name, _ in self))

    def calls(self, layer: str) -> list[Weights | Reduced]:
        """Every call of a layer, in order."""
        return [self[key] for key in self if key[0] == own_name(layer)]

    def select(self, pattern: str) -> Tape:
        """The tape of the layers whose names match, as file names do: `tape.select("decoder.*.self_attn")`."""
        chosen = [key for key in self if matches(key[0], pattern)]
        if not chosen:
            raise KeyError(f"no layer matches {pattern!r}; there are {listed(self.layers)}")
        extras = {key: self.extras(key) for key in chosen}
        entries = {key: self[key] for key in chosen}
        tape = Tape(entries, extras=extras, tokens=self._tokens, groups=self._groups, facts=self.facts)
        tape._pictures = self._pictures
        tape._summaries = {key: x for key, x in self._summaries.items() if key in chosen}
        tape._overviews = {key: x for key, x in self._overviews.items() if key in chosen}
        return tape

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
    def tokens(self, tokens: Tokens | TokensByLayer | None) -> None:
        self._tokens = [] if tokens is None else tokens_by_layer(tokens)
        if self._recorder is None or not self._recorder.is_open:
            self.tell_misplaced(stacklevel=3)

    def tell_misplaced(self, *, stacklevel: int) -> None:
        """Warn of tokens that fit no layer."""
        if self._tokens:
            for told in misplaced(self._tokens, {key: key[0] for key in self}, self._shape):
                warnings.warn(told, stacklevel=stacklevel)

    def tokens_of(self, key: str | int | Key, *, batch: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """The tokens of a layer's queries and of its keys in one batch row; None for an axis they do not fit."""
        key = self._key(key)
        found = meant_for(key[0], self._tokens)
        if found is None:
            return None, None
        _, i, j = self._shape(key)
        return fitting(found.queries, i, batch), fitting(found.keys, j, batch)

    def group(self, name: str, queries: Groups, keys: Groups | None = None, *, layers: str = "*") -> None:
        """Give the layers that match groups of tokens: `tape.group("words", words(tokens))`."""
        keys = queries if keys is None else keys
        if not isinstance(queries, Groups) or not isinstance(keys, Groups):
            got = type(keys if isinstance(queries, Groups) else queries).__name__
            raise TypeError(f"groups must be Groups, got {got}; write tape.group({name!r}, words(tokens))")
        self._groups.setdefault(name, []).append(Labels(layers, queries, keys))
        self._tell("groups", layers, lambda shapes: misgrouped(name, queries, keys, shapes))

    def group_names(self, key: str | int | Key) -> list[str]:
        """The names of the groups a layer was given."""
        name = self._key(key)[0]
        return [group for group, labels in self._groups.items() if meant_for(name, labels) is not None]

    def groups_of(self, key: str | int | Key, name: str) -> tuple[Groups, Groups]:
        """The groups of a layer's queries and of its keys."""
        key = self._key(key)
        found = meant_for(key[0], self._groups.get(name, []))
        if found is None:
            layer = shown_name(key[0])
            raise KeyError(f"{layer!r} has no groups {name!r}; give it some with tape.group({name!r}, ...)")
        for groups, n, axis in zip((found.queries, found.keys), self._shape(key)[1:], ("queries", "keys"), strict=True):
            if groups.ids.numel() != n:
                layer, given = shown_name(key[0]), groups.ids.numel()
                raise ValueError(f"groups {name!r} are of {given} tokens, {layer!r} has {n} {axis}")
        return found.queries, found.keys

    def mass(self, key: str | int | Key, name: str) -> Tensor:
        """Attention between groups, summed over keys and averaged over queries: b h query-groups key-groups."""
        queries, keys = self.groups_of(key, name)
        A = self[key]
        if isinstance(A, Reduced):
            raise ValueError(f"attention between groups needs queries and keys, and of {A!r} only measures were kept")
        return A.mass(queries.ids.to(A.device), keys.ids.to(A.device))

    def picture(
        self, images: Image | Sequence[Image], *, patches: tuple[int, int], special: int = 1, layers: str = "*"
    ) -> None:
        """Say which image, or images of the batch rows, was cut into (rows, columns) of patches.

        `special` tokens stand before the patches. In the layers that match, the axes that are of this many tokens are
        shown on the image: `tape.picture(pixels, patches=(14, 14))`.
        """
        given = pictures(images, patches, special)
        self._pictures.append(Labels(layers, given, given))
        self._tell("pictures", layers, lambda shapes: misfit(given, shapes))

    def pictures_of(self, key: str | int | Key, *, batch: int = 0) -> tuple[Picture | None, Picture | None]:
        """The pictures that a layer's queries and its keys are patches of; None where there is none."""
        key = self._key(key)
        found = meant_for(key[0], self._pictures)
        if found is None:
            return None, None
        if 1 < len(found.queries) <= batch:
            return None, None
        picture = found.queries[batch if len(found.queries) > 1 else 0]
        i, j = (picture if picture.tokens == n else None for n in self._shape(key)[1:])
        return i, j

    def summarize(self) -> None:
        """Measure every layer once, so that a file of the tape, saved afterwards, opens with all its maps drawn.

        Long inputs want it: a viewer draws the whole of a matrix from what was measured here.
        """
        for key in self:
            if isinstance(self[key], Weights):
                self.summary(key)

    def summary(self, key: str | int | Key) -> Summary:
        """Entropy, received mass, maximum, distance and map of a layer, measured once and kept."""
        key = self._key(key)
        for _ in self.summarizing(key):
            pass
        return self._summaries[key]

    def summarizing(self, key: str | int | Key) -> Iterator[float]:
        """Measure a layer, some heads at a time; yields the share that is done."""
        key = self._key(key)
        A = self[key]
        if isinstance(A, Reduced):
            raise ValueError(f"a summary needs queries and keys, and of {A!r} only measures were kept")
        if self.summarized(key):
            return
        heads = A.shape[-3]
        # A GPU takes all heads at once, by a kernel where there is one.
        step = max(1, ENTRIES * heads // max(A.shape.numel(), 1)) if A.device.type == "cpu" else heads
        parts = []
        for first in range(0, heads, step):
            some = A if step >= heads else A.select(heads=slice(first, first + step))
            parts.append(some.summary())
            yield min(first + step, heads) / heads
        found = parts[0] if len(parts) == 1 else joined(parts, A.shape)
        self._summaries[key] = found
        self._overviews.pop(key, None)
        if A.known_statistic is None and found.statistic is not None:
            self._remember(key, Weights(A.call, found.statistic.flatten(0, -3).unsqueeze(-1)))

    def overview(self, key: str | int | Key) -> Overview:
        """A few numbers and a small map for each head of a layer."""
        key = self._key(key)
        A = self[key]
        if isinstance(A, Reduced):
            return Overview.of(A)
        if not self.summarized(key) or key not in self._overviews:
            self._overviews[key] = Overview.of(self.summary(key))
        return self._overviews[key]

    def summarized(self, key: str | int | Key) -> bool:
        """Is the summary of a layer, as it now is, there already?"""
        key = self._key(key)
        found = self._summaries.get(key)
        return found is not None and (*found.entropy.shape, found.received.shape[-1]) == tuple(self[key].shape)

    def table(self) -> Any:
        """A row for each layer, call, batch row and head, and a column for each measure.

        Entropy, largest weight and distance are means over the queries that see something; received is the largest
        share of the attention that one key has. A pandas data frame where pandas is installed, else a dictionary of
        columns.
        """
        return table(self.items())

    # Views are a room above this one: they are asked for at the front door, when somebody wants to look.
    def view(
        self,
        other: Tape | None = None,
        *,
        name: str = "capture",
        device: str | torch.device | None = None,
        open_browser: bool = True,
    ) -> Any:
        """The zoomable map of this tape, or of two side by side, in a browser, until `.close()` of what is returned.

        On a `device` such as "cuda" every part of it is exact at once, at any length.
        """
        return regard.views.view(self, other, name=name, device=device, open_browser=open_browser)

    def page(self, other: Tape | None = None, *, name: str = "capture") -> Any:
        """The same as one offline file of some megabytes, `tape.page().save("page.html")`; notebooks show it inline."""
        return regard.views.page(self, other, name=name)

    def save(self, path: str | Path) -> None:
        """Write everything to one `.safetensors` file, whole or not at all."""
        summaries = {key: (found, self.overview(key)) for key, found in self._summaries.items() if self.summarized(key)}
        archive.save(
            Path(path),
            {key: (self[key], self.extras(key)) for key in self},
            tokens=self._tokens,
            groups=self._groups,
            pictures=self._pictures,
            facts=self.facts,
            summaries=summaries,
        )

    @classmethod
    def load(cls, path: str | Path) -> Tape:
        """The tape of a file that `save` wrote; a file that is damaged or something else raises `ValueError`."""
        return cls._of(archive.load(Path(path)))

    @classmethod
    def open(cls, path: str | Path) -> Tape:
        """As `load`, at once: tensors stay in the file until they are looked at, and unchecked.

        `archive.check(path)` reads them all and raises if they are not what was written.
        """
        return cls._of(archive.mapped(Path(path)))

    @classmethod
    def _of(cls, found: archive.Found) -> Tape:
        return cls(
            found.entries,
            extras=found.extras,
            tokens=[Labels(*labels) for labels in found.tokens],
            groups={name: [Labels(*labels) for labels in given] for name, given in found.groups.items()},
            pictures=[Labels(layers, given, given) for layers, given in found.pictures],
            facts=found.facts,
            summaries=found.summaries,
        )

    @property
    def _entries(self) -> Mapping[Key, Weights | Reduced | Record]:
        return self._stored if self._recorder is None else self._recorder.entries

    def _remember(self, key: Key, A: Weights) -> None:
        """Let these be the weights of a layer from now on."""
        entry = self._entries[key]
        if not isinstance(entry, Record):
            self._stored = {**self._stored, key: A}
        elif entry.store.folder is None:  # what lies in files is read again, not held
            self._made[key] = entry.rows, A

    def _with_statistic(self, key: Key, A: Weights) -> Weights:
        """Weights with their row statistic, where a summary has found it."""
        found = self._summaries.get(key)
        if A.known_statistic is not None or found is None or found.statistic is None:
            return A
        if found.statistic.shape != A.shape[:-1]:
            return A
        return Weights(A.call, found.statistic.flatten(0, -3).unsqueeze(-1))

    def _key(self, key: str | int | Key) -> Key:
        if isinstance(key, tuple) and key in self._entries:
            return key
        if isinstance(key, Integral):
            keys = list(self)
            if not -len(keys) <= key < len(keys):
                raise IndexError(f"the tape has {len(keys)} entries, got index {key}")
            return keys[int(key)]
        name, *call = key if isinstance(key, tuple) else (key,)
        calls = [known for known in self if name in (known[0], shown_name(known[0]))]
        if len(meant := [known for known in calls if call in ([], [known[1]])]) == 1:
            return meant[0]
        if calls:
            shown = ", ".join(f"tape[{shown_name(layer)!r}, {call}]" for layer, call in calls)
            times = "once" if len(calls) == 1 else f"{len(calls)} times"
            raise KeyError(f"{shown_name(calls[0][0])!r} was called {times}; write {shown}")
        raise KeyError(f"no layer {name!r} on the tape; there are {listed(self.layers)}")

    def _tell(self, what: str, pattern: str, misfit: Callable[[Mapping[str, Shape]], str | None]) -> None:
        """Warn of what fits no layer, or was given for none there is."""
        shapes = {key[0]: self._shape(key) for key in self if matches(key[0], pattern)}
        told = misfit(shapes) if shapes or not len(self) else unplaced(what, [pattern], self.layers)
        if told is not None:
            warnings.warn(told, stacklevel=3)

    def _shape(self, key: Key) -> Shape:
        """How many batch rows, queries and keys a layer has."""
        entry = self._entries[key]
        if isinstance(entry, Record):
            return entry.batch, entry.rows, entry.keys
        *lead, _, i, j = entry.shape
        return math.prod(lead), i, j
