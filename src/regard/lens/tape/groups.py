"""Groups of tokens: words, lines, sentences, patches of an image, spans of your own.

Attention between groups is `A.mass(queries.ids, keys.ids)`, or `tape.mass(layer, "words")` once a tape has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ...checks import check_int, check_integer_tensor, check_tensor
from ..layer_names import shown_name

STARTS = ("▁", "Ġ", " ")  # how tokenizers mark the first piece of a word
ENDINGS = (".", "!", "?", "。", "！", "？", "…", "।", "؟")
BREAKS = ("\n", "Ċ", "<0x0A>")
SPECIAL = re.compile(r"<(?!0x).+>|\[[A-Z].*\]")  # such as <s>, <|endoftext|> and [CLS]; not a byte, <0xE2>


@dataclass(frozen=True, eq=False)
class Groups:
    """Which group each token is in, whole numbers from 0, and what the groups are called."""

    ids: Int[Tensor, " n"]
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        check_tensor("Groups ids", self.ids)
        check_integer_tensor("Groups ids", self.ids, 1)
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.ids.numel() and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < len(self.labels):
            raise ValueError(
                f"Groups ids must be from 0 to the number of labels {len(self.labels)} less one, "
                f"got {int(self.ids.min())} to {int(self.ids.max())}"
            )

    def __len__(self) -> int:
        return len(self.labels)


def words(tokens: Sequence[str]) -> Groups:
    """Pieces of words back to words, by the marks of WordPiece (`##s`), SentencePiece (`▁the`) and byte BPE (`Ġthe`).

    >>> words(["[CLS]", "atten", "##tion", "is", "[SEP]"]).labels
    ('[CLS]', 'attention', 'is', '[SEP]')
    >>> words(["▁atten", "tion", "▁is"]).labels
    ('attention', 'is')
    """
    pieced = any(token.startswith("##") for token in tokens)
    marked = not pieced and any(token.startswith(STARTS) for token in tokens)

    def goes_on(n: int) -> bool:
        if marked:
            return not (
                tokens[n].startswith((*STARTS, *BREAKS, "<", "["))
                or tokens[n - 1] in BREAKS
                or SPECIAL.fullmatch(tokens[n - 1])
            )
        return tokens[n].startswith("##")

    def joined(part: Sequence[str]) -> str:
        return "".join(token.removeprefix("##") for token in part).lstrip("".join(STARTS))

    return _runs(tokens, goes_on, joined)


def lines(tokens: Sequence[str]) -> Groups:
    """Tokens up to and with each line break."""
    return _runs(tokens, lambda n: not _holds(tokens[n - 1], BREAKS), _text)


def sentences(tokens: Sequence[str]) -> Groups:
    """Tokens up to and with each full stop, question or exclamation mark, or line break, closing quotes included.

    >>> sentences(["Look", ".", "Who", "'s", "there", "?"]).labels
    ('Look.', "Who'sthere?")
    """
    closing = ("'", '"', "”", "’", ")", "]", "»", "」")

    def goes_on(n: int) -> bool:
        before = n - 1
        while before > 0 and _bare(tokens[before]) in closing:
            before -= 1
        ended = _bare(tokens[before]).endswith(ENDINGS) or _holds(tokens[before], BREAKS)
        return not ended or _bare(tokens[n]) in closing

    return _runs(tokens, goes_on, _text)


def patches(rows: int, cols: int, *, special: int = 1, size: int = 1) -> Groups:
    """The patches of an image in reading order behind `special` tokens, joined to squares of `size` by `size`.

    >>> patches(4, 4, size=2).labels
    ('special', '0,0', '0,1', '1,0', '1,1')
    """
    for name, value, least in (("rows", rows, 1), ("cols", cols, 1), ("special", special, 0), ("size", size, 1)):
        check_int(name, value, least)
    across, down = -(-cols // size), -(-rows // size)
    square = (torch.arange(rows) // size)[:, None] * across + torch.arange(cols) // size
    first = 1 if special else 0
    ids = torch.cat((torch.zeros(special, dtype=torch.long), square.flatten() + first))
    return Groups(ids, (*["special"] * first, *(f"{y},{x}" for y in range(down) for x in range(across))))


def spans(n: int, named: Mapping[str, tuple[int, int]]) -> Groups:
    """Spans of your own, from a first token up to, and without, a last; n tokens, those outside in a group "other".

    >>> spans(6, {"question": (0, 2), "answer": (4, 6)}).ids.tolist()
    [0, 0, 2, 2, 1, 1]
    """
    ids = torch.full((n,), len(named))
    for number, (name, (start, stop)) in enumerate(named.items()):
        if not 0 <= start < stop <= n:
            raise ValueError(f"span {name!r} must lie within the {n} tokens, got {(start, stop)}")
        if bool((ids[start:stop] < len(named)).any()):
            raise ValueError(f"span {name!r}, {(start, stop)}, overlaps one before it")
        ids[start:stop] = number
    return Groups(ids, (*named, *(["other"] if bool((ids == len(named)).any()) else [])))


def misgrouped(name: str, queries: Groups, keys: Groups, shapes: Mapping[str, tuple[int, int, int]]) -> str | None:
    """What is to be said of groups that fit no layer, by how many batch rows, queries and keys each has."""
    given = queries.ids.numel(), keys.ids.numel()
    if not shapes or any(given == shape[1:] for shape in shapes.values()):
        return None
    layer, (_, i, j) = next(iter(shapes.items()))
    return (
        f"groups {name!r} of {given[0]} queries and {given[1]} keys were given, and {shown_name(layer)!r} has {i} and "
        f"{j}; give those of all tokens, tape.group({name!r}, queries, keys) where they differ"
    )


def _runs(tokens: Sequence[str], goes_on: Callable[[int], bool], label: Callable[[Sequence[str]], str]) -> Groups:
    """Runs of tokens, each going on until it does not."""
    starts = [n for n in range(len(tokens)) if n == 0 or not goes_on(n)]
    ids = torch.zeros(len(tokens), dtype=torch.long)
    ids[starts[1:]] = 1
    ends = [*starts[1:], len(tokens)] if starts else []
    labels = [label(tokens[start:stop]) for start, stop in zip(starts, ends, strict=True)]
    return Groups(ids.cumsum(0), tuple(labels))


def _text(part: Sequence[str]) -> str:
    return "".join(" " + _bare(x) if x.startswith(STARTS) else x.removeprefix("##") for x in part).strip()


def _bare(token: str) -> str:
    return token.lstrip("".join(STARTS))


def _holds(token: str, marks: Sequence[str]) -> bool:
    return any(mark in token for mark in marks)
