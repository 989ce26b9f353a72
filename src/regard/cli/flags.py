"""Flags from dataclasses: a field `dim: Annotated[int, "the width"] = 256` is the option `--dim`, and its help.

So a group of settings is written once: it is what Python takes, what a config file may say, and what `--help` shows.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

NONE = type(None)


@dataclass(frozen=True)
class Flag:
    """The option of one field of one section: `Annotated[type, help]`, or `Annotated[type, help, "--name"]`."""

    section: str
    field: str
    name: str
    type: Any
    help: str

    @property
    def key(self) -> str:
        """What Python calls it where options of several sections meet."""
        return f"{self.section}_{self.field}"

    def parameter(self, panel: str) -> inspect.Parameter:
        """The parameter from which typer makes the option; None where it is not given."""
        name = f"{self.name}/--no-{self.name[2:]}" if self.type is bool else self.name
        option = typer.Option(name, help=self.help, rich_help_panel=panel, show_default=False)
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[self.type | None, option], default=None
        )


def flags_of(section: str, group: type, *, prefix: str = "") -> list[Flag]:
    """The flags of a group of settings."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in dataclasses.fields(group):
        kind, said, *named = get_args(hints[field.name])
        shown = "" if field.default is None else f" (default {_format_default(field.default)})"
        name = named[0] if named else "--" + field.name.replace("_", "-")
        name = f"--{prefix}{name[2:]}"
        found.append(Flag(section, field.name, name, _without_none(kind), said + shown))
    return found


def command(run: Callable[..., None], fixed: Mapping[str, Any], flags: Mapping[str, list[Flag]]) -> Callable[..., None]:
    """A function for typer that calls `run(**fixed options, given={flag: value})` with the flags that were given.

    `fixed` are options by name, each an annotation or a pair of annotation and default; `flags` come by panel.
    """
    by_key = {flag.key: flag for some in flags.values() for flag in some}

    def called(**options: Any) -> None:
        given = {flag: options.pop(key) for key, flag in by_key.items()}
        try:
            run(**options, given={flag: value for flag, value in given.items() if value is not None})
        except ValueError as error:
            raise ValueError(with_flag_names(str(error), by_key.values())) from error

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option[0], default=option[1])
        if isinstance(option, tuple)
        else inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option)
        for name, option in fixed.items()
    ]
    parameters += [flag.parameter(panel) for panel, some in flags.items() for flag in some]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def with_flag_names(message: str, flags: Iterable[Flag]) -> str:
    """What is said to Python, said to the command line: `kind='rnn'` as `--model rnn`, `segment=` as `--segment`.

    A field that the message begins with is meant, too: `kv_heads must be 1 or more`.
    """
    by_field: dict[str, list[Flag]] = {}
    for flag in flags:
        by_field.setdefault(flag.field, []).append(flag)
    for field, several in by_field.items():
        # A name that sections share is of the one the message names.
        meant = several if len(several) == 1 else [flag for flag in several if f"[{flag.section}]: " in message]
        # Alone, as a word of the sentence: Alibi(heads=8) and a path are left as they are.
        written = rf"(?<!\S){field}=('?)([\w.+-]*)\1(?=([^\s;,:.)])?)"
        for flag in meant:
            message = re.sub(rf"^(\[\w+\]: )?{field}(?= must )", rf"\g<1>{flag.name}", message)
            message = re.sub(written, partial(_as_typed, flag), message)
    return message


def _as_typed(flag: Flag, found: re.Match[str]) -> str:
    _, value, follows = found.groups()
    if flag.type is bool and value in ("True", "False"):
        return flag.name if value == "True" else f"--no-{flag.name[2:]}"
    return f"{flag.name} {value}" if value or follows else flag.name


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        [kind] = [member for member in get_args(kind) if member is not NONE]
    return kind


def _format_default(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
