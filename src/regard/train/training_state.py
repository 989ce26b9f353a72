"""The training state of a checkpoint: progress, optimizer, position in the data and generators; saved and restored."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import checkpoint, rng
from .batches import Epochs
from .callbacks import Callback
from .dataclass_json import check_types, from_json, to_json
from .distributed import Group
from .failures import CheckpointError
from .lora import PREFIX, join_lora, lora_layers, split_lora
from .optimizer import moments, optimizer_numbers, put_moments, put_numbers, whole
from .recipe import Recipe

NUMBERS, TENSORS = "training.json", "training.safetensors"
OWN = (checkpoint.MODEL, checkpoint.MANIFEST, NUMBERS, TENSORS)
RECIPE = "recipe.json"
DATA = "data.json"  # an optional record of the data, with the evaluation data under "valid"
FORMAT = 1
WORST = sys.float_info.max  # stands for NaN and infinity, which JSON lacks


@dataclass(kw_only=True)
class TrainingState:
    """The progress of a run, and all else that it depends on besides weights, moments, data and generators."""

    step: int = 0  # number of updates
    epoch: int = 0
    batch: int = 0  # batches consumed of this epoch; 0 between epochs
    sum: float = 0.0  # the loss since the last row of the log
    count: float = 0.0
    evaluated: tuple[int, ...] = ()  # steps with an evaluation; `scores` are theirs, lower is better
    scores: tuple[float, ...] = ()
    data: str | None = None  # fingerprint of the training data, None if it has none

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def best(self) -> int | None:
        """The first step with the lowest score."""
        return self.evaluated[self.scores.index(min(self.scores))] if self.scores else None

    @property
    def lowest(self) -> float | None:
        """The lowest score, NaN if none is finite or -infinity."""
        if not self.scores:
            return None
        cost = min(self.scores)
        return math.nan if cost == WORST else -math.inf if cost == -WORST else cost

    @property
    def worse(self) -> int:
        """The number of evaluations since the best one."""
        return len(self.scores) - 1 - self.scores.index(min(self.scores)) if self.scores else 0

    def end_reason(self, recipe: Recipe) -> str | None:
        """Return why the run is over, None while it is not."""
        if recipe.steps is not None and self.step >= recipe.steps:
            return "steps"
        if recipe.epochs is not None and self.epoch >= recipe.epochs:
            return "epochs"
        return "patience" if recipe.patience is not None and self.worse >= recipe.patience else None

    def due(self, every: int | None) -> bool:
        """Whether the step is a multiple of `every`, or for None at the end of an epoch."""
        return self.step > 0 and (self.batch == 0 if every is None else self.step % every == 0)

    def score(self, value: float, recipe: Recipe) -> None:
        """Record the metric of this step; NaN is worse than every number."""
        cost = value if recipe.better == "lower" else -value
        self.evaluated += (self.step,)
        self.scores += (WORST if math.isnan(cost) else min(max(cost, -WORST), WORST),)

    def forget_scores(self) -> None:
        """Restart the search for the best: scores of another metric or on other data are not comparable."""
        self.evaluated = self.scores = ()


@dataclass
class Saver:
    """Writes the checkpoints of a run; `written` is the step of the last one on the disk."""

    run: Path
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    batches: Epochs
    recipe: Recipe
    files: Mapping[str, str]
    group: Group
    written: int | None
    callbacks: Sequence[Callback] = ()
    given: bool = False  # whether the user chose the optimizer or a scheduler, whose settings are then saved too

    def __post_init__(self) -> None:
        self._whole = set() if self.path is None else {self.path}

    @property
    def path(self) -> Path | None:
        """The last checkpoint written."""
        return None if self.written is None else checkpoint.path_of(self.run, self.written)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint of this step unless it exists; every process takes part, the first one writes."""
        if state.step == self.written:
            return
        weights = self._gather(checkpoint.tensors(self.model))
        training = self._gather(moments(self.optimizer, self.model))
        if self.group.leads:
            weights, lora = split_lora(weights, self.model)
            training |= lora
        for what, x in rng.capture().items():
            training |= {f"random.{rank}.{what}": part for rank, part in enumerate(self.group.gather(x))}
        numbers = {"state": to_json(state), "batches": self.batches.state(), "recipe": to_json(self.recipe)}
        if self.given:
            numbers["optimizer"] = optimizer_numbers(self.optimizer, self.scheduler, self.model)
        text = json.dumps({"format": FORMAT, **numbers}, indent=1, allow_nan=False)
        if self.group.leads:
            path = checkpoint.path_of(self.run, state.step)
            checkpoint.write(path, {**self.files, checkpoint.MODEL: weights, TENSORS: training, NUMBERS: text})
            self._whole.add(path)
            keep, best = self.recipe.keep, self._best(state)
            checkpoint.prune(self.run, keep=keep, upto=state.step, best=best, whole=self._whole)
            checkpoint.write_text(self.run / RECIPE, self.recipe.to_json())
        self.group.wait()
        self.written = state.step
        for callback in self.callbacks:
            callback.save(state.step, checkpoint.path_of(self.run, state.step))

    def mark_best(self, state: TrainingState) -> None:
        """Point the link `best` of the run at the best step."""
        if self.group.leads:
            checkpoint.mark_best(self.run, self._best(state))

    def _gather(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors one at a time; only the process that writes keeps them."""
        gathered = {}
        for name, x in named.items():
            x = whole(x)
            if self.group.leads:
                gathered[name] = x.cpu()
        return gathered

    def _best(self, state: TrainingState) -> Path | None:
        return None if state.best is None else checkpoint.path_of(self.run, state.best)


def read(path: Path) -> tuple[TrainingState, dict[str, Any], Recipe]:
    """Read a verified checkpoint: its progress, the position in the data, and its recipe."""
    source = str(path / NUMBERS)
    try:
        numbers = json.loads(checkpoint.read_text(path, NUMBERS))
        known = {"format", "state", "batches", "recipe"}
        if numbers.keys() - {"optimizer"} != known or numbers["format"] != FORMAT:
            raise ValueError(f"{source} does not have format {FORMAT}")
        state = from_json(TrainingState, json.dumps(numbers["state"]), source=source)
        return state, numbers["batches"], Recipe.from_json(json.dumps(numbers["recipe"]), source=source)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{error}; was it written by another version?") from None


def evaluated_on_other(path: Path, files: Mapping[str, str]) -> bool:
    """Whether the records of a checkpoint and of a run both name evaluation data, and name different ones."""
    if DATA not in files or not (path / DATA).exists():
        return False
    before, now = (_evaluated_on(text) for text in (checkpoint.read_text(path, DATA), files[DATA]))
    return before is not None and now is not None and before != now


def _evaluated_on(record: str) -> Any:
    try:
        data = json.loads(record)
    except ValueError:
        return None
    return data.get("valid") if isinstance(data, dict) else None


def put_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into a model; into one with LoRA the parts that were saved beside them."""
    weights = checkpoint.read_tensors(path)
    if lora_layers(model):
        weights = join_lora(weights, checkpoint.read_tensors(path, TENSORS))
    checkpoint.put(weights, model, source=str(path / checkpoint.MODEL))


def restore(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    recipe: Recipe,
    group: Group,
    given: bool = False,
) -> None:
    """Restore the optimizer's state and this process's generators; an additional process seeds new ones."""
    numbers = json.loads(checkpoint.read_text(path, NUMBERS)).get("optimizer")
    if numbers is not None:
        put_numbers(numbers, optimizer, scheduler, model, source=str(path / NUMBERS))
    elif given:
        raise ValueError(f"{path / NUMBERS} was saved with the AdamW of the recipe; leave optimizer and scheduler out")
    training = checkpoint.read_tensors(path, TENSORS)
    own = f"random.{group.rank}."
    kept = {key: x for key, x in training.items() if not key.startswith(("random.", PREFIX))}
    put_moments(kept, optimizer, model, source=str(path / TENSORS))
    generators = {key.removeprefix(own): x for key, x in training.items() if key.startswith(own)}
    if generators:
        rng.restore(generators)
    else:
        rng.seed(recipe.seed, group.rank)
