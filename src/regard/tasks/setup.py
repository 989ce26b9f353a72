"""The steps of a training run, shared by all tasks: check, prepare, and only then write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..lens import Monitor
from ..train import Epochs, Group, Outcome, Progress, Recipe, Silence, fit, process_group
from ..train.progress import default_progress
from . import run_folder
from .dry_run import add_lines, cost_lines, is_dry_run
from .fine_tuning import BASE, FineTuning, as_fine_tuning, begin, choose_parameters, saved_new, saved_tuning


@dataclass(frozen=True)
class Start:
    """The start of a run; `say` prints a line to the log.

    The model and the tokenizers are those of `checkpoint`, if there is one: the one to resume from, or, if `fresh`, the
    one whose fine-tuning begins.
    """

    checkpoint: Path | None
    group: Group
    say: Callable[[str], None]
    fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The arguments of a task for `fit`; `files` are its `config.json` and tokenizers.

    `new` is the beginning of the names of the parameters that fine-tuning does not take over, None for none.
    `describe` returns the lines about the data that a dry run prints.
    """

    model: nn.Module
    batches: Epochs
    evaluate: Callable[[Any], Mapping[str, float]] | None
    files: Mapping[str, str]
    unit: str = "tokens"
    new: str | None = None
    describe: Callable[[], list[str]] | None = None


def run(
    prepare: Callable[[Start], Setup],
    recipe: Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train the model that `prepare` returns, in the folder `out`; `files` are stored in each checkpoint too.

    A new run begins with the weights of `base`, if given. A resumed run keeps its own, and the parameters it trains.

    `prepare` raises every error in data and settings before anything is written. It runs in each training process, with
    PyTorch's generator seeded. `device` is by default a GPU per process if there are any.
    """
    shown = show or default_progress(every=recipe.log_every)
    with process_group(device) as group:
        say = shown.say if group.leads else Silence().say
        if is_dry_run():
            say = _say_dry
        new = is_dry_run() and not resume
        checkpoint = None if new else run_folder.checkpoint_to_resume(out, resume=resume, say=say)
        group.wait()  # no process writes before all have checked the folder
        torch.manual_seed(recipe.seed)
        tuning = as_fine_tuning(base) if checkpoint is None else _tuning_of(checkpoint, as_fine_tuning(base))
        fresh = checkpoint is None and tuning is not None
        source = run_folder.open_run(tuning.run) if tuning is not None and fresh else checkpoint
        setup = prepare(Start(source, group, say, fresh))
        record = {}
        if tuning is not None and source is not None:
            if fresh:
                record[BASE] = begin(setup.model, source, tuning, setup.files, say, new=setup.new)
            else:
                choose_parameters(setup.model, tuning, new=saved_new(source))
                record[BASE] = run_folder.read_text(source, BASE)
        if is_dry_run():
            if setup.describe is not None:
                add_lines(setup.describe())
            add_lines(cost_lines(setup.model, setup.batches, recipe, group.device))
            return Outcome(step=0, epoch=0, reason="dry run", best=Path(out), score=None)
        return fit(
            setup.model.to(group.device),
            setup.batches,
            recipe,
            folder=out,
            evaluate=setup.evaluate,
            files={**setup.files, **record, **(files or {})},
            resume=resume,
            unit=setup.unit,
            show=shown,
            monitor=None if recipe.monitor is None else Monitor(setup.model, recipe.monitor, clip=recipe.qk_clip),
        )


def _say_dry(line: str) -> None:
    add_lines([line])


def _tuning_of(checkpoint: Path, given: FineTuning | None) -> FineTuning | None:
    """Return how a run to resume is fine-tuned; raise if `given` differs."""
    saved = saved_tuning(checkpoint)
    if given is not None and given != saved:
        raise ValueError(
            f"a resumed run cannot change its fine-tuning: it was {saved}, got {given}; leave base out, or name "
            "another folder"
        )
    return saved
