"""Annotations of a tape's layers: which tokens, groups of tokens and image patches their queries and keys are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..layer_names import list_names, matches, shown_name
from .groups import Groups
from .image_patches import Image, PatchedImage, patched_images

K = TypeVar("K")
Shape = tuple[int, int, int]  # batch rows, queries, keys
Tokens = Sequence[str] | Sequence[Sequence[str]]  # the tokens of one text, or of each batch row
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

    def set_tokens(self, tokens: Tokens | TokensByLayer | None) -> None:
        """Replace the tokens of all layers; None removes them."""
        self.tokens = [] if tokens is None else parse_tokens(tokens)

    def tokens_of(self, layer: str, shape: Shape, batch: int) -> tuple[list[str] | None, list[str] | None]:
        """Return the tokens of a layer's queries and keys in one batch row; None for an axis of another length."""
        labels = last_match(layer, self.tokens)
        if labels is None:
            return None, None
        _, i, j = shape
        return tokens_of_row(labels.queries, i, batch), tokens_of_row(labels.keys, j, batch)

    def add_groups(self, name: str, queries: Groups, keys: Groups | None, pattern: str) -> Labels:
        """Give the layers that match `pattern` groups of queries and keys; the keys' are the queries' if None."""
        keys = queries if keys is None else keys
        if not isinstance(queries, Groups) or not isinstance(keys, Groups):
            got = type(keys if isinstance(queries, Groups) else queries).__name__
            raise TypeError(f"groups must be Groups, got {got}; write tape.group({name!r}, words(tokens))")
        labels = Labels(pattern, queries, keys)
        self.groups.setdefault(name, []).append(labels)
        return labels

    def group_names(self, layer: str) -> list[str]:
        """Return the names of the groups that a layer has."""
        return [name for name, labels in self.groups.items() if last_match(layer, labels) is not None]

    def groups_of(self, layer: str, name: str, shape: Shape) -> tuple[Groups, Groups]:
        """Return the groups of a layer's queries and keys; `KeyError` if there are none of that name."""
        labels = last_match(layer, self.groups.get(name, []))
        if labels is None:
            raise KeyError(f"{shown_name(layer)!r} has no groups {name!r}; add them with tape.group({name!r}, ...)")
        for groups, n, axis in zip((labels.queries, labels.keys), shape[1:], ("queries", "keys"), strict=True):
            if groups.ids.numel() != n:
                tokens = groups.ids.numel()
                raise ValueError(f"groups {name!r} have {tokens} tokens, but {shown_name(layer)!r} has {n} {axis}")
        return labels.queries, labels.keys

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


def tokens_of_row(texts: Sequence[list[str]], n: int, batch: int) -> list[str] | None:
    """Return the n tokens of a batch row, or None if the row has no tokens or another number of them.

    A text of n + 1 tokens is cut: a model never reads the last token it generates.
    """
    if len(texts) > 1 and batch >= len(texts):
        return None
    row = texts[0] if len(texts) == 1 else texts[batch]
    return row[:n] if len(row) in (n, n + 1) else None


def unmatched_tokens(
    tokens: Sequence[Labels], layers: Mapping[K, str], shape_of: Callable[[K], Shape]
) -> Iterator[str]:
    """Yield a warning for tokens whose pattern matches no layer, and for tokens that fit no layer they match.

    `layers` are the layer names by key.
    """
    matched = {key: labels for key, name in layers.items() if (labels := last_match(name, tokens)) is not None}
    if tokens and not matched:
        yield no_layer_matches("tokens", (labels.layers for labels in tokens), layers.values())
    for labels in dict.fromkeys(matched.values()):
        keys = [key for key, layer_labels in matched.items() if layer_labels is labels]
        shapes, texts = [shape_of(key) for key in keys], max(labels.queries, labels.keys, key=len)
        layer = shown_name(layers[keys[0]])
        b, i, j = shapes[0]
        wrong = [row for row in range(len(texts)) if not any(_fits(labels, shape, row) for shape in shapes)]
        if len(texts) > 1 and all(len(texts) != rows for rows, _, _ in shapes):
            yield (
                f"tokens of {len(texts)} texts were given, but {layer!r} has {b} batch rows; set tape.tokens to one "
                "list of tokens for all rows, or to one list per row"
            )
        elif wrong:
            all_wrong = len(wrong) == len(texts)
            row = "" if all_wrong else f" for batch row {wrong[0]}"
            yield (
                f"{_token_count(texts if all_wrong else [texts[wrong[0]]])} tokens were given{row}, but {layer!r} has "
                f"{i} queries and {j} keys; set tape.tokens to one token per position, including padding and special "
                "tokens such as [CLS]"
            )


def no_layer_matches(what: str, patterns: Iterable[str], layers: Iterable[str]) -> str:
    """Return the warning for annotations whose patterns match no layer."""
    shown = ", ".join(map(repr, patterns))
    return f"{what} were given for {shown}, which matches no layer; there are {list_names(layers)}"


def _fits(labels: Labels, shape: Shape, row: int) -> bool:
    """Whether the tokens of a batch row have the length of the query axis or of the key axis."""
    axes = zip((labels.queries, labels.keys), shape[1:], strict=True)
    return any(tokens_of_row(texts, n, row) is not None for texts, n in axes)


def _token_count(texts: Sequence[list[str]]) -> str:
    """Return the number of tokens, such as `9`, or `7 to 9` if the texts differ in length."""
    fewest, most = min(map(len, texts), default=0), max(map(len, texts), default=0)
    return str(most) if fewest == most else f"{fewest} to {most}"


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
