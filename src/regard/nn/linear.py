"""Linear: x W^T + b, with a product that the steps of a decoding may replace by a faster one (`prepacked.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Linear):
    """x W^T + b: `nn.Linear`, by the product of an enclosing `use_product`."""

    def forward(self, x: Float[Tensor, "*b in_features"]) -> Float[Tensor, "*b out_features"]:
        return linear(x, self.weight, self.bias)


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
