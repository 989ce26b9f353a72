"""Dry runs: what a training run would read, learn and cost, without writing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Tokenizer
from ..train import Epochs, Recipe
from ..train.batches import move_to_device
from ..train.fit import computes_in_bfloat16
from ..train.gradient import Objective

MEASURED_STEPS = 3
MAX_SECONDS = 20.0  # no step begins after this time
SHOWN_EXAMPLES = 2
MAX_CLASSES = 20

_lines: ContextVar[list[str] | None] = ContextVar("lines of a dry run", default=None)


@contextmanager
def dry_run() -> Iterator[list[str]]:
    """Within the block, training runs write nothing: they add lines about their data and costs to the list.

    >>> from regard.tasks import language
    >>> with dry_run() as lines:
    ...     _ = language.train(["a text"] * 20, out="nowhere", model=language.Model(length=8, dim=16), tokens=16)
    >>> lines[0]
    'text: 20 lines, 161 tokens'
    """
    before = _lines.set([])
    try:
        yield _lines.get() or []
    finally:
        _lines.reset(before)
