"""Word alignments: links between the words of two sentences, from cross-attention; files of links; error rates.

Cross-attention has the target words as queries and the source words as keys, so a map of a sentence pair has dims
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
    """The links of a sentence pair, `(source, target)` from 0: the sure links, and all possible ones.

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
                    f"a link must be source-target, such as 1-2, or 1p2 if it is only possible, with words counted "
                    f"from {first}, got {word!r}"
                )
            link = int(match[1]) - first, int(match[3]) - first
            (sure if match[2] == "-" else possible).append(link)
        return cls(sure, possible)

    def flip(self) -> Links:
        """Return the links with source and target swapped."""
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
    """Read a file with one sentence pair per line; an empty line is a pair without links."""
    links = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                links.append(Links.parse(line.decode("utf8"), first=first))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return links


def write_pharaoh(path: str | Path, links: Iterable[Links]) -> None:
    """Write a file with one line per sentence pair."""
    Path(path).write_text("".join(f"{pair}\n" for pair in links), encoding="utf8")


def word_weights(
    A: Weights, target_words: Sequence[int | None], source_words: Sequence[int | None]
) -> Float[Tensor, "h target source"]:
    """Attention between words: the weights of their pieces, summed over source pieces and averaged over target pieces.

    >>> import torch
    >>> from regard import weights
    >>> A = weights(torch.randn(1, 8, 4, 16), torch.randn(1, 8, 5, 16))
    >>> word_weights(A, [0, 1, 1, None], [0, 0, 1, 2, None]).shape  # None: no word, as an end of sentence
    torch.Size([8, 2, 3])

    `target_words` and `source_words` hold the word number of each token (`word_ids()` of a Hugging Face tokenizer), or
    None for no word; a word without tokens has weight 0. Pass one head of the result, `[3]`, or its `.mean(0)` to
    `argmax_links`.
    """
    check_weights(A)
    if A.shape[:-3].numel() != 1:
        raise ValueError(f"word_weights takes one sentence pair, got shape {tuple(A.shape)}; write A.select(batch=0)")
    targets, t = _word_of_each_token("target_words", target_words, A.shape[-2])
    sources, s = _word_of_each_token("source_words", source_words, A.shape[-1])
    return A.select(batch=0).mass(targets.to(A.device), sources.to(A.device))[0, :, :t, :s]


def argmax_links(weights: Float[Tensor, "target source"]) -> Links:
    """Link each target word to the source word with the largest weight; no link if all its weights are 0."""
    weights = _check_map("weights", weights)
    if not weights.numel():
        return Links()
    best = weights.max(-1)
    pairs = zip(best.indices.tolist(), range(len(weights)), strict=True)
    return Links(pair for pair, weight in zip(pairs, best.values.tolist(), strict=True) if weight > 0)


def mutual_links(
    weights: Float[Tensor, "target source"], reverse: Float[Tensor, "source target"] | None = None
) -> Links:
    """Link two words if each has the largest weight for the other: high precision, low recall.

    `reverse` is the map of a model that translates in the other direction; by default the columns of `weights` are used
    for the source words.
    """
    weights = _check_map("weights", weights)
    reverse = weights.mT if reverse is None else _check_map("reverse", reverse)
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
    all sentence pairs (Och & Ney 2003, sec. 5): A are `links`, S and P the sure and possible links of `gold`.

    >>> score = alignment_score([Links.parse("0-0 1-1 2-2")], [Links.parse("0-0 1-1 3p3 2p2")])
    >>> score.precision, score.recall, score.error
    (1.0, 1.0, 0.0)
    """
    links, gold = list(links), list(gold)
    if len(links) != len(gold):
        raise ValueError(
            f"links and gold must have the same number of sentence pairs, got {len(links)} and {len(gold)}"
        )
    proposed = sum(len(pair.possible) for pair in links)
    sure = sum(len(truth.sure) for truth in gold)
    in_sure = sum(len(pair.possible & truth.sure) for pair, truth in zip(links, gold, strict=True))
    in_possible = sum(len(pair.possible & truth.possible) for pair, truth in zip(links, gold, strict=True))
    return AlignmentScore(
        precision=in_possible / proposed if proposed else 0.0,
        recall=in_sure / sure if sure else 0.0,
        error=1 - (in_sure + in_possible) / (proposed + sure) if proposed + sure else 0.0,
    )


def head_errors(
    maps: Iterable[Sequence[Float[Tensor, "h target source"]]], gold: Iterable[Links]
) -> Float[Tensor, "layers h"]:
    """Alignment error rate of `argmax_links` for each layer and head, to choose the best head.

    `maps` holds, for each sentence pair, the `word_weights` of each layer. Choose the head on other sentences than
    those you report.
    """
    gold = list(gold)
    by_pair: list[list[list[Links]]] = []
    for layers in maps:
        by_pair.append([[argmax_links(head) for head in heads] for heads in layers])
    if len({tuple(map(len, layers)) for layers in by_pair}) > 1:
        raise ValueError("maps must have the same layers and heads for every sentence pair")
    by_head = [[list(pairs) for pairs in zip(*heads, strict=True)] for heads in zip(*by_pair, strict=True)]
    return torch.tensor([[alignment_score(links, gold).error for links in heads] for heads in by_head])


def _pair(link: Link) -> Link:
    source, target = (int(word) for word in link)
    if min(source, target) < 0:
        raise ValueError(f"a link must be (source, target), both 0 or more, got {(source, target)}")
    return source, target


def _word_of_each_token(name: str, words: Sequence[int | None], n: int) -> tuple[Tensor, int]:
    """Return the word number of each token, where tokens of no word get the next free number, and the word count."""
    if len(words) != n:
        raise ValueError(f"{name} must hold a word for each of the {n} tokens, got {len(words)}")
    ids = [int(word) for word in words if word is not None]
    if ids and min(ids) < 0:
        raise ValueError(f"{name} must be 0 or more, or None for a token of no word, got {min(ids)}")
    count = max(ids, default=-1) + 1
    return torch.tensor([count if word is None else int(word) for word in words]), count


def _check_map(name: str, weights: Tensor) -> Tensor:
    """Return `weights`; raise unless it is one matrix."""
    if not isinstance(weights, Tensor) or weights.ndim != 2:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{name} must be one map of dims target source, got {got}; write weights[head] or .mean(0)")
    return weights
