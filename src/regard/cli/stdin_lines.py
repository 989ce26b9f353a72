"""Standard input through an encoder-decoder, line by line, for `translate` and `summarize`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..tasks.pairs import Draft
from ..tasks.seq2seq_task import MAX_CAPTURED_PAIRS, Writer
from .attention_output import check_fits, max_examples
from .decoding_flags import Search
from .stdin_chunks import chunks_of_input
from .terminal import n_best_lines, one_line, print_truncated, progress

Runs = Annotated[
    list[Path], typer.Argument(help="Folder of a run, or of several runs to decode with as an ensemble.", metavar="RUN")
]


def write_lines(
    writer: Writer, search: Search, *, doing: str, what: str, attention: Path | None, keep: bool, stream: bool = False
) -> list[Draft]:
    """Print the output for each line of standard input; with `keep`, return each line with its best output."""
    most = max_examples(attention, MAX_CAPTURED_PAIRS)
    number, unfinished, long, pairs = 0, 0, 0, []
    with progress(doing) as show:
        for lines in chunks_of_input(stream=stream):
            check_fits(attention, number + len(lines), most)
            found = writer.n_best(lines, **search.settings_of(lines, before=number), show=show)
            for best in found:
                print(*n_best_lines(number, [(one_line(one.text), one.score) for one in best], search.nbest), sep="\n")
                number += 1
            sys.stdout.flush()
            unfinished += sum(not best[0].finished for best in found)
            long += sum(writer.too_long(lines))
            if keep:
                pairs += [
                    Draft(line, one_line(best[0].text), best[0].tokens) for line, best in zip(lines, found, strict=True)
                ]
    search.check_prefixes(number)
    search.print_unfinished(what, unfinished, number, longest=writer.longest)
    print_truncated("documents", long, number, writer.limit)
    return pairs
