"""Find the modules that mix positions by changing one position of their input.

How it works
    The model runs once. When a module returns, it runs a second time with one position of one input replaced by noise,
    while the modules within it that are known to mix return what they returned before. Their outputs are changed at
    one position too. A module mixes positions if other
    positions of its output change; or, if the output has another shape, if an element of it depends on two positions.
    A module that gives another output for the same input, such as one that keeps a state, is not tested.

    Convolutions, pooling, recurrent layers and norms over positions of `torch.nn` are recognized by class. A module
    that holds another kind of mixing module is tested only if its own code has a product or names an attention.

Cost
    A run of the model, and one to three more of each module that is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..interception.module_scan import attends, multiplies
from ..interception.opaque_calls import attached_values, opaque_attention
from .model_copy import map_tensors, tensors_in

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ELEMENTWISE = (nn.Linear, nn.Bilinear, nn.Embedding, nn.Identity, nn.RMSNorm)
ELEMENTWISE_FILES = frozenset((nn.ReLU.__module__, nn.Dropout.__module__))
MIXES = "mixes positions"
MIXING = "changing one position of its input changes other positions of its output"
MAX_TESTS = 3  # calls of a module that are tested until one mixes positions
MAX_INPUTS = 3  # tensor arguments of a call that are changed, one at a time
MIN_ERROR = 16  # in units of rounding: a smaller change of an output is none


class Mixing(NamedTuple):
    """The kind of a module that mixes positions, and what shows that it does."""

    kind: str
    reason: str


def mixing_modules(model: nn.Module, run: Callable[[], Any], lead: tuple[int, ...] = ()) -> dict[nn.Module, Mixing]:
    """Return the modules that mix positions by themselves, in the order of their returns; `run` calls the model.

    `lead` is the number of batch rows, and that of positions after it, as far as they are known from the input of the
    model. They decide which axes of a tensor are positions.
    """
    test = _MixingTest(lead)
    hooks = []
    for module in model.modules():
        if not _is_elementwise(module):
            hooks.append(module.register_forward_pre_hook(test.enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(test.leave))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return test.found


class _Call(NamedTuple):
    """A call of a module under way, and the mixing modules that returned within it, with their outputs."""

    args: Any
    kwargs: Any
    random_state: Tensor
    inner: list[tuple[nn.Module, Any]]


class _MixingTest:
    """Hooks that test each module when it returns."""

    def __init__(self, lead: tuple[int, ...]) -> None:
        self.lead = lead
        self.found: dict[nn.Module, Mixing] = {}
        self.tests: dict[nn.Module, int] = {}
        self.calls: list[_Call] = []
        self.testing = False
        self.frozen: dict[nn.Module, deque[Any]] = {}  # outputs that modules return during a test

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.testing:
            args, kwargs = map_tensors(Tensor.clone, args), map_tensors(Tensor.clone, kwargs)
            self.calls.append(_Call(args, kwargs, torch.get_rng_state(), []))

    def leave(self, module: nn.Module, args: Any, out: Any) -> Any:
        if self.testing:
            frozen = self.frozen.get(module)
            return frozen.popleft() if frozen else None
        call = self.calls.pop()
        # The axes of a convolution are known by its class, so its output is changed in place of its input.
        is_fixed = self._is_mixing(module, call, out) or isinstance(module, CONVOLUTIONS)
        if self.calls:
            self.calls[-1].inner.extend([(module, map_tensors(Tensor.clone, out))] if is_fixed else call.inner)
        return None

    def _is_mixing(self, module: nn.Module, call: _Call, out: Any) -> bool:
        if module in self.found:
            return True
        if (known := mixing_of_class(module, call.args)) is not None:
            self.found[module] = known
            return True
        if isinstance(module, CONVOLUTIONS) or self.tests.get(module, 0) == MAX_TESTS:
            return False
        inner = [self.found[each].kind for each, _ in call.inner if each in self.found]
        if MIXES in inner and not _may_mix_itself(module):
            return False
        self.tests[module] = self.tests.get(module, 0) + 1
        state = torch.get_rng_state()
        self.testing = True
        try:
            if self._mixes_positions(module, call, out):
                self.found[module] = Mixing(MIXES, MIXING)
        except Exception:  # the noise may be no valid input of the module
            return False
        finally:
            torch.set_rng_state(state)
            self.testing = False
        return module in self.found

    def _mixes_positions(self, module: nn.Module, call: _Call, out: Any) -> bool:
        """Whether a change of one position of an input changes other positions of the output."""
        before = _floats_in(out)
        named = (*((None, x) for x in call.args), *call.kwargs.items())
        inputs = [
            (x, position_axes(x, self.lead)) for name, x in named if _is_sequence(x) and not (name and "mask" in name)
        ]
        # Outputs of inner modules stay as they are when an input changes, so each is an input of its own.
        inner = [(x, inner_axes(each, x, self.lead)) for each, out in call.inner for x in _floats_in(out) if x.ndim > 1]
        for x, axes in (*inputs[:MAX_INPUTS], *inner[: MAX_INPUTS if _may_mix_itself(module) else 1]):
            for axis in axes:
                n, first = x.shape[axis], (x.shape[axis] - 1) // 2
                changed = self._change_position(module, call, x, axis, first, before)
                others = _moves_others(changed, axis, n)
                if not others and any(map(Tensor.any, changed)) and not _has_axis(changed, axis, n):
                    others = _depend_on_both(changed, self._change_position(module, call, x, axis, first + 1, before))
                if others:
                    same = self._run(module, call, Tensor.clone)
                    return not any(map(Tensor.any, map(_differs, before, same)))
        return False

    def _change_position(
        self, module: nn.Module, call: _Call, x: Tensor, axis: int, position: int, before: list[Tensor]
    ) -> list[Tensor]:
        """Return for each output which elements change if x is replaced by noise at one position."""
        noise = torch.randn(x.select(axis, position).shape, generator=torch.Generator().manual_seed(position))
        other = x.clone()
        other.select(axis, position).copy_(noise.to(x) * x.std() + x.mean())
        after = self._run(module, call, lambda y: other if y is x else y.clone())
        return [_differs(a, b) for a, b in zip(before, after, strict=True)]

    def _run(self, module: nn.Module, call: _Call, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Run a module again; the mixing modules within it return what they did."""
        self.frozen = {}
        for inner, out in call.inner:
            self.frozen.setdefault(inner, deque()).append(map_tensors(change, out))
        torch.set_rng_state(call.random_state)
        return _floats_in(module.forward(*map_tensors(change, call.args), **map_tensors(change, call.kwargs)))


def mixing_of_class(module: nn.Module, args: Any) -> Mixing | None:
    """Return how a module of `torch.nn` mixes positions by its class; None for other classes."""
    kind, inputs = type(module).__name__, tensors_in(args)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return Mixing("recurrence", f"{kind} carries a state from position to position and has no attention weights")
    if isinstance(module, CONVOLUTIONS):
        sizes = zip(module.kernel_size, module.stride, strict=True)
        is_wide = any(size > 1 and size != stride for size, stride in sizes)  # patches are positions, and do not mix
        return Mixing("convolution", f"{kind} mixes neighbouring positions with fixed weights") if is_wide else None
    if type(module).__module__ == nn.AvgPool1d.__module__:
        return Mixing("pooling", f"{kind} pools positions and has no attention weights")
    if isinstance(module, nn.LayerNorm):
        return NORM if len(module.normalized_shape) > 1 else None
    if not inputs or inputs[0].ndim < 3:
        return None
    uses_input = isinstance(module, INSTANCE_NORMS) or module.training or getattr(module, "running_mean", None) is None
    is_norm = isinstance(module, nn.GroupNorm) or (isinstance(module, (*BATCH_NORMS, *INSTANCE_NORMS)) and uses_input)
    return NORM if is_norm else None


NORM = Mixing("norm", "it normalizes over positions and has no attention weights")


def _is_elementwise(module: nn.Module) -> bool:
    """Whether a module of `torch.nn` acts on each row alone."""
    if type(module).__module__.startswith("torch.nn.utils.") and not is_parametrized(module):
        return True  # it computes parameters, not activations
    if isinstance(module, ELEMENTWISE) or (isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1):
        return True
    return type(module).__module__ in ELEMENTWISE_FILES and not isinstance(module, nn.MultiheadAttention)


def _may_mix_itself(module: nn.Module) -> bool:
    """Whether the code of a module may mix positions beside what its submodules do."""
    kind: type = type(module)
    return attends(kind) or multiplies(kind) or opaque_attention(kind, attached_values(module)) is not None


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1


def _floats_in(x: Any) -> list[Tensor]:
    return [y for y in tensors_in(x) if y.is_floating_point()]


def position_axes(x: Tensor, lead: tuple[int, ...] = ()) -> list[int]:
    """Return the axes that may be positions: n d, b n d, n b d, b h n d, b c h w, b n h d."""
    axes = [0] if x.ndim == 2 else [1, 0] if x.ndim == 3 else [2]
    is_batch_first = x.ndim == 3 and bool(lead) and x.shape[0] == lead[0] != x.shape[1]
    if lead and x.ndim == 2 and x.shape[0] == lead[0]:
        axes = []  # one vector for each batch row
    elif is_batch_first or (len(lead) == 2 and x.ndim > 2 and x.shape[:2] == lead and lead[0] != lead[1]):
        axes = [1]
    return [axis for axis in axes if x.shape[axis] > 1]


def inner_axes(module: nn.Module, x: Tensor, lead: tuple[int, ...] = ()) -> list[int]:
    """Return the axes of a module's output that may be positions; those of a convolution are last."""
    return [x.ndim - 1] if isinstance(module, CONVOLUTIONS) and x.shape[-1] > 1 else position_axes(x, lead)[:1]


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Return the elements that differ by more than rounding."""
    a, b = a.nan_to_num(), b.nan_to_num()
    largest = a.abs().amax() if a.numel() else a.new_zeros(())
    return (a - b).abs() > MIN_ERROR * torch.finfo(a.dtype).eps * largest


def _has_axis(changed: list[Tensor], axis: int, n: int) -> bool:
    """Whether each output has the positions of the input on the same axis."""
    return all(x.ndim > axis and x.shape[axis] == n for x in changed)


def _moves_others(changed: list[Tensor], axis: int, n: int) -> bool:
    """Whether two or more positions of an output changed, on the axis of the input's positions."""
    return any(int(x.movedim(axis, 0).flatten(1).any(1).sum()) > 1 for x in changed if _has_axis([x], axis, n))


def _depend_on_both(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether an element of an output changes with either of two positions."""
    return any(bool((a & b).any()) for a, b in zip(first, second, strict=True))
