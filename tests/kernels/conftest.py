"""Kernels interpreted on the CPU, or compiled on a GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with the development extras on Linux")

from regard.kernels.summary import generic as reduce
from regard.ops.backends import triton


@pytest.fixture
def device(monkeypatch):
    """Where kernels run; interpreted, in tiles so small that short sequences are cut into many."""
    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setattr(triton, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(reduce, "tile_config", lambda d, dtype: reduce.TileConfig(32, 32, 4, 2))
    return "cpu"
