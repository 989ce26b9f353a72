"""WrittenRows: rows of weights of several layers are compared at once."""

from __future__ import annotations

import pytest
import torch

from regard.lens.recording.written_rows import WrittenRows, have_weights

TOLERANCE = 0.03


def written(n=19, b=2, scale=0.5, change=lambda A: A):
    q, k = torch.randn(b, 3, n, 4), torch.randn(b, 3, n, 4)
    rows = slice(n % 7, n, 7)
    return WrittenRows(q, k, change((q @ k.mT * scale).softmax(-1)[:, :, rows].clone()), rows, scale, 0)


def moved(A):
    A[0, 1, 0] = A[0, 1, 0].roll(1)
    return A


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_each_layer_gets_its_own_verdict(layers):
    many = [written(n=19 if n % 3 else 13, change=moved if n % 5 == 4 else lambda A: A) for n in range(layers)]
    assert have_weights(many, TOLERANCE) == [n % 5 != 4 for n in range(layers)]


def test_scales_are_told_apart():
    one = written(scale=0.5)
    assert have_weights([one, one._replace(scale=1.5)], TOLERANCE) == [True, False]


def test_weights_that_are_no_numbers_are_not_believed():
    assert have_weights([written(change=lambda A: A * torch.nan)], TOLERANCE) == [False]


def test_overwritten_keys_are_not_judged_for_the_tape_does_not_show_them():
    one = written()
    one.k.add_(1)
    assert one.is_overwritten
    assert have_weights([one], TOLERANCE) == [True]
