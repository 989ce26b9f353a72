"""`regard train TASK`: settings from a resumed run, a config file and flags, in this order, make the plan of a run.

A plan is a frozen dataclass whose fields are groups of settings: `data`, `vocabulary`, `model` and so on, the sections
of a config file. Each checkpoint holds it as `plan.json`, which is itself a valid config file.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_type_hints

import typer

from ..checks import suggest_name
from ..tasks import run_folder
from ..train import Outcome
from ..train.dataclass_json import from_json, to_json
from . import fingerprints
from .averaging import average_last
from .device import Device
from .flags import Flag, command, flags_of
from .terminal import is_main_process, print_status
from .training_flags import Training


class TrainingPlan(Protocol):
    """A frozen dataclass of sections, one of which is `training`."""

    @property
    def training(self) -> Training: ...


P = TypeVar("P", bound=TrainingPlan)

PLAN_FILE = "plan.json"
CHANGEABLE_SECTIONS = ("data", "valid", "batching", "training")  # may change when a run is resumed
MAX_CONFIG_BYTES = 2**20
PANELS = {"data": "Training data", "valid": "Validation data"}

Values = Mapping[str, Mapping[str, Any]]
Out = Annotated[
    Path,
    typer.Option(
        "--out", help="Folder of the run; must be new or empty unless --resume is given.", rich_help_panel="Run"
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="TOML or JSON file with these settings; flags override it.", rich_help_panel="Run"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.", rich_help_panel="Run")]


def add_train_command(
    app: typer.Typer, name: str, plan: type[P], run: Callable[[P, Path, bool, str | None, Mapping[str, str]], Outcome]
) -> None:
    """Add the command of a task to `app`; it makes a plan from the flags and calls `run`.

    `run(plan, out, resume, device, files)` trains and stores `files` in each checkpoint; its docstring is the help.
    """

    def train_from_flags(
        out: Path, config: Path | None, resume: bool, device: str | None, given: Mapping[Flag, Any]
    ) -> None:
        checkpoint = _checkpoint_to_resume(out, task=name, resume=resume)
        saved = {} if checkpoint is None else _saved_plan(checkpoint, plan)
        made = make_plan(plan, saved, {} if config is None else read_config(config, plan), given, source=config)
        prints = fingerprints.fingerprints(made)
        if checkpoint is not None:
            fingerprints.check_matches(
                checkpoint, made, prints, say=print_status if is_main_process() else lambda line: None
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
    """The class of settings of each section of a plan."""
    hints = get_type_hints(plan).items()
    return {name: next(filter(dataclasses.is_dataclass, (hint, *get_args(hint)))) for name, hint in hints}


def flags_by_panel(plan: type) -> dict[str, list[Flag]]:
    """The flags of each section, by panel; the flags of the section `valid` begin with `--valid-`."""
    return {
        PANELS.get(section, section.capitalize()): flags_of(
            section, group, prefix="valid-" if section == "valid" else ""
        )
        for section, group in sections(plan).items()
    }


def make_plan(plan: type[P], saved: Values, config: Values, given: Mapping[Flag, Any], *, source: Path | None) -> P:
    """Merge the settings of a saved run, a config file and flags into a plan; later ones override earlier ones."""
    values: dict[str, dict[str, Any]] = {}
    flagged = [(flag.section, {flag.field: value}) for flag, value in given.items()]
    for section, settings in (*saved.items(), *config.items(), *flagged):
        values.setdefault(section, {}).update(settings)
    for section, before in saved.items():
        for name, value in before.items():
            if section not in CHANGEABLE_SECTIONS and values[section][name] != value:
                raise ValueError(
                    f"a resumed run cannot change its {section}: {name} was {value!r}, got {values[section][name]!r}; "
                    "give --out a new folder to train another model"
                )
    made: dict[str, Any] = {}
    for section, group in sections(plan).items():
        where = f"{source} [{section}]" if section in config else f"[{section}]"
        settings = values.get(section, {})
        is_absent = section == "valid" and all(value is None for value in settings.values())
        made[section] = None if is_absent else from_json(group, json.dumps(settings, default=str), source=where)
    return plan(**made)


def plan_to_json(plan: Any) -> dict[str, Any]:
    """Return a plan as the content of a config file."""
    groups = {section: getattr(plan, section) for section in sections(type(plan))}
    return {section: to_json(group) for section, group in groups.items() if group is not None}


def read_config(path: Path, plan: type) -> Values:
    """Read the sections of a config file; raise for a section that the plan does not have."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes, too large for a config file")
        text = path.read_text(encoding="utf-8-sig")  # some editors on Windows save a byte order mark
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not valid UTF-8; expected a config file") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"{path} is not valid {kind}: {error}") from None
    return _check_sections(config, plan, source=str(path))


def _check_sections(config: Any, plan: type, *, source: str) -> Values:
    """Raise unless each section is known and holds keys and values; `make_plan` checks the keys."""
    groups = sections(plan)
    if not isinstance(config, dict):
        raise ValueError(f"{source} must be an object of sections, {', '.join(groups)}, got {type(config).__name__}")
    for section, settings in config.items():
        if section not in groups:
            raise ValueError(f"{source}: unknown section {section!r}; {suggest_name(section, groups)}")
        if not isinstance(settings, dict):
            raise ValueError(f"{source}: section {section!r} must hold keys and values, got {settings!r}")
    return config


def _checkpoint_to_resume(out: Path, *, task: str, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; raise for a run of another task or without --resume."""
    checkpoint = run_folder.checkpoint_to_resume(out, resume=resume, say=lambda line: None)
    if checkpoint is not None and (other := run_folder.task_of(checkpoint)) != task:
        raise ValueError(f"{out} holds a run of the task {other!r}, not {task!r}; name another folder")
    return checkpoint


def _saved_plan(checkpoint: Path, plan: type) -> Values:
    """Return the plan that a checkpoint was trained with."""
    return _check_sections(
        json.loads(run_folder.read_text(checkpoint, PLAN_FILE)), plan, source=str(checkpoint / PLAN_FILE)
    )


def _json_text(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
