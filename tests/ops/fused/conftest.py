"""Kernels interpreted on the CPU, as in tests/kernels, and blocks of rows that fail."""

import pytest

from regard.ops.blocks import measures
from tests.kernels.conftest import device

__all__ = ["device"]


@pytest.fixture
def no_walk(monkeypatch):
    """Whoever asks for blocks of rows fails."""
    for name in ("topk", "bin_sums", "bin_maxima"):
        monkeypatch.delattr(measures, name)
