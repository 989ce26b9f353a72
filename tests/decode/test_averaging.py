"""Checkpoint averaging is the mean, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from regard.decode import average
from tests.decode.steppers import Recurrent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_average_is_the_mean_in_its_own_dtype(dtype):
    each = [{"w": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)} for _ in range(5)]
    found = average(each)
    for name in ("w", "b"):
        expected = torch.stack([one[name].double() for one in each]).mean(0)
        assert found[name].dtype == dtype
        assert torch.equal(found[name], expected.to(dtype))


def test_a_generator_of_state_dicts_is_read_once_and_loads_back():
    models = [Recurrent(seed=seed) for seed in range(3)]
    whole = Recurrent()
    whole.load_state_dict(average(model.state_dict() for model in models))
    expected = sum(model.out.weight for model in models) / 3
    torch.testing.assert_close(whole.out.weight, expected)


def test_the_average_of_one_is_that_one_and_a_copy():
    one = {"w": torch.randn(3), "n": torch.tensor(4)}
    found = average([one])
    assert torch.equal(found["w"], one["w"])
    for name in one:
        assert found[name].data_ptr() != one[name].data_ptr()


def test_counters_are_the_last_ones():
    assert average([{"n": torch.tensor(3)}, {"n": torch.tensor(8)}])["n"].item() == 8


def test_checkpoints_are_not_modified():
    each = [{"w": torch.ones(2, dtype=torch.float64)} for _ in range(3)]
    average(each)
    assert all(torch.equal(one["w"], torch.ones(2, dtype=torch.float64)) for one in each)


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ([], "pass at least one checkpoint, got none"),
        (
            [{"w": torch.ones(2)}, {"v": torch.ones(2)}],
            r"same tensors, got \['v', 'w'\] in only one of numbers 1 and 2",
        ),
        (
            [{"w": torch.ones(2)}, {"w": torch.ones(3)}],
            r"got w \(2,\) torch.float32 in number 1 and \(3,\) torch.float32",
        ),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2).half()}], r"\(2,\) torch.float16 in number 2"),
    ],
    ids=["none", "names", "shapes", "dtypes"],
)
def test_averaging_says_what_it_cannot_do(each, message):
    with pytest.raises(ValueError, match=message):
        average(each)
