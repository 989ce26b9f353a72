"""CUDA graphs: replay forward and backward as one graph for each batch shape that recurs.

A small model spends its time on kernel launches; replaying a graph launches all kernels at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..graph_recorder import GraphRecorder
from .distributed import Group

Pass = Callable[[Any, float], tuple[Tensor, Tensor]]
Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]
MAX_GRAPHS = 256


class Replayed:
    """A pass over a batch of weight 1, replayed as a CUDA graph once its shape has occurred before.

    The first batch of a shape runs eagerly, which also allocates gradients and initializes libraries; the second one
    is captured. Gradients must be set to zero between updates, not to None: a graph writes to fixed addresses.
    """

    def __init__(self, run: Pass, group: Group) -> None:
        self.run, self.device = run, group.device
        if self.device.type != "cuda":
            raise ValueError(f"graphs=True needs a model on a GPU, got one on {self.device}; leave graphs out")
        if group.size > 1:
            raise ValueError(f"graphs=True needs a single process, got {group.size}; leave graphs out")
        self.recorder = GraphRecorder(self.device)
        self.met: set[Shape] = set()
        self.graphs: dict[Shape, _Graph] = {}

    def __call__(self, batch: Any, weight: float) -> tuple[Tensor, Tensor]:
        shape = _shape(batch)
        if shape not in self.graphs:
            if shape not in self.met or len(self.graphs) == MAX_GRAPHS:
                self.met.add(shape)
                return self.run(batch, weight)
            self.graphs[shape] = self._capture(batch)
        return self.graphs[shape](batch)

    def _capture(self, batch: dict[str, Tensor]) -> _Graph:
        inputs = {name: torch.empty_like(x, device=self.device).copy_(x) for name, x in batch.items()}
        try:
            replay, (loss, count) = self.recorder.record(lambda: self.run(inputs, 1.0))
        except RuntimeError as error:
            raise ValueError(
                f"the model cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); its loss must not read "
                "tensor values on the host, as packed recurrent networks do; train it without graphs"
            ) from error
        return _Graph(replay, inputs, loss, count)


@dataclass(frozen=True)
class _Graph:
    """A captured pass, its input tensors, and its output tensors."""

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    loss: Tensor
    count: Tensor

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        for name, x in batch.items():
            self.inputs[name].copy_(x, non_blocking=True)
        self.replay()
        return self.loss, self.count


def _shape(batch: Any) -> Shape:
    if not isinstance(batch, dict) or not all(isinstance(x, Tensor) for x in batch.values()):
        raise TypeError(f"with graphs a batch must be a dict of tensors, got {type(batch).__name__}")
    return tuple((name, x.shape, x.dtype) for name, x in batch.items())
