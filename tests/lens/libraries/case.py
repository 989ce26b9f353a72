"""Case: one small random model of a library, and the inputs it runs on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

Inputs = Sequence[Any] | Mapping[str, Any]
SHARPER = (4.0, 2.0, 1.0, 0.5)  # factors of random weights, from uneven attention to the library's own


def seed(n: int) -> None:
    """Seed every generator that a library draws from."""
    random.seed(n)
    numpy.random.seed(n)
    torch.manual_seed(n)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, built again for each run with the same seed, and its inputs.

    `call` runs a model that is not called as `model(*inputs)`. `batched` says whether dim 0 of every input tensor is
    the batch. `excused` are modules, by a part of their name, whose softmax mixes no positions and need not be named.
    `no_entry` are modules that are no attention of queries over keys: no entry of the tape may be theirs. `attends` are
    modules that must be on the tape or in `tape.unseen`, where the truth cannot know it: weights without a softmax.
    `audit` runs `capture(audit=True)`, which finds mixers without weights that no list of classes has. `edge_weights`
    returns the edges, 2 e, and their weights, e h, of the first graph layer, as its library reports them.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    call: Callable[..., Any] | None = None
    train: bool = False
    batched: bool = True
    sharper: Sequence[float] = SHARPER
    excused: Sequence[str] = ()
    no_entry: Sequence[str] = ()
    attends: Sequence[str] = ()
    audit: bool = False
    edge_weights: Callable[..., tuple[Tensor, Tensor]] | None = None

    def model(self, factor: float) -> nn.Module:
        """Return the model with its matrices scaled, so that its attention is uneven."""
        seed(0)
        model = self.build().train(self.train)
        with torch.no_grad():
            for x in model.parameters():
                if x.ndim > 1 and x.is_floating_point():
                    x.mul_(factor)
        return model

    def run(self, model: nn.Module, inputs: Inputs) -> Any:
        """Run the model as its library does."""
        seed(1)
        with torch.no_grad():
            if self.call is not None:
                return self.call(model, *inputs)
            return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)

    def make_inputs(self) -> Inputs:
        seed(2)
        return self.inputs()


def change_first_row(inputs: Any, batch: int) -> Any:
    """Return inputs whose batch row 0 is another text or picture; nothing else differs."""
    if isinstance(inputs, Mapping):
        return {name: change_first_row(x, batch) for name, x in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(change_first_row(x, batch) for x in inputs)
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or inputs.dtype == torch.bool or inputs.shape[0] != batch:
        return inputs
    changed = inputs.clone()
    first = inputs[0]
    changed[0] = first.flip(-1) * 1.5 + 0.1 if first.is_floating_point() else first.flip(0)
    return changed
