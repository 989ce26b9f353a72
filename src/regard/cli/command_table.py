"""The commands and their flags as data, so that help and bad flags are answered before PyTorch is imported.

`python -m regard.cli.command_table_writer` writes `command_table.json` from the commands. The command line first parses
its arguments by this table. If they are right and no call for help, it imports `commands.py`, which parses them again
and runs the command.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .flags import OnceCommand, PlainGroup

FILE = Path(__file__).with_name("command_table.json")
TYPES: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}
SETTINGS = ("help", "metavar", "rich_help_panel", "show_default", "min", "max", "exists")
RIGHT = object()  # the result of parsing arguments that a command can run with

Table = Mapping[str, Any]


@cache
def read_table() -> Table:
    """Return the table of all commands."""
    return json.loads(FILE.read_text("utf-8"))


class TableGroup(PlainGroup):
    """A group of commands that a table describes; the root of the command line if it is given no table."""

    def __init__(self, *, table: Table | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.table: Table = read_table() if table is None else table
        # typer suggests names from these keys.
        self.commands = dict.fromkeys(self.table)  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of this name, or None if there is none."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        if "commands" in entry:
            return TableGroup(
                table=entry["commands"],
                name=cmd_name,
                help=entry["help"],
                no_args_is_help=True,
                rich_markup_mode="rich",
                rich_help_panel=entry["panel"],
            )
        return TableCommand(cmd_name, entry)


class TableCommand(OnceCommand):
    """A command that parses its arguments and runs nothing."""

    def __init__(self, name: str, entry: Table) -> None:
        super().__init__(
            name,
            context_settings=dict(entry["context"]),
            help=entry["help"],
            rich_markup_mode="rich",
            rich_help_panel=entry["panel"],
        )
        self.entry = entry

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, made at the first call."""
        if not self.params:
            app = typer.Typer(add_completion=False)
            app.command()(_function(self.entry["parameters"]))
            self.params = typer.main.get_command(app).params
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; if the help of this command depends on a run and a folder is given, leave them alone."""
        if self.entry["of_run"] and "--help" in args and any(Path(argument).is_dir() for argument in args):
            return []
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Return that the arguments are right."""
        return RIGHT


def _function(parameters: Sequence[Table]) -> Any:
    """Return a function with these parameters, from which typer makes a command."""

    def accept(**given: Any) -> Any:
        return RIGHT

    made = [_parameter(entry) for entry in parameters]
    accept.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    accept.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return accept


def _parameter(entry: Table) -> inspect.Parameter:
    kind: Any = Literal[tuple(entry["choices"])] if "choices" in entry else TYPES[entry["type"]]
    kind = list[kind] if entry.get("many") else kind
    kind = kind | None if entry.get("optional") else kind
    make = typer.Argument if entry.get("argument") else typer.Option
    settings = {name: entry[name] for name in SETTINGS if name in entry}
    return inspect.Parameter(
        entry["name"],
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, make(*entry.get("declarations", ()), **settings)],
        default=entry.get("default", inspect.Parameter.empty),
    )
