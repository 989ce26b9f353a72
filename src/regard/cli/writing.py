"""Standard input through a writer, line by line: what `translate` and `summarize` have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..data import Pair
from ..tasks.writer import MOST, Writer
from .attention import must_fit, room
from .screen import chunks_of_input, one_line, progress, ranked, said

Runs = Annotated[list[Path], typer.Argument(help="a run, or several that decode as one", metavar="DIR")]
Beam = Annotated[int, typer.Option("--beam", help="hypotheses side by side; 1 is greedy")]
Nbest = Annotated[int, typer.Option("--nbest", help="print so many for each line: number ||| text ||| score")]
Penalty = Annotated[float, typer.Option("--length-penalty", help="alpha of Wu et al. 2016; 0 for none")]


def write_lines(
    writer: Writer,
    *,
    doing: str,
    what: str,
    nbest: int,
    beam: int,
    penalty: float,
    min_length: int = 0,
    no_repeat: int | None = None,
    attention: Path | None,
    keep: bool,
) -> list[Pair]:
    """Print what becomes of each line, as soon as many are done; lines with their best, where these are to be kept."""
    most = room(attention, MOST)
    number, unfinished, long, pairs = 0, 0, 0, []
    with progress(doing) as show:
        for lines in chunks_of_input():
            must_fit(attention, number + len(lines), most)
            found = writer.n_best(
                lines, n=nbest, beam=beam, alpha=penalty, min_length=min_length, no_repeat=no_repeat, show=show
            )
            for best in found:
                print(*ranked(number, [(one_line(one.text), one.score) for one in best], nbest), sep="\n")
                number += 1
            sys.stdout.flush()
            unfinished += sum(not best[0].finished for best in found)
            long += sum(writer.too_long(lines))
            if keep:
                pairs += [Pair(line, one_line(best[0].text)) for line, best in zip(lines, found, strict=True)]
    if unfinished:
        said(f"{unfinished:,} of {number:,} {what} did not come to an end and were cut off")
    tell_long(writer, long, number)
    return pairs


def tell_long(writer: Writer, long: int, number: int) -> None:
    """Say how many documents have not been read to their end."""
    if long:
        limit = writer.limit
        said(f"{long:,} of {number:,} documents have more than {limit} tokens, of which the rest was not read")
