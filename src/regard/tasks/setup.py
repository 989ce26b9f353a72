"""The course of a training run, the same for every task: look, prepare, and only then write."""

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
    """Where a run begins: at a `checkpoint`, or anew where that is None; `say` tells whoever watches."""

    checkpoint: Path | None
    group: Group
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a task hands to `fit`; `files` are the `config.json` and tokenizers by which it is loaded again."""

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
    """Train what `prepare` makes ready, in the folder `out`; `files` are more texts to keep in each checkpoint.

    Everything that can be wrong with data or settings shows in `prepare`, before anything is written. It is called
    with PyTorch's generator seeded, on each of the processes that train together. They train on `device`, each on its
    own GPU where there are any unless given.
    """
    shown = show or default_progress(every=recipe.log_every)
    with process_group(device) as group:
        say = shown.say if group.leads else Silence().say
        checkpoint = run_folder.checkpoint_to_resume(out, resume=resume, say=say)
        group.wait()  # nobody writes before all have looked
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
