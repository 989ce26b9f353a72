"""The tree of a beam of two: greedy search takes the likelier first word, and its best sequence is less likely."""

from __future__ import annotations

import math

import torch
from drawing import OUTPUT, PLAIN, QUERY, arrow, box, paper, write
from matplotlib.figure import Figure
from torch import Tensor

from regard.decode import beam, greedy

START, A, B, END = range(4)
NAMES = ("start", "a", "b", "end")


class Chain:
    """A model that looks at the last token only: the rows of `chances` are what follows each."""

    def __init__(self, chances: Tensor) -> None:
        self.logits = chances.log()

    def start(self, source: None) -> Chain:
        """Return the state before the first token, which is none."""
        return self

    def step(self, tokens: Tensor, state: Chain) -> tuple[Tensor, Chain]:
        """Return the logits after these tokens."""
        return self.logits[tokens], self

    def select(self, rows: Tensor) -> Chain:
        """Return the state of these rows."""
        return self


def chances() -> Tensor:
    """The probability of each token after each other."""
    table = torch.zeros(4, 4)
    table[START, [A, B]] = torch.tensor([0.6, 0.4])
    table[A, [A, B, END]] = torch.tensor([0.25, 0.25, 0.5])
    table[B, [A, B, END]] = torch.tensor([0.05, 0.05, 0.9])
    table[END, END] = 1.0
    return table


def found() -> dict[str, tuple[tuple[int, ...], float]]:
    """The sequence and its probability by greedy search and by a beam of two."""
    asked = {"source": None, "prefix": [[START]], "end": END, "max_length": 6}
    straight, [best, *_] = greedy(Chain(chances()), **asked)[0], beam(Chain(chances()), width=2, **asked)[0]
    return {name: (x.tokens, math.exp(x.log_probability)) for name, x in {"greedy": straight, "beam": best}.items()}


def draw() -> Figure:
    """From left to right; thick arrows are those of the beam's best sequence."""
    figure, axes = paper(5.2, 3.15)
    table, best = chances(), found()["beam"][0]
    box(axes, 0.1, 1.33, 0.6, 0.3, "start", PLAIN)
    for first, y in ((A, 0.72), (B, 2.24)):
        p = table[START, first].item()
        width = 2.6 if best[0] == first else 1.0
        arrow(axes, (0.7, 1.48), (1.58, y), width=width)
        write(axes, 0.98, 0.5 * (1.48 + y) + (-0.1 if first == A else 0.13), f"{p:.2f}", size=8)
        box(axes, 1.6, y - 0.15, 0.85, 0.3, f"{NAMES[first]}  {p:.2f}", OUTPUT)
        for n, second in enumerate((A, B, END)):
            q = table[first, second].item()
            end = y - 0.45 + 0.45 * n
            thick = best[:2] == (first, second)
            arrow(axes, (2.45, y), (3.38, end), width=2.6 if thick else 1.0)
            write(axes, (2.8, 2.95, 2.72)[n], 0.5 * (y + end) + (-0.14, -0.09, 0.17)[n], f"{q:.2f}", size=8)
            fill = OUTPUT if p * q >= 0.3 - 1e-6 else PLAIN
            box(axes, 3.4, end - 0.15, 1.0, 0.3, f"{NAMES[second]}  {p * q:.2f}", QUERY if thick else fill)
    for name, (tokens, p) in found().items():
        y = 1.17 if tokens[0] == A else 2.69
        write(axes, 4.5, y, f"{name}\n{p:.2f}", ha="left", size=8)
    write(axes, 2.6, 3.03, "arrows: probability of the next token; boxes: of the whole beginning", size=8)
    return figure
