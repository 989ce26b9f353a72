"""Losses against their definition, item by item."""

import math

import pytest
import torch

from regard.nn import Loss, cross_entropy
from regard.nn.losses import cross_entropy_per_target

D = torch.float64


def plain(logits, targets, padding, smoothing):
    """-sum_c p_c log softmax_c, one position after the other."""
    total, count = 0.0, 0
    for row, target in zip(logits.reshape(-1, logits.shape[-1]).tolist(), targets.flatten().tolist(), strict=True):
        if target == padding:
            continue
        count += 1
        log_sum = math.log(sum(math.exp(x) for x in row))
        for c, x in enumerate(row):
            p = smoothing / len(row) + (1 - smoothing) * (c == target)
            total -= p * (x - log_sum)
    return total, count


@pytest.mark.parametrize("padding", [None, 0, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 1)])
def test_cross_entropy_is_its_definition(shape, smoothing, padding):
    logits, targets = torch.randn(*shape, 9, dtype=D), torch.randint(9, shape)
    targets.view(-1)[0] = padding or 0
    counted = None if padding is None else targets != padding
    loss = cross_entropy(logits, targets, counted=counted, smoothing=smoothing)
    total, count = plain(logits, targets, padding, smoothing)
    assert loss.count == count
    assert abs(loss.sum.item() - total) <= 1e-12 * max(1.0, abs(total))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_changes_neither_loss_nor_gradient(smoothing):
    logits, targets = torch.randn(3, 4, 9, dtype=D), torch.randint(1, 9, (3, 4))
    wide = torch.cat([logits, torch.randn(3, 5, 9, dtype=D) * 1e3], 1).requires_grad_()
    narrow = logits.clone().requires_grad_()
    longer = torch.nn.functional.pad(targets, (0, 5))
    padded = cross_entropy(wide, longer, counted=longer != 0, smoothing=smoothing)
    unpadded = cross_entropy(narrow, targets, counted=targets != 0, smoothing=smoothing)
    padded.mean.backward()
    unpadded.mean.backward()
    assert padded.count == unpadded.count == 12
    assert torch.allclose(padded.mean, unpadded.mean, rtol=0, atol=1e-12)
    assert torch.allclose(wide.grad[:, :4], narrow.grad, rtol=0, atol=1e-12)
    assert not wide.grad[:, 4:].any()


def test_nothing_but_padding_is_zero_not_nan():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), counted=nothing, smoothing=0.1)
    loss.mean.backward()
    assert loss.count == 0
    assert loss.mean == 0
    assert not logits.grad.any()


def test_mean_takes_counts_of_both_kinds():
    assert Loss(torch.tensor(6.0), 4).mean == Loss(torch.tensor(6.0), torch.tensor(4)).mean == 1.5
    assert Loss(torch.tensor(0.0), 0).mean == 0


def test_minus_100_is_a_wrong_class_where_it_counts():
    targets = torch.tensor([1, -100])
    assert cross_entropy(torch.randn(2, 5), targets, counted=targets != -100).count == 1
    with pytest.raises(IndexError, match="-100"):
        cross_entropy(torch.randn(2, 5), targets)


def test_bad_calls_are_answered():
    with pytest.raises(ValueError, match=r"smoothing must be at least 0 and below 1, got 1.0"):
        cross_entropy(torch.randn(2, 5), torch.tensor([1, 2]), smoothing=1.0)
    with pytest.raises(ValueError, match=r"one more dim than targets, the classes, got \(2, 3, 5\) and \(2, 4\)"):
        cross_entropy(torch.randn(2, 3, 5), torch.ones(2, 4, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_are_whole_numbers_of_any_kind(dtype):
    logits, targets = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    counted = torch.tensor([[True] * 5, [True, True, False, False, False]])
    right = cross_entropy_per_target(logits, targets, counted=counted)
    assert torch.equal(cross_entropy_per_target(logits, targets.to(dtype), counted=counted), right)
    with pytest.raises(TypeError, match="targets must hold whole numbers, got"):
        cross_entropy_per_target(logits, targets.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, D])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
def test_what_is_not_counted_may_hold_anything(held, smoothing, dtype):
    logits, targets = torch.randn(2, 3, 7, dtype=dtype), torch.tensor([[1, 2, 9], [3, -100, 0]])
    counted = torch.tensor([[True, True, False], [True, False, True]])
    odd = logits.masked_fill(~counted[..., None], held).requires_grad_()
    plain = logits.requires_grad_()
    loss = cross_entropy(odd, targets, counted=counted, smoothing=smoothing)
    right = cross_entropy(plain, targets, counted=counted, smoothing=smoothing)
    loss.sum.backward()
    right.sum.backward()
    assert torch.equal(loss.sum, right.sum)
    assert torch.equal(odd.grad, plain.grad)
    assert not odd.grad[~counted].any()
