"""Fit the tokens of texts to the batch rows of a layer: in which rows they may stand, and where padding goes.

Tokens of a batch row fit if there is one for each position, padding included, or one for each real token. A list with
padding must have it where the mask of the layer has padding. Callers that sort texts by length, as the `encode` of
sentence-transformers does, run them in another order than the user's lists: then no row is labelled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from .groups import PADDING_LABEL, SPECIAL_TOKEN

PADDING_NAME = re.compile(r"[<\[|▁]*pad(ding)?[>\]|]*", re.IGNORECASE)  # [PAD], <pad>, <|padding|>


def fit_tokens(texts: Sequence[Sequence[str]], real: Tensor) -> list[list[str] | None]:
    """Return the n tokens of each batch row, or None for a row that they do not fit; `real` is `b n`.

    `texts` holds one text for all rows, or one for each. A text of n + 1 tokens is cut: a model never reads the last
    token that it generates.

    >>> import torch
    >>> fit_tokens([["a", "cat", "sat"], ["a", "cat"]], torch.tensor([[True] * 3, [True, True, False]]))
    [['a', 'cat', 'sat'], ['a', 'cat', '[PAD]']]
    """
    rows = real.tolist()
    some = [texts[0] if len(texts) == 1 else texts[n] if n < len(texts) else None for n in range(len(rows))]
    padding = _own_padding_labels(some, rows)
    fitted = [None if text is None else _fit_row(text, row, padding) for text, row in zip(some, rows, strict=True)]
    if 1 < len(texts) == len(rows) and None in fitted:
        lengths = set(map(sum, rows))
        misfits = [text for text, tokens in zip(texts, fitted, strict=True) if tokens is None]
        # A text as long as another row of the batch may belong there, and the text of that row to a third one.
        if any(count_tokens(text, real.shape[1], padding) in lengths for text in misfits):
            return [None] * len(rows)
    return fitted


def count_tokens(text: Sequence[str], n: int, padding: set[str] | None = None) -> int:
    """Return the number of tokens in a text, without padding; a text of n + 1 tokens is cut to n."""
    cut = text[:n]
    while cut and _is_padding(cut[-1], padding or set()):
        cut = cut[:-1]
    while cut and _is_padding(cut[0], padding or set()):
        cut = cut[1:]
    return len(cut)


def _fit_row(text: Sequence[str], real: list[bool], padding: set[str]) -> list[str] | None:
    n, count = len(real), sum(real)
    if len(text) in (n, n + 1):
        cut = list(text[:n])
        hidden = {label for label, is_real in zip(cut, real, strict=True) if not is_real}
        is_padded = len(hidden) <= 1 and all(
            _is_padding(x, padding) or SPECIAL_TOKEN.fullmatch(x) or not x.strip() for x in hidden
        )
        is_plain = not padding or not any(
            _is_padding(x, padding) for x, is_real in zip(cut, real, strict=True) if is_real
        )
        return cut if is_padded and is_plain else None
    if len(text) == count:
        tokens = iter(text)
        return [next(tokens) if is_real else PADDING_LABEL for is_real in real]
    return None


def _own_padding_labels(texts: Sequence[Sequence[str] | None], rows: Sequence[list[bool]]) -> set[str]:
    """Return the labels that stand for padding: those named so, and one that stands at all padding and nowhere else.

    The set is empty if no row has padding.
    """
    hidden: list[str] = []
    shown: set[str] = set()
    for text, real in zip(texts, rows, strict=True):
        if text is not None and len(text) >= len(real):
            hidden += [x for x, is_real in zip(text, real, strict=False) if not is_real]
            shown.update(x for x, is_real in zip(text, real, strict=False) if is_real)
    if all(map(all, rows)):
        return set()
    named = {x for x in (*hidden, *shown) if PADDING_NAME.fullmatch(x)} | {PADDING_LABEL}
    is_own = len(hidden) > 1 and len(set(hidden)) == 1 and hidden[0] not in shown
    return named | ({hidden[0]} if is_own else set())


def _is_padding(label: str, padding: set[str]) -> bool:
    return label in padding or PADDING_NAME.fullmatch(label) is not None
