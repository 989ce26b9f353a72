"""BLEU by the length of the source, as Bahdanau et al. 2015 draw it (figure 2): what attention gains, and where.

    python -m results.lengths --source test.de --target test.en --out lengths.png \\
        "with attention=runs/deen-bahdanau-0/test.en" "without=runs/deen-plain-0/test.en"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from regard.tasks.metrics import bleu

EDGES = (0, 8, 11, 14, 17, 21, 100)  # words of a source, the last of each bin left out


def by_length(sources: Sequence[str], targets: Sequence[str], written: Sequence[str]) -> list[tuple[float, float]]:
    """The mean length of the sources in each bin, in words, and the BLEU of what was written from them."""
    found = []
    for low, high in pairwise(EDGES):
        rows = [row for row, source in enumerate(sources) if low <= len(source.split()) < high]
        if rows:
            mean = sum(len(sources[row].split()) for row in rows) / len(rows)
            found.append((mean, bleu([written[row] for row in rows], [targets[row] for row in rows]).value))
    return found


def main() -> None:
    """Print the numbers and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("written", nargs="+", metavar="NAME=FILE")
    given = parser.parse_args()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.subplots()
    sources, targets = (path.read_text(encoding="utf8").splitlines() for path in (given.source, given.target))
    for one in given.written:
        name, _, path = one.partition("=")
        points = by_length(sources, targets, Path(path).read_text(encoding="utf8").splitlines())
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
        print(name, " ".join(f"{length:.1f}:{score:.1f}" for length, score in points))
    axes.set_xlabel("words of the source")
    axes.set_ylabel("BLEU")
    axes.legend(frameon=False)
    figure.savefig(given.out, dpi=150)


if __name__ == "__main__":
    main()
