"""Recipe: the settings of a training run, as one frozen value that is saved with the run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .dataclass_json import check_types, from_json, to_json
from .loggers import LoggerName
from .scheduled_sampling import Forcing
from .schedules import Constant, Schedule

STEADY = Constant(1e-3)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run other than the model and the data.

    >>> recipe = Recipe(steps=2_000, rate=Constant(1e-3, warmup=100))
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True

    A step is one update of the weights, from `accumulate` batches on each process. Training ends after `steps` or
    `epochs`, whichever comes first, or after `patience` evaluations without a better `metric`.
    """

    steps: int | None = None
    epochs: int | None = None
    seed: int = 0

    rate: Schedule = STEADY
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0  # on matrices only, not on biases and gains
    clip: float | None = 1.0  # the largest norm of the gradient
    accumulate: int = 1
    forcing: Forcing | None = None

    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 autocast on CUDA
    compile: bool = False
    graphs: bool = False  # replay the pass as a CUDA graph for each batch shape that recurs
    shard: bool = False  # shard the weights over the processes (FSDP2)

    evaluate_every: int | None = None  # steps; None: at the end of each epoch
    metric: str = "loss"  # name of the evaluation metric that decides which checkpoint is best
    better: Literal["lower", "higher"] = "lower"
    patience: int | None = None

    save_every: int | None = None  # steps; None: at the end of each epoch
    keep: int = 2  # number of newest checkpoints to keep, beside the best one
    log_every: int = 50
    loggers: tuple[LoggerName, ...] = ("csv",)
    monitor: int | None = None  # steps between those at which the heads are watched, by a monitor passed to `fit`
    qk_clip: float | None = None  # the largest logit, above which a monitor clips queries and keys of a head

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps is self.epochs is None:
            raise ValueError("a recipe needs an end; pass steps or epochs")
        for name in ("steps", "epochs"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        for name in ("accumulate", "evaluate_every", "patience", "save_every", "keep", "log_every", "monitor"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2**32 - 1, got {self.seed}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be above 0, got {self.eps}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.qk_clip is not None and self.monitor is None:
            raise ValueError(f"qk_clip needs a monitor, got qk_clip={self.qk_clip} alone; pass monitor, such as 1")
        if self.graphs and self.monitor is not None:
            raise ValueError("graphs cannot be combined with monitor; choose one")
        if self.graphs and (self.compile or self.shard or self.forcing is not None):
            raise ValueError("graphs cannot be combined with compile, shard or forcing; choose one")
        if self.clip is not None and not (self.clip > 0 and math.isfinite(self.clip)):
            raise ValueError(f"clip must be above 0 and finite, got {self.clip}; None leaves gradients as they are")

    def to_json(self) -> str:
        """Return the recipe as the text of a JSON file."""
        return json.dumps(to_json(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "recipe") -> Recipe:
        """Build a recipe from JSON; an unknown key raises and names the nearest known one."""
        return from_json(cls, text, source=source)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Load a recipe from a file, such as the `recipe.json` of a run."""
        return cls.from_json(Path(path).read_text(encoding="utf8"), source=str(path))
