"""Save and restore the random generators of Python, NumPy and PyTorch as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed(number: int, rank: int = 0) -> None:
    """Seed every generator; each process of a group gets a different seed."""
    number = (number + 7_919 * rank) % 2**32
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def capture() -> dict[str, Tensor]:
    """Return the state of every generator. Float64 holds 32-bit words exactly; NaN means no cached Gaussian."""
    _, words, waiting = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor([*words, math.nan if waiting is None else waiting], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, gauss], dtype=torch.float64),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Tensor]) -> None:
    """Restore every generator to a state from `capture`."""
    *words, waiting = state["python"].tolist()
    random.setstate((3, tuple(map(int, words)), None if math.isnan(waiting) else waiting))
    *keys, position, has_gauss, gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_gauss), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators at the end of the block."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
