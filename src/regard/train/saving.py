"""The training half of a checkpoint: state, optimizer, place in the data and generators, written and taken up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from . import checkpoint
from . import rng as randomness
from .batches import Epochs
from .dataclass_json import from_json, to_json
from .distributed import Group
from .failures import CheckpointError
from .optimizer import moments, put_moments, whole
from .recipe import Recipe
from .state import State

NUMBERS, TENSORS = "training.json", "training.safetensors"
OWN = (checkpoint.MODEL, checkpoint.MANIFEST, NUMBERS, TENSORS)
RECIPE = "recipe.json"
DATA = "data.json"  # a record of the data, if there is one: under "valid", what the run is evaluated on
FORMAT = 1


@dataclass
class Saver:
    """Writes the checkpoints of a run; `written` is the step of the one that is on the disk."""

    run: Path
    model: nn.Module
    optimizer: AdamW
    batches: Epochs
    recipe: Recipe
    files: Mapping[str, str]
    group: Group
    written: int | None

    def __post_init__(self) -> None:
        self._whole = set() if self.path is None else {self.path}

    @property
    def path(self) -> Path | None:
        """The checkpoint written last."""
        return None if self.written is None else checkpoint.path_of(self.run, self.written)

    def save(self, state: State) -> None:
        """Write this step unless it is written; every process takes part, the first one writes."""
        if state.step == self.written:
            return
        weights = self._gathered(checkpoint.tensors(self.model))
        training = self._gathered(moments(self.optimizer, self.model))
        for what, x in randomness.capture().items():
            training |= {f"random.{rank}.{what}": part for rank, part in enumerate(self.group.gather(x))}
        numbers = {"state": to_json(state), "batches": self.batches.state(), "recipe": to_json(self.recipe)}
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

    def mark_best(self, state: State) -> None:
        """Let the link `best` of the run point at the best step."""
        if self.group.leads:
            checkpoint.mark_best(self.run, self._best(state))

    def _gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors whole, one after the other, and only where they are written."""
        gathered = {}
        for name, x in named.items():
            x = whole(x)
            if self.group.leads:
                gathered[name] = x.cpu()
        return gathered

    def _best(self, state: State) -> Path | None:
        return None if state.best is None else checkpoint.path_of(self.run, state.best)


def read(path: Path) -> tuple[State, dict[str, Any], Recipe]:
    """The numbers of a verified checkpoint: its state, the place in the data, and the recipe it was made by."""
    source = str(path / NUMBERS)
    try:
        numbers = json.loads(checkpoint.read_text(path, NUMBERS))
        if numbers.keys() != {"format", "state", "batches", "recipe"} or numbers["format"] != FORMAT:
            raise ValueError(f"{source} is not of format {FORMAT}")
        state = from_json(State, json.dumps(numbers["state"]), source=source)
        return state, numbers["batches"], Recipe.from_json(json.dumps(numbers["recipe"]), source=source)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{error}; was it written by another version?") from None


def evaluated_on_other(path: Path, files: Mapping[str, str]) -> bool:
    """Do the record of a checkpoint and that of a run both tell what it is evaluated on, and not the same?"""
    if DATA not in files or not (path / DATA).exists():
        return False
    before, now = (_evaluated_on(text) for text in (checkpoint.read_text(path, DATA), files[DATA]))
    return before is not None and now is not None and before != now


def _evaluated_on(record: str) -> Any:
    try:
        told = json.loads(record)
    except ValueError:
        return None
    return told.get("valid") if isinstance(told, dict) else None


def restore(path: Path, *, model: nn.Module, optimizer: AdamW, recipe: Recipe, group: Group) -> None:
    """Give the optimizer its moments and this process its generators; a process that is new starts fresh ones."""
    training = checkpoint.read_tensors(path, TENSORS)
    own = f"random.{group.rank}."
    kept = {key: x for key, x in training.items() if not key.startswith("random.")}
    put_moments(kept, optimizer, model, source=str(path / TENSORS))
    generators = {key.removeprefix(own): x for key, x in training.items() if key.startswith(own)}
    if generators:
        randomness.restore(generators)
    else:
        randomness.seed(recipe.seed, group.rank)
