"""Flags from dataclasses: the field `dim: Annotated[int, "Width."] = 256` becomes the option `--dim` with that help.

Settings are therefore declared once, for Python, for config files and for `--help`.
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
        """The name of the parameter, unique among the options of all sections."""
        return f"{self.section}_{self.field}"

    def parameter(self, panel: str) -> inspect.Parameter:
        """The parameter from which typer makes the option; its value is None if the user leaves it out."""
        name = f"{self.name}/--no-{self.name[2:]}" if self.type is bool else self.name
        option = typer.Option(name, help=self.help, rich_help_panel=panel, show_default=False)
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[self.type | None, option], default=None
        )


def flags_of(section: str, group: type, *, prefix: str = "") -> list[Flag]:
    """The flags of a group of settings."""
    hints = get_type_hints(group, include_extras=True)
    flags = []
    for field in dataclasses.fields(group):
        kind, text, *names = get_args(hints[field.name])
        default = "" if field.default is None else f" Default: {_format_default(field.default)}."
        name = names[0] if names else "--" + field.name.replace("_", "-")
        name = f"--{prefix}{name[2:]}"
        flags.append(Flag(section, field.name, name, _without_none(kind), text + default))
    return flags


def command(run: Callable[..., None], fixed: Mapping[str, Any], flags: Mapping[str, list[Flag]]) -> Callable[..., None]:
    """Return a function for typer that calls `run(**fixed, given={flag: value})` with the flags that the user gave.

    `fixed` are options by name, each an annotation or a pair of annotation and default; `flags` are grouped by panel.
    """
    by_key = {flag.key: flag for group in flags.values() for flag in group}

    def run_with_flags(**options: Any) -> None:
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
    parameters += [flag.parameter(panel) for panel, group in flags.items() for flag in group]
    run_with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run_with_flags


def with_flag_names(message: str, flags: Iterable[Flag]) -> str:
    """Write the fields in an error message as flags: `kind='rnn'` as `--model rnn`, `segment=` as `--segment`.

    A field at the beginning of the message is replaced too: `kv_heads must be 1 or more`.
    """
    by_field: dict[str, list[Flag]] = {}
    for flag in flags:
        by_field.setdefault(flag.field, []).append(flag)
    for field, several in by_field.items():
        # If several sections have this field, the message names the section.
        matching = several if len(several) == 1 else [flag for flag in several if f"[{flag.section}]: " in message]
        # Only whole words: Alibi(heads=8) and paths stay as they are.
        assignment = rf"(?<!\S){field}=('?)([\w.+-]*)\1(?=([^\s;,:.)])?)"
        for flag in matching:
            message = re.sub(rf"^(\[\w+\]: )?{field}(?= must )", rf"\g<1>{flag.name}", message)
            message = re.sub(assignment, partial(_as_typed, flag), message)
    return message


def _as_typed(flag: Flag, match: re.Match[str]) -> str:
    _, value, follows = match.groups()
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
