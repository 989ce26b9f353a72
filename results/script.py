"""What the scripts of this folder have in common: flags, a device, and training that can be asked to stop."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from regard.train import Cosine, Epochs, Failure, Recipe, fit, own_device
from regard.train.schedules import Schedule


def parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Flags every script has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, required=True, help="the folder of the run")
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="replay steps as CUDA graphs")
    return made


def falling(given: argparse.Namespace, peak: float) -> Cosine:
    """A rate that climbs a while and then falls to 0."""
    return Cosine(peak, steps=given.steps, warmup=min(given.steps // 10, 500))


def train(
    given: argparse.Namespace,
    model: nn.Module,
    batches: Epochs,
    evaluate: Callable[[Any], Mapping[str, float]],
    *,
    rate: Schedule,
    evaluate_every: int,
    metric: str = "loss",
    better: Any = "lower",
    unit: str = "tokens",
) -> None:
    """Fit the model as the flags say; a training that ends before its time ends the process with its exit code."""
    recipe = Recipe(
        steps=given.steps,
        seed=given.seed,
        rate=rate,
        weight_decay=0.01,
        evaluate_every=min(given.steps, evaluate_every),
        save_every=min(given.steps, evaluate_every),
        metric=metric,
        better=better,
        log_every=min(given.steps, 50),
        graphs=bool(given.graphs),
    )
    try:
        fit(model.to(own_device()), batches, recipe, folder=given.out, evaluate=evaluate, unit=unit)
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
