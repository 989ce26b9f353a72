"""The command line: a thin layer over `regard.tasks`, and the only room that knows all the others.

Exit codes: 0 success, 2 bad input or usage, 3 no usable checkpoint, 4 NaN or infinity in training, 5 disk, memory or
device, 130 and 143 interrupted. Every error is one line on standard error that begins with `error:`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from .. import __version__
from ..train import Failure
from ..train.failures import FULL_DISK, memory_errors
from ..train.progress import printable
from . import (
    answering,
    captioning,
    classification,
    demo,
    explain,
    language,
    look,
    runs,
    serve,
    summarization,
    train_command,
    translation,
)
from .flags import OnceCommand
from .terminal import is_main_process, print_status

UsageError: Any = typer.BadParameter.__bases__[0]  # typer has no public name for it


class TrainFirst(TyperGroup):
    """Lists the group `train` first; typer lists command groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, `train` first."""
        return sorted(super().list_commands(ctx), key=lambda name: name != "train")


app = typer.Typer(
    cls=TrainFirst,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
train = typer.Typer(no_args_is_help=True, help="Train a model. Each task has a command, listed by regard train --help.")
app.add_typer(train, name="train", rich_help_panel="Train")
check = typer.Typer(
    no_args_is_help=True, help="Print what a training run would read, learn and need, without training."
)
app.add_typer(check, name="check-data", rich_help_panel="Train")

TASKS: tuple[tuple[str, Any, Any], ...] = (
    ("translation", translation.TranslationPlan, translation.train),
    ("language", language.LanguagePlan, language.train),
    ("summarization", summarization.SummarizationPlan, summarization.train),
    ("answering", answering.AnsweringPlan, answering.train),
    ("classification", classification.ClassificationPlan, classification.train),
    ("captioning", captioning.CaptioningPlan, captioning.train),
)
for name, plan, run in TASKS:
    train_command.add_train_command(train, name, plan, run)
    train_command.add_check_command(check, name, plan, run)

app.command(rich_help_panel="Train", cls=OnceCommand)(demo.demo)
app.command(rich_help_panel="Train", cls=OnceCommand)(runs.average)
for use in (
    translation.translate,
    translation.align,
    language.generate,
    summarization.summarize,
    answering.answer,
    classification.classify,
    captioning.caption,
):
    app.command(rich_help_panel="Use", cls=OnceCommand)(use)
app.command(rich_help_panel="Use", cls=OnceCommand)(serve.serve)
app.command("evaluate", rich_help_panel="Use", cls=OnceCommand)(runs.evaluate)
app.command("score", rich_help_panel="Use", cls=OnceCommand)(runs.score)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(look.look)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(look.view)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(explain.explain)
app.command(rich_help_panel="Look inside", cls=OnceCommand, context_settings={"ignore_unknown_options": True})(
    explain.bench
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process."""
    try:
        with memory_errors("use a smaller batch, beam or model"), warnings.catch_warnings():
            warnings.showwarning = _print_warning
            code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        problem = error.format_message().replace(": Value error, ", ": ").removesuffix(".")
        _fail(f"{problem or 'expected a command'}; see --help", 2)
    except Failure as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output has closed it. Without dup2, Python would print an error when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        if error.errno in FULL_DISK:
            where = error.filename or "standard output"
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # closing the stream would fail once more
            _fail(f"{where} could not be written: {error.strerror}; make room on the disk, then try again", 5)
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except ValueError as error:
        _fail(str(error), 2)
    sys.exit(code or 0)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without its place in the code; of several processes only the first prints."""
    if is_main_process():
        print_status(f"warning: {message}")


def _version(asked: bool) -> None:
    if asked:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Attention in neural networks: train models, use them, and look inside.

    Example:

        regard train translation --source a.de --target a.en --out runs/deen && regard translate runs/deen < in.de

    New here? Run regard demo, which trains four small models in a few minutes and shows their attention.
    """


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    sys.exit(code)
