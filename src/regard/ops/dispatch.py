"""Choose the backend that runs a call."""

from __future__ import annotations

from types import ModuleType

import torch

from .backend_plan import BackendPlan, Objections
from .backends import flex, reference, sdpa, tiled, triton
from .backends.sdpa_varlen import plan_varlen
from .call import Call
from .terms.masks import Causal
from .terms.scores import Additive

BACKENDS: dict[str, ModuleType] = {backend.name: backend for backend in (sdpa, flex, triton, tiled, reference)}
# Compiling FlexAttention for a kind of mask takes 3 seconds. A dense mask costs less than that over ten thousand calls
# up to MAX_DENSE_MASK queries times keys, and MAX_DENSE_SCORES queries times keys times heads times batch rows.
MAX_DENSE_MASK, MAX_DENSE_SCORES = 2**22, 2**27


def choose(call: Call) -> BackendPlan:
    """The plan of `call.backend`, or of the first backend without objections."""
    if call.backend is not None:
        plan = find_backend(call.backend).plan(call)
        if isinstance(plan, BackendPlan):
            return plan
        raise ValueError(f"backend {call.backend!r} cannot run this call: " + "; ".join(plan))
    objections: dict[str, Objections] = {}
    for backend in order(call):
        plan = backend.plan(call)
        if isinstance(plan, BackendPlan):
            return plan
        objections[backend.name] = plan
    reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in objections.items())
    raise ValueError(
        f"no backend runs this call in linear memory: {reasons}; pass backend='reference' to store the matrix"
    )


def order(call: Call) -> tuple[ModuleType, ...]:
    """Backends by measured speed, fastest first, without the reference, which stores the matrix."""
    if isinstance(call.score, Additive):
        return triton, tiled, sdpa, flex
    masked = call.mask is not None and not isinstance(call.mask, Causal)
    may_compile = call.q.device.type == "cuda" and masked and not torch.compiler.is_compiling()
    if may_compile and _is_long(call) and plan_varlen(call) is None:
        # With a mask of keys PyTorch's kernels take 2 to 3 times as long as FlexAttention.
        return flex, sdpa, triton, tiled
    return sdpa, flex, triton, tiled


def _is_long(call: Call) -> bool:
    b, h, i, j = call.shape
    return i * j > MAX_DENSE_MASK or b * h * i * j > MAX_DENSE_SCORES


def find_backend(name: str) -> ModuleType:
    """The backend of that name."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]
