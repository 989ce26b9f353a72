"""x W^T + b, with a product that the steps of a decoding may replace by a faster one (`prepacked.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .. import torch_internals

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
GLOBAL_HOOKS = torch_internals.global_module_hooks()


def project(layer: nn.Module, x: Float[Tensor, "*b in_features"]) -> Float[Tensor, "*b out_features"]:
    """layer(x); of an `nn.Linear` by the product of an enclosing `use_product`, unless hooks watch the layer.

    Layers are `nn.Linear` itself and no subclass, so that tools that look for that class, such as dynamic
    quantization, find and may replace them.
    """
    if torch.compiler.is_compiling() or (product := _current_product.get()) is None:
        return layer(x)
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return layer(x)
    return product(x, layer.weight, layer.bias) if not any(GLOBAL_HOOKS) else layer(x)


def linear(
    x: Float[Tensor, "*b in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*b out_features"]:
    """x W^T + b: `F.linear`, or the product of an enclosing `use_product`."""
    return F.linear(x, weight, bias) if torch.compiler.is_compiling() else current_product()(x, weight, bias)


def current_product() -> Product:
    """Return the function that multiplies in this thread: `current_product()(x, weight, bias)`."""
    return _current_product.get() or F.linear


@contextmanager
def use_product(product: Product | None) -> Iterator[None]:
    """Within the block and in this thread, `linear` multiplies by `product`; None stands for `F.linear`."""
    before = _current_product.set(product)
    try:
        yield
    finally:
        _current_product.reset(before)


_current_product: ContextVar[Product | None] = ContextVar("product of linear layers", default=None)
