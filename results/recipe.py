"""Recipe: the commands that train one model and measure it, read from a TOML file."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command: one of `regard`, or a module of this package, with files for its standard streams where it has any."""

    command: str
    input: str | None = None
    output: str | None = None

    def arguments(self, places: Mapping[str, Any]) -> list[str]:
        """The words of the command, names in braces filled in.

        >>> Step(command="evaluate {run} --text a.txt").arguments({"run": "runs/a"})[1:]
        ['-m', 'regard', 'evaluate', 'runs/a', '--text', 'a.txt']
        """
        words = [word.format(**places) for word in shlex.split(self.command)]
        module = [] if words[0].startswith("results.") else ["regard"]
        return [sys.executable, "-m", *module, *words]


def with_flags(command: str, flags: str) -> str:
    """Return a command with more flags; these replace the flags of the same name that it has.

    >>> with_flags("train language --steps 900 --graphs --dim 64", "--steps 2 --no-graphs")
    'train language --dim 64 --steps 2 --no-graphs'
    """
    given = {word.replace("--no-", "--") for word in flags.split() if word.startswith("--")}
    kept, skipping = [], False
    for word in command.split():
        if word.startswith("--"):
            skipping = word.replace("--no-", "--") in given
        if not skipping:
            kept.append(word)
    return " ".join([*kept, flags])


@dataclass(frozen=True, kw_only=True)
class Measure(Step):
    """A command that prints `metric value`, what the number is called, the bar it must reach, and what others have."""

    metric: str
    name: str
    bar: float | None = None
    better: str = "higher"
    published: str = ""

    def reached(self, value: float) -> bool | None:
        """Whether the value reaches the bar, None where there is none."""
        if self.bar is None:
            return None
        return value >= self.bar if self.better == "higher" else value <= self.bar


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, on which folders of data, with which seeds; what to do then; and what to measure.

    `needs` names recipes that must have run before, whose folders are `{runs}/NAME-SEED`. `smoke` are flags that make
    it a matter of seconds, for data of a few lines.
    """

    name: str
    task: str
    data: str
    folders: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    needs: tuple[str, ...] = ()
    train: str | None = None
    smoke: str = ""
    then: tuple[Step, ...] = ()
    measure: tuple[Measure, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """The recipe in a file; a key it does not know is an error."""
        found = tomllib.loads(path.read_text(encoding="utf8"))
        if unknown := sorted(found.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"{path}: unknown key {unknown[0]!r}")
        values: dict[str, Any] = {key: tuple(some) if isinstance(some, list) else some for key, some in found.items()}
        values["then"] = tuple(Step(**step) for step in values.get("then", ()))
        values["measure"] = tuple(Measure(**one) for one in values.get("measure", ()))
        return cls(name=path.stem, **values)


def recipes(folder: Path = FOLDER) -> dict[str, Recipe]:
    """Every recipe by name."""
    return {path.stem: Recipe.load(path) for path in sorted(folder.glob("*.toml"))}
