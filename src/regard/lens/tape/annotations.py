"""Annotations of a tape's layers: which tokens, groups of tokens and image patches their queries and keys are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..layer_names import list_names, matches, shown_name
from ..real_tokens import RealTokens
from .groups import Groups, groups_by_row, place_groups
from .image_patches import Image, PatchedImage, patched_images
from .token_fit import count_tokens, fit_tokens

K = TypeVar("K")
Shape = tuple[int, int, int]  # batch rows, queries, keys
Tokens = Sequence[str] | Sequence[Sequence[str]]  # the tokens of one text, or of each batch row
GroupsByRow = Groups | Sequence[Groups] | Tensor  # for all batch rows, for each of them, or ids `b n`
TokensByLayer = Mapping[str, Tokens | tuple[Tokens, Tokens]]  # tokens by layer pattern; a pair is (queries, keys)


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of the query axis and the key axis of every layer whose name matches the pattern `layers`."""

    layers: str
    queries: Any
    keys: Any


class Annotations:
    """The tokens, groups and images of a tape. The last `Labels` whose pattern matches a layer apply to it."""

    def __init__(
        self,
        tokens: Sequence[Labels] = (),
        groups: Mapping[str, Sequence[Labels]] | None = None,
        images: Sequence[Labels] = (),
    ) -> None:
        self.tokens = list(tokens)
        self.groups = {name: list(labels) for name, labels in (groups or {}).items()}
        self.images = list(images)
        self._fitted: dict[tuple[int, tuple[int, ...], bytes], list[list[str] | None]] = {}

    def set_tokens(self, tokens: Tokens | TokensByLayer | None) -> None:
        """Replace the tokens of all layers; None removes them."""
        self.tokens = [] if tokens is None else parse_tokens(tokens)
        self._fitted.clear()

    def tokens_of(self, layer: str, real: RealTokens, batch: int) -> tuple[list[str] | None, list[str] | None]:
        """Return the tokens of a layer's queries and keys in one batch row; None for an axis that they do not fit."""
        labels = last_match(layer, self.tokens)
        if labels is None:
            return None, None
        if batch >= len(real.queries):
            return None, None
        i, j = (self._fit(*axis)[batch] for axis in _axes(labels, real))
        return i, j

    def _fit(self, texts: list[list[str]], real: Tensor) -> list[list[str] | None]:
        """Return the tokens of each batch row, fitted once for layers with the same padding."""
        key = id(texts), tuple(real.shape), real.cpu().numpy().tobytes()
        if key not in self._fitted:
            self._fitted[key] = fit_tokens(texts, real)
        return self._fitted[key]

    def add_groups(self, name: str, queries: GroupsByRow, keys: GroupsByRow | None, pattern: str) -> Labels:
        """Give the layers that match `pattern` groups of queries and keys; the keys' are the queries' if None."""
        labels = Labels(pattern, *(groups_by_row(name, x) for x in (queries, queries if keys is None else keys)))
        self.groups.setdefault(name, []).append(labels)
        return labels

    def group_names(self, layer: str) -> list[str]:
        """Return the names of the groups that a layer has."""
        return [name for name, labels in self.groups.items() if last_match(layer, labels) is not None]

    def groups_of(self, layer: str, name: str, real: RealTokens) -> tuple[list[Groups], list[Groups]]:
        """Return the groups of a layer's queries and keys in each batch row; `KeyError` if none have that name."""
        labels = last_match(layer, self.groups.get(name, []))
        if labels is None:
            raise KeyError(f"{shown_name(layer)!r} has no groups {name!r}; add them with tape.group({name!r}, ...)")
        found: list[list[Groups]] = []
        for rows, tokens, axis in zip(
            (labels.queries, labels.keys), (real.queries, real.keys), ("queries", "keys"), strict=True
        ):
            if len(rows) not in (1, len(tokens)):
                raise ValueError(
                    f"groups {name!r} were given for {len(rows)} texts, but {shown_name(layer)!r} has {len(tokens)} "
                    "batch rows; pass one for all rows, or one for each"
                )
            placed = [place_groups(rows[n % len(rows)], row) for n, row in enumerate(tokens)]
            if None in placed:
                row = placed.index(None)
                n, length, count = rows[row % len(rows)].ids.numel(), tokens.shape[1], int(tokens[row].sum())
                which = "" if len(rows) == 1 else f" of batch row {row}"
                padded = "" if count == length else f", {count} of them real"
                raise ValueError(
                    f"groups {name!r}{which} have {n} tokens, but {shown_name(layer)!r} has {length} {axis}{padded}"
                )
            found.append([x for x in placed if x is not None])
        queries, keys = found
        return queries, keys

    def one_grouping_of_different_texts(self, layer: str, name: str, real: RealTokens) -> str | None:
        """Return a warning if one grouping was given for the batch rows of a layer, and their texts differ."""
        labels = last_match(layer, self.groups.get(name, []))
        tokens = last_match(layer, self.tokens)
        if labels is None:
            return None
        for axis, rows in zip(("queries", "keys"), (real.queries, real.keys), strict=True):
            texts = [] if tokens is None else getattr(tokens, axis)
            differ = any(text != texts[0] for text in texts) or bool((rows != rows[:1]).any())
            if len(getattr(labels, axis)) == 1 and len(rows) > 1 and differ:
                return (
                    f"one grouping {name!r} was given for {len(rows)} different texts in {shown_name(layer)!r}; pass "
                    f"one for each batch row, tape.group({name!r}, [words(tokens) for tokens in texts])"
                )
        return None

    def add_images(
        self, images: Image | Sequence[Image], patches: tuple[int, int], special: int, pattern: str
    ) -> list[PatchedImage]:
        """Give the layers that match `pattern` one image for all batch rows, or one image per row."""
        patched = patched_images(images, patches, special)
        self.images.append(Labels(pattern, patched, patched))
        return patched

    def images_of(self, layer: str, shape: Shape, batch: int) -> tuple[PatchedImage | None, PatchedImage | None]:
        """Return the images whose patches a layer's queries and keys are; None for an axis of another length."""
        labels = last_match(layer, self.images)
        if labels is None or 1 < len(labels.queries) <= batch:
            return None, None
        image = labels.queries[batch if len(labels.queries) > 1 else 0]
        i, j = (image if image.tokens == n else None for n in shape[1:])
        return i, j


def parse_tokens(tokens: Tokens | TokensByLayer) -> list[Labels]:
    """Return `Labels` for each layer pattern; tokens without a pattern are for every layer."""
    by_layer = isinstance(tokens, Mapping)
    labels = []
    for pattern, texts in tokens.items() if isinstance(tokens, Mapping) else [("*", tokens)]:
        pair = by_layer and isinstance(texts, tuple) and len(texts) == 2 and not all(isinstance(x, str) for x in texts)
        queries, keys = texts if pair else (texts, texts)
        labels.append(Labels(pattern, _token_rows(queries), _token_rows(keys)))
    return labels


def last_match(layer: str, labels: Sequence[Labels]) -> Labels | None:
    """Return the last labels whose pattern matches a layer."""
    return next((x for x in reversed(labels) if matches(layer, x.layers)), None)


def unmatched_tokens(
    tokens: Sequence[Labels], layers: Mapping[K, str], real_tokens_of: Callable[[K], RealTokens]
) -> Iterator[str]:
    """Yield a warning for tokens whose pattern matches no layer, and for tokens that fit no layer they match.

    `layers` are the layer names by key.
    """
    matched = {key: labels for key, name in layers.items() if (labels := last_match(name, tokens)) is not None}
    if tokens and not matched:
        yield no_layer_matches("tokens", (labels.layers for labels in tokens), layers.values())
    for labels in dict.fromkeys(matched.values()):
        keys = [key for key, layer_labels in matched.items() if layer_labels is labels]
        real, layer = [real_tokens_of(key) for key in keys], shown_name(layers[keys[0]])
        if message := _misfit(labels, real, layer):
            yield message


def _misfit(labels: Labels, real: Sequence[RealTokens], layer: str) -> str | None:
    """Return a warning if tokens fit no layer in a batch row; `layer` is the name of the first."""
    texts = max(labels.queries, labels.keys, key=len)
    (b, i), j = real[0].queries.shape, real[0].keys.shape[1]
    if len(texts) > 1 and all(len(texts) != len(each.queries) for each in real):
        return (
            f"tokens of {len(texts)} texts were given, but {layer!r} has {b} batch rows; set tape.tokens to one "
            "list of tokens for all rows, or to one list per row"
        )
    fitted = [zip(*(fit_tokens(*axis) for axis in _axes(labels, each)), strict=True) for each in real]
    fits = [[pair != (None, None) for pair in pairs] for pairs in fitted]
    wrong = [row for row in range(b) if not any(row < len(rows) and rows[row] for rows in fits)]
    if not wrong:
        return None
    given = [texts[row % len(texts)] for row in wrong]
    if all(each.are_all for each in real):
        which = "" if len(wrong) == b else f" for batch row {wrong[0]}"
        return (
            f"{_range(map(len, given if len(wrong) == b else given[:1]))} tokens were given{which}, but {layer!r} has "
            f"{i} queries and {j} keys; set tape.tokens to one token per position, including padding and special "
            "tokens such as [CLS]"
        )
    count = (real[0].queries if i == j else real[0].keys).sum(1).tolist()
    rows, numbers, counts = (
        ", ".join(map(str, x))
        for x in zip(
            *((row, count_tokens(text, max(i, j)), count[row]) for row, text in zip(wrong, given, strict=True)),
            strict=True,
        )
    )
    return (
        f"the tokens of batch row{'s' * (len(wrong) > 1)} {rows} do not fit {layer!r}: {numbers} tokens were given for "
        f"{counts} real ones. They are not shown; set tape.tokens to the tokens of each row, with or without padding, "
        "in the order of the batch (some callers sort texts by length)"
    )


def _axes(labels: Labels, real: RealTokens) -> tuple[tuple[list[list[str]], Tensor], tuple[list[list[str]], Tensor]]:
    return (labels.queries, real.queries), (labels.keys, real.keys)


def no_layer_matches(what: str, patterns: Iterable[str], layers: Iterable[str]) -> str:
    """Return the warning for annotations whose patterns match no layer."""
    shown = ", ".join(map(repr, patterns))
    return f"{what} were given for {shown}, which matches no layer; there are {list_names(layers)}"


def _range(lengths: Iterable[int]) -> str:
    """Return a number, such as `9`, or `7 to 9` if they differ."""
    numbers = sorted(lengths)
    return str(numbers[-1]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def _token_rows(tokens: Any) -> list[list[str]]:
    """Return one list of tokens for all batch rows, or one per row."""
    if isinstance(tokens, str):
        raise TypeError(f"tokens must be a list of strings, got the string {tokens!r}; write its tokens one by one")
    is_one_text = all(isinstance(token, str) for token in tokens)
    rows = [tokens] if is_one_text else list(tokens)
    if not all(isinstance(row, Sequence) and all(isinstance(token, str) for token in row) for row in rows):
        raise TypeError(
            "tokens must be strings, or lists of strings, one for each batch row; "
            "write tokenizer.convert_ids_to_tokens(ids)"
        )
    return [list(row) for row in rows]
