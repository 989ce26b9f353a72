"""`regard train summarization` and `summarize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..data import Pair
from ..tasks import summarization
from ..tasks.metrics import RougeWords
from ..tasks.seq2seq_task import MAX_CAPTURED_PAIRS
from ..tasks.summarization import DocumentBatching, SummarizationModelSettings, Summarizer
from ..tasks.vocabulary import WordVocabulary
from ..train import Outcome
from ..train.failures import disk_errors
from .attention_output import check_single_input, max_examples, save_pairs
from .cleaning import Cleaning
from .decoding_flags import LENGTH, LENGTH_PENALTY, Beam, MaxLength, Nbest, Penalty, Search
from .device import Device
from .evaluation_files import OUT, REFERENCE, check_out, read_references, write_outputs
from .files import Files, SummaryFiles
from .fine_tuning_flags import FineTuningFlags
from .stdin_chunks import Stream
from .stdin_lines import Runs, write_lines
from .terminal import print_truncated, progress
from .training_flags import DecoderTraining


@dataclass(frozen=True, kw_only=True)
class SummarizationPlan:
    """The sections of `regard train summarization`."""

    data: SummaryFiles
    valid: SummaryFiles | None
    cleaning: Cleaning
    vocabulary: WordVocabulary
    model: SummarizationModelSettings
    batching: DocumentBatching
    finetuning: FineTuningFlags
    training: DecoderTraining


def train(plan: SummarizationPlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a summarizer on documents and their summaries.

    Examples:

        regard train summarization --documents a.txt --summaries a.summary --out runs/news

        regard train summarization --jsonl xsum.jsonl --valid-jsonl dev.jsonl --coverage 1 --out runs/xsum

        regard train summarization --pairs long.tsv --model transformer --tokenizer bpe --limit 4096 \\
            --batch-tokens 16384 --encoder-mask "Window(128) | Global(4)" --out runs/long

    The model pointer can copy words from the document, even words outside its vocabulary. The best checkpoint has the
    highest ROUGE-L on the validation data; without validation data it is the last one.
    """
    pairs, valid = plan.data.read(), None if plan.valid is None else plan.valid.read(prefix="valid-")
    return summarization.train(
        plan.cleaning.clean(pairs, valid),
        valid=valid,
        out=out,
        recipe=plan.training.recipe("rougeL", "rouge1", "rouge2", "loss"),
        **plan.finetuning.unless_kept(model=plan.model, vocabulary=plan.vocabulary),
        batching=plan.batching,
        base=plan.finetuning.tuning,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class SummarizationEvaluation(SummaryFiles):
    """The flags of `regard evaluate` for a summarizer."""

    beam: Annotated[int, "Beam size; 1 is greedy search."] = 4
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    max_length: Annotated[int | None, LENGTH] = None
    no_repeat: Annotated[
        int | None, "Never repeat a sequence of this number of tokens. Default: repetition is allowed."
    ] = None
    rouge: Annotated[RougeWords, "Words that ROUGE compares: stemmed English words, or words of any script."] = (
        "english"
    )
    reference: Annotated[Files | None, REFERENCE] = None
    out: Annotated[str | None, OUT] = None

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute ROUGE-1, -2 and -L of the summaries, and the loss; several run folders are one ensemble."""
        search = Search(
            beam=self.beam, penalty=self.length_penalty, max_length=self.max_length, no_repeat=self.no_repeat
        )
        pairs = list(self.read())
        references = read_references(pairs, self.reference)
        check_out(self.out, *folders, *self.files, references=self.reference)
        summarizer = Summarizer.load(*folders, device=device)
        with progress("summarizing") as show:
            found = summarizer.write([pair.source for pair in pairs], **search.one_best, show=show)
        written = [one.text for one in found]
        write_outputs(self.out, written)
        _print_truncated(summarizer, pairs)
        search.print_method()
        return dict(summarizer.measure(written, pairs, words=self.rouge, references=references))


@dataclass(frozen=True, kw_only=True)
class SummarizationScoring(SummaryFiles):
    """The flags of `regard score` for a summarizer."""

    def run(self, folders: Sequence[Path], device: str | None) -> list[float]:
        """Compute log p(summary | document) of each pair; several run folders are one ensemble."""
        pairs = list(self.read())
        summarizer = Summarizer.load(*folders, device=device)
        with progress("scoring") as show:
            found = summarizer.score(pairs, show=show)
        _print_truncated(summarizer, pairs)
        return found


def summarize(
    folders: Runs,
    beam: Beam = 4,
    nbest: Nbest = 1,
    penalty: Penalty = 0.6,
    min_length: Annotated[int, typer.Option(help="Minimum number of tokens of a summary.")] = 0,
    max_length: MaxLength = None,
    no_repeat: Annotated[
        int | None,
        typer.Option(help="Never repeat a sequence of this number of tokens, e.g. 3. Default: repetition is allowed."),
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(help="Write the attention to this file: .png (one document) or .safetensors for regard view."),
    ] = None,
    stream: Stream = False,
    device: Device = None,
) -> None:
    """Summarize the documents on standard input, one per line.

    Examples:

        regard summarize runs/news < documents > summaries

        regard summarize runs/news runs/news2 --beam 8 --no-repeat 3 < documents > summaries

        head -n 1 documents | regard summarize runs/news --attention first.png
    """
    search = Search(
        beam=beam, nbest=nbest, penalty=penalty, min_length=min_length, max_length=max_length, no_repeat=no_repeat
    )
    max_examples(attention, MAX_CAPTURED_PAIRS, *folders)
    check_single_input(attention, folders)
    summarizer = Summarizer.load(*folders, device=device)
    pairs = write_lines(
        summarizer,
        search,
        doing="summarizing",
        what="summaries",
        attention=attention,
        keep=attention is not None,
        stream=stream,
    )
    if attention is not None and pairs:
        with disk_errors(attention, then="try again"):
            save_pairs(summarizer, pairs, attention)


def _print_truncated(summarizer: Summarizer, pairs: Sequence[Pair]) -> None:
    print_truncated(
        "documents", sum(summarizer.too_long([pair.source for pair in pairs])), len(pairs), summarizer.limit
    )
