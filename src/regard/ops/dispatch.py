"""Which backend runs a call, and why not the others."""

from __future__ import annotations

from types import ModuleType

from .backends import reference, sdpa, tiled
from .call import Call

BACKENDS: dict[str, ModuleType] = {backend.name: backend for backend in (sdpa, tiled, reference)}  # fastest first


def choose(call: Call) -> ModuleType:
    """The backend asked for, or the first that has no objections."""
    if call.backend is not None:
        backend = named(call.backend)
        if found := backend.objections(call):
            raise ValueError(f"backend {call.backend!r} cannot run this call: " + "; ".join(found))
        return backend
    return next(backend for backend in BACKENDS.values() if not backend.objections(call))


def named(name: str) -> ModuleType:
    """The backend of that name."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def table(call: Call) -> str:
    """Every backend in order, the chosen one marked, the others with their objections."""
    chosen = choose(call)
    b, h, i, j = call.shape
    lines = [
        f"attend {b} x {h} x {i} x {j}, d = {call.q.shape[-1]}, {call.q.dtype}, {call.q.device}".replace("torch.", "")
    ]
    lines += [
        f"  {name:<10} {term!r}"
        for name in ("score", "mask", "bias", "normalize")
        if (term := getattr(call, name)) is not None
    ]
    for backend in BACKENDS.values():
        found = backend.objections(call)
        verdict = "chosen" if backend is chosen else "; ".join(found) or "could, comes later in the order"
        lines.append(f"{'->' if backend is chosen else '  '} {backend.name:<10} {verdict}")
    return "\n".join(lines)
