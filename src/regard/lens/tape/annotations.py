"""Labels: what the queries and keys of some layers are, tokens or groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..layer_names import listed, matches, shown_name

K = TypeVar("K")
Tokens = Sequence[str] | Sequence[Sequence[str]]  # of one text, or of each batch row
TokensByLayer = Mapping[str, Tokens | tuple[Tokens, Tokens]]  # a pair for queries and keys of different texts


@dataclass(frozen=True, eq=False)
class Labels:
    """The two axes of every layer whose name matches the pattern `layers`."""

    layers: str
    queries: Any
    keys: Any


def tokens_by_layer(tokens: Tokens | TokensByLayer) -> list[Labels]:
    """What was said of tokens, for each pattern."""
    by_layer = isinstance(tokens, Mapping)
    found = []
    for pattern, texts in tokens.items() if isinstance(tokens, Mapping) else [("*", tokens)]:
        pair = by_layer and isinstance(texts, tuple) and len(texts) == 2 and not all(isinstance(x, str) for x in texts)
        queries, keys = texts if pair else (texts, texts)
        found.append(Labels(pattern, _texts(queries), _texts(keys)))
    return found


def meant_for(layer: str, labels: Sequence[Labels]) -> Labels | None:
    """The last labels whose pattern matches a layer."""
    return next((x for x in reversed(labels) if matches(layer, x.layers)), None)


def fitting(texts: Sequence[list[str]], n: int, batch: int) -> list[str] | None:
    """The tokens of a batch row, if there are n; or one more, for the last token a model writes it never reads.

    None where they are of another number, and for a batch row that none were given of.
    """
    if len(texts) > 1 and batch >= len(texts):
        return None
    row = texts[0] if len(texts) == 1 else texts[batch]
    return row[:n] if len(row) in (n, n + 1) else None


def misplaced(
    tokens: Sequence[Labels], layers: Mapping[K, str], shape: Callable[[K], tuple[int, int, int]]
) -> Iterator[str]:
    """What is to be said of tokens that fit no layer they were given for, or were given for none there is.

    `layers` are names by key, and `shape` tells how many batch rows, queries and keys a layer has.
    """
    placed = {key: labels for key, name in layers.items() if (labels := meant_for(name, tokens)) is not None}
    if tokens and not placed:
        yield unplaced("tokens", (labels.layers for labels in tokens), layers.values())
    for labels in dict.fromkeys(placed.values()):
        own = [key for key, one in placed.items() if one is labels]
        shapes, texts = [shape(key) for key in own], max(labels.queries, labels.keys, key=len)
        layer = shown_name(layers[own[0]])
        b, i, j = shapes[0]
        wrong = [row for row in range(len(texts)) if not any(_fit(labels, one, row) for one in shapes)]
        if len(texts) > 1 and all(len(texts) != rows for rows, _, _ in shapes):
            yield (
                f"tokens of {len(texts)} texts were given, and {layer!r} has a batch of {b}; set tape.tokens to those "
                "of one text for all, or of one for each"
            )
        elif wrong:
            all_wrong = len(wrong) == len(texts)
            whose = "" if all_wrong else f" for batch row {wrong[0]}"
            yield (
                f"{_counted(texts if all_wrong else [texts[wrong[0]]])} tokens were given{whose}, and {layer!r} has "
                f"{i} queries and {j} keys; set tape.tokens to one for each, special ones such as [CLS] and padding too"
            )


def unplaced(what: str, patterns: Iterable[str], layers: Iterable[str]) -> str:
    """What is to be said of what was given for no layer there is."""
    return f"{what} were given for {', '.join(map(repr, patterns))}, which matches no layer; there are {listed(layers)}"


def _fit(labels: Labels, shape: tuple[int, int, int], row: int) -> bool:
    """Are the tokens of a batch row those of an axis?"""
    axes = zip((labels.queries, labels.keys), shape[1:], strict=True)
    return any(fitting(texts, n, row) is not None for texts, n in axes)


def _counted(texts: Sequence[list[str]]) -> str:
    """How many tokens there are, as `9` or, of several batch rows, `7 to 9`."""
    fewest, most = min(map(len, texts), default=0), max(map(len, texts), default=0)
    return str(most) if fewest == most else f"{fewest} to {most}"


def _texts(tokens: Any) -> list[list[str]]:
    """A text for each batch row, or one for all."""
    if isinstance(tokens, str):
        raise TypeError(f"tokens must be a list of strings, got the string {tokens!r}; write its tokens one by one")
    one = all(isinstance(token, str) for token in tokens)
    rows = [tokens] if one else list(tokens)
    if not all(isinstance(row, Sequence) and all(isinstance(token, str) for token in row) for row in rows):
        raise TypeError(
            "tokens must be strings, or lists of strings, one for each batch row; "
            "write tokenizer.convert_ids_to_tokens(ids)"
        )
    return [list(row) for row in rows]
