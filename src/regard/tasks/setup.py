"""The steps of a training run, shared by all tasks: check, prepare, and only then write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..train import Epochs, Group, Outcome, Progress, Recipe, Silence, fit, process_group
from ..train.progress import default_progress
from . import run_folder


@dataclass(frozen=True)
class Start:
    """The start of a run: the `checkpoint` to resume from, None for a new run; `say` prints a line to the log."""

    checkpoint: Path | None
    group: Group
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The arguments of a task for `fit`; `files` are its `config.json` and tokenizers."""

    model: nn.Module
    batches: Epochs
    evaluate: Callable[[Any], Mapping[str, float]] | None
    files: Mapping[str, str]
    unit: str = "tokens"


def run(
    prepare: Callable[[Start], Setup],
    recipe: Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
) -> Outcome:
    """Train the model that `prepare` returns, in the folder `out`; `files` are stored in each checkpoint too.

    `prepare` raises every error in data and settings before anything is written. It runs in each training process, with
    PyTorch's generator seeded. `device` is by default a GPU per process if there are any.
    """
    shown = show or default_progress(every=recipe.log_every)
    with process_group(device) as group:
        say = shown.say if group.leads else Silence().say
        checkpoint = run_folder.checkpoint_to_resume(out, resume=resume, say=say)
        group.wait()  # no process writes before all have checked the folder
        torch.manual_seed(recipe.seed)
        setup = prepare(Start(checkpoint, group, say))
        return fit(
            setup.model.to(group.device),
            setup.batches,
            recipe,
            folder=out,
            evaluate=setup.evaluate,
            files={**setup.files, **(files or {})},
            resume=resume,
            unit=setup.unit,
            show=shown,
        )
