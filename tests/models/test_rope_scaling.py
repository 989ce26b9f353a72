"""Stretch: slow turns are divided, fast ones stay."""

from __future__ import annotations

import pytest
import torch

from regard.models import Stretch

D = torch.float64


def test_a_stretch_divides_slow_turns_and_leaves_fast_ones():
    frequencies = torch.tensor([1.0, 0.1, 0.01, 1e-5], dtype=D)
    stretched = Stretch(factor=8.0, original=1000)(frequencies)
    torch.testing.assert_close(stretched[:2], frequencies[:2])
    torch.testing.assert_close(stretched[3], frequencies[3] / 8)
    turns = 0.01 * 1000 / (2 * torch.pi)
    share = (turns - 1) / 3
    torch.testing.assert_close(stretched[2], torch.tensor(0.01 * share + 0.01 / 8 * (1 - share), dtype=D))


def test_a_stretch_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"low and high must be 0 < low < high, got low=4.0 and high=1.0"):
        Stretch(factor=2.0, low=4.0, high=1.0)
    with pytest.raises(TypeError, match="low must be a number, got 'x'"):
        Stretch(factor=2.0, low="x")
