"""`regard evaluate`, `score` and `average`: what is done with a run, whatever its task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..tasks import run_folder
from ..train.dataclass_json import from_json
from . import answering, captioning, classification, language, summarization, translation
from .averaging import average_checkpoints
from .device import Device
from .flags import Flag, command, flags_of

Folders = Annotated[list[Path], typer.Argument(help="a run, or several that work as one", metavar="DIR")]

# What a run of each task can be run_task: a dataclass of flags, with `run(folders, device)`.
EVALUATIONS: dict[str, Any] = {
    "translation": translation.TranslationEvaluation,
    "language": language.LanguageEvaluation,
    "summarization": summarization.SummarizationEvaluation,
    "answering": answering.AnsweringEvaluation,
    "classification": classification.ClassificationEvaluation,
    "captioning": captioning.CaptioningEvaluation,
}
SCORINGS: dict[str, Any] = {
    "translation": translation.TranslationScoring,
    "language": language.LanguageScoring,
    "summarization": summarization.SummarizationScoring,
    "captioning": captioning.CaptioningScoring,
}


def task_command(questions: Mapping[str, Any], run: Callable[[Any], None]) -> Callable[..., None]:
    """A command whose flags are those of all tasks, and that asks a run what its own task knows to answer."""

    def run_task(folders: Sequence[Path], device: str | None, given: Mapping[Flag, Any]) -> None:
        run(task_settings(questions, folders, given).run(folders, device))

    made = command(run_task, {"folders": Folders, "device": (Device, None)}, shared_flags(questions))
    made.__doc__ = run.__doc__
    return made


def shared_flags(questions: Mapping[str, Any]) -> dict[str, list[Flag]]:
    """The flags of all tasks by panel, those that several tasks have in a panel of their own, once.

    A flag of several tasks is one flag: it must have the same name for the field and the same type in all of them.
    """
    owners: dict[str, list[Flag]] = {}
    for task, group in questions.items():
        for flag in flags_of(task, group):
            owners.setdefault(flag.name, []).append(flag)
    panels: dict[str, list[Flag]] = {"Several tasks": []}
    for name, flags in owners.items():
        if len({(flag.field, flag.type) for flag in flags}) > 1:
            tasks = ", ".join(flag.section for flag in flags)
            raise TypeError(f"{name} must be the same field of the same type in {tasks}; name one of them otherwise")
        if len(flags) == 1:
            panels.setdefault(flags[0].section.capitalize(), []).append(flags[0])
        else:
            alike = len({flag.help for flag in flags}) == 1
            told = flags[0].help if alike else "; ".join(f"{flag.section}: {flag.help}" for flag in flags)
            panels["Several tasks"].append(replace(flags[0], help=told))
    return panels


def task_settings(questions: Mapping[str, Any], folders: Sequence[Path], given: Mapping[Flag, Any]) -> Any:
    """What the flags given ask of these runs; raises for a flag of another task."""
    task = run_folder.task_of(run_folder.open_run(folders[0]))
    if task not in questions:
        raise ValueError(f"{folders[0]} is of the task {task!r}, expected {' or '.join(map(repr, questions))}")
    known = [flag.name for flag in flags_of(task, questions[task])]
    for flag in given:
        if flag.name not in known:
            raise ValueError(f"{folders[0]} is of the task {task!r}, which takes {', '.join(known)}, got {flag.name}")
    values = {flag.field: value for flag, value in given.items()}
    return from_json(questions[task], json.dumps(values), source=task)


def print_evaluation(found: Mapping[str, object]) -> None:
    """Measure a model on data of its task: a name, a number and how it was computed, line by line.

    Examples:

        regard evaluate runs/deen --source test.de --target test.en

        regard evaluate runs/shakespeare --text test.txt

        regard evaluate runs/news --documents test.txt --summaries test.summary

        regard evaluate runs/squad --data dev.json
    """
    for name, measured in found.items():
        print(f"{name:12}{measured}")


def print_scores(found: Sequence[float]) -> None:
    """Print the log-probability of each line, in nats, under a model.

    Examples:

        regard score runs/deen --source test.de --target test.en

        regard score runs/shakespeare --text lines.txt
    """
    for value in found:
        print(f"{value:.4f}")


evaluate = task_command(EVALUATIONS, print_evaluation)
score = task_command(SCORINGS, print_scores)


def average(
    folders: Annotated[list[Path], typer.Argument(help="a run, or checkpoints of one", metavar="DIR")],
    out: Annotated[Path, typer.Option(help="the new checkpoint, to be used as a run is")],
    last: Annotated[int, typer.Option(help="of a run, take so many of the newest checkpoints")] = 5,
) -> None:
    """Average the weights of checkpoints, which often decodes better than the last of them.

    Examples:

        regard average runs/deen --last 5 --out runs/deen-averaged

        regard average runs/deen/step-00009000 runs/deen/step-00010000 --out runs/deen-averaged

    Which they are is told; the weights before the first step are never among them.
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; expected a run or a checkpoint")
    print(average_checkpoints(folders, out, last=last))
