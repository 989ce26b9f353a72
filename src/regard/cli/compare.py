"""`regard compare`: two runs on the same test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import regard

from ..lens import Links
from ..ops.memory_limit import format_size
from ..tasks import run_comparison, run_folder
from ..tasks.answering import Answerer
from ..tasks.captioning import Describer
from ..tasks.classification import Classifier
from ..tasks.language import LanguageModel
from ..tasks.metrics import RougeWords, check_tokenizable
from ..tasks.paired_bootstrap import paired_bootstrap
from ..tasks.pairs import TextPair
from ..tasks.run_comparison import Comparison, ExamplePair, TestOutputs
from ..tasks.seq2seq_task import Writer
from ..tasks.summarization import Summarizer
from ..tasks.text_inputs import TextInputs
from ..tasks.translation import Translator
from ..train import checkpoint as checkpoints
from ..train.dataclass_json import check_types
from ..train.failures import disk_errors
from .attention_output import draw
from .captioning import CaptionFiles
from .classification import LabelledFiles
from .decoding_flags import COVERAGE, LENGTH, LENGTH_PENALTY, Search
from .evaluation_files import REFERENCE, read_references
from .files import Files, PairFiles, QuestionFile, SummaryFiles, TextFile, check_writable
from .runs import task_command
from .terminal import one_line, progress
from .translation import read_gold

EXAMPLES = "Number of examples to print, those where the runs differ most."
SAMPLES = "Number of resampled test sets of the paired bootstrap."
BEAM = "Beam size; 1 is greedy search."
MAX_SHOWN_CHARACTERS = 400
LETTERS = ("A", "B")


@dataclass(frozen=True, kw_only=True)
class ComparisonFlags:
    """The flags that all tasks share."""

    examples: Annotated[int, EXAMPLES] = 5
    samples: Annotated[int, SAMPLES] = 1000

    def check(self) -> None:
        """Raise unless the numbers are in range."""
        check_types(self)
        for name, value, least in (("examples", self.examples, 0), ("samples", self.samples, 100)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def compare(self, folders: Sequence[Path], a: TestOutputs, b: TestOutputs) -> Comparison:
        """Compare the outputs of two runs."""
        names = str(folders[0]), str(folders[1])
        return run_comparison.compare_outputs(names, a, b, examples=self.examples, samples=self.samples)


@dataclass(frozen=True, kw_only=True)
class TranslationComparison(ComparisonFlags, PairFiles):
    """The flags of `regard compare` for translators."""

    beam: Annotated[int, BEAM] = 5
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    coverage_penalty: Annotated[float, COVERAGE] = 0.0
    max_length: Annotated[int | None, LENGTH] = None
    tokenize: Annotated[str, "Tokenizer of sacreBLEU: 13a, intl, zh, char or none."] = "13a"
    reference: Annotated[Files | None, REFERENCE] = None
    gold: Annotated[str | None, "File of gold word links, in Pharaoh format, to compare alignment errors."] = None
    first: Annotated[int, "Number of the first word in the gold links."] = 0
    attention: Annotated[
        str | None,
        "Write both runs' attention over the printed examples, while they read the target: .png, or .html to zoom.",
    ] = None

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Translate by both runs, and compare."""
        self.check()
        check_tokenizable(self.tokenize)
        search = Search(
            beam=self.beam, penalty=self.length_penalty, max_length=self.max_length, coverage=self.coverage_penalty
        )
        pairs = list(self.read())
        references = read_references(pairs, self.reference)
        gold = None if self.gold is None else read_gold(Path(self.gold), len(pairs), first=self.first)
        picture = check_attention(self.attention, (".png", ".html"), self.examples, *folders, *self.files)
        writers = [Translator.load(folder, device=device) for folder in folders]
        if picture is not None or gold is not None:
            for writer in writers:
                writer.align([])  # raises before decoding if there is no attention
        found = []
        for writer, letter in zip(writers, LETTERS, strict=True):
            with progress(f"translating with {letter}") as show:
                found.append(
                    run_comparison.translation_outputs(
                        writer, pairs, references, tokenize=self.tokenize, show=show, **search.one_best
                    )
                )
        compared = self.compare(folders, *found)
        if gold is not None:
            compared = _with_alignment(compared, writers, pairs, gold, self.samples)
        chosen = [pairs[one.number] for one in compared.examples if pairs[one.number].target.strip()]
        if picture is not None and chosen:
            if picture.suffix == ".png":
                maps = zip(*(writer.word_maps(chosen) for writer in writers), strict=True)
                targets, sources = ([text.split() for text in side] for side in zip(*map(_texts, chosen), strict=True))
                named = tuple(f"{letter}: {name}" for letter, name in zip(LETTERS, compared.names, strict=True))
                draw(
                    regard.views.side_by_side(
                        list(maps), targets, sources, names=(named[0], named[1]), axes=("target", "source")
                    ),
                    picture,
                )
            else:
                _save_page(writers, chosen, compared.names, picture)
        return compared


@dataclass(frozen=True, kw_only=True)
class SummarizationComparison(ComparisonFlags, SummaryFiles):
    """The flags of `regard compare` for summarizers."""

    beam: Annotated[int, BEAM] = 4
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    max_length: Annotated[int | None, LENGTH] = None
    no_repeat: Annotated[
        int | None, "Never repeat a sequence of this number of tokens. Default: repetition is allowed."
    ] = None
    rouge: Annotated[RougeWords, "Words that ROUGE compares: stemmed English words, or words of any script."] = (
        "english"
    )
    reference: Annotated[Files | None, REFERENCE] = None
    attention: Annotated[
        str | None,
        "Write both runs' attention over the printed examples, while they read the target: .html to zoom.",
    ] = None

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Summarize by both runs, and compare."""
        self.check()
        search = Search(
            beam=self.beam, penalty=self.length_penalty, max_length=self.max_length, no_repeat=self.no_repeat
        )
        pairs = list(self.read())
        references = read_references(pairs, self.reference)
        page = check_attention(self.attention, (".html",), self.examples, *folders, *self.files)
        writers = [Summarizer.load(folder, device=device) for folder in folders]
        found = []
        for writer, letter in zip(writers, LETTERS, strict=True):
            with progress(f"summarizing with {letter}") as show:
                found.append(
                    run_comparison.summary_outputs(
                        writer, pairs, references, words=self.rouge, show=show, **search.one_best
                    )
                )
        compared = self.compare(folders, *found)
        if page is not None and compared.examples:
            _save_page(writers, [pairs[one.number] for one in compared.examples], compared.names, page)
        return compared


@dataclass(frozen=True, kw_only=True)
class ClassificationComparison(ComparisonFlags, LabelledFiles):
    """The flags of `regard compare` for classifiers."""

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Classify by both runs, and compare."""
        self.check()
        found = []
        for folder, letter in zip(folders, LETTERS, strict=True):
            classifier = Classifier.load(folder, device=device)
            field = "text" if isinstance(classifier.reads, TextInputs) else "image"
            if self.shows not in (None, f"{field}s"):
                raise ValueError(f"{folder} classifies {field}s, got {self.shows}")
            with progress(f"classifying with {letter}") as show:
                examples = self.read(classes=classifier.classes)
                found.append(run_comparison.class_outputs(classifier, examples, field=field, show=show))
        return self.compare(folders, *found)


@dataclass(frozen=True, kw_only=True)
class AnsweringComparison(ComparisonFlags, QuestionFile):
    """The flags of `regard compare` for models that answer questions."""

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Answer by both runs, and compare."""
        self.check()
        questions, found = self.read(), []
        for folder, letter in zip(folders, LETTERS, strict=True):
            with progress(f"answering with {letter}") as show:
                answerer = Answerer.load(folder, device=device)
                found.append(run_comparison.answer_outputs(answerer, questions, show=show))
        return self.compare(folders, *found)


@dataclass(frozen=True, kw_only=True)
class CaptioningComparison(ComparisonFlags, CaptionFiles):
    """The flags of `regard compare` for captioners."""

    beam: Annotated[int, BEAM] = 3
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    max_length: Annotated[int | None, LENGTH] = None

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Caption by both runs, and compare."""
        self.check()
        Search(beam=self.beam, penalty=self.length_penalty, max_length=self.max_length)
        examples, found = self.read(), []
        settings: dict[str, Any] = {"beam": self.beam, "alpha": self.length_penalty, "max_length": self.max_length}
        for folder, letter in zip(folders, LETTERS, strict=True):
            with progress(f"describing with {letter}") as show:
                describer = Describer.load(folder, device=device)
                found.append(run_comparison.caption_outputs(describer, examples, show=show, **settings))
        return self.compare(folders, *found)


@dataclass(frozen=True, kw_only=True)
class LanguageComparison(ComparisonFlags, TextFile):
    """The flags of `regard compare` for language models."""

    def run(self, folders: Sequence[Path], device: str | None) -> Comparison:
        """Score each line by both runs, and compare."""
        self.check()
        lines, found = list(self.read()), []
        for folder, letter in zip(folders, LETTERS, strict=True):
            with progress(f"reading with {letter}") as show:
                model = LanguageModel.load(folder, device=device)
                found.append(run_comparison.language_outputs(model, lines, show=show))
        return self.compare(folders, *found)


COMPARISONS: Mapping[str, Any] = {
    "translation": TranslationComparison,
    "language": LanguageComparison,
    "summarization": SummarizationComparison,
    "answering": AnsweringComparison,
    "classification": ClassificationComparison,
    "captioning": CaptioningComparison,
}


def print_comparison(compared: Comparison) -> None:
    """Compare two runs on the same test data: metrics, examples where they differ most, speed and size.

    Examples:

        regard compare runs/deen runs/deen2 --source test.de --target test.en

        regard compare runs/deen runs/deen2 --pairs test.tsv --gold test.pharaoh --attention difference.png

        regard compare runs/reviews runs/reviews2 --labelled test.tsv --examples 10

    Each metric comes with the interval of 95 % of the difference and its p-value, by a paired bootstrap (Koehn 2004).
    Speed is measured once, on the test data, A before B; each has run one example before.
    """
    for letter, name, count, seconds in zip(
        LETTERS, compared.names, compared.parameters, compared.seconds, strict=True
    ):
        size = format_size(_weights_file(Path(name)).stat().st_size)
        speed = compared.count / max(seconds, 1e-9)
        print(f"{letter}  {name}  {count:,} parameters · {size} · {speed:,.1f} examples/s")
    samples = next(iter(compared.metrics.values())).samples
    wide = max(6, *map(len, compared.metrics))
    print(f"\n{'metric':{wide}}  {'A':>9}  {'B':>9}  {'B - A':>9}  {'95 % interval':>20}  {'p':>6}  better")
    for name, found in compared.metrics.items():
        interval = f"{_with_sign(found.low)} to {_with_sign(found.high)}"
        winner = "-" if found.p >= 0.05 else _winner(found.difference, compared.better.get(name, "higher"))
        print(
            f"{name:{wide}}  {_plain(found.a):>9}  {_plain(found.b):>9}  {_with_sign(found.difference):>9}  "
            f"{interval:>20}  {found.p:>6.3f}  {winner}"
        )
    print(
        f"\n{compared.count:,} examples, {compared.same:,} with the same output; paired bootstrap of {samples:,} "
        "samples; better: the run, if p is below 0.05"
    )
    for one in compared.examples:
        _print_example(one, compared.each_name)


def check_attention(path: str | None, ends: Sequence[str], examples: int, *read: Path | str | None) -> Path | None:
    """Return the path of the attention's file; raise if it cannot be written, or if no example is printed."""
    if path is None:
        return None
    if examples == 0:
        raise ValueError("--attention is that of the printed examples, got --examples 0; print one or more")
    check_writable(Path(path), *read, flag="--attention", ends=ends)
    return Path(path)


def check_two_runs(folders: Sequence[Path]) -> None:
    """Raise unless there are two runs of one task."""
    if len(folders) != 2:
        raise ValueError(f"regard compare takes two runs, got {len(folders)}; name two folders")
    first, second = (run_folder.task_of(run_folder.open_run(folder)) for folder in folders)
    if first != second:
        raise ValueError(f"both runs must have one task, got {first!r} and {second!r}")


def _with_alignment(
    compared: Comparison, writers: Sequence[Translator], pairs: Sequence[TextPair], gold: Sequence[Links], samples: int
) -> Comparison:
    """Add the alignment error rate over the test data."""
    a, b = (run_comparison.alignment_statistics(writer.align(pairs), gold) for writer in writers)
    name = "alignment error"
    return replace(
        compared,
        metrics={**compared.metrics, name: paired_bootstrap(a, b, samples=samples)},
        better={**compared.better, name: "lower"},
    )


def _save_page(writers: Sequence[Writer], pairs: Sequence[TextPair], names: tuple[str, str], path: Path) -> None:
    """Write the attention of both runs over the same pairs as one page."""
    page = regard.views.page(*(writer.tape(pairs) for writer in writers), name=list(names))
    with disk_errors(path, then="try again"):
        page.save(path)


def _print_example(one: ExamplePair, each_name: str) -> None:
    """Print the outputs of both runs for an example, one below the other."""
    letter = LETTERS[one.gain > 0]
    a, b = map(_plain, one.scores)
    print(f"\nexample {one.number + 1}, {letter} is better: {each_name}, A {a}, B {b}")
    texts = {"input": one.input, "reference": one.reference, "A": one.outputs[0], "B": one.outputs[1]}
    for name, text in texts.items():
        if text or (name in LETTERS and any(one.outputs)):
            line = one_line(text)
            print(f"  {name:9}  {line[:MAX_SHOWN_CHARACTERS]}{'…' if len(line) > MAX_SHOWN_CHARACTERS else ''}")


def _texts(pair: TextPair) -> tuple[str, str]:
    return pair.target, pair.source


def _weights_file(folder: Path) -> Path:
    return run_folder.open_run(folder) / checkpoints.MODEL


def _winner(difference: float, better: str) -> str:
    return LETTERS[(difference > 0) == (better == "higher")]


def _plain(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _with_sign(value: float) -> str:
    text = _plain(value)
    return f"+{text}" if value > 0 and not math.isclose(value, 0, abs_tol=5e-5) else text


Two = Annotated[list[Path], typer.Argument(help="Folders of two runs of one task.", metavar="RUN RUN")]
compare = task_command(COMPARISONS, print_comparison, check=check_two_runs, folders=Two)
