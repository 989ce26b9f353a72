"""Our own kernels on a GPU: additive attention, block by block, its scores without a tanh for each pair."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..call import Call
from ..problem import prepare
from ..products import product
from ..rows import evaluate
from ..scores import Additive
from ..tracing import outside_the_graph, transformed

name = "triton"
DEVICES = ("cuda",)  # on the CPU Triton interprets a kernel: good for tests alone


def objections(call: Call) -> list[str]:
    """What keeps this backend from running the call."""
    found = unavailable(call)
    if not isinstance(call.score, Additive):
        found.append("it is for additive scores; for products PyTorch's kernels are as fast")
    if transformed():
        found.append("it works block by block, in place, which torch.func cannot follow")
    return found


@outside_the_graph
def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    out, statistic = evaluate(replace(prepare(call), kernel=True), product(call.v, call.dropout))
    return out.to(call.v.dtype), statistic


def unavailable(call: Call) -> list[str]:
    """What keeps any of our kernels from these tensors."""
    found = []
    if call.q.device.type not in DEVICES:
        found.append(f"it is compiled for GPUs, and q is on {call.q.device}")
    elif not installed():
        found.append("Triton is not installed; pip install triton")
    if call.q.dtype == torch.float64:
        found.append("its arithmetic is float32")
    return found


@cache
def installed() -> bool:
    """Is there a Triton?"""
    return find_spec("triton") is not None
