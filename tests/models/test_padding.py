"""Padding as lengths or as a keep: read alike, and refused with what to write."""

import pytest
import torch

from regard.models.padding import check_lengths, counted_of, counted_targets, keep_of

IDS = torch.zeros(3, 5, dtype=torch.long)
LENGTHS = torch.tensor([5, 0, 2])
KEEP = torch.tensor([[True] * 5, [False] * 5, [True, True, False, False, False]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_lengths_and_keep_say_the_same(dtype):
    assert torch.equal(keep_of(LENGTHS.to(dtype), IDS), KEEP)
    assert torch.equal(counted_of(LENGTHS.to(dtype), IDS, name="lengths"), KEEP)
    assert keep_of(KEEP, IDS) is KEEP


def test_a_keep_may_pad_on_the_left():
    assert keep_of(KEEP.flip(1), IDS)[2].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        (KEEP[:2], ValueError, r"keep must be lengths \(b,\) or keep .* for ids \(3, 5\), got torch.bool \(2, 5\)"),
        (KEEP[0], ValueError, r"got torch.bool \(5,\)"),
        (LENGTHS[None], ValueError, r"got torch.int64 \(1, 3\)"),
        ([5, 0, 2], TypeError, r"keep must be a tensor, got .*torch.tensor\(\[3, 5\]\)"),
        (LENGTHS.float(), TypeError, "keep must"),
        (LENGTHS[:2], ValueError, "keep must be one number per row, from 0 to 5, for 3 rows, got 2 numbers"),
        (torch.tensor([5, 0, 6]), ValueError, "from 0 to 5, for 3 rows, got 6$"),
        (torch.tensor([5, -1, 2]), ValueError, "from 0 to 5, for 3 rows, got -1$"),
    ],
)
def test_padding_that_does_not_fit_is_refused(padding, error, message):
    with pytest.raises(error, match=message):
        keep_of(padding, IDS)


def test_a_keep_in_place_of_lengths_is_refused_with_what_to_write():
    with pytest.raises(
        TypeError, match=r"lengths must be the number of real .*, got torch.bool \(3,\); write keep.sum"
    ):
        check_lengths("lengths", torch.tensor([True, False, True]), IDS)


def test_no_rows_have_no_lengths():
    assert keep_of(LENGTHS[:0], IDS[:0]).shape == (0, 5)


def test_targets_without_lengths_all_count():
    batch = {"target": IDS}
    assert counted_targets(batch)[0] is IDS
    assert counted_targets(batch)[1].all()
    assert torch.equal(counted_targets(batch | {"target_lengths": LENGTHS})[1], KEEP)
    with pytest.raises(ValueError, match="target_lengths must be one number per row"):
        counted_targets(batch | {"target_lengths": LENGTHS + 1})
