"""register_kernel: let the lens record attention kernels that regard does not know."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .intercepted import OutputLayout
from .kernel_call import KernelCall
from .patching import Kernel, KernelRun, original_function

_REGISTERED: OrderedDict[int, Kernel] = OrderedDict()


def register_kernel(
    function: Callable[..., Any],
    to_kernel_call: Callable[..., KernelCall],
    *,
    output: str = "b h i e",
    dropout: str | None = None,
) -> RemovableHandle:
    """Let `capture`, `ablate` and `importance` see calls of an attention function.

    >>> import torch
    >>> from torch import nn
    >>> from regard import Causal
    >>> from regard.lens import KernelCall, capture, register_kernel
    >>> def fast_attention(q, k, v):  # b i h d
    ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ...     return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    >>> def to_kernel_call(q, k, v):
    ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ...     return KernelCall(q=q, k=k, v=v, mask=Causal())
    >>> class Layer(nn.Module):
    ...     def forward(self, x):
    ...         return fast_attention(x, x, x)
    >>> layer = Layer()
    >>> with register_kernel(fast_attention, to_kernel_call, output="b i h e"):
    ...     with capture(layer) as tape:
    ...         out = layer(torch.randn(1, 5, 2, 8))
    >>> tape
    Tape(1 layer)
    (model)  Weights(1 x 2 x 5 x 5, mask=Causal())

    `to_kernel_call` receives the arguments of `function` and returns a `KernelCall`, or raises `NotUnderstood` with
    the reason. `output` names the dims of what `function` returns (its first element, if it returns a tuple): b batch,
    h heads, i queries, e the width of a value; dims in parentheses are one dim, as in "b i (h e)". `dropout` is the
    name of the argument with the dropout probability, so that the check can run the function without it.

    64 rows of `A @ v` are compared with the output of each call. If they differ, `capture` warns, names the layer and
    leaves it out. Call `remove()` of the handle, or use it as a context, to take the kernel back.
    """
    if not callable(function) or not callable(to_kernel_call):
        raise TypeError(f"register_kernel takes two functions, got {function!r} and {to_kernel_call!r}")
    dims = _parse_dims(output)
    name = getattr(function, "__name__", repr(function))
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    kernel = Kernel(
        function=original_function(function),
        homes=() if home is None else (home,),
        to_kernel_call=lambda run: to_kernel_call(*run.args, **run.kwargs),
        layout=lambda run, out: _layout(dims, run, out),
        mismatch=f"the KernelCall registered for {name} does not reproduce its output",
        dropout=dropout,
    )
    handle = RemovableHandle(_REGISTERED)
    _REGISTERED[handle.id] = kernel
    return handle


def registered_kernels() -> list[Kernel]:
    """Return the registered kernels, the latest registration of a function last."""
    return list(_REGISTERED.values())


def _parse_dims(output: str) -> list[str]:
    """Return the letters of each dim: "b i (h e)" -> ["b", "i", "he"]."""
    dims, inside = [], False
    for token in output.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            dims.append("")
            inside = True
        elif token == ")":
            inside = False
        elif inside:
            dims[-1] += token
        else:
            dims.append(token)
    letters = "".join(dims)
    if sorted(letters) not in (sorted("bhie"), sorted("hie")) or inside:
        raise ValueError(f"output must name the dims b, h, i and e once each, as in 'b i (h e)', got {output!r}")
    return dims


def _layout(dims: list[str], run: KernelRun, out: Tensor) -> OutputLayout:
    """Return the layout of an output with these dims."""
    letters = "".join(dims)
    order = [letters.index(letter) for letter in "bhie" if letter in letters]

    def heads(x: Tensor) -> Tensor:
        if len(dims) < len(letters):
            q, v = run.kernel_call.q, run.kernel_call.v
            sizes = {"b": q.shape[0], "h": q.shape[-3], "i": q.shape[-2], "e": v.shape[-1]}
            x = x.reshape([sizes[letter] for letter in letters])
        x = x.permute(order)
        return x if "b" in letters else x[None]

    def output(x: Tensor) -> Tensor:
        x = x if "b" in letters else x[0]
        return x.permute([order.index(n) for n in range(len(order))]).reshape(out.shape)

    return OutputLayout(heads, output)
