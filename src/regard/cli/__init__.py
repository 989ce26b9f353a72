"""The command line: a thin layer over `regard.tasks`, and the only room that knows all the others.

Exit codes: 0 success, 1 findings of `regard check`, 2 bad input or usage, 3 no usable checkpoint, 4 NaN or infinity in
training, 5 disk, memory or device, 130 and 143 interrupted. Every error is one line on standard error that begins with
`error:`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from .. import __version__
from ..printable import printable
from .command_table import RIGHT, TableGroup
from .terminal import is_main_process, print_status

UsageError: Any = typer.BadParameter.__bases__[0]  # typer has no public name for it

app = typer.Typer(
    cls=TableGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _parse(given)
        if code is RIGHT:
            code = _run(given)
        sys.stdout.flush()
    except UsageError as error:
        problem = error.format_message().replace(": Value error, ", ": ").removesuffix(".")
        _fail(f"{problem or 'expected a command'}; see --help", 2)
    except BrokenPipeError:
        # The reader of our output has closed it. Without dup2, Python would print an error when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        from ..train.failures import FULL_DISK

        if error.errno in FULL_DISK:
            where = error.filename or "standard output"
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # closing the stream would fail once more
            _fail(f"{where} could not be written: {error.strerror}; make room on the disk, then try again", 5)
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except ValueError as error:
        _fail(str(error), 2)
    sys.exit(code or 0)


def _parse(arguments: list[str]) -> Any:
    """Answer a call for help or raise for bad arguments by the table; return `RIGHT` if a command can run."""
    command: Any = TableGroup()
    path, rest = "regard", arguments
    while rest and isinstance(command, TableGroup) and (named := command.get_command(None, rest[0])):
        command, path, rest = named, f"{path} {rest[0]}", rest[1:]
    return (app if path == "regard" else command)(args=rest, prog_name=path, standalone_mode=False)


def _run(arguments: list[str]) -> Any:
    """Run the command that the arguments name; it imports PyTorch."""
    from ..train.failures import Failure, memory_errors
    from . import commands

    try:
        with memory_errors("use a smaller batch, beam or model"), warnings.catch_warnings():
            warnings.showwarning = _print_warning
            return commands.app(args=arguments, standalone_mode=False, prog_name="regard")
    except Failure as error:
        _fail(str(error), error.exit_code)


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

    Examples:

        regard look --sample

        regard train translation --source a.de --target a.en --out runs/deen

    New here? Run regard demo, which trains four small models in a few minutes and shows their attention.
    """


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    sys.exit(code)
