"""Find attention at the level of ATen: softmaxes whose result multiplies activations, and fused kernels.

A softmax counts if its output multiplies activations, in a matrix product or elementwise, that are then summed over the
dimension of the softmax. So a classifier, a sampler, a loss and a router whose largest weights are selected do not
count. The mode sees the operators in Python code, in scripted functions and in `torch.vmap`, and those of a compiled
function, which PyTorch runs uncompiled while the mode is active.

The mode runs Python code for every operator: on the CPU a forward pass of 12 layers of width 64 takes 3 to 4 times as
long, at 16 and at 128 positions. So it runs in an audit alone, on a copy of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import torch_internals
from .model_copy import tensors_in

SOFTMAXES = frozenset(("aten::_softmax", "aten::_safe_softmax", "aten::_log_softmax"))
FUSED = ("_scaled_dot_product_", "_efficient_attention", "_flash_attention", "_cudnn_attention")
PRODUCTS = frozenset(("aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm", "aten::mv"))
MULTIPLIED = frozenset(("aten::mul", "aten::mul_"))
SUMS = frozenset(("aten::sum",))
MAX_FOLLOWED = 64  # tensors made from softmaxes that are followed at a time


def attention_ops(model: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, str]:
    """Return the operator that attended in each module, the innermost under way; `run` calls the model once."""
    mode, hooks = _AttentionOps(), []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(mode.enter))
        hooks.append(module.register_forward_hook(mode.leave, always_call=True))
    try:
        with torch.no_grad(), mode:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return mode.found


class _Softmaxed(NamedTuple):
    """A tensor made from the output of a softmax."""

    tensor: Tensor  # kept alive, so that its id stays its own
    size: int  # length of the dimension of the softmax
    operator: str
    is_product: bool  # was it multiplied with activations, elementwise?


class _AttentionOps(torch_internals.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[nn.Module, str] = {}
        self.modules: list[nn.Module] = []
        self.followed: OrderedDict[int, _Softmaxed] = OrderedDict()

    def enter(self, module: nn.Module, args: Any) -> None:
        self.modules.append(module)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.modules[-1:] == [module]:
            self.modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if any(fused in name for fused in FUSED) and "backward" not in name:
            self._note(name)
        elif name in SOFTMAXES:
            if isinstance(out, Tensor) and args[0].ndim and (size := args[0].shape[args[1]]) > 1:
                self._follow(_Softmaxed(out, size, name, is_product=False))
        elif self.followed:
            self._follow_operator(name, args, out)
        return out

    def _follow_operator(self, name: str, args: Any, out: Any) -> None:
        """Note an average by a softmax, or follow a tensor that is made from one."""
        inputs = tensors_in(args)
        for n, x in enumerate(inputs):
            softmaxed = self.followed.get(id(x))
            if softmaxed is None:
                continue
            size = softmaxed.size
            others = [y for y in inputs if y is not x and id(y) not in self.followed]
            if name in PRODUCTS:
                contracted = x.shape[-1] if n == len(inputs) - 2 else x.shape[-2 if x.ndim > 1 else -1]
                if contracted == size and not any(isinstance(y, nn.Parameter) for y in others):
                    self._note(softmaxed.operator)
            elif name in SUMS:
                dims = args[1] if len(args) > 1 and args[1] else range(x.ndim)
                if softmaxed.is_product and any(x.shape[dim] == size for dim in dims):
                    self._note(softmaxed.operator)
            elif isinstance(out, Tensor) and out.numel() >= x.numel():
                is_product = softmaxed.is_product or (name in MULTIPLIED and any(y.ndim for y in others))
                self._follow(softmaxed._replace(tensor=out, is_product=is_product))
            return

    def _follow(self, softmaxed: _Softmaxed) -> None:
        self.followed[id(softmaxed.tensor)] = softmaxed
        if len(self.followed) > MAX_FOLLOWED:
            self.followed.popitem(last=False)

    def _note(self, operator: str) -> None:
        if self.modules:
            self.found.setdefault(self.modules[-1], operator)
