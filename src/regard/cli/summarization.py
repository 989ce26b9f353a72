"""`regard train summarization` and `summarize`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..data import Pair
from ..tasks import summarization
from ..tasks.metrics import Words
from ..tasks.summarization import LongBatching, Model, Summarizer
from ..tasks.vocabulary import WordVocabulary
from ..tasks.writer import MOST, Written
from ..train import Outcome
from ..train.failures import disk_errors
from .attention import must_be_of_one, must_fit, room, save_pairs
from .files import SummaryFiles
from .recipe import Training
from .screen import chunks_of_input, progress, said


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sections of `regard train summarization`."""

    data: SummaryFiles
    valid: SummaryFiles | None
    vocabulary: WordVocabulary
    model: Model
    batching: LongBatching
    training: Training


def train(plan: Plan, out: Path, resume: bool, files: Mapping[str, str]) -> Outcome:
    """Train a summarizer on documents and their summaries.

    Examples:

        regard train summarization --documents a.txt --summaries a.summary --out runs/news

        regard train summarization --jsonl xsum.jsonl --valid-jsonl dev.jsonl --coverage 1 --out runs/xsum

        regard train summarization --pairs long.tsv --model transformer --tokenizer bpe --limit 4096 \\
            --batch-tokens 16384 --encoder-mask "Window(128) | Global(4)" --out runs/long

    A model of the kind pointer copies words of the document, those outside of its vocabulary among them. The best
    checkpoint is that with the highest ROUGE-L on the validation data, or the last where there is none.
    """
    return summarization.train(
        plan.data.read(),
        valid=None if plan.valid is None else plan.valid.read(prefix="valid-"),
        out=out,
        recipe=plan.training.recipe("rougeL", "rouge1", "rouge2", "loss"),
        model=plan.model,
        vocabulary=plan.vocabulary,
        batching=plan.batching,
        resume=resume,
        files=files,
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation(SummaryFiles):
    """What `regard evaluate` asks of a summarizer."""

    beam: Annotated[int, "hypotheses side by side; 1 is greedy"] = 4
    no_repeat: Annotated[int | None, "write no so many tokens in a row twice"] = None
    rouge: Annotated[Words, "the words of ROUGE: English, stemmed, or those of any script"] = "english"

    def run(self, folders: Sequence[Path]) -> dict[str, object]:
        """ROUGE-1, -2 and -L of summaries, and the loss."""
        pairs = list(self.read())
        summarizer = Summarizer.load(*folders)
        with progress("summarizing") as show:
            found = summarizer.evaluate(pairs, beam=self.beam, no_repeat=self.no_repeat, words=self.rouge, show=show)
        _tell_cut(summarizer, [pair.source for pair in pairs])
        return dict(found)


@dataclass(frozen=True, kw_only=True)
class Scoring(SummaryFiles):
    """What `regard score` asks of a summarizer."""

    def run(self, folders: Sequence[Path]) -> list[float]:
        """log p(summary | document) of each pair."""
        pairs = list(self.read())
        summarizer = Summarizer.load(*folders)
        with progress("scoring") as show:
            found = summarizer.score(pairs, show=show)
        _tell_cut(summarizer, [pair.source for pair in pairs])
        return found


def summarize(
    folders: Annotated[list[Path], typer.Argument(help="a run, or several that decode as one", metavar="DIR...")],
    beam: Annotated[int, typer.Option(help="hypotheses side by side; 1 is greedy")] = 4,
    nbest: Annotated[int, typer.Option("--nbest", help="print so many a document: number ||| text ||| score")] = 1,
    penalty: Annotated[float, typer.Option("--length-penalty", help="alpha of Wu et al. 2016; 0 for none")] = 0.6,
    min_length: Annotated[int, typer.Option(help="the fewest tokens of a summary")] = 0,
    no_repeat: Annotated[int | None, typer.Option(help="write no so many tokens in a row twice, such as 3")] = None,
    attention: Annotated[
        Path | None,
        typer.Option(help="what was looked at: a .png of one document, or a .safetensors for regard view"),
    ] = None,
) -> None:
    """Summarize standard input, a document a line.

    Examples:

        regard summarize runs/news < documents > summaries

        regard summarize runs/news runs/news2 --beam 8 --no-repeat 3 < documents > summaries

        head -n 1 documents | regard summarize runs/news --attention first.png
    """
    most = room(attention, MOST)
    must_be_of_one(attention, folders)
    summarizer = Summarizer.load(*folders)
    number, unfinished, cut, pairs = 0, 0, 0, []
    with progress("summarizing") as show:
        for documents in chunks_of_input():
            must_fit(attention, number + len(documents), most)
            found = summarizer.n_best(
                documents,
                n=nbest,
                beam=beam,
                alpha=penalty,
                min_length=min_length,
                no_repeat=no_repeat,
                show=show,
            )
            for best in found:
                print(*_shown(number, best, nbest), sep="\n")
                number += 1
            sys.stdout.flush()
            unfinished += sum(not best[0].finished for best in found)
            cut += sum(summarizer.too_long(documents))
            if attention is not None:
                pairs += [Pair(document, _line(best[0])) for document, best in zip(documents, found, strict=True)]
    if attention is not None and pairs:
        with disk_errors(attention):
            save_pairs(summarizer, pairs, attention)
    if unfinished:
        said(f"{unfinished:,} of {number:,} summaries did not come to an end and were cut off")
    if cut:
        said(_cut(cut, number, summarizer))


def _tell_cut(summarizer: Summarizer, documents: Sequence[str]) -> None:
    if cut := sum(summarizer.too_long(documents)):
        said(_cut(cut, len(documents), summarizer))


def _cut(cut: int, number: int, summarizer: Summarizer) -> str:
    return f"{cut:,} of {number:,} documents have more than {summarizer.limit} tokens, of which the rest was not read"


def _shown(number: int, best: Sequence[Written], nbest: int) -> list[str]:
    if nbest == 1:
        return [_line(best[0])]
    return [f"{number} ||| {_line(one)} ||| {one.score:.4f}" for one in best]


def _line(one: Written) -> str:
    """The text on one line, whatever the model has written."""
    return " ".join(one.text.splitlines())
