"""Explain: what a call costs, which backend runs it, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

from . import dispatch
from .backend_plan import BackendPlan
from .blocks.mask_layout import TILE
from .call import Call
from .memory_limit import format_size
from .terms.mask_tiles import Grid
from .terms.scores import Additive
from .weights import choose_reducer

REASONS = {
    "sdpa": "could",
    "flex": "could, where sdpa cannot",
    "triton": "could, where sdpa and flex cannot",
    "tiled": "could, slower",
    "reference": "could, storing the matrix; ask for it by name",
}


def explain_call(call: Call) -> str:
    """The call, what it costs, and every backend: the chosen one marked, the others with their objections.

    The last line says how `summary()` of the weights would run.
    """
    chosen = dispatch.choose(call).backend
    b, h, i, j = call.shape
    lines = [
        f"attend {b} x {h} x {i} x {j}, d = {call.q.shape[-1]}, {call.q.dtype}, {call.q.device}".replace("torch.", "")
    ]
    lines += [f"  {name:<10} {term!r}" for name, term in call.slots.items() if term is not None]
    lines.append(f"  {'cost':<10} {cost(call)}")
    for backend in dispatch.BACKENDS.values():
        if backend.name == chosen:
            lines.append(f"-> {backend.name:<10} chosen")
        else:
            plan = backend.plan(call)
            reason = REASONS[backend.name] if isinstance(plan, BackendPlan) else "; ".join(plan)
            lines.append(f"   {backend.name:<10} {reason}")
    lines.append(f"  {'summary':<10} {choose_reducer(call).describe()}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Cost:
    """Lower bounds for one attention: arithmetic on the tiles that are not empty, and every tensor moved once."""

    flops: int
    moved: int  # bytes
    share: float  # share of the matrix that lies in tiles that are not empty
    matrix: int  # bytes the stored matrix would take

    def __str__(self) -> str:
        work, moved, matrix = format_size(self.flops, "FLOP"), format_size(self.moved), format_size(self.matrix)
        return f"{work} over {100 * self.share:.3g} % of the matrix, {moved} moved; the matrix would take {matrix}"


def cost(call: Call) -> Cost:
    """An estimate from shapes and from the structure of the mask; nothing is computed."""
    assert call.v is not None
    b, h, i, j = call.shape
    share = 1.0
    if call.mask is not None and b and i and j:
        some, _ = call.mask.tiles(Grid(call.whole(), TILE, TILE))
        share = some.expand(*some.shape[:2], -(-i // TILE), -(-j // TILE)).double().mean().item()
    # A product of d numbers takes 2 d operations, a sum of d tanh about 4 d.
    score = (4 if isinstance(call.score, Additive) else 2) * call.k.shape[-1]
    flops = b * h * i * j * share * (score + 2 * call.v.shape[-1])
    moved = (call.q.numel() + call.k.numel() + call.v.numel() + b * h * i * call.v.shape[-1]) * call.q.itemsize
    return Cost(round(flops), moved, share, b * h * i * j * call.dtype.itemsize)
