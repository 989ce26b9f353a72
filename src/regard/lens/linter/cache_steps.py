"""Run a text token by token through a cache, in the ways in which attention code keeps one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .call_adapter import CallAdapter

FLAGS = ("use_cache", "return_cache")
STARTS = ("start_pos", "start_position", "input_pos", "offset", "past_length")


class CachedRun:
    """The outputs of a text, b n e, read in steps through a cache, and the positions that each step looked up."""

    def __init__(self, outputs: Tensor, positions: list[tuple[str, list[int]]]) -> None:
        self.outputs = outputs
        self.positions = positions


def has_cache(adapter: CallAdapter) -> bool:
    """Return whether the call has an argument for a cache or for the position at which it goes on."""
    return bool(adapter.caches) or any(name in adapter.parameters for name in STARTS)


def run_cached(adapter: CallAdapter, x: Tensor, sizes: list[int]) -> CachedRun | str:
    """Read x in pieces of the given sizes; return the outputs, or the reason why no cache could be used."""
    errors = []
    for way in (_own_cache, _returned_cache, _start_position):
        with _PositionLookups(adapter.module) as lookups:
            try:
                outputs = way(adapter, x, sizes)
            except Exception as error:  # the module may raise anything in a way that is not its own
                errors.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
        if outputs is not None:
            return CachedRun(outputs, lookups.calls)
    if errors:
        return f"its cache argument was tried and raised {errors[-1]}"
    return "forward has a cache argument, and returns no cache that could be passed to the next call"


def full_positions(adapter: CallAdapter, x: Tensor) -> list[tuple[str, list[int]]]:
    """Return the positions that one full pass looks up."""
    with _PositionLookups(adapter.module) as lookups:
        adapter.run(x)
    return lookups.calls


def positions_of_pass(calls: list[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Join the positions of several calls, by the embedding that was looked up."""
    joined: dict[str, list[int]] = {}
    for name, positions in calls:
        joined.setdefault(name, []).extend(positions)
    return joined


def _own_cache(adapter: CallAdapter, x: Tensor, sizes: list[int]) -> Tensor | None:
    """A layer that makes its own cache, `layer.new_cache()`, which each call fills."""
    make = getattr(adapter.module, "new_cache", None)
    if make is None or "cache" not in adapter.caches:
        return None
    cache, pieces = make(), []
    for piece in x.split(sizes, 1):
        pieces.append(adapter.run(piece, cache=cache))
    return torch.cat(pieces, 1)


def _returned_cache(adapter: CallAdapter, x: Tensor, sizes: list[int]) -> Tensor | None:
    """A call that returns its cache beside the output, and takes it the next time."""
    if not adapter.caches:
        return None
    name, cache, pieces = adapter.caches[0], None, []
    for piece in x.split(sizes, 1):
        extra: dict[str, Any] = {flag: True for flag in FLAGS if flag in adapter.parameters}
        extra |= {} if cache is None else {name: cache}
        out = adapter.call(piece, **extra)
        cache = _cache_in(out, name)
        if cache is None:
            return None
        pieces.append(adapter.output(out))
    return torch.cat(pieces, 1)


def _start_position(adapter: CallAdapter, x: Tensor, sizes: list[int]) -> Tensor | None:
    """A module that keeps its cache in buffers, and is called with the position of the first new token."""
    name = next((each for each in STARTS if each in adapter.parameters), None)
    if name is None:
        return None
    start, pieces = 0, []
    for piece in x.split(sizes, 1):
        pieces.append(adapter.run(piece, None, **{name: start}))
        start += piece.shape[1]
    return torch.cat(pieces, 1)


def _cache_in(out: Any, name: str) -> Any:
    """Return the cache in an output: the entry of its name, or what follows the first tensor."""
    if isinstance(out, Mapping):
        return out.get(name, out.get("past_key_values"))
    if not isinstance(out, tuple) or len(out) < 2:
        return None
    rest = [each for each in out[1:] if each is not None]
    nested = [each for each in rest if not isinstance(each, Tensor)]
    return (nested or rest or [None])[-1]


class _PositionLookups:
    """Records the indices of embeddings that are looked up by position: the same for all texts, each one more."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[tuple[str, list[int]]] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> _PositionLookups:
        for name, module in self.module.named_modules():
            if isinstance(module, nn.Embedding):
                self.hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            ids = args[0] if args and isinstance(args[0], Tensor) else None
            if ids is None or ids.ndim > 2 or not ids.numel():
                return
            rows = ids.reshape(-1, ids.shape[-1]) if ids.ndim else ids.reshape(1, 1)
            if bool((rows == rows[:1]).all()) and bool((rows[0].diff() == 1).all()):
                self.calls.append((name, rows[0].tolist()))

        return record
