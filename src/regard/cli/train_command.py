"""Plans: all that a training command is told, in sections, by a config file, by the run it resumes, and by flags.

A plan is a frozen dataclass whose fields are groups of settings: `data`, `vocabulary`, `model` and so on, the sections
of a config file. It goes into each checkpoint as `plan.json`, which is itself a config file.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_type_hints

import typer

from ..tasks import run_folder
from ..train import Outcome
from ..train.dataclass_json import from_json, to_json, unknown
from . import fingerprints
from .averaging import average_last
from .device import Device
from .flags import Flag, command, flags_of
from .terminal import is_main_process, print_status
from .training_flags import Training


class TrainingPlan(Protocol):
    """A frozen dataclass of sections, the one on training among them."""

    @property
    def training(self) -> Training: ...


P = TypeVar("P", bound=TrainingPlan)

PLAN_FILE = "plan.json"
CHANGEABLE_SECTIONS = (
    "data",
    "valid",
    "batching",
    "training",
)  # what a resumed run may be told anew, its data by other names
MAX_CONFIG_BYTES = 2**20

Values = Mapping[str, Mapping[str, Any]]
Out = Annotated[Path, typer.Option("--out", help="the folder of the run, a new one", rich_help_panel="Run")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="a TOML or JSON file of these settings; flags override it", rich_help_panel="Run"),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --out", rich_help_panel="Run")]


def add_train_command(
    app: typer.Typer, name: str, plan: type[P], run: Callable[[P, Path, bool, str | None, Mapping[str, str]], Outcome]
) -> None:
    """Give `app` the command of a task, which makes a plan of its flags and has it run.

    `run(plan, out, resume, device, files)` trains and keeps `files` in each checkpoint; its docstring is the help.
    """

    def train_from_flags(
        out: Path, config: Path | None, resume: bool, device: str | None, given: Mapping[Flag, Any]
    ) -> None:
        begun = _checkpoint_to_resume(out, task=name, resume=resume)
        saved = {} if begun is None else _saved_plan(begun, plan)
        made = make_plan(plan, saved, {} if config is None else read_config(config, plan), given, source=config)
        prints = fingerprints.fingerprints(made)
        if begun is not None:
            fingerprints.check_matches(
                begun, made, prints, say=print_status if is_main_process() else lambda line: None
            )
        outcome = run(
            made,
            out,
            resume,
            device,
            {PLAN_FILE: _json_text(plan_to_json(made)), fingerprints.FILE: _json_text(prints)},
        )
        if is_main_process():
            print(outcome.best if made.training.average is None else average_last(out, last=made.training.average))

    options = {"out": Out, "config": (Config, None), "resume": (Resume, False), "device": (Device, None)}
    app.command(name, help=run.__doc__)(command(train_from_flags, options, flags_by_panel(plan)))


def sections(plan: type) -> dict[str, Any]:
    """The group of settings in each section of a plan."""
    hints = get_type_hints(plan).items()
    return {name: next(filter(dataclasses.is_dataclass, (hint, *get_args(hint)))) for name, hint in hints}


def flags_by_panel(plan: type) -> dict[str, list[Flag]]:
    """The flags of each section, by panel; those of the section `valid` begin with `--valid-`."""
    return {
        section.capitalize(): flags_of(section, group, prefix="valid-" if section == "valid" else "")
        for section, group in sections(plan).items()
    }


def make_plan(plan: type[P], saved: Values, told: Values, given: Mapping[Flag, Any], *, source: Path | None) -> P:
    """The plan of what a run has saved, overridden by what a config file tells, overridden by the flags given."""
    values: dict[str, dict[str, Any]] = {}
    flagged = [(flag.section, {flag.field: value}) for flag, value in given.items()]
    for section, some in (*saved.items(), *told.items(), *flagged):
        values.setdefault(section, {}).update(some)
    for section, before in saved.items():
        for name, value in before.items():
            if section not in CHANGEABLE_SECTIONS and values[section][name] != value:
                raise ValueError(
                    f"a resumed run keeps its {section}: {name} was {value!r}, got {values[section][name]!r}; "
                    "name another folder to train anew"
                )
    made: dict[str, Any] = {}
    for section, group in sections(plan).items():
        where = f"{source} [{section}]" if section in told else f"[{section}]"
        some = values.get(section, {})
        absent = section == "valid" and all(value is None for value in some.values())
        made[section] = None if absent else from_json(group, json.dumps(some, default=str), source=where)
    return plan(**made)


def plan_to_json(plan: Any) -> dict[str, Any]:
    """A plan as the content of a config file."""
    groups = {section: getattr(plan, section) for section in sections(type(plan))}
    return {section: to_json(group) for section, group in groups.items() if group is not None}


def read_config(path: Path, plan: type) -> Values:
    """The sections of a config file, each name among those the plan knows."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes; expected a config file")
        text = path.read_text(encoding="utf-8-sig")  # as some editors on Windows save it
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a config file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not valid UTF-8; expected a config file") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"{path} is not {kind}: {error}") from None
    return _checked(found, plan, source=str(path))


def _checked(found: Any, plan: type, *, source: str) -> Values:
    groups = sections(plan)
    if not isinstance(found, dict):
        raise ValueError(f"{source} must be an object of sections, {', '.join(groups)}, got {type(found).__name__}")
    for section, some in found.items():
        if section not in groups:
            raise ValueError(f"{source}: unknown section {section!r}; {unknown(section, groups)}")
        if not isinstance(some, dict):
            raise ValueError(f"{source}: section {section!r} must hold keys and values, got {some!r}")
        known = [field.name for field in dataclasses.fields(groups[section])]
        for name in some:
            if name not in known:
                raise ValueError(f"{source} [{section}]: unknown key {name!r}; {unknown(name, known)}")
    return found


def _checkpoint_to_resume(out: Path, *, task: str, resume: bool) -> Path | None:
    """The checkpoint of the run to resume, None where there is none yet; refuses a run that is not to be resumed."""
    checkpoint = run_folder.checkpoint_to_resume(out, resume=resume, say=lambda line: None)
    if checkpoint is not None and (other := run_folder.task_of(checkpoint)) != task:
        raise ValueError(f"{out} holds a run of the task {other!r}, got {task!r}; name another folder")
    return checkpoint


def _saved_plan(checkpoint: Path, plan: type) -> Values:
    """The plan that a checkpoint was made by."""
    return _checked(json.loads(run_folder.read_text(checkpoint, PLAN_FILE)), plan, source=str(checkpoint / PLAN_FILE))


def _json_text(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
