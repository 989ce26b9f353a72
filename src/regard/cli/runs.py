"""`regard evaluate`, `score` and `average`, for runs of any task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..tasks import run_folder
from ..train.dataclass_json import from_json
from . import answering, captioning, classification, fingerprints, language, summarization, translation
from .averaging import average_checkpoints
from .device import Device
from .flags import Flag, OnceCommand, command, flags_of
from .run_view import PLAN_FILE
from .terminal import print_status
from .train_command import reading_settings

Folders = Annotated[
    list[Path], typer.Argument(help="Folder of a run, or of several runs to use as an ensemble.", metavar="RUN")
]

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


def task_command(
    settings: Mapping[str, Any],
    run: Callable[[Any], None],
    *,
    check: Callable[[Sequence[Path]], None] = lambda folders: None,
    folders: Any = Folders,
) -> Callable[..., None]:
    """Return a command with the flags of all tasks, which runs the settings class of the task of the given run.

    `check` is called with the folders first, and `folders` is their argument.
    """

    def run_task(folders: Sequence[Path], device: str | None, given: Mapping[Flag, Any]) -> None:
        check(folders)
        made = task_settings(settings, folders, given)
        found = made.run(folders, device)
        for note in reading_notes(folders[0], made, given):
            print_status(note)
        run(found)

    made = command(run_task, {"folders": folders, "device": (Device, None)}, shared_flags(settings))
    made.__doc__ = run.__doc__
    return made


def help_of_run(settings: Mapping[str, Any], run: Callable[[Any], None]) -> type[OnceCommand]:
    """Return the class of a command whose `--help`, beside a run, shows the flags of its task only."""

    class HelpOfRun(OnceCommand):
        """A command with the flags of all tasks."""

        help_is_of_run = True

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Parse the arguments, or print the help of the task of a run and exit."""
            folders = [Path(argument) for argument in args if Path(argument).is_dir()]
            if "--help" not in args or not folders:
                return super().parse_args(ctx, args)
            task = task_of_run(settings, folders[0])
            app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            app.command(cls=OnceCommand)(task_command({task: settings[task]}, run))
            app(args=["--help"], prog_name=ctx.command_path, standalone_mode=False)
            raise typer.Exit

    return HelpOfRun


def task_of_run(settings: Mapping[str, Any], folder: Path) -> str:
    """Return the task of a run; raise unless `settings` has it."""
    task = run_folder.task_of(run_folder.open_run(folder))
    if task not in settings:
        raise ValueError(f"{folder} is a run of the task {task!r}, expected {' or '.join(map(repr, settings))}")
    return task


def shared_flags(settings: Mapping[str, Any]) -> dict[str, list[Flag]]:
    """Group the flags of all tasks by panel; a flag of several tasks appears once, in a panel of its own.

    Such a flag must have the same field name and type in all tasks.
    """
    owners: dict[str, list[Flag]] = {}
    for task, group in settings.items():
        for flag in flags_of(task, group):
            owners.setdefault(flag.name, []).append(flag)
    panels: dict[str, list[Flag]] = {"Several tasks": []}
    for name, flags in owners.items():
        if len({(flag.field, flag.type) for flag in flags}) > 1:
            tasks = ", ".join(flag.section for flag in flags)
            raise TypeError(f"{name} has different fields or types in {tasks}; rename one of them")
        if len(flags) == 1:
            panels.setdefault(flags[0].section.capitalize(), []).append(flags[0])
        else:
            same = len({flag.help for flag in flags}) == 1
            text = flags[0].help if same else " ".join(f"{flag.section.capitalize()}: {flag.help}" for flag in flags)
            panels["Several tasks"].append(replace(flags[0], help=text))
    return panels


def task_settings(settings: Mapping[str, Any], folders: Sequence[Path], given: Mapping[Flag, Any]) -> Any:
    """Return the settings made of the flags for the task of the runs; raise for a flag of another task."""
    task = task_of_run(settings, folders[0])
    checkpoint = run_folder.open_run(folders[0])
    known = [flag.name for flag in flags_of(task, settings[task])]
    for flag in given:
        if flag.name not in known:
            raise ValueError(
                f"{folders[0]} is a run of the task {task!r}; it takes {', '.join(known)}, got {flag.name}"
            )
    values = {flag.field: value for flag, value in given.items()}
    return from_json(settings[task], json.dumps({**_reading_of(checkpoint, settings[task]), **values}), source=task)


def reading_notes(folder: Path, made: Any, given: Mapping[Flag, Any]) -> list[str]:
    """Return the settings of a run's data that the user did not give, and a warning for files of its training data."""
    checkpoint, names = run_folder.open_run(folder), {flag.name for flag in given}
    flags = {flag.field: flag.name for flag in flags_of("data", type(made))}
    remembered = {flags[field]: value for field, value in _reading_of(checkpoint, type(made)).items()}
    shown = [f"{name} {value}" for name, value in remembered.items() if name not in names]
    notes = [f"as in training: {' '.join(shown)}"] if shown else []
    return notes + [
        f"warning: {file} has the content of the training data of {folder}"
        for file in fingerprints.training_files(checkpoint, made)
    ]


def _reading_of(checkpoint: Path, settings: type) -> dict[str, Any]:
    """Return how a run reads its data, as far as it differs from the defaults; empty if no command has trained it."""
    if not (checkpoint / PLAN_FILE).exists():
        return {}
    data = json.loads(run_folder.read_text(checkpoint, PLAN_FILE)).get("data", {})
    default = {field.name: field.default for field in fields(settings)}
    return {
        name: value for name, value in reading_settings(data, settings).items() if value != default.get(name, value)
    }


def print_evaluation(metrics: Mapping[str, object]) -> None:
    """Evaluate a model on data of its task. Each line is a metric: its name, its value and how it was computed.

    Examples:

        regard evaluate runs/deen --source test.de --target test.en

        regard evaluate runs/shakespeare --text test.txt

        regard evaluate runs/news --documents test.txt --summaries test.summary

        regard evaluate runs/squad --data dev.json
    """
    for name, value in metrics.items():
        print(f"{name:12}{value}")


def print_scores(scores: Sequence[float]) -> None:
    """Print the log-probability of each example under a model, in nats, one per line.

    Examples:

        regard score runs/deen --source test.de --target test.en

        regard score runs/shakespeare --text lines.txt
    """
    for score in scores:
        print(f"{score:.4f}")


evaluate = task_command(EVALUATIONS, print_evaluation)
score = task_command(SCORINGS, print_scores)


def average(
    folders: Annotated[
        list[Path], typer.Argument(help="Folder of a run, or folders of its checkpoints.", metavar="RUN")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint, which can be used like a run.")],
    last: Annotated[int, typer.Option(help="Number of newest checkpoints of a run to average.")] = 5,
) -> None:
    """Average the weights of checkpoints, which often gives better results than the last checkpoint.

    Examples:

        regard average runs/deen --last 5 --out runs/deen-averaged

        regard average runs/deen/step-00009000 runs/deen/step-00010000 --out runs/deen-averaged

    Prints which checkpoints were averaged. The checkpoint of step 0 is never included.
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; expected a run or a checkpoint")
    print(average_checkpoints(folders, out, last=last))
