"""The definition with its loop turned outward: blocks of rows, in memory linear in the sequence.

Pure PyTorch, every term, any device, empty tiles skipped; differentiable once.
"""

from __future__ import annotations

from torch import Tensor

from ..blocks.prepared_call import prepare
from ..blocks.products import product
from ..blocks.reduction import evaluate
from ..call import Call
from ..torch_state import in_functorch, run_uncompiled

name = "tiled"


def objections(call: Call) -> list[str]:
    """What keeps this backend from running the call."""
    return ["it works block by block, in place, which torch.func cannot follow"] if in_functorch() else []


@run_uncompiled
def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    out, statistic = evaluate(prepare(call), product(call.v, call.dropout))
    return out.to(call.v.dtype), statistic
