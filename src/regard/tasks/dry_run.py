"""Dry runs: what a training run would read, learn and cost, without writing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Tokenizer
from ..ops.memory_limit import format_size
from ..train import Epochs, Recipe
from ..train.batches import move_to_device
from ..train.fit import in_bfloat16
from ..train.gradient import Objective

MEASURED_STEPS = 3
MAX_SECONDS = 20.0  # no step begins after this time
SHOWN_EXAMPLES = 2
MAX_CLASSES = 20

_lines: ContextVar[list[str] | None] = ContextVar("lines of a dry run", default=None)


@contextmanager
def dry_run() -> Iterator[list[str]]:
    """Within the block, training runs write nothing: they add lines about their data and costs to the list.

    with dry_run() as lines:
        language.train(["a text"] * 20, out="nowhere", model=language.Model(length=8, dim=16), tokens=16)
    lines[0]  # 'text: 20 lines, 61 tokens'
    """
    lines: list[str] = []
    before = _lines.set(lines)
    try:
        yield lines
    finally:
        _lines.reset(before)


def is_dry_run() -> bool:
    """Whether training runs write nothing here."""
    return _lines.get() is not None


def add_lines(lines: Iterable[str]) -> None:
    """Add lines to those of the dry run."""
    found = _lines.get()
    assert found is not None
    found += lines


def length_line(what: str, unit: str, counts: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """Return the number and the lengths of texts.

    >>> length_line("source", "texts", [3, 5, 4])
    'source: 3 texts of 3 to 5 tokens, median 4, 95 % have at most 5; 12 tokens'
    """
    lengths = np.asarray(counts)
    middle, high = (int(np.quantile(lengths, share, method="higher")) for share in (0.5, 0.95))
    return (
        f"{what}: {len(lengths):,} {unit} of {lengths.min():,} to {lengths.max():,} tokens, median {middle:,}, 95 % "
        f"have at most {high:,}; {lengths.sum():,} tokens"
    )


def unknown_line(what: str, tokenizer: Tokenizer, ids: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return the size of a vocabulary, and how many of the ids stand for unknown text."""
    unknown = total = 0
    for row in ids:
        total += len(row)
        unknown += 0 if tokenizer.unk is None else int((np.asarray(row) == tokenizer.unk).sum())
    share = f"{unknown:,} of {total:,} tokens are unknown, {unknown / max(1, total):.2%}"
    return f"{what}: vocabulary of {len(tokenizer):,} tokens; {share}"


def class_line(what: str, labels: Sequence[int] | np.ndarray[Any, Any], classes: Sequence[str]) -> str:
    """Return the number of examples of each class.

    >>> class_line("training", [0, 1, 1, 1], ["bad", "good"])
    'training: 4 examples; good 3 (75.0 %), bad 1 (25.0 %)'
    """
    counts = np.bincount(np.asarray(labels, np.int64), minlength=len(classes))
    order = np.argsort(-counts, kind="stable")
    shown = [f"{classes[n]} {counts[n]:,} ({100 * counts[n] / counts.sum():.1f} %)" for n in order[:MAX_CLASSES]]
    more = [f"and {len(classes) - MAX_CLASSES:,} other classes"] * (len(classes) > MAX_CLASSES)
    return f"{what}: {counts.sum():,} examples; {', '.join(shown + more)}"


def example_lines(what: str, rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of the first examples."""
    return [f"{what} {n}: {' | '.join(tokenizer.labels(row))}" for n, row in enumerate(rows[:SHOWN_EXAMPLES], start=1)]


def cost_lines(model: nn.Module, batches: Epochs, recipe: Recipe, device: torch.device) -> list[str]:
    """Return the size of the model, and the memory, time and disk that training takes, from its first steps.

    The steps change the model in memory.
    """
    model.to(device).train()
    sizes = [(p.numel(), p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    trained = sum(size for _, size, is_trained in sizes if is_trained)
    weights = sum(size for _, size, _ in sizes)
    seconds, activations, taken = _measure(model, batches, recipe, device)
    step = sorted(seconds)[len(seconds) // 2] * recipe.accumulate
    total = _total_steps(batches, recipe, taken)
    length = "" if total is None else f", about {_clock(step * total)} for {total:,} steps"
    count = sum(n for n, _, is_trained in sizes if is_trained)
    parts = {"weights": weights, "gradients": trained, "optimizer": 2 * trained, "activations of a batch": activations}
    shares = ", ".join(f"{part} {format_size(size)}" for part, size in parts.items())
    return [
        f"model: {type(model).__name__}, {count:,} of {sum(n for n, _, _ in sizes):,} parameters are trained",
        f"memory: about {format_size(sum(parts.values()))}: {shares}",
        f"time: {step:.3g} s a step on {device}{length}, evaluations and checkpoints left out",
        f"disk: about {format_size(weights + 2 * trained)} a checkpoint, at most {recipe.keep + 2} at a time",
    ]


def _measure(model: nn.Module, batches: Epochs, recipe: Recipe, device: torch.device) -> tuple[list[float], int, int]:
    """Return the seconds of each batch, the most bytes that a backward pass needs, and the number of batches."""
    objective, handed = Objective(model), {} if recipe.forcing is None else {"forcing": recipe.forcing(0)}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}  # emptied after each batch, because the next one may reuse its addresses
    most = 0

    def hold(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16(recipe, device))
    seconds: list[float] = []
    began = time.perf_counter()
    for batch in islice(batches, MEASURED_STEPS):
        if seconds and time.perf_counter() - began > MAX_SECONDS:
            break
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x), autocast:
            loss, _ = objective(move_to_device(batch, device), handed)
        most = max(most, sum(held.values()))
        held.clear()
        loss.backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    if not seconds:
        raise ValueError("batches must have at least one batch per epoch, got an empty epoch")
    return seconds, most, len(seconds)


def _total_steps(batches: Epochs, recipe: Recipe, taken: int) -> int | None:
    """Return the number of steps of the run, from the share of the epoch that `taken` batches were; None if unknown."""
    counts = [recipe.steps]
    progress: Callable[[], float | None] | None = getattr(batches, "progress", None)
    share = None if progress is None else progress()
    if recipe.epochs is not None and share:
        counts.append(max(1, round(recipe.epochs * taken / share / recipe.accumulate)))
    return min((count for count in counts if count is not None), default=None)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
