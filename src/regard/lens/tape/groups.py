"""Groups of tokens: words, lines, sentences, patches of an image, named spans.

Attention between groups is `A.mass(queries.ids, keys.ids)`, or `tape.mass(layer, "words")` after `tape.group(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...checks import check_int, check_integer_tensor, check_tensor
from ...ops.weights import Weights
from ..layer_names import shown_name

WORD_STARTS = ("▁", "Ġ", " ")  # prefixes by which tokenizers mark the first piece of a word
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "…", "।", "؟")
SEPARATORS = frozenset({"[SEP]", "</s>", "<sep>", "<|endoftext|>", "<eos>"})  # between texts
LINE_BREAKS = ("\n", "Ċ", "<0x0A>")
PADDING_LABEL = "[PAD]"  # for padding, if tokens or groups were given for the real tokens alone
SPECIAL_TOKEN = re.compile(r"<(?!0x).+>|\[[A-Z].*\]")  # <s>, <|endoftext|>, [CLS]; not a byte such as <0xE2>


@dataclass(frozen=True, eq=False)
class Groups:
    """The group number of each token, from 0, and the label of each group."""

    ids: Int[Tensor, " n"]
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        check_tensor("Groups ids", self.ids)
        check_integer_tensor("Groups ids", self.ids, 1)
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.ids.numel() and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < len(self.labels):
            raise ValueError(
                f"Groups ids must be at least 0 and below the number of labels {len(self.labels)}, "
                f"got {int(self.ids.min())} to {int(self.ids.max())}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, group: str | int) -> tuple[int, ...]:
        """Return the positions of the tokens of a group, by its number, or of all groups of this label.

        >>> spans(6, {"question": (0, 2), "answer": (4, 6)})["answer"]
        (4, 5)
        """
        if isinstance(group, str):
            numbers = [n for n, label in enumerate(self.labels) if label == group]
            if not numbers:
                known = ", ".join(map(repr, dict.fromkeys(self.labels)))
                raise KeyError(f"there is no group {group!r}; the groups are {known}")
        else:
            check_int("group", group)
            if group >= len(self):
                raise IndexError(f"group must be below the number of groups {len(self)}, got {group}")
            numbers = [group]
        chosen = torch.isin(self.ids, self.ids.new_tensor(numbers))
        return tuple(chosen.nonzero().flatten().tolist())


def words(tokens: Sequence[str]) -> Groups:
    """Group word pieces into words, by the marks of WordPiece (`##s`), SentencePiece (`▁the`) and byte BPE (`Ġthe`).

    >>> words(["[CLS]", "atten", "##tion", "is", "[SEP]"]).labels
    ('[CLS]', 'attention', 'is', '[SEP]')
    >>> words(["▁atten", "tion", "▁is"]).labels
    ('attention', 'is')
    """
    is_wordpiece = any(token.startswith("##") for token in tokens)
    has_start_marks = not is_wordpiece and any(token.startswith(WORD_STARTS) for token in tokens)

    def continues_word(n: int) -> bool:
        if has_start_marks:
            return not (
                tokens[n].startswith((*WORD_STARTS, *LINE_BREAKS, "<", "["))
                or tokens[n - 1] in LINE_BREAKS
                or SPECIAL_TOKEN.fullmatch(tokens[n - 1])
            )
        return tokens[n].startswith("##")

    def word_of(part: Sequence[str]) -> str:
        return "".join(token.removeprefix("##") for token in part).lstrip("".join(WORD_STARTS))

    return _group_runs(tokens, continues_word, word_of)


def lines(tokens: Sequence[str]) -> Groups:
    """Group tokens into lines; a line break belongs to the line that it ends."""
    return _group_runs(tokens, lambda n: not _contains_any(tokens[n - 1], LINE_BREAKS), _text_of)


def sentences(tokens: Sequence[str]) -> Groups:
    """Group tokens into sentences.

    A sentence ends after a full stop, question mark, exclamation mark or line break, and the closing quotes behind it;
    also after a separator such as [SEP], so that a pair of texts has at least two.

    >>> sentences(["Look", ".", "Who", "'s", "there", "?"]).labels
    ('Look.', "Who'sthere?")
    >>> sentences(["[CLS]", "a", "cat", "[SEP]", "it", "slept", ".", "[SEP]"]).ids.tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    closing = ("'", '"', "”", "’", ")", "]", "»", "」", *SEPARATORS)

    def continues_sentence(n: int) -> bool:
        if _without_mark(tokens[n]) in closing:
            return True
        before = n - 1
        while before > 0 and _without_mark(tokens[before]) in closing:
            before -= 1
        ended = _without_mark(tokens[before]).endswith(SENTENCE_ENDS) or _contains_any(tokens[before], LINE_BREAKS)
        return not ended and SEPARATORS.isdisjoint(map(_without_mark, tokens[before:n]))

    return _group_runs(tokens, continues_sentence, _text_of)


def patches(rows: int, cols: int, *, special: int = 1, size: int = 1) -> Groups:
    """Group the patches of an image, in reading order after `special` tokens, into squares of `size` by `size` patches.

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
    """Group n tokens into named spans (start, stop), stop excluded; tokens outside of all spans are in a group "other".

    >>> spans(6, {"question": (0, 2), "answer": (4, 6)}).ids.tolist()
    [0, 0, 2, 2, 1, 1]
    """
    ids = torch.full((n,), len(named))
    for number, (name, (start, stop)) in enumerate(named.items()):
        if not 0 <= start < stop <= n:
            raise ValueError(f"span {name!r} must lie within the {n} tokens, got {(start, stop)}")
        if bool((ids[start:stop] < len(named)).any()):
            raise ValueError(f"span {name!r} {(start, stop)} overlaps an earlier span")
        ids[start:stop] = number
    return Groups(ids, (*named, *(["other"] if bool((ids == len(named)).any()) else [])))


def groups_by_row(name: str, groups: Groups | Sequence[Groups] | Tensor) -> list[Groups]:
    """Return one `Groups` for all batch rows, or one for each; `groups` may be ids `b n`, labelled by their numbers.

    >>> [x.ids.tolist() for x in groups_by_row("parts", torch.tensor([[0, 0, 1], [0, 1, 1]]))]
    [[0, 0, 1], [0, 1, 1]]
    """
    if isinstance(groups, Tensor):
        check_integer_tensor(f"groups {name!r}", groups, 2)
        labels = tuple(map(str, range(int(groups.max()) + 1 if groups.numel() else 0)))
        return [Groups(ids, labels) for ids in groups]
    rows = [groups] if isinstance(groups, Groups) else list(groups)
    for row in rows:
        if not isinstance(row, Groups):
            raise TypeError(
                f"groups must be Groups, got {type(groups).__name__}; write tape.group({name!r}, words(tokens)), or a "
                f"list of them for the batch rows, [words(tokens) for tokens in texts]"
            )
    return rows


def place_groups(groups: Groups, real: Bool[Tensor, " n"]) -> Groups | None:
    """Return groups of the n tokens of a text with padding; None if there are groups of another number of tokens.

    If groups were given for the real tokens alone, padding becomes a last group.
    """
    if groups.ids.numel() == real.numel():
        return groups
    if groups.ids.numel() != int(real.sum()):
        return None
    ids = torch.full(real.shape, len(groups), dtype=torch.long)
    ids[real.cpu()] = groups.ids.cpu().long()
    return Groups(ids, (*groups.labels, PADDING_LABEL))


def mass_between(
    A: Weights, queries: Sequence[Groups], keys: Sequence[Groups], real_queries: Tensor, real_keys: Tensor
) -> Tensor:
    """Return attention between the groups of real tokens in each batch row: b h query-groups key-groups.

    `queries` and `keys` hold groups of all tokens for each batch row; a row with fewer groups than others ends with
    zeros. Only real queries count in the mean of a group.
    """
    ids, counts = [], []
    for rows, real in ((queries, real_queries), (keys, real_keys)):
        numbers = torch.stack([x.ids.to(A.device).long() for x in rows])
        counts.append(max(len(x) for x in rows))
        ids.append(torch.where(real.to(A.device), numbers, counts[-1]))  # padding is a last group, which is dropped
    mass = A.mass(*ids)
    missing = [max(0, n - m) for n, m in zip(counts, mass.shape[-2:], strict=True)]
    return torch.nn.functional.pad(mass, (0, missing[1], 0, missing[0]))[..., : counts[0], : counts[1]]


def group_mismatch(
    name: str, queries: Sequence[Groups], keys: Sequence[Groups], shapes: Mapping[str, tuple[int, int, int]]
) -> str | None:
    """Return a warning if the groups fit no layer; `shapes` are (batch rows, queries, keys) by layer name.

    Groups of each batch row may leave out its padding.
    """
    tokens = tuple(max((x.ids.numel() for x in groups), default=0) for groups in (queries, keys))
    if not shapes or any(tokens == shape[1:] for shape in shapes.values()):
        return None
    if max(len(queries), len(keys)) > 1 and any(max(tokens) <= min(shape[1:]) for shape in shapes.values()):
        return None
    layer, (_, i, j) = next(iter(shapes.items()))
    return (
        f"groups {name!r} cover {tokens[0]} queries and {tokens[1]} keys, but {shown_name(layer)!r} has {i} queries "
        f"and {j} keys; pass groups of all tokens, or tape.group({name!r}, queries, keys) if the two axes differ"
    )


def _group_runs(
    tokens: Sequence[str], continues: Callable[[int], bool], label_of: Callable[[Sequence[str]], str]
) -> Groups:
    """Group consecutive tokens: token n joins the group of token n - 1 if `continues(n)`."""
    starts = [n for n in range(len(tokens)) if n == 0 or not continues(n)]
    ids = torch.zeros(len(tokens), dtype=torch.long)
    ids[starts[1:]] = 1
    ends = [*starts[1:], len(tokens)] if starts else []
    labels = [label_of(tokens[start:stop]) for start, stop in zip(starts, ends, strict=True)]
    return Groups(ids.cumsum(0), tuple(labels))


def _text_of(part: Sequence[str]) -> str:
    return "".join(" " + _without_mark(x) if x.startswith(WORD_STARTS) else x.removeprefix("##") for x in part).strip()


def _without_mark(token: str) -> str:
    return token.lstrip("".join(WORD_STARTS))


def _contains_any(token: str, marks: Sequence[str]) -> bool:
    return any(mark in token for mark in marks)
