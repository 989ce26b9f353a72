"""Flags from dataclasses: the field `dim: Annotated[int, "Width."] = 256` becomes the option `--dim` with that help.

Settings are therefore declared once, for Python, for config files and for `--help`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

NONE = type(None)


METAVARS: Mapping[Any, str] = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}


def _plain_words(parameter: Any) -> Any:
    """Show a parameter in words instead of Python's types: `N` for a number, nothing for a switch."""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: None
    elif parameter.metavar is None:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        else:
            kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
            kind = get_args(kind)[0] if get_origin(kind) is list else kind
            choices = get_args(kind) if get_origin(kind) is Literal else None
            parameter.metavar = "|".join(choices) if choices else METAVARS.get(kind)
    return parameter


class PlainHelp(TyperCommand):
    """A command whose help names values in words: `N`, `PATH`, `RUN...`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, `--help` among them."""
        return [_plain_words(parameter) for parameter in super().get_params(ctx)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The arguments in the line of usage, without the braces that typer puts around names."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands with the help of `PlainHelp`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, `--help` among them."""
        return [_plain_words(parameter) for parameter in super().get_params(ctx)]


class OnceCommand(PlainHelp):
    """A command that refuses an option given twice, since the last value would win, unless it takes several."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command line."""
        given = list(self.make_parser(ctx).parse_args(list(args))[2])
        for parameter, count in Counter(given).items():
            if count > 1 and parameter.param_type_name == "option" and not parameter.multiple:
                raise ValueError(f"{parameter.opts[0]} was given {count} times, and takes one value; give it once")
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class Flag:
    """The option of one field of one section: `Annotated[type, help]`, or `Annotated[type, help, "--name"]`."""

    section: str
    field: str
    name: str
    type: Any
    help: str
    many: bool = False

    @property
    def key(self) -> str:
        """The name of the parameter, unique among the options of all sections."""
        return f"{self.section}_{self.field}"

    def parameter(self, panel: str) -> inspect.Parameter:
        """The parameter from which typer makes the option; its value is None if the user leaves it out."""
        name = f"{self.name}/--no-{self.name[2:]}" if self.type is bool else self.name
        choices = get_args(self.type) if self.many and get_origin(self.type) is Literal else ()
        shown = "|".join(choices) or None
        option = typer.Option(name, help=self.help, rich_help_panel=panel, show_default=False, metavar=shown)
        # typer has no lists of choices; the group of settings checks them.
        kind: Any = list[str] if choices else list[self.type] if self.many else self.type  # type: ignore[name-defined]
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind | None, option], default=None
        )

    def value(self, given: Any) -> Any:
        """Return what the user gave: of a flag that may be repeated, one value or a tuple; None if it was left out."""
        if not self.many:
            return given
        return None if not given else given[0] if len(given) == 1 else tuple(given)


def flags_of(section: str, group: type, *, prefix: str = "") -> list[Flag]:
    """The flags of a group of settings."""
    hints = get_type_hints(group, include_extras=True)
    flags = []
    for field in dataclasses.fields(group):
        kind, text, *names = get_args(hints[field.name])
        default = "" if field.default is None else f" Default: {_format_default(field.default)}."
        name = names[0] if names else "--" + field.name.replace("_", "-")
        name = f"--{prefix}{name[2:]}"
        single, many = _single_type(kind)
        flags.append(Flag(section, field.name, name, single, text + default, many))
    return flags


def command(run: Callable[..., None], fixed: Mapping[str, Any], flags: Mapping[str, list[Flag]]) -> Callable[..., None]:
    """Return a function for typer that calls `run(**fixed, given={flag: value})` with the flags that the user gave.

    `fixed` are options by name, each an annotation or a pair of annotation and default; `flags` are grouped by panel.
    """
    by_key = {flag.key: flag for group in flags.values() for flag in group}

    def run_with_flags(**options: Any) -> None:
        given = {flag: flag.value(options.pop(key)) for key, flag in by_key.items()}
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


def _single_type(kind: Any) -> tuple[Any, bool]:
    """Return the type of one value, without None, and whether there may be several: `str | tuple[str, ...]`."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    several = [member for member in members if get_origin(member) is tuple]
    [single] = [member for member in members if member is not NONE and member not in several]
    return single, bool(several)


def _format_default(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
