"""fit: train a model, in one visible loop that can be killed at any moment and resumed exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoint, progress, saving
from . import rng as randomness
from .batches import Epochs, moved
from .cuda_graphs import Replayed
from .dataclass_json import unknown
from .distributed import Group, joined, spread
from .failures import CheckpointError, NonFiniteError, Stopped, memory_errors
from .gradient import Objective, Step, forward_and_backward, mean_gradient
from .log import Board, Log
from .nonfinite import first_non_finite
from .optimizer import adamw, set_rate
from .recipe import Recipe
from .saving import Saver
from .schedules import Plateau
from .signals import Interruption, Signals
from .state import State


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: where, why ("steps", "epochs" or "patience"), and the checkpoint to use."""

    step: int
    epoch: int
    reason: str
    best: Path
    score: float | None  # the watched metric of the best checkpoint, NaN where no evaluation gave a number

    def __str__(self) -> str:
        score = "" if self.score is None else f", {progress.number(self.score, digits=4)}"
        return f"ended after {self.step} steps by {self.reason}; best: {self.best}{score}"


def fit(
    model: nn.Module,
    batches: Epochs,
    recipe: Recipe,
    *,
    folder: str | Path,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    files: Mapping[str, str] | None = None,
    resume: bool = False,
    unit: str = "tokens",
    show: progress.Progress | None = None,
) -> Outcome:
    """Train `model` on `batches` as `recipe` says, keeping checkpoints and logs in `folder`.

    >>> import tempfile, torch
    >>> from regard.train import Constant, Recipe, Shuffled, fit
    >>> class Line(torch.nn.Linear):
    ...     def loss(self, batch):
    ...         x, y = batch
    ...         return (self(x) - y).square().mean()
    >>> x = torch.randn(64, 1)
    >>> batches = Shuffled([(x[n : n + 8], 3 * x[n : n + 8] + 1) for n in range(0, 64, 8)])
    >>> model = Line(1, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome = fit(model, batches, Recipe(steps=200, rate=Constant(0.1)), folder=folder)
    >>> round(model.weight.item(), 2), round(model.bias.item(), 2)
    (3.0, 1.0)

    `model.loss(batch)` returns a scalar tensor, or an object with `sum` and `count` (`regard.nn.Loss`): then
    accumulated batches, and those of several processes, are averaged over all their items, whatever their sizes. With
    `recipe.forcing` it is called as `model.loss(batch, forcing=probability)`.

    `evaluate(model)`, called in evaluation mode and without gradients, returns numbers by name, `recipe.metric` among
    them; it runs on every process. `files` go into each checkpoint: the model's `config.json`, its `tokenizer.json`.
    Where a `data.json` among them says under "valid" what is evaluated on, scores on other data are not compared.

    The model trains on the device it is on. Under `torchrun` every process calls `fit` with its share of the batches
    and a folder that all can see. SIGTERM and SIGINT save and raise `Stopped`; `resume=True` goes on from the newest
    checkpoint that is whole, on the CPU bit for bit, or begins where there is none yet. What goes wrong is a `Failure`
    with the exit code to end with, and the last good checkpoint stays.
    """
    _check(model, batches, recipe, evaluate, files or {})
    run, device = Path(folder), next(model.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=_in_bfloat16(recipe, device))
    with (
        memory_errors("make the batches smaller, and accumulate more of them"),
        joined(device) as group,
        Signals() as signals,
        _shown(show, recipe, group.leads) as shown,
        Board() as board,
    ):
        start = _starting_point(run, group, resume=resume, say=shown.say)
        state, ended = State(), False
        if start is not None:
            state, ended = _take_up(start, model, batches, recipe, files or {}, say=shown.say)
        trained = _prepared(model, recipe, group)
        once = partial(forward_and_backward, trained, autocast, group.device)
        replayed = Replayed(partial(once, {}), group) if recipe.graphs else None
        optimizer = adamw(model, recipe)
        if start is None:
            randomness.seed(recipe.seed, group.rank)
        else:
            saving.restore(start, model=model, optimizer=optimizer, recipe=recipe, group=group)
        saver = Saver(run, model, optimizer, batches, recipe, files or {}, group, written=state.step if start else None)
        saver.mark_best(state)
        saver.save(state)  # before the first step: a disk that cannot be written to should not cost an hour
        log = Log(run, state, recipe, shown, board if group.leads else None, epoch=_length(batches, recipe), unit=unit)
        left, last = iter(batches), None
        counted = state.batch > 0  # of what went before in this epoch, nothing is known
        model.train()

        while True:
            over, stop = state.finished(recipe), int(group.largest(signals.received))
            evaluating = evaluate is not None and _owed(state, recipe, bool(over) or ended)
            if over or stop or evaluating or state.due(recipe.save_every):
                saver.save(state)
            if stop:
                stopped = Stopped(stop, f"stopped at step {state.step}; saved, to be resumed from {run}")
                shown.say(str(stopped))
                raise stopped
            if evaluate is not None and evaluating:
                try:
                    with autocast:
                        metrics = _evaluated(model, evaluate, recipe, signals, group)
                except Interruption:
                    continue
                state.score(metrics[recipe.metric], recipe)
                saver.mark_best(state)
                log.evaluation(state, metrics)
                over = state.finished(recipe)
            ended = False
            if over:
                outcome = _outcome(run, state, recipe, over)
                shown.say(str(outcome))
                return outcome

            parts = list(itertools.islice(left, recipe.accumulate))
            most = int(group.largest(len(parts)))
            if most:
                # A process that runs out before the others goes on with its last batch, weighing nothing.
                last = parts[-1] if parts else last
                if last is None:
                    raise ValueError(f"every process must have a batch to begin with, number {group.rank} has none")
                weighed = [(part, 1.0) for part in parts] + [(last, 0.0)] * (most - len(parts))
                handed = {} if recipe.forcing is None else {"forcing": recipe.forcing(state.step)}
                rate = recipe.rate(state.step + 1, state.scores)
                set_rate(optimizer, rate)
                step = mean_gradient(trained, weighed, replayed or partial(once, handed), group, clip=recipe.clip)
                if not step.finite:
                    raise _non_finite(step, model, parts, handed, state, saver)
                optimizer.step()
                optimizer.zero_grad(set_to_none=not recipe.graphs)
                state.step, state.batch = state.step + 1, state.batch + most
                counted = counted or step.count > 0
                log.training(state, step.sum, step.count, step.norm, rate)
            elif state.batch == 0:
                raise ValueError("batches must hold at least one batch an epoch, got an epoch without any")
            if most < recipe.accumulate:
                if not counted:
                    raise ValueError(
                        f"batches must hold something to learn from, got an epoch of {state.batch} in which no loss "
                        "counted an item; look for empty batches, or for targets that are all padding"
                    )
                state.epoch, state.batch, left, counted = state.epoch + 1, 0, iter(batches), False


def _evaluated(
    model: nn.Module,
    evaluate: Callable[[Any], Mapping[str, float]],
    recipe: Recipe,
    signals: Signals,
    group: Group,
) -> dict[str, float]:
    """The numbers of the evaluation, as the first process has them; training does not notice that it took place."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    alone = group.size == 1  # a process that left in the middle would leave the others waiting
    try:
        with (
            torch.no_grad(),
            randomness.untouched(),
            signals.at_once() if alone else nullcontext(),
        ):
            metrics = _numbers(evaluate(model), recipe)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if recipe.metric not in metrics:
        raise ValueError(f"evaluate gave no {recipe.metric!r}, the metric to watch; {unknown(recipe.metric, metrics)}")
    return dict(zip(metrics, group.same(list(metrics.values())), strict=True))


def _numbers(found: object, recipe: Recipe) -> dict[str, float]:
    """What an evaluation returned, in Python numbers."""
    if not isinstance(found, Mapping):
        raise TypeError(
            f"evaluate must return numbers by name, got {type(found).__name__}; "
            f"write return {{{recipe.metric!r}: ...}}, the metric to watch among them"
        )
    return {name: float(value) for name, value in found.items()}


def _owed(state: State, recipe: Recipe, last: bool) -> bool:
    """Is an evaluation of this step due, or the last one, and not yet made?"""
    made = state.step in state.evaluated[-1:]
    return state.step > 0 and not made and (last or state.due(recipe.evaluate_every))


def _starting_point(run: Path, group: Group, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, None for a new run; every process is told what the first one found."""
    step = -1.0
    if group.leads:
        there = checkpoint.saved(run)
        if there and not resume:
            raise ValueError(f"{run} already holds a run, up to {there[-1].name}; pass resume=True or another folder")
        found = checkpoint.usable(run, say)
        if found is None and (run / saving.RECIPE).exists():
            raise CheckpointError(f"{run} holds a run but none of its checkpoints; nothing was changed there")
        step = -1.0 if found is None else float(checkpoint.step_of(found))
    [step] = group.same([step])
    return None if step < 0 else checkpoint.path_of(run, int(step))


def _take_up(
    start: Path,
    model: nn.Module,
    batches: Epochs,
    recipe: Recipe,
    files: Mapping[str, str],
    *,
    say: Callable[[str], None],
) -> tuple[State, bool]:
    """Weights, data and state as a checkpoint has them, and whether to evaluate what was the last step of a run.

    That was done when the run ended, but is not among what the checkpoint has: a run that goes on would lose what may
    have been its best. Where training goes by scores, they are those of a run that was longer from the start.
    """
    state, place, before = saving.read(start)
    checkpoint.put(checkpoint.read_tensors(start), model, source=str(start / checkpoint.MODEL))
    batches.restore(place)
    say(f"resuming from {start}")
    for field in fields(Recipe):
        if (old := getattr(before, field.name)) != (new := getattr(recipe, field.name)):
            say(f"the recipe is not the one of the checkpoint: {field.name} was {old!r} and is {new!r}")
    of, now = _watched(before), _watched(recipe)
    if of == now and saving.evaluated_on_other(start, files):
        of, now = "other data", "those of this"
    if state.scores and of != now:
        state.forget_scores()
        rate = ", and the rate begins at its peak again" if isinstance(recipe.rate, Plateau) else ""
        say(
            f"scores so far are of {of}, and not compared with {now}; "
            f"the best is sought anew from step {state.step}{rate}"
        )
    ended = bool(state.finished(before)) and not state.finished(recipe) and state.step not in state.evaluated
    by_scores = recipe.patience is not None or isinstance(recipe.rate, Plateau)
    if ended and by_scores and not state.due(recipe.evaluate_every):
        say(f"the evaluation of step {state.step}, where the run ended, is left out: training goes by those in between")
        ended = False
    return state, ended


def _watched(recipe: Recipe) -> str:
    """What says which checkpoint is best."""
    return f"{recipe.metric}, {recipe.better} being better"


def _prepared(model: nn.Module, recipe: Recipe, group: Group) -> nn.Module:
    objective = Objective(model)
    if recipe.compile:
        objective.compile()
    return spread(objective, group, shard=recipe.shard)


def _length(batches: Epochs, recipe: Recipe) -> int | None:
    """The steps of an epoch, where the batches know their number."""
    return math.ceil(len(batches) / recipe.accumulate) if isinstance(batches, Sized) else None


def _in_bfloat16(recipe: Recipe, device: torch.device) -> bool:
    return recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type == "cuda")


@contextmanager
def _shown(show: progress.Progress | None, recipe: Recipe, leads: bool) -> Iterator[progress.Progress]:
    shown = show or progress.fitting(every=recipe.log_every)
    try:
        yield shown if leads else progress.Silence()
    finally:
        shown.close()


def _non_finite(
    step: Step, model: nn.Module, parts: list[Any], handed: dict[str, float], state: State, saver: Saver
) -> NonFiniteError:
    """What to raise: which step and batch, the first thing that is not finite, and where the last good state is."""
    first, last = state.batch + 1, state.batch + len(parts)
    where = f"batch {first}" if first == last else f"batches {first} to {last}"
    place = "its weights are shared out, so no process alone can say where"
    if not saver.recipe.shard:
        objective, device = Objective(model), saver.group.device
        number, place = first_non_finite(model, [partial(objective, moved(x, device), handed) for x in parts])
        where = where if number is None else f"batch {first + number}"
    return NonFiniteError(
        f"loss {step.loss:g} with a gradient of norm {step.norm:g} at step {state.step + 1} "
        f"(epoch {state.epoch}, {where}): {place}; the last good state is {saver.path}; "
        "resume from there with a lower rate or a smaller clip"
    )


def _outcome(run: Path, state: State, recipe: Recipe, reason: str) -> Outcome:
    best = state.step if state.best is None else state.best
    score = None if state.lowest is None else state.lowest * (1 if recipe.better == "lower" else -1)
    path = checkpoint.path_of(run, best)
    return Outcome(step=state.step, epoch=state.epoch, reason=reason, best=path, score=score)


def _check(model: nn.Module, batches: Epochs, recipe: Recipe, evaluate: object, files: Mapping[str, str]) -> None:
    if not callable(getattr(model, "loss", None)):
        raise TypeError(f"model must have a method loss(batch), got {type(model).__name__} without one")
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters to train, got {type(model).__name__} without any")
    if not isinstance(batches, Epochs):
        raise TypeError(
            f"batches must have __iter__, state and restore, got {type(batches).__name__}; wrap a list in Shuffled(...)"
        )
    if evaluate is None and (recipe.patience is not None or isinstance(recipe.rate, Plateau)):
        raise ValueError("patience and Plateau wait for evaluations; give data to validate by, in Python evaluate=")
    for name in files:
        if name in saving.OWN or not checkpoint.NAME.fullmatch(name):
            raise ValueError(f"files must have plain names other than {', '.join(saving.OWN)}, got {name!r}")
