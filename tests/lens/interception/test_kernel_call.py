"""One attention call as a value."""

import dataclasses

import pytest
import torch

from regard.lens import KernelCall


def test_a_call_is_frozen_and_takes_names_only():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        KernelCall(q=q, k=k, v=v).scale = 1.0
    with pytest.raises(TypeError, match="positional"):
        KernelCall(q, k, v)
