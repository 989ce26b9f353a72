"""Describe a capture for the viewer: its layers, texts, groups of tokens and pictures by number."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...lens.layer_names import shown_name
from ...lens.recording.generation import looks_back_only
from ...lens.recording.recorder import Key
from ...lens.recording.reduced import Reduced
from ...lens.recording.sampled_weights import SparseWeights
from ...lens.tape.groups import Groups, sentences, words
from ...lens.tape.image_patches import PatchedImage
from ...lens.tape.kept_summaries import KeptSummaries
from ...lens.tape.predictions import Predictions
from ...lens.tape.tape import Tape
from ...ops.call import SLOTS
from ...ops.weights import Weights
from .pyramid import levels

SPLITS: dict[str, Callable[[list[str]], Groups]] = {"words": words, "sentences": sentences}
START_TOKENS, START_CHARACTERS = 8, 32  # limits of the first words that name a text
Pair = tuple[int | None, int | None]  # numbers for the queries and for the keys


class Capture:
    """A tape under a name, its layers, texts, groups and pictures by number.

    `kept` are the summaries beside the tape's file, None if it has no file or nothing is to be written.
    """

    def __init__(self, tape: Tape, name: str, kept: KeptSummaries | None = None) -> None:
        if not isinstance(tape, Tape):
            hint = "to write a file call tape.page().save('attention.html')"
            if isinstance(tape, str | Path) and Path(tape).suffix != ".html":
                hint = "to view a file call serve(path), or view(Tape.load(path))"
            raise TypeError(f"the viewer shows a Tape, got {type(tape).__name__}; {hint}")
        self.tape, self.name, self.kept = tape, name, kept
        self.keys: list[Key] = list(tape)
        if not self.keys:
            raise ValueError("the tape holds no layers: run the model inside `with capture(model) as tape:` first")
        self.texts: list[list[str]] = []
        self.pictures: list[PatchedImage] = []
        self._split: dict[tuple[str, int], int] = {}
        self._groups: list[tuple[str, int, Callable[[], Groups]]] = []
        for key in self.keys:
            if len(tape[key].shape) != 4:
                name, got = shown_name(key[0]), tuple(tape[key].shape)
                raise ValueError(f"layer {name!r} must have dims b h i j to be shown, got shape {got}")
        self._predicted: list[tuple[int, Predictions, Tensor]] = []  # the first layer that has them, and its queries
        self.layers = [self._layer(key) for key in self.keys]  # descriptions, as JSON
        passes = _passes([name for name, _ in self.keys], self._asks_again)
        for layer, stack in zip(self.layers, _stacks(self.layers, passes), strict=True):
            layer["stack"] = stack

    def entry(self, layer: int) -> Weights | Reduced:
        """Return the weights of a layer, or its kept measures; those of edges or points are computed."""
        return self._entry(self.keys[layer])

    def _entry(self, key: Key) -> Weights | Reduced:
        A = self.tape[key]
        return A.measures() if isinstance(A, SparseWeights) else A

    def group(self, number: int) -> Groups:
        """Return groups by number; words and sentences are split on first use."""
        name, n, make = self._groups[number]
        found = make()
        self._groups[number] = name, n, lambda: found
        return found

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    def describe(self) -> dict[str, Any]:
        """Return the description of the capture, as JSON."""
        unseen = {f"not recorded: {shown_name(each.layer)}": each.kind for each in self.tape.unseen}
        return {
            "name": f"{self.name} ({self.tape.coverage})" if self.tape.is_partial else self.name,
            "facts": {name: str(value) for name, value in self.tape.facts.items()} | unseen,
            "batch": max(layer["batch"] for layer in self.layers),
            "layers": self.layers,
            "texts": [{"n": len(text), "start": _start(text)} for text in self.texts],
            "groups": [{"name": name, "n": n} for name, n, _ in self._groups],
            "pictures": [_shape(picture) for picture in self.pictures],
        }

    def _asks_again(self, before: int, after: int) -> bool:
        """Whether a later call attends to the same keys with other queries, as layers with shared weights may.

        A second call of a decoder with the same number of tokens looks the same, and is taken for further layers.
        """
        one, other = self.entry(before), self.entry(after)
        if not (isinstance(one, Weights) and isinstance(other, Weights)):
            return False
        alike = one.shape == other.shape and _same(one.call.k, other.call.k)
        return alike and not _same(one.call.q, other.call.q)

    def _layer(self, key: Key) -> dict[str, Any]:
        A = self._entry(key)
        b, h, i, j = A.shape
        texts = [self._texts(key, batch) for batch in range(b)]
        return {
            "name": shown_name(key[0]),
            "call": key[1],
            "batch": b,
            "n_i": i,
            "n_j": j,
            **_terms(A, h),
            "self": self._among(A, texts[0] if texts else (None, None)),
            "levels": levels(i, j),
            "finest": _finest(A),
            "top": None,
            "texts": texts,
            "padding": self._padding(key),
            "groups": self._all_groups(key, texts),
            "values": self._values(key),
            "predictions": self._predictions(key),
            "effects": self._effects(key),
            "picture": [self._pictures(key, batch) for batch in range(b)],
        }

    def _values(self, key: Key) -> str | None:
        """Return what the norms of value-weighted maps are of, None if no values were kept."""
        extras = self.tape.extras(key)
        if extras.v is None:
            return None
        return "v" if extras.projection is None else "v W_o"

    def _predictions(self, key: Key) -> int | None:
        """Return the first layer with the same predictions for its queries; None without predictions."""
        found = self.tape.predictions_of(key)
        if found is None:
            return None
        real = self.tape.real_queries(key)
        for layer, known, queries in self._predicted:
            if known.names is found.names and torch.equal(queries, real):
                return layer
        self._predicted.append((self.keys.index(key), found, real))
        return self.keys.index(key)

    def predictions(self, layer: int) -> Predictions | None:
        """Return the predictions that `describe` names by the layer."""
        return next((found for first, found, _ in self._predicted if first == layer), None)

    def _effects(self, key: Key) -> dict[str, list[float | None]]:
        """Return the effects of a layer's heads by name, None for heads without one."""
        effects = self.tape.effects_of(key).items()
        return {name: [x if math.isfinite(x) else None for x in values] for name, values in effects}

    def _padding(self, key: Key) -> list[list[list[list[int]]]] | None:
        """Return, for each batch row, the ranges of queries and of keys that are padding; None without padding."""
        real = self.tape.real_queries(key), self.tape.real_keys(key)
        if all(bool(x.all()) for x in real):
            return None
        sides = [[true_ranges(~row) for row in x.cpu()] for x in real]
        return [list(pair) for pair in zip(*sides, strict=True)]

    def _texts(self, key: Key, batch: int) -> Pair:
        queries, keys = self.tape.tokens_of(key, batch=batch)
        return self._text(queries), self._text(keys)

    def _text(self, tokens: list[str] | None) -> int | None:
        if tokens is None:
            return None
        if tokens not in self.texts:
            self.texts.append(tokens)
        return self.texts.index(tokens)

    def _all_groups(self, key: Key, texts: list[Pair]) -> dict[str, list[Pair]]:
        found: dict[str, list[Pair]] = {}
        for name in self.tape.group_names(key):
            with suppress(ValueError):  # the groups are for another number of tokens
                rows = [self.tape.groups_of(key, name, batch=batch) for batch in range(len(texts))]
                found[name] = [(self._group(name, queries), self._group(name, keys)) for queries, keys in rows]
        for name in SPLITS:
            if name not in found and any(text is not None for pair in texts for text in pair):
                found[name] = [(self._split_of(name, i), self._split_of(name, j)) for i, j in texts]
        return found

    def _group(self, name: str, groups: Groups) -> int:
        for number, (known, _, make) in enumerate(self._groups):
            if known == name and make() is groups:
                return number
        self._groups.append((name, groups.ids.numel(), lambda: groups))
        return len(self._groups) - 1

    def _split_of(self, name: str, text: int | None) -> int | None:
        if text is None:
            return None
        if (name, text) not in self._split:
            self._split[name, text] = len(self._groups)
            tokens = self.texts[text]
            self._groups.append((name, len(tokens), lambda: SPLITS[name](tokens)))
        return self._split[name, text]

    def _pictures(self, key: Key, batch: int) -> Pair:
        queries, keys = self.tape.pictures_of(key, batch=batch)
        return self._picture(queries), self._picture(keys)

    def _picture(self, picture: PatchedImage | None) -> int | None:
        if picture is None:
            return None
        if picture not in self.pictures:
            self.pictures.append(picture)
        return self.pictures.index(picture)

    def _among(self, A: Weights | Reduced, texts: Pair) -> bool:
        """Whether the queries are among the keys: by their texts if known, otherwise by mask and shape."""
        i, j = A.shape[-2:]
        first = A.call.first_position if isinstance(A, Weights) else j - i
        queries, keys = texts
        if queries is not None and keys is not None:
            return self.texts[keys][max(first, 0) :][:i] == self.texts[queries]
        if (queries is None) != (keys is None):
            return False
        return i == j or (isinstance(A, Weights) and looks_back_only(A.call.mask))


def _start(text: list[str]) -> list[str]:
    """Return the first tokens of a text, which name it in a menu."""
    return [token[:START_CHARACTERS] for token in text[:START_TOKENS]]


def true_ranges(flags: Tensor) -> list[list[int]]:
    """Return the first and the last place of each run of True.

    >>> true_ranges(torch.tensor([True, True, False, True]))
    [[0, 1], [3, 3]]
    """
    edges = torch.nn.functional.pad(flags.int(), (1, 1)).diff()
    firsts, stops = (edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist()
    return [[first, stop - 1] for first, stop in zip(firsts, stops, strict=True)]


def _terms(A: Weights | Reduced, heads: int) -> dict[str, Any]:
    """Return the head numbers, the position of the first query, and the terms as text."""
    if isinstance(A, Reduced):
        slots = dict.fromkeys(SLOTS)
        offset = A.shape[-1] - A.shape[-2]
        return {"kind": "measures", "heads": list(range(heads)), "offset": offset, "causal": False, **slots}
    call = A.call
    return {
        "kind": "weights",
        "heads": list(range(heads)) if call.head_ids is None else call.head_ids.tolist(),
        "offset": call.first_position,
        "causal": looks_back_only(call.mask),
        **{slot: None if term is None else repr(term) for slot, term in call.slots.items()},
    }


def _stacks(layers: list[dict[str, Any]], passes: list[int]) -> list[list[int]]:
    """Return, for each layer, the layers of the same forward pass from the first up to it, over the same tokens.

    The list is empty if queries and keys are different tokens, or if only measures were kept.
    """
    fields = ("self", "kind", "batch", "n_i", "n_j", "texts")
    found: list[list[int]] = []
    for at, top in enumerate(layers):
        flows = top["self"] and top["kind"] == "weights" and top["n_i"] == top["n_j"]
        below = range(bisect_left(passes, passes[at]), at + 1) if flows else ()
        found.append([n for n in below if all(layers[n][field] == top[field] for field in fields)])
    return found


def _passes(names: list[str], asks_again: Callable[[int, int], bool]) -> list[int]:
    """Number the forward pass of each call: a new pass begins when a name comes again after a different one.

    Calls with new queries to the same memory begin no pass, and neither does a name that comes again after only such
    calls.

    >>> _passes(["a", "b", "a", "b"], lambda before, after: False)
    [0, 0, 1, 1]
    >>> _passes(["own", "cross", "own", "cross"], lambda before, after: after == 3)
    [0, 0, 0, 0]
    """
    places: dict[str, list[int]] = {}
    for n, name in enumerate(names):
        places.setdefault(name, []).append(n)
    before = {later: n for calls in places.values() for n, later in pairwise(calls)}
    after = {n: later for later, n in before.items()}

    def remembers(n: int) -> bool:
        return (n in before and asks_again(before[n], n)) or (n in after and asks_again(n, after[n]))

    found: list[int] = []
    seen: set[str] = set()
    for n, name in enumerate(names):
        again = name in seen and name != names[n - 1]
        if again and (asks_again(before[n], n) or all(map(remembers, range(before[n] + 1, n)))):
            again = False
        seen = {name} if again else seen | {name}
        found.append(found[-1] + again if found else 0)
    return found


def _same(x: Tensor, y: Tensor) -> bool:
    return (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)


def _finest(A: Weights | Reduced) -> int:
    """Return the finest level: single weights, or for a kept map, the first level whose cells are no smaller."""
    if isinstance(A, Weights):
        return 0
    if not A.maps:
        return levels(*A.shape[-2:])
    sizes = torch.tensor([A.shape[-2:]]) / torch.tensor([list(A[name].shape[-2:]) for name in A.maps])
    return min(levels(*A.shape[-2:]) - 1, int(sizes.amax(1).amin().log2().ceil().clamp(min=0)))


def _shape(picture: PatchedImage) -> dict[str, int]:
    height, width = picture.pixels.shape[:2]
    grid = {"rows": picture.rows, "cols": picture.cols, "special": picture.special}
    return {"width": width, "height": height, **grid}
