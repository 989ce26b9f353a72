"""What backends hand to PyTorch's kernels, counted."""

from __future__ import annotations

import pytest

from regard.ops.backends import sdpa
from regard.ops.backends import sdpa_blocks as blocks
from regard.ops.backends import torch_kernels as kernels


@pytest.fixture
def calls(monkeypatch):
    """How often the shortcut, the single call and the blocks were taken."""
    taken = []
    for module, name in ((kernels, "run_fused"), (blocks, "run_blocks")):
        real = getattr(module, name)

        def counted(*args, real=real, name=name, **kwargs):
            taken.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(sdpa, name, counted)
    return taken
