"""Write `command_table.json` from the commands: `python -m regard.cli.command_table_writer`."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from .command_table import FILE, SETTINGS, Table


def describe(app: Any) -> Table:
    """Return the table of a typer app: for each command its help and its parameters."""
    groups = {group.name: group for group in app.registered_groups}
    commands = {command.name or command.callback.__name__: command for command in app.registered_commands}
    table: dict[str, Any] = {}
    for name in [*groups, *commands]:
        if name in groups:
            inner = groups[name].typer_instance
            entry = {"help": inner.info.help, "commands": describe(inner)}
            table[name] = {**entry, "panel": groups[name].rich_help_panel}
        else:
            table[name] = _describe_command(commands[name])
    return table


def _describe_command(command: Any) -> Table:
    function, panel = command.callback, command.rich_help_panel
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {
        "help": inspect.cleandoc(command.help or function.__doc__),
        "panel": panel if isinstance(panel, str) else None,
        "context": command.context_settings or {},
        "of_run": getattr(command.cls, "help_is_of_run", False),
        "parameters": [_describe_parameter(parameter, hints[parameter.name]) for parameter in parameters],
    }


def _describe_parameter(parameter: inspect.Parameter, hint: Any) -> Table:
    kind, info = get_args(hint)[:2]
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    [single] = [member for member in members if member is not type(None)]
    entry: dict[str, Any] = {"name": parameter.name}
    if isinstance(info, typer.models.ArgumentInfo):
        entry["argument"] = True
    if get_origin(single) is list:
        entry["many"], [single] = True, get_args(single)
    if len(members) > 1:
        entry["optional"] = True
    if get_origin(single) is Literal:
        entry["choices"] = list(get_args(single))
    else:
        entry["type"] = single.__name__
    if parameter.default is not inspect.Parameter.empty:
        default = parameter.default
        entry["default"] = str(default) if isinstance(default, Path) else default
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    if names:
        entry["declarations"] = names
    plain = type(info)()
    entry |= {name: value for name in SETTINGS if (value := getattr(info, name)) != getattr(plain, name)}
    return entry


def as_text(table: Table) -> str:
    """Return the content of the file of a table, with each parameter on a line of its own."""
    return _as_lines(table, "") + "\n"


def _as_lines(value: Any, indent: str) -> str:
    if isinstance(value, Mapping) and value and "name" not in value:
        rows = [f"{json.dumps(key)}: {_as_lines(one, indent + ' ')}" for key, one in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        rows = [_as_lines(one, indent + " ") for one in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    first, last = "[]" if isinstance(value, list) else "{}"
    return f"{first}\n{indent} " + f",\n{indent} ".join(rows) + f"\n{indent}{last}"


def write_table() -> None:
    """Write the table of the commands into the package."""
    from .commands import app

    FILE.write_text(as_text(describe(app)), encoding="utf-8")


if __name__ == "__main__":
    write_table()
