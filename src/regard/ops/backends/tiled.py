"""The definition with its loop turned outward: blocks of rows, in memory linear in the sequence.

Pure PyTorch, every term, any device, empty tiles skipped; differentiable once.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..backend_plan import BackendPlan, Objections
from ..blocks.prepared_call import prepare
from ..blocks.products import product
from ..blocks.reduction import evaluate
from ..call import Call
from ..torch_state import in_functorch, run_uncompiled

name = "tiled"


def plan(call: Call) -> BackendPlan | Objections:
    """How this backend runs the call, or why it cannot."""
    if in_functorch():
        return ["it works block by block, in place, which torch.func cannot follow"]
    return BackendPlan(name, partial(_run, call))


@run_uncompiled
def _run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    out, statistic = evaluate(prepare(call), product(call.v, call.dropout))
    return out.to(call.v.dtype), statistic
