"""`regard train answering` and `answer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import regard

from ..data import Lines
from ..tasks import answering
from ..tasks.answering import Answerer, AnsweringModelSettings, Asking
from ..tasks.document_windows import QuestionWithContext, WindowSettings
from ..tasks.vocabulary import WordVocabulary
from ..train import Outcome
from ..train import checkpoint as checkpoints
from ..train.dataclass_json import check_types
from ..train.failures import disk_errors
from .attention_output import TAPE, check_fits, draw, max_examples
from .device import Device
from .files import QuestionFile, check_writable
from .fine_tuning_flags import FineTuningFlags
from .stdin_chunks import Stream, chunks_of_input
from .terminal import n_best_lines, print_status, progress
from .training_flags import Training

THRESHOLD = (
    "Give an empty answer if the best score is below this (only for models trained with unanswerable questions)."
)


@dataclass(frozen=True, kw_only=True)
class PretrainedEncoder:
    """The pretrained encoder that a model starts from."""

    folder: Annotated[
        str | None,
        "Hugging Face folder of a BERT, RoBERTa or DistilBERT to fine-tune; replaces model and vocabulary settings.",
        "--pretrained",
    ] = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class AnsweringBatching:
    """The size of a batch."""

    tokens: Annotated[
        int, "Maximum number of tokens of a batch, padding included: windows x longest row.", "--batch-tokens"
    ] = 8192

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class AnsweringPlan:
    """The sections of `regard train answering`."""

    data: QuestionFile
    valid: QuestionFile | None
    vocabulary: WordVocabulary
    model: AnsweringModelSettings
    pretrained: PretrainedEncoder
    windows: WindowSettings
    batching: AnsweringBatching
    finetuning: FineTuningFlags
    training: Training


def train(plan: AnsweringPlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a model that finds the answers to questions in documents, on a file in the format of SQuAD.

    Examples:

        regard train answering --data train.json --valid-data dev.json --out runs/squad

        regard train answering --data train.json --model bert --tokenizer wordpiece --out runs/bert

        regard train answering --data train.json --pretrained bert-base-uncased --rate 3e-5 --epochs 2 --out runs/bert

    The best checkpoint has the highest F1 on the validation data; without validation data it is the last one.
    """
    return answering.train(
        plan.data.read(),
        valid=None if plan.valid is None else plan.valid.read(prefix="valid-"),
        out=out,
        recipe=plan.training.recipe("f1", "exact"),
        **plan.finetuning.unless_kept(
            model=plan.model,
            vocabulary=plan.vocabulary,
            pretrained=plan.pretrained.folder,
            windows=plan.windows,
        ),
        base=plan.finetuning.tuning,
        tokens=plan.batching.tokens,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class AnsweringEvaluation(QuestionFile):
    """The flags of `regard evaluate` for a model that answers questions."""

    threshold: Annotated[float, THRESHOLD] = 0.0

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute F1 and exact matches as SQuAD does."""
        questions = self.read()
        if len(folders) != 1:
            raise ValueError(
                f"models that answer questions cannot be used as an ensemble, got {len(folders)} folders; name one"
            )
        answerer = Answerer.load(folders[0], device=device)
        with progress("answering") as show:
            found = answerer.evaluate(questions, threshold=self.threshold, show=show)
        _print_cut(answerer, questions)
        return dict(found)


def answer(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    document: Annotated[Path | None, typer.Option(help="File with the text to find answers in.")] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(help="Question about the document; may be repeated. Default: the lines of standard input."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Instead of a document: answer all questions of a file in the format of SQuAD.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the answers to --data to this file: JSON, by question id. Default: print them."),
    ] = None,
    nbest: Annotated[
        int,
        typer.Option(
            "--nbest", help="Number of answers to print per question, as: question number ||| text ||| score."
        ),
    ] = 1,
    threshold: Annotated[float, typer.Option(help=THRESHOLD)] = 0.0,
    attention: Annotated[
        Path | None,
        typer.Option(
            help="Write the attention of questions to this file: .png (one question) or .safetensors for regard view."
        ),
    ] = None,
    stream: Stream = False,
    device: Device = None,
) -> None:
    """Answer questions about a document, one answer per line; the line is empty if the document has no answer.

    Examples:

        regard answer runs/squad --document tower.txt --question "When did it open?"

        regard answer runs/squad --document tower.txt < questions > answers

        regard answer runs/squad --data dev.json --out predictions.json

        regard answer runs/squad --document tower.txt --question "When did it open?" --attention look.png

    An answer is copied from the document, with line breaks replaced by spaces. The answers to --data are JSON in the
    format that the official SQuAD evaluation reads.
    """
    if nbest < 1:
        raise ValueError(f"--nbest must be at least 1, got {nbest}")
    most = max_examples(attention, answering.MAX_CAPTURED_QUESTIONS, folder, document, data)
    if (document is None) == (data is None):
        raise ValueError(
            "give either --document, with questions about it, or --data, a file of documents and questions"
        )
    if data is not None:
        if question or nbest != 1:
            raise ValueError("--data contains the questions, and prints one answer each; remove --question and --nbest")
        check_writable(out, folder, data)
        _answer_all(folder, QuestionFile(data=data), out, threshold, attention, device)
        return
    if out is not None:
        raise ValueError("--out is only for the answers to --data; answers about a --document are printed")
    text = _text(document)
    answerer, number, seen = Answerer.load(folder, device=device), 0, []
    for some in _questions(question, stream):
        check_fits(attention, number + len(some), most)
        asked = [Asking(one, text) for one in some]
        with progress("answering") as show:
            found = answerer.n_best(asked, n=nbest, threshold=threshold, show=show)
        for best in found:
            print(*n_best_lines(number, [(" ".join(one.text.split()), one.score) for one in best], nbest), sep="\n")
            number += 1
        sys.stdout.flush()
        _print_cut(answerer, asked)
        seen += asked if attention is not None else []
    _save_attention(answerer, seen, attention)


def _answer_all(
    folder: Path, file: QuestionFile, out: Path | None, threshold: float, attention: Path | None, device: str | None
) -> None:
    questions = file.read()
    check_fits(attention, len(questions), max_examples(attention, answering.MAX_CAPTURED_QUESTIONS))
    answerer = Answerer.load(folder, device=device)
    with progress("answering") as show:
        found = answerer.answer(questions, threshold=threshold, show=show)
    answers = {asked.id: answered.text for asked, answered in zip(questions, found, strict=True)}
    written = json.dumps(answers, ensure_ascii=False, indent=2)
    if out is None:
        print(written)
    else:
        checkpoints.write_text(out, f"{written}\n", then="try again")
    _print_cut(answerer, questions)
    _save_attention(answerer, questions, attention)


def _save_attention(answerer: Answerer, asked: Sequence[QuestionWithContext], path: Path | None) -> None:
    if path is None or not asked:
        return
    with disk_errors(path, then="try again"):
        if path.suffix == TAPE:
            answerer.tape(asked).save(path)
            return
        A, words = answerer.look(asked[0])
        draw(regard.views.text(A, words, title=asked[0].question), path)


def _text(document: Path | None) -> str:
    """Read a text and check its encoding; every line end becomes one newline."""
    lines = Lines(str(document))
    len(lines)
    return "\n".join(lines)


def _questions(given: list[str] | None, stream: bool) -> Iterator[list[str]]:
    if given:
        yield given
    else:
        yield from chunks_of_input(stream=stream)


def _print_cut(answerer: Answerer, asked: Sequence[QuestionWithContext]) -> None:
    if cut := sum(answerer.too_long(asked)):
        limit = answerer.config.windows.question
        print_status(
            f"{cut:,} of {len(asked):,} questions have more than {limit} tokens; only the first {limit} were read"
        )
