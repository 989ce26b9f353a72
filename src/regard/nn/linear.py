"""Linear: products with weights, and weights prepared for a decoding, which multiplies few rows by them many times."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MOST = 128  # rows beyond which it hardly shows that weights are arranged anew at each product
LEAST = 2**18  # numbers in a matrix below which it does not pay
LARGE = 2**21  # numbers in a matrix from which it pays to put a row where it is multiplied fastest
BEHIND = 4096  # numbers, a page at least

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Linear):
    """x W^T + b: PyTorch's, with prepared weights where some are in force."""

    def forward(self, x: Float[Tensor, "*b in_features"]) -> Float[Tensor, "*b out_features"]:
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*b in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*b out_features"]:
    """x W^T + b, with prepared weights where some are in force."""
    return F.linear(x, weight, bias) if torch.compiler.is_compiling() else product()(x, weight, bias)


def product() -> Product:
    """What multiplies here and now: `product()(x, weight, bias)`."""
    return _in_force.get() or F.linear


class Prepared:
    """Weights as the steps of one decoding like them best.

    >>> layer, x, prepared = Linear(512, 512), torch.randn(5, 512), Prepared()
    >>> with torch.no_grad(), prepared.for_rows(x):
    ...     y = layer(x)
    >>> torch.allclose(y, layer(x), atol=1e-5)
    True

    To multiply a few rows by a matrix, the CPU spends more time on arranging the matrix for its kernel than on
    multiplying. Here each is arranged at its first product and stays so for the next, which takes the memory of the
    weights once more, for as long as this lives. Only float32 on the CPU, without gradients; all else is as it was.
    """

    def __init__(self) -> None:
        self._arranged: dict[int, Arranged] = {}

    @contextmanager
    def for_rows(self, x: Tensor) -> Iterator[None]:
        """Within the block, `linear` multiplies as many rows as x has in the way that is fastest for these."""
        before = _in_force.set(self._product(x))
        try:
            yield
        finally:
            _in_force.reset(before)

    def _product(self, x: Tensor) -> Product | None:
        rows = x.shape[0]
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if rows == 1:
            return _on_firm_ground if ON_ARM else None
        return self._few if 1 < rows <= MOST and ARRANGES else None

    def _few(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.numel() < LEAST or weight.dtype != torch.float32 or not is_ordinary(weight):
            return F.linear(x, weight, bias)
        found = self._arranged.get(id(weight))
        if found is None or found.version != weight._version or found.place != weight.data_ptr():
            arranged = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), x.numel() // x.shape[-1])
            found = self._arranged[id(weight)] = Arranged(weight, weight._version, weight.data_ptr(), arranged)
        return torch.ops.mkldnn._linear_pointwise(x, found.arranged, bias, "none", [], "")


def is_ordinary(weight: Tensor) -> bool:
    """May it be taken apart? One of inference mode tells of no change, a quantized one may only be multiplied by."""
    return type(weight) in (nn.Parameter, Tensor) and not weight.is_inference()


class Arranged(NamedTuple):
    """A weight as it is multiplied by, and as it was when it was arranged; kept, so that no other has its id."""

    weight: Tensor
    version: int
    place: int
    arranged: Tensor


def _on_firm_ground(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row x times a matrix, x in a place with memory behind it that has been written to.

    The prefetcher of an ARM Neoverse runs off the end of x at every row of the matrix. Where no page is behind it, as
    behind what was allocated last, it looks for one each time, and the product takes three times as long.
    """
    if weight.numel() < LARGE or x.numel() != weight.shape[1]:
        return F.linear(x, weight, bias)
    key = x.shape, x.dtype
    room = _rooms.of.get(key)
    if room is None:
        with torch.inference_mode(False):
            room = _rooms.of[key] = x.new_zeros(x.numel() + BEHIND)[: x.numel()].view(x.shape)
    return F.linear(room.copy_(x), weight, bias)


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


ARRANGES = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ON_ARM = platform.machine() in ("aarch64", "arm64")
_rooms = _Rooms()
_in_force: ContextVar[Product | None] = ContextVar("prepared weights", default=None)
