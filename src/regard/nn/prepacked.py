"""Prepacked weights: matrices in the layout of oneDNN, for a decoding that multiplies few rows by them many times."""

from __future__ import annotations

import os
import platform
import threading
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_internals
from .linear import Product, use_product

MAX_PREPACKED_ROWS = 128  # with more rows the product takes so long that packing the matrix each time hardly shows
MIN_PREPACKED_ENTRIES = 2**18  # packing a smaller matrix costs more than it saves
CAN_PREPACK = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

# On ARM the packed product goes on using all cores after `torch.set_num_threads(1)`: then weights are not packed.
IGNORES_THREADS = platform.machine() in ("aarch64", "arm64")

# Work-around for the prefetcher of ARM Neoverse CPUs; set it to False to multiply a single row as everywhere else.
# While a matrix is multiplied by one row, that prefetcher runs off the end of the row at each row of the matrix. If the
# page behind is not mapped, as behind a recent allocation, it searches for the page each time, and the product takes
# three times as long. `python -m benchmarks decoding` on such a CPU, with either value, shows the difference.
PAD_SINGLE_ROWS = platform.machine() in ("aarch64", "arm64")
MIN_PADDED_ENTRIES = 2**21  # with a smaller matrix the copy of the row costs more than it saves
PADDING_ENTRIES = 4096  # a page at least, whatever the dtype


class PrepackedWeights:
    """Cache of weights packed by oneDNN for products with a few rows, as the steps of one decoding make them.

    >>> from regard.nn.linear import project
    >>> layer, x, prepacked = nn.Linear(512, 512), torch.randn(5, 512), PrepackedWeights()
    >>> with torch.no_grad(), prepacked.for_rows(x):
    ...     y = project(layer, x)
    >>> torch.allclose(y, layer(x), atol=1e-5)
    True

    To multiply a few rows by a matrix, the CPU spends more time on packing the matrix for its kernel than on
    multiplying. The cache packs each matrix at its first product and keeps the result for the next ones. It takes the
    memory of the weights once more, for as long as it lives. It is used for float32 on the CPU without gradients or
    autocast; all other products are plain `F.linear`.
    """

    def __init__(self) -> None:
        self._packed: dict[int, PackedWeight] = {}

    def for_rows(self, x: Tensor) -> AbstractContextManager[None]:
        """Within the block, `linear` and `project` multiply by the fastest product for as many rows as x has."""
        return use_product(self._product_for(x))

    def _product_for(self, x: Tensor) -> Product | None:
        rows = x.shape[0]
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if rows == 1:
            return multiply_padded_row if PAD_SINGLE_ROWS else None
        if IGNORES_THREADS and torch.get_num_threads() < _default_threads():
            return None
        return self._multiply_packed if 1 < rows <= MAX_PREPACKED_ROWS and CAN_PREPACK else None

    def _multiply_packed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b by the packed W; by `F.linear` if W is small or may not be packed."""
        if weight.numel() < MIN_PREPACKED_ENTRIES or weight.dtype != torch.float32 or not is_plain_tensor(weight):
            return F.linear(x, weight, bias)
        entry = self._packed.get(id(weight))
        if entry is None or entry.version != weight._version or entry.address != weight.data_ptr():
            packed = torch_internals.pack_linear_weight(weight.detach(), x.numel() // x.shape[-1])
            entry = self._packed[id(weight)] = PackedWeight(weight, weight._version, weight.data_ptr(), packed)
        return torch_internals.packed_linear(x, entry.packed, bias)


def _default_threads() -> int:
    """Return the number of threads that PyTorch has unless `torch.set_num_threads` was called."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() else os.cpu_count() or 1


class PackedWeight(NamedTuple):
    """A packed weight, and what the weight was when it was packed; the weight is kept so that its id stays unique."""

    weight: Tensor
    version: int
    address: int
    packed: Tensor


def is_plain_tensor(weight: Tensor) -> bool:
    """Return whether a weight may be copied into another layout.

    A tensor of inference mode has no version that shows a change; a subclass, such as a quantized weight, may
    only be multiplied by.
    """
    return type(weight) in (nn.Parameter, Tensor) and not weight.is_inference()


def multiply_padded_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for one row x, copied to a buffer with written memory behind it; see `PAD_SINGLE_ROWS`."""
    if weight.numel() < MIN_PADDED_ENTRIES or x.numel() != weight.shape[1]:
        return F.linear(x, weight, bias)
    key = x.shape, x.dtype
    buffer = _row_buffers.by_shape.get(key)
    if buffer is None:
        with torch.inference_mode(False):
            padded = x.new_zeros(x.numel() + PADDING_ENTRIES)
            buffer = _row_buffers.by_shape[key] = padded[: x.numel()].view(x.shape)
    return F.linear(buffer.copy_(x), weight, bias)


class _RowBuffers(threading.local):
    def __init__(self) -> None:
        self.by_shape: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


_row_buffers = _RowBuffers()
