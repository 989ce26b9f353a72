"""Word alignments: links between the words of two sentences, read from cross-attention, written, and judged.

Cross-attention has the target words for queries and the source words for keys, so a map of a sentence pair has dims
`target source`. A link is `(source, target)`, as in the Pharaoh format `0-0 1-2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...ops.weights import Weights
from .head_measures import check_weights

Link = tuple[int, int]
LINK = re.compile(r"(\d+)([-p?])(\d+)", re.ASCII)


@dataclass(frozen=True)
class Links:
    """The links of a sentence pair, `(source, target)` from 0: the sure ones, and all that are possible.

    >>> gold = Links.parse("0-0 1-2 2p1")
    >>> sorted(gold.sure), sorted(gold.possible)
    ([(0, 0), (1, 2)], [(0, 0), (1, 2), (2, 1)])
    >>> str(gold), str(gold & Links([(1, 2), (3, 3)]))
    ('0-0 1-2 2p1', '1-2')

    `Links(pairs)` are all sure. Links of two models or of both directions combine by `&` and `|`.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    def __init__(self, sure: Iterable[Link] = (), possible: Iterable[Link] = ()) -> None:
        pairs = [_pair(link) for link in sure], [_pair(link) for link in possible]
        object.__setattr__(self, "sure", frozenset(pairs[0]))
        object.__setattr__(self, "possible", frozenset(pairs[0] + pairs[1]))

    @classmethod
    def parse(cls, line: str, *, first: int = 0) -> Links:
        """Read a line of Pharaoh format: `1-2` is sure, `1p2` or `1?2` possible; `first` numbers the first word."""
        sure: list[Link] = []
        possible: list[Link] = []
        for word in line.split():
            match = LINK.fullmatch(word)
            if match is None or min(int(match[1]), int(match[3])) < first:
                raise ValueError(
                    f"a link must be source-target, such as 1-2, or 1p2 where it is merely possible, words counted "
                    f"from {first}, got {word!r}"
                )
            link = int(match[1]) - first, int(match[3]) - first
            (sure if match[2] == "-" else possible).append(link)
        return cls(sure, possible)

    def flip(self) -> Links:
        """Source and target exchanged."""
        return Links(((t, s) for s, t in self.sure), ((t, s) for s, t in self.possible))

    def __and__(self, other: Links) -> Links:
        return Links(self.sure & other.sure, self.possible & other.possible)

    def __or__(self, other: Links) -> Links:
        return Links(self.sure | other.sure, self.possible | other.possible)

    def __len__(self) -> int:
        return len(self.possible)

    def __str__(self) -> str:
        return " ".join(f"{s}{'-' if (s, t) in self.sure else 'p'}{t}" for s, t in sorted(self.possible))


def read_pharaoh(path: str | Path, *, first: int = 0) -> list[Links]:
    """The links of each line of a file; an empty line is a sentence pair without links."""
    links = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                links.append(Links.parse(line.decode("utf8"), first=first))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return links


def write_pharaoh(path: str | Path, links: Iterable[Links]) -> None:
    """One line a sentence pair."""
    Path(path).write_text("".join(f"{one}\n" for one in links), encoding="utf8")


def word_weights(
    A: Weights, target_words: Sequence[int | None], source_words: Sequence[int | None]
) -> Float[Tensor, "h target source"]:
    """Attention between words from attention between their pieces: summed over a source word's pieces, averaged over
    a target word's.

    >>> import torch
    >>> from regard import weights
    >>> A = weights(torch.randn(1, 8, 4, 16), torch.randn(1, 8, 5, 16))
    >>> word_weights(A, [0, 1, 1, None], [0, 0, 1, 2, None]).shape  # None: no word, as an end of sentence
    torch.Size([8, 2, 3])

    Each argument says which word each token belongs to (`word_ids()` of a Hugging Face tokenizer); words no token
    belongs to have weight 0. One head of the result, `[3]`, or `.mean(0)` of some goes to `argmax_links`.
    """
    check_weights(A)
    if A.shape[:-3].numel() != 1:
        raise ValueError(f"word weights are of one sentence pair, got shape {tuple(A.shape)}; write A.select(batch=0)")
    targets, t = _groups("target_words", target_words, A.shape[-2])
    sources, s = _groups("source_words", source_words, A.shape[-1])
    return A.select(batch=0).mass(targets.to(A.device), sources.to(A.device))[0, :, :t, :s]


def argmax_links(weights: Float[Tensor, "target source"]) -> Links:
    """Each target word with the source word it attends to most; none for a word that attends to nothing."""
    weights = _map("weights", weights)
    if not weights.numel():
        return Links()
    best = weights.max(-1)
    pairs = zip(best.indices.tolist(), range(len(weights)), strict=True)
    return Links(pair for pair, weight in zip(pairs, best.values.tolist(), strict=True) if weight > 0)


def mutual_links(
    weights: Float[Tensor, "target source"], reverse: Float[Tensor, "source target"] | None = None
) -> Links:
    """The links both directions agree on: each word the other's first choice.

    `reverse` is the map of a model that translates the other way; without one, source words choose by the columns of
    `weights`. Few links, most of them right.
    """
    weights = _map("weights", weights)
    reverse = weights.mT if reverse is None else _map("reverse", reverse)
    if reverse.shape != weights.mT.shape:
        raise ValueError(
            f"reverse must have dims source target, {tuple(weights.mT.shape)}, got shape {tuple(reverse.shape)}"
        )
    return argmax_links(weights) & argmax_links(reverse).flip()


class AlignmentScore(NamedTuple):
    """Precision over possible links, recall over sure ones, and the alignment error rate."""

    precision: float
    recall: float
    error: float


def alignment_score(links: Iterable[Links], gold: Iterable[Links]) -> AlignmentScore:
    """precision = |A & P| / |A|, recall = |A & S| / |S|, error = 1 - (|A & S| + |A & P|) / (|A| + |S|), counted over
    all sentence pairs (Och & Ney 2003, sec. 5): A the links given, S and P the sure and possible ones of gold.

    >>> score = alignment_score([Links.parse("0-0 1-1 2-2")], [Links.parse("0-0 1-1 3p3 2p2")])
    >>> score.precision, score.recall, score.error
    (1.0, 1.0, 0.0)
    """
    links, gold = list(links), list(gold)
    if len(links) != len(gold):
        raise ValueError(f"links and gold must be of the same sentence pairs, got {len(links)} and {len(gold)}")
    given = sum(len(one.possible) for one in links)
    sure = sum(len(one.sure) for one in gold)
    in_sure = sum(len(one.possible & right.sure) for one, right in zip(links, gold, strict=True))
    in_possible = sum(len(one.possible & right.possible) for one, right in zip(links, gold, strict=True))
    return AlignmentScore(
        precision=in_possible / given if given else 0.0,
        recall=in_sure / sure if sure else 0.0,
        error=1 - (in_sure + in_possible) / (given + sure) if given + sure else 0.0,
    )


def head_errors(
    maps: Iterable[Sequence[Float[Tensor, "h target source"]]], gold: Iterable[Links]
) -> Float[Tensor, "layers h"]:
    """The alignment error rate of `argmax_links` for each layer and head, to choose one by.

    `maps` holds, for each sentence pair, the `word_weights` of each layer. Choose on other sentences than you report.
    """
    gold = list(gold)
    found: list[list[list[Links]]] = []
    for layers in maps:
        found.append([[argmax_links(head) for head in heads] for heads in layers])
    if len({tuple(map(len, layers)) for layers in found}) > 1:
        raise ValueError("maps must have the same layers and heads for every sentence pair")
    by_head = [[list(pairs) for pairs in zip(*heads, strict=True)] for heads in zip(*found, strict=True)]
    return torch.tensor([[alignment_score(links, gold).error for links in heads] for heads in by_head])


def _pair(link: Link) -> Link:
    source, target = (int(word) for word in link)
    if min(source, target) < 0:
        raise ValueError(f"a link must be (source, target), both 0 or more, got {(source, target)}")
    return source, target


def _groups(name: str, words: Sequence[int | None], n: int) -> tuple[Tensor, int]:
    """The word of each token, those of no word in a group behind the last; and how many words there are."""
    if len(words) != n:
        raise ValueError(f"{name} must hold a word for each of the {n} tokens, got {len(words)}")
    ids = [int(word) for word in words if word is not None]
    if ids and min(ids) < 0:
        raise ValueError(f"{name} must be 0 or more, or None for tokens of no word, got {min(ids)}")
    count = max(ids, default=-1) + 1
    return torch.tensor([count if word is None else int(word) for word in words]), count


def _map(name: str, weights: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or weights.ndim != 2:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{name} must be one map of dims target source, got {got}; write weights[head] or .mean(0)")
    return weights
