"""Flags of fine-tuning: begin with the weights of another run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..tasks import run_folder
from ..tasks.fine_tuning import FineTuning
from ..train.dataclass_json import check_types

KEPT_SECTIONS = ("vocabulary", "model", "pretrained", "windows")


@dataclass(frozen=True, kw_only=True)
class FineTuningFlags:
    """A run to begin with, and what of it to train."""

    run: Annotated[
        str | None,
        "Begin with the weights and tokenizers of this run, on other data and with a new optimizer.",
        "--from",
    ] = None
    freeze: Annotated[
        str | tuple[str, ...] | None,
        "Keep the parameters whose names match this pattern, e.g. 'encoder.*', as they are; may be repeated.",
    ] = None
    lora: Annotated[
        int | None,
        "Train only a low-rank change of this rank of the attention projections (LoRA); checkpoints hold merged "
        "weights.",
        "--lora-rank",
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.run is None and (self.freeze is not None or self.lora is not None):
            raise ValueError("--freeze and --lora-rank need --from, a run to begin with; add it, or leave them out")

    @property
    def tuning(self) -> FineTuning | None:
        """The settings for the task, None to begin anew."""
        if self.run is None:
            return None
        patterns = (self.freeze,) if isinstance(self.freeze, str) else self.freeze or ()
        return FineTuning(run=self.run, freeze=patterns, lora=self.lora)

    def unless_kept(self, **settings: Any) -> dict[str, Any]:
        """Return settings of a new model; none if the model is that of another run."""
        return {} if self.run is not None else settings


def kept_sections(run: Path, task: str, plan_file: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of a run's plan that a run begun with it keeps; empty if no command has trained the run."""
    checkpoint = run_folder.open_run(run)
    if (other := run_folder.task_of(checkpoint)) != task:
        raise ValueError(f"{run} is a run of the task {other!r}; fine-tune it with regard train {other} --from {run}")
    if not (checkpoint / plan_file).exists():
        return {}
    plan = json.loads(run_folder.read_text(checkpoint, plan_file))
    return {section: settings for section, settings in plan.items() if section in KEPT_SECTIONS}
