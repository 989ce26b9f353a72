"""fit: train a model, in one visible loop that can be killed at any moment and resumed exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..checks import suggest_name
from . import checkpoint, progress, rng, training_state
from .batches import Epochs, move_to_device
from .callbacks import Callback, StepMonitor
from .cuda_graphs import Pass, Replayed
from .distributed import Group, distribute, process_group
from .failures import CheckpointError, NonFiniteError, Stopped, memory_errors
from .gradient import GradientStep, Objective, forward_and_backward, mean_gradient
from .loader_epochs import LoaderEpochs
from .log import Log
from .loggers import CsvLogger, Logger, make_loggers
from .nonfinite import first_non_finite
from .optimizer import make_optimizer, make_scheduler, set_rate
from .recipe import STEADY, Recipe
from .run_lock import run_lock
from .schedules import Plateau
from .signals import Interruption, Signals
from .training_state import Saver, TrainingState


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
    batches: Epochs | DataLoader[Any],
    recipe: Recipe,
    *,
    folder: str | Path,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    files: Mapping[str, str] | None = None,
    resume: bool = False,
    unit: str | None = None,
    show: progress.Progress | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] | None = None,
    monitor: StepMonitor | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
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
    If a `data.json` among them names the evaluation data under "valid", scores on other data are not compared.

    `batches` may also be a PyTorch `DataLoader`, which `LoaderEpochs` seeds with `recipe.seed`. The speed in the log is
    that since its last row, in `unit`s: by default tokens, and batches if the loss is a scalar. `callbacks` are called
    after steps, evaluations and checkpoints, and at the end; see `Callback`. The numbers of the run go to
    `loggers`, each a `Logger`, by default to the loggers that `recipe.loggers` names. A `monitor`,
    `regard.lens.Monitor(model)`, watches the heads of the model's attention and writes their history to the folder,
    which a resumed run continues.

    `optimizer(model)` returns any optimizer of PyTorch instead of AdamW, and `scheduler(optimizer)` any of its
    schedulers, which steps after each update, `ReduceLROnPlateau` after each evaluation. The recipe's `rate` then sets
    the learning rate only if it is not the default, and `betas`, `eps` and `weight_decay` are not used.

    The model trains on the device it is on. Under `torchrun` every process calls `fit` with its share of the batches
    and a folder that all can see. SIGTERM and SIGINT save and raise `Stopped`; `resume=True` continues from the newest
    intact checkpoint, on the CPU bit for bit, or starts if there is none yet. Errors are a `Failure` with an exit code,
    and the last good checkpoint stays. One process trains in a folder at a time: a second one is refused, and so
    are other batches on `resume=True`, if they have a `fingerprint()` as `Shuffled` and `regard.data.Batches` do.
    """
    if isinstance(batches, DataLoader):
        batches = LoaderEpochs(batches, seed=recipe.seed)
    _check(model, batches, recipe, evaluate, files or {}, scheduler)
    if monitor is None and recipe.monitor is not None:
        raise ValueError("the recipe has monitor, but fit has none; pass monitor=regard.lens.Monitor(model, every=...)")
    if monitor is not None and recipe.graphs:
        raise ValueError("a replayed CUDA graph cannot be watched; leave out monitor or graphs")
    run, device = Path(folder), next(model.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16(recipe, device))
    with (
        memory_errors("make the batches smaller, and accumulate more of them"),
        process_group(device) as group,
        Signals() as signals,
        _open_progress(show, recipe, group.leads) as shown,
        run_lock(run, shown.say) if group.leads else nullcontext(),
        ExitStack() as closing,
    ):
        written = make_loggers(recipe.loggers) if loggers is None else list(loggers)
        for logger in written:
            closing.callback(logger.close)
        if monitor is not None:
            closing.callback(monitor.close)
        start = _starting_point(run, group, resume=resume, say=shown.say)
        state, ended = TrainingState(), False
        if start is not None:
            state, ended = _resume(start, model, batches, recipe, files or {}, say=shown.say)
        if group.leads:
            state.data = _fingerprint_of(batches, state.data)
        trained = _prepare(model, recipe, group)
        once = partial(forward_and_backward, trained, autocast, group.device)
        replayed = Replayed(partial(once, {}), group) if recipe.graphs else None
        updates = make_optimizer(model, recipe, optimizer)
        schedule = make_scheduler(updates, scheduler)
        given = optimizer is not None or scheduler is not None
        if start is None:
            rng.seed(recipe.seed, group.rank)
        else:
            training_state.restore(
                start,
                model=model,
                optimizer=updates,
                scheduler=schedule,
                recipe=recipe,
                group=group,
                given=given,
            )
        called = tuple(callbacks) if group.leads else ()
        saver = Saver(
            run,
            model,
            updates,
            schedule,
            batches,
            recipe,
            files or {},
            group,
            written=state.step if start else None,
            callbacks=called,
            given=given,
        )
        saver.mark_best(state)
        saver.save(state)  # before the first step, so that a disk that cannot be written to fails at once
        log = Log(
            run,
            state,
            recipe,
            shown,
            written if group.leads else (),
            epoch=_steps_per_epoch(batches, recipe),
            unit=unit,
            callbacks=called,
        )
        if start is None and (line := _long_warmup(recipe, log.total_steps(state))):
            shown.say(line)
        if monitor is not None:
            numbers = [logger for logger in written if not isinstance(logger, CsvLogger)]  # it has a table of its own
            monitor.start(run, state.step, say=shown.say, loggers=numbers, compiled=recipe.compile)
        left, last = iter(batches), None
        counted = state.batch > 0  # whether a loss of this epoch counted an item; assumed after a resume
        model.train()

        while True:
            over, stop = state.end_reason(recipe), int(group.largest(signals.received))
            evaluating = evaluate is not None and _is_evaluation_due(state, recipe, bool(over) or ended)
            if over or stop or evaluating or state.due(recipe.save_every):
                saver.save(state)
            if stop:
                stopped = Stopped(stop, f"stopped at step {state.step}; saved, resume from {run}")
                shown.say(str(stopped))
                raise stopped
            if evaluate is not None and evaluating:
                try:
                    with autocast:
                        metrics = _evaluate(model, evaluate, recipe, signals, group)
                except Interruption:
                    continue
                state.score(metrics[recipe.metric], recipe)
                saver.mark_best(state)
                if isinstance(schedule, ReduceLROnPlateau):
                    schedule.step(metrics[recipe.metric])
                log.evaluation(state, metrics)
                over = state.end_reason(recipe)
            ended = False
            if over:
                outcome = _outcome(run, state, recipe, over)
                shown.say(str(outcome))
                for callback in called:
                    callback.end(outcome)
                return outcome

            log.begin_step()
            parts = list(itertools.islice(left, recipe.accumulate))
            most = int(group.largest(len(parts)))
            if most:
                # A process that runs out of batches before the others repeats its last one with weight 0.
                last = parts[-1] if parts else last
                if last is None:
                    raise ValueError(f"every process needs at least one batch, process {group.rank} has none")
                weighed = [(part, 1.0) for part in parts] + [(last, 0.0)] * (most - len(parts))
                handed = {} if recipe.forcing is None else {"forcing": recipe.forcing(state.step)}
                if schedule is None and (optimizer is None or recipe.rate != STEADY):
                    set_rate(updates, recipe.rate(state.step + 1, state.scores))
                rate = updates.param_groups[0]["lr"]
                computed: Pass = replayed or partial(once, handed)
                if monitor is not None:
                    monitor.begin_step(state.step + 1)
                    computed = _unless_repeated(computed, monitor)
                step = mean_gradient(trained, weighed, computed, group, clip=recipe.clip)
                if not step.finite:
                    raise _non_finite(step, model, parts, handed, state, saver)
                updates.step()
                updates.zero_grad(set_to_none=not recipe.graphs)
                if monitor is not None:
                    monitor.end_step()
                if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
                    schedule.step()
                state.step, state.batch = state.step + 1, state.batch + most
                counted = counted or step.count > 0
                log.training(state, step.sum, step.count, step.norm, rate, batches=most * group.size)
            elif state.batch == 0:
                raise ValueError("batches must have at least one batch per epoch, got an empty epoch")
            if most < recipe.accumulate:
                if not counted:
                    raise ValueError(
                        f"no loss in the {state.batch} batches of an epoch counted an item; check for empty batches "
                        "or targets that are all padding"
                    )
                state.epoch, state.batch, left, counted = state.epoch + 1, 0, iter(batches), False


def _unless_repeated(compute: Pass, monitor: StepMonitor) -> Pass:
    """Return a pass that the monitor does not count for batches of weight 0, which only keep processes in step."""

    def compute_pass(batch: Any, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        with nullcontext() if weight else monitor.pause():
            return compute(batch, weight)

    return compute_pass


def _evaluate(
    model: nn.Module,
    evaluate: Callable[[Any], Mapping[str, float]],
    recipe: Recipe,
    signals: Signals,
    group: Group,
) -> dict[str, float]:
    """Return the metrics of the first process; the state of training, generators included, is left unchanged."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    alone = group.size == 1  # a process that stopped in the middle would block the others
    try:
        with (
            torch.no_grad(),
            rng.preserved_generators(),
            signals.at_once() if alone else nullcontext(),
        ):
            metrics = _as_floats(evaluate(model), recipe)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if recipe.metric not in metrics:
        raise ValueError(
            f"evaluate returned no {recipe.metric!r}, the recipe's metric; {suggest_name(recipe.metric, metrics)}"
        )
    return dict(zip(metrics, group.same(list(metrics.values())), strict=True))


def _as_floats(metrics: object, recipe: Recipe) -> dict[str, float]:
    """Return what `evaluate` returned as Python floats; raises unless it is a mapping."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"evaluate must return numbers by name, got {type(metrics).__name__}; "
            f"write return {{{recipe.metric!r}: ...}}"
        )
    return {name: float(value) for name, value in metrics.items()}


def _is_evaluation_due(state: TrainingState, recipe: Recipe, last: bool) -> bool:
    """Whether to evaluate now: the step is due or the last, is not 0, and has not been evaluated."""
    made = state.step in state.evaluated[-1:]
    return state.step > 0 and not made and (last or state.due(recipe.evaluate_every))


def _starting_point(run: Path, group: Group, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; the first process decides for all."""
    step = -1.0
    if group.leads:
        there = checkpoint.all_checkpoints(run)
        if there and not resume:
            raise ValueError(f"{run} already holds a run, up to {there[-1].name}; pass resume=True or another folder")
        found = checkpoint.usable(run, say)
        if found is None and (run / training_state.RECIPE).exists():
            raise CheckpointError(
                f"{run} holds a run without checkpoints, which cannot be resumed; nothing was changed there, name "
                "another folder"
            )
        step = -1.0 if found is None else float(checkpoint.step_of(found))
    [step] = group.same([step])
    return None if step < 0 else checkpoint.path_of(run, int(step))


def _resume(
    start: Path,
    model: nn.Module,
    batches: Epochs,
    recipe: Recipe,
    files: Mapping[str, str],
    *,
    say: Callable[[str], None],
) -> tuple[TrainingState, bool]:
    """Restore weights, data and state from a checkpoint; return the state, and whether to evaluate it again.

    The last checkpoint of a run is written before the final evaluation, so its score is not in the checkpoint, and a
    continued run would lose what may have been its best step. If training depends on scores (patience, Plateau), the
    evaluation is left out instead, so that scores are those of a run that was longer from the start.
    """
    state, place, before = training_state.read(start)
    training_state.put_weights(start, model)
    batches.restore(place)
    say(f"resuming from {start}")
    for field in fields(Recipe):
        if (old := getattr(before, field.name)) != (new := getattr(recipe, field.name)):
            say(f"the recipe differs from that of the checkpoint: {field.name} was {old!r} and is {new!r}")
    of, now = _watched_metric(before), _watched_metric(recipe)
    if of == now and training_state.evaluated_on_other(start, files):
        of, now = "on other data", "on this data"
    if state.scores and of != now:
        state.forget_scores()
        rate = ", and the rate restarts at its peak" if isinstance(recipe.rate, Plateau) else ""
        say(
            f"earlier scores ({of}) are not comparable with new ones ({now}); "
            f"the search for the best restarts at step {state.step}{rate}"
        )
    ended = bool(state.end_reason(before)) and not state.end_reason(recipe) and state.step not in state.evaluated
    by_scores = recipe.patience is not None or isinstance(recipe.rate, Plateau)
    if ended and by_scores and not state.due(recipe.evaluate_every):
        say(
            f"no evaluation at step {state.step}, where the run ended: training depends on the regular evaluations only"
        )
        ended = False
    return state, ended


def _fingerprint_of(batches: Epochs, before: str | None) -> str | None:
    """Return the fingerprint of the batches; raise if that of the checkpoint differs. The first process checks its own.

    Data without a fingerprint is accepted.
    """
    own = getattr(batches, "fingerprint", None)
    now = None if own is None else own()
    if before is not None and now is not None and before != now:
        raise ValueError(
            "a resumed run must continue with the same training data, but these batches hold other data than those of "
            "the checkpoint; give the same data, or name another folder to train another model"
        )
    return before if now is None else now


def _long_warmup(recipe: Recipe, steps: int | None) -> str | None:
    """Return a warning if the warm-up takes more than a fifth of the run, None otherwise."""
    warmup = recipe.rate.warmup
    if steps is None or warmup <= max(1, steps / 5):
        return None
    reached = max(recipe.rate(step) for step in {max(1, min(steps, warmup)), max(1, steps)})
    return (
        f"the warm-up takes {warmup:,} of {steps:,} steps, so the learning rate reaches {reached:.1e} of "
        f"{recipe.rate.peak:.1e}; a fifth of the steps, {max(1, steps // 5):,}, is enough for most models"
    )


def _watched_metric(recipe: Recipe) -> str:
    """Return the criterion for the best checkpoint, in words."""
    return f"{recipe.metric}, {recipe.better} being better"


def _prepare(model: nn.Module, recipe: Recipe, group: Group) -> nn.Module:
    objective = Objective(model)
    if recipe.compile:
        objective.compile()
    return distribute(objective, group, shard=recipe.shard)


def _steps_per_epoch(batches: Epochs, recipe: Recipe) -> int | None:
    """Return the steps of an epoch, None if the batches have no length."""
    try:
        return math.ceil(len(batches) / recipe.accumulate) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over a stream
        return None


def in_bfloat16(recipe: Recipe, device: torch.device) -> bool:
    """Return whether a run on this device computes in bfloat16."""
    return recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type == "cuda")


@contextmanager
def _open_progress(show: progress.Progress | None, recipe: Recipe, leads: bool) -> Iterator[progress.Progress]:
    shown = show or progress.default_progress(every=recipe.log_every)
    try:
        yield shown if leads else progress.Silence()
    finally:
        shown.close()


def _non_finite(
    step: GradientStep, model: nn.Module, parts: list[Any], handed: dict[str, float], state: TrainingState, saver: Saver
) -> NonFiniteError:
    """Return the error: step and batch, the first non-finite tensor, and the last good checkpoint."""
    first, last = state.batch + 1, state.batch + len(parts)
    where = f"batch {first}" if first == last else f"batches {first} to {last}"
    place = "the weights are sharded, so no process can locate it"
    if not saver.recipe.shard:
        objective, device = Objective(model), saver.group.device
        number, place = first_non_finite(model, [partial(objective, move_to_device(x, device), handed) for x in parts])
        where = where if number is None else f"batch {first + number}"
    return NonFiniteError(
        f"loss {step.loss:g} with a gradient of norm {step.norm:g} at step {state.step + 1} "
        f"(epoch {state.epoch}, {where}): {place}; the last good state is {saver.path}; "
        "resume from there with a lower rate or a smaller clip"
    )


def _outcome(run: Path, state: TrainingState, recipe: Recipe, reason: str) -> Outcome:
    best = state.step if state.best is None else state.best
    score = None if state.lowest is None else state.lowest * (1 if recipe.better == "lower" else -1)
    path = checkpoint.path_of(run, best)
    return Outcome(step=state.step, epoch=state.epoch, reason=reason, best=path, score=score)


def _check(
    model: nn.Module,
    batches: Epochs,
    recipe: Recipe,
    evaluate: object,
    files: Mapping[str, str],
    scheduler: object,
) -> None:
    if not callable(getattr(model, "loss", None)):
        raise TypeError(f"model must have a method loss(batch), got {type(model).__name__} without one")
    if next(model.parameters(), None) is None:
        raise ValueError(f"model must have parameters to train, got {type(model).__name__} without any")
    if not isinstance(batches, Epochs):
        raise TypeError(
            f"batches must have __iter__, state and restore, got {type(batches).__name__}; wrap a list in Shuffled(...)"
            " or pass a DataLoader"
        )
    if scheduler is not None and recipe.rate != STEADY:
        raise ValueError(
            f"the learning rate is set by the scheduler or by the recipe, got rate={recipe.rate}; leave one out"
        )
    if evaluate is None and (recipe.patience is not None or isinstance(recipe.rate, Plateau)):
        raise ValueError("patience and Plateau need evaluations; pass validation data (in Python: evaluate=)")
    for name in files:
        if name in training_state.OWN or not checkpoint.NAME.fullmatch(name):
            raise ValueError(f"files must have plain names other than {', '.join(training_state.OWN)}, got {name!r}")
