"""Which backend runs a call, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from .backends import flex, reference, sdpa, tiled, triton
from .blocks.mask_layout import TILE
from .call import Call
from .terms.mask_tiles import Grid
from .terms.masks import Causal
from .terms.scores import Additive

BACKENDS: dict[str, ModuleType] = {backend.name: backend for backend in (sdpa, flex, triton, tiled, reference)}
SHORT = 2**18  # entries up to which compiling FlexAttention for a kind of call takes longer than it will ever save


def choose(call: Call) -> ModuleType:
    """The backend asked for, or the first that has no objections."""
    if call.backend is not None:
        backend = named(call.backend)
        if found := backend.objections(call):
            raise ValueError(f"backend {call.backend!r} cannot run this call: " + "; ".join(found))
        return backend
    objections = {}
    for backend in order(call):
        objections[backend.name] = backend.objections(call)
        if not objections[backend.name]:
            return backend
    found = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in objections.items())
    raise ValueError(
        f"no backend runs this call in linear memory: {found}; pass backend='reference' to store the matrix"
    )


def order(call: Call) -> tuple[ModuleType, ...]:
    """Backends by measured speed, fastest first; the reference, which stores the matrix, must be asked for."""
    if isinstance(call.score, Additive):
        return triton, tiled, sdpa, flex
    masked = call.mask is not None and not isinstance(call.mask, Causal)
    long = call.shape[2] * call.shape[3] > SHORT
    if call.q.device.type == "cuda" and masked and long and not torch.compiler.is_compiling():
        # With a mask of keys PyTorch's kernels take 2 to 3 times as long as FlexAttention.
        return flex, sdpa, triton, tiled
    return sdpa, flex, triton, tiled


def named(name: str) -> ModuleType:
    """The backend of that name."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def table(call: Call) -> str:
    """The call, what it costs, and every backend: the chosen one marked, the others with their objections."""
    chosen = choose(call)
    b, h, i, j = call.shape
    lines = [
        f"attend {b} x {h} x {i} x {j}, d = {call.q.shape[-1]}, {call.q.dtype}, {call.q.device}".replace("torch.", "")
    ]
    lines += [f"  {name:<10} {term!r}" for name, term in call.slots.items() if term is not None]
    lines.append(f"  {'cost':<10} {cost(call)}")
    for backend in BACKENDS.values():
        found = "; ".join(backend.objections(call))
        verdict = "chosen" if backend is chosen else found or REASONS[backend.name]
        lines.append(f"{'->' if backend is chosen else '  '} {backend.name:<10} {verdict}")
    return "\n".join(lines)


REASONS = {
    "sdpa": "could",
    "flex": "could, where sdpa cannot",
    "triton": "could, where sdpa and flex cannot",
    "tiled": "could, slower",
    "reference": "could, storing the matrix; ask for it by name",
}


@dataclass(frozen=True)
class Cost:
    """What an attention takes at least: arithmetic on the tiles that are not empty, and each tensor moved once."""

    flops: int
    moved: int  # bytes
    share: float  # of the matrix in tiles that are not empty
    matrix: int  # bytes of the matrix that is not stored

    def __str__(self) -> str:
        return (
            f"{_short(self.flops)}FLOP over {100 * self.share:.3g} % of the matrix, {_short(self.moved)}B moved; "
            f"the matrix would take {_short(self.matrix)}B"
        )


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


def _short(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} P"
