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
from ..tasks.dry_run import dry_run
from ..train import Outcome
from ..train.dataclass_json import from_json, to_json
from . import fine_tuning_flags, fingerprints
from .averaging import average_last
from .device import Device
from .flags import Flag, OnceCommand, command, flags_of
from .run_view import PLAN_FILE, write_plot
from .terminal import is_main_process, print_status
from .training_flags import Training


class TrainingPlan(Protocol):
    """A frozen dataclass of sections; it has the section `training`."""

    @property
    def training(self) -> Training: ...


P = TypeVar("P", bound=TrainingPlan)

CHANGEABLE_SECTIONS = ("data", "valid", "batching", "training")  # may change when a run is resumed
MAX_CONFIG_BYTES = 2**20
# Settings that earlier versions wrote into the plan of every task; null says that they had no effect.
ONCE_OF_ALL_TASKS = ("forcing", "forcing_k")
PANELS = {"data": "Training data", "valid": "Validation data", "finetuning": "Fine-tuning"}

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
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would be read, learned and needed, and write nothing.", rich_help_panel="Run"
    ),
]
Plot = Annotated[
    bool, typer.Option("--plot", help="At the end, draw the curves into curves.png in --out.", rich_help_panel="Run")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.", rich_help_panel="Run")]


def add_train_command(
    app: typer.Typer, name: str, plan: type[P], run: Callable[[P, Path, bool, str | None, Mapping[str, str]], Outcome]
) -> None:
    """Add the command of a task to `app`; it makes a plan from the flags and calls `run`.

    `run(plan, out, resume, device, files)` trains and stores `files` in each checkpoint; its docstring is the help.
    """

    def train_from_flags(
        out: Path,
        config: Path | None,
        resume: bool,
        dry: bool,
        plot: bool,
        device: str | None,
        given: Mapping[Flag, Any],
    ) -> None:
        checkpoint = _checkpoint_to_resume(out, task=name, resume=resume)
        settings = {} if config is None else read_config(config, plan)
        saved = _base_plan(name, settings, given) if checkpoint is None else _saved_plan(checkpoint, plan)
        made = make_plan(plan, saved, settings, given, source=config)
        # The plan is saved with this number, so that a resumed run with more steps keeps its warm-up.
        training = dataclasses.replace(made.training, warmup=made.training.warmup_steps)
        made = dataclasses.replace(made, training=training)  # type: ignore[type-var]
        if plot and "csv" not in made.training.loggers:
            raise ValueError("--plot draws the CSV tables of the log, and --log leaves them out; add --log csv")
        prints = fingerprints.fingerprints(made)
        if checkpoint is not None:
            fingerprints.check_matches(
                checkpoint, made, prints, say=print_status if is_main_process() else lambda line: None
            )
        if dry:
            _print_dry_run(lambda: run(made, out, resume, device, {}))
            return
        outcome = run(
            made,
            out,
            resume,
            device,
            {PLAN_FILE: _json_text(plan_to_json(made)), fingerprints.FILE: _json_text(prints)},
        )
        if is_main_process():
            if plot:
                print_status(f"curves: {write_plot(out)}")
            print(outcome.best if made.training.average is None else average_last(out, last=made.training.average))

    options = {
        "out": Out,
        "config": (Config, None),
        "resume": (Resume, False),
        "dry": (DryRun, False),
        "plot": (Plot, False),
        "device": (Device, None),
    }
    app.command(name, help=run.__doc__, cls=OnceCommand)(command(train_from_flags, options, flags_by_panel(plan)))


def add_check_command(
    app: typer.Typer, name: str, plan: type[P], run: Callable[[P, Path, bool, str | None, Mapping[str, str]], Outcome]
) -> None:
    """Add the command that prints what `run` would read, learn and need, from the flags of training."""

    def check_from_flags(config: Path | None, device: str | None, given: Mapping[Flag, Any]) -> None:
        settings = {} if config is None else read_config(config, plan)
        made = make_plan(plan, _base_plan(name, settings, given), settings, given, source=config)
        _print_dry_run(lambda: run(made, Path("nowhere"), False, device, {}))

    text = (
        f"Print what regard train {name} would read, learn and need; write nothing.\n\nExample:\n\n"
        f"    regard check-data {name} --config plan.toml\n\nThe flags are those of regard train {name}."
    )
    options = {"config": (Config, None), "device": (Device, None)}
    app.command(name, help=text, cls=OnceCommand)(command(check_from_flags, options, flags_by_panel(plan)))


def _print_dry_run(run: Callable[[], object]) -> None:
    """Print the lines of a dry run."""
    with dry_run() as lines:
        run()
    if is_main_process():
        print(*lines, "nothing was written", sep="\n")


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
                begun = "resumed" if "training" in saved else "fine-tuned"
                hint = "give --out a new folder" if "training" in saved else "leave out --from"
                raise ValueError(
                    f"a {begun} run cannot change its {section}: {name} was {value!r}, got {values[section][name]!r}; "
                    f"{hint} to train another model"
                )
    if any(value is not None for value in values.get("valid", {}).values()):
        values["valid"] = {**reading_settings(values.get("data", {}), sections(plan)["data"]), **values["valid"]}
    made: dict[str, Any] = {}
    for section, group in sections(plan).items():
        where = f"{source} [{section}]" if section in config else f"[{section}]"
        settings = values.get(section, {})
        is_absent = section == "valid" and all(value is None for value in settings.values())
        made[section] = None if is_absent else from_json(group, json.dumps(settings, default=str), source=where)
    return plan(**made)


def reading_settings(data: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return the settings of data that say how files are read, such as columns: those with a default other than None.

    Validation data is read like training data, and so is the data that a run is evaluated on.
    """
    reading = {field.name for field in dataclasses.fields(group) if field.default is not None}
    return {name: value for name, value in data.items() if name in reading}


def plan_to_json(plan: Any) -> dict[str, Any]:
    """Return a plan as the content of a config file."""
    groups = {section: getattr(plan, section) for section in sections(type(plan))}
    return {section: to_json(group) for section, group in groups.items() if group is not None}


def read_config(path: Path, plan: type) -> Values:
    """Read the sections of a config file; raise for a section that the plan does not have."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes, too large for a config file")
        if path.suffix in (".yaml", ".yml"):
            raise ValueError(f"{path} is YAML, which is not read; write the settings as TOML or JSON, a section each")
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
    return {section: _by_field(section, groups[section], settings, source) for section, settings in config.items()}


def _by_field(section: str, group: type, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a section by field; a key may be the field or its flag, as `model` for `--model`.

    Dashes and underscores are the same in a key, and so are `valid-source` and `source` in the section `valid`.
    """
    keys: dict[str, str] = {}
    for prefix in ("", "valid-") if section == "valid" else ("",):
        for flag in flags_of(section, group, prefix=prefix):
            keys[flag.name[2:].replace("-", "_")] = flag.field
    keys |= {field.name: field.name for field in dataclasses.fields(group)}
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key in ONCE_OF_ALL_TASKS and key not in keys and value is None:
            continue
        field = keys.get(key.replace("-", "_"), key)
        if field in found:
            raise ValueError(f"{source} [{section}]: {key!r} is given twice, also as {field!r}; leave one out")
        found[field] = value
    return found


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


def _base_plan(task: str, config: Values, given: Mapping[Flag, Any]) -> Values:
    """Return the sections of the plan that a new run takes over from the run in --from; none without the flag."""
    run = next((value for flag, value in given.items() if flag.name == "--from"), None)
    run = run or config.get("finetuning", {}).get("run")
    if run is None:
        return {}
    kept = fine_tuning_flags.kept_sections(Path(run), task, PLAN_FILE)
    for section in (*config, *(flag.section for flag in given)):
        if section in fine_tuning_flags.KEPT_SECTIONS and section not in kept:
            raise ValueError(f"{run} has no {PLAN_FILE} to compare with, so its {section} is kept; leave it out")
    return kept


def _json_text(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
