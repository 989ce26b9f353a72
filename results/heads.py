"""The alignment error rate of the best head of a translator, or of the best one each way where both must agree.

    python -m results.heads runs/de-en --reverse runs/en-de --source test.de --target test.en --gold gold.pharaoh

Every layer, every head, and words when they are written or when they are read. `best` is the least error of all, chosen
by the links it is judged by. `chosen` is fair: of each half of the sentences it is by what is best on the other half.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from regard.data import Pair, parallel
from regard.lens import Links, alignment_score, argmax_links, mutual_links, read_pharaoh
from regard.tasks.translation import Translator
from regard.tasks.word_alignment import cross_layers

Maps = Sequence[Tensor]  # of each sentence pair, target source


class Head(NamedTuple):
    """A head, and when its words attend."""

    layer: int
    head: int
    when: Literal["written", "read"]

    def named(self) -> str:
        """In words."""
        return f"layer {self.layer}, head {self.head}, when {self.when}"


def heads_of(translator: Translator) -> Iterator[Head]:
    """All of them, at both moments."""
    [model] = translator.models
    for layer, name in enumerate(cross_layers(model)):
        for head in range(getattr(model.get_submodule(name), "heads", 1)):
            yield Head(layer, head, "written")
            yield Head(layer, head, "read")


def maps_of(translator: Translator, pairs: Sequence[Pair]) -> dict[Head, Maps]:
    """What each of them makes of the pairs."""
    return {head: translator.word_maps(pairs, **head._asdict()) for head in heads_of(translator)}


def best(maps: dict[Head, Maps], gold: Sequence[Links], rows: Sequence[int]) -> Head:
    """The one with the least error on these sentences."""

    def error(head: Head) -> float:
        return alignment_score([argmax_links(maps[head][row]) for row in rows], [gold[row] for row in rows]).error

    return min(maps, key=error)


def linked(ways: Sequence[dict[Head, Maps]], heads: Sequence[Head], row: int) -> Links:
    """The links of a sentence by these heads, one each way."""
    there, *back = (maps[head][row] for maps, head in zip(ways, heads, strict=True))
    return mutual_links(there, *back) if back else argmax_links(there)


def main() -> None:
    """Measure, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a translator")
    parser.add_argument("--reverse", type=Path, help="one the other way")
    for name in ("source", "target", "gold"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    pairs, gold = list(parallel(given.source, given.target)), read_pharaoh(given.gold)
    ways, golds = [maps_of(Translator.load(given.run), pairs)], [gold]
    if given.reverse is not None:
        ways.append(maps_of(Translator.load(given.reverse), [Pair(pair.target, pair.source) for pair in pairs]))
        golds.append([one.flip() for one in gold])
    everything = range(len(pairs))
    parts = {"best": (everything, everything), "chosen": (everything[1::2], everything[::2])}
    for name, by in parts.items():
        heads = [[best(maps, right, rows) for maps, right in zip(ways, golds, strict=True)] for rows in by]
        links = [linked(ways, heads[row % 2], row) for row in everything]
        print(name, f"{alignment_score(links, gold).error:.4f}", *(f"({one.named()})" for one in heads[0]))


if __name__ == "__main__":
    main()
