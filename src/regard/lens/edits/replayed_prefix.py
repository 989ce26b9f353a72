"""Run a model again from one of its attention layers on: what it computed before is replayed.

A `PrefixRecorder` watches one pass. At the first call of each chosen layer it keeps the outputs of the modules that had
finished by then: the embedding, the blocks before, and in the block itself other layers before this one. Of a module
that has finished as a whole only its own output is kept, and norms and projections of the block run again, so a model
of n blocks keeps n hidden states.

`replay_outputs` returns these outputs and does not run the modules again. That holds for models whose modules compute
functions of their inputs: a tensor that the model writes to after a module has returned it is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...torch_internals import tree_leaves
from ..interception.intercepted import InterceptedAttention


class FinishedCall(NamedTuple):
    """A module call that has finished, and what it returned."""

    module: nn.Module
    output: Any
    versions: tuple[int, ...]  # the version counters of its tensors
    caller: nn.Module

    def is_unchanged(self) -> bool:
        """Whether the model has not written to the output since."""
        return self.versions == _versions(self.output)


@dataclass(eq=False)
class _RunningCall:
    """A module call under way, and the calls within it that have finished."""

    module: nn.Module
    finished: list[FinishedCall] = field(default_factory=list)


class PrefixRecorder:
    """Consumer that keeps what a model computed before the first call of each layer that `is_chosen`."""

    def __init__(self, is_chosen: Callable[[str], bool]) -> None:
        self._is_chosen = is_chosen
        self._running: list[_RunningCall] = []
        self._trunk: list[nn.Module] = []  # the modules that run whichever chosen layer does
        self.before: dict[str, list[FinishedCall]] = {}  # layer -> calls before it, layers in order of their first call
        self.shapes: dict[str, tuple[int, ...]] = {}  # b h i e of the heads of each layer

    def observe(self, attention: InterceptedAttention) -> Tensor:
        """Note the calls that have finished before this one."""
        layer, out = attention.layer, attention.out
        if layer not in self.shapes:
            self.shapes[layer] = tuple(attention.heads.shape)
            if self._is_chosen(layer):
                # What the layer itself has called may be a part of its attention, such as dropout on the weights.
                self.before[layer] = [call for running in self._running[:-1] for call in running.finished]
                self._drop_parts_of_blocks()
        return out

    def _drop_parts_of_blocks(self) -> None:
        """Drop calls of modules without parts, such as norms, unless all layers have them before them."""
        running = [each.module for each in self._running]
        if len(self.before) > 1:
            running = [
                x for x, y in takewhile(lambda pair: pair[0] is pair[1], zip(self._trunk, running, strict=False))
            ]
        self._trunk = running
        for layer, calls in self.before.items():
            self.before[layer] = [x for x in calls if x.caller in running or any(x.module.children())]

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of the model within the block."""
        hooks = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(self._begin))
            hooks.append(module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.before = {layer: [x for x in calls if x.is_unchanged()] for layer, calls in self.before.items()}

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(_RunningCall(module))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if self._running:
            caller = self._running[-1]
            caller.finished.append(FinishedCall(module, output, _versions(output), caller.module))


@contextmanager
def replay_outputs(calls: Collection[FinishedCall], change: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Return recorded outputs, or what `change` makes of them, in place of the first calls of modules in the block."""
    outputs: dict[nn.Module, list[Any]] = {}
    for call in calls:
        outputs.setdefault(call.module, []).append(call.output)
    own = {module: vars(module).get("forward") for module in outputs}  # such as the wrapper of another library
    for module, recorded in outputs.items():
        object.__setattr__(module, "forward", _replay(module.forward, recorded, change))
    try:
        yield
    finally:
        for module, forward in own.items():
            object.__delattr__(module, "forward")
            if forward is not None:
                object.__setattr__(module, "forward", forward)


def _replay(
    forward: Callable[..., Any], recorded: list[Any], change: Callable[[Any], Any] | None
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not recorded:
            return forward(*args, **kwargs)
        output = recorded.pop(0)
        return output if change is None else change(output)

    return run


def _versions(output: Any) -> tuple[int, ...]:
    return tuple(x._version for x in tree_leaves(output) if isinstance(x, Tensor))
