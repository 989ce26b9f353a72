"""Batches that can be left and taken up again, and moved to a device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.train import Shuffled
from regard.train.batches import Epochs, move_to_device


@given(st.integers(1, 13), st.integers(1, 4), st.integers(0, 30), st.integers(0, 3))
def test_state_restores_the_rest_of_the_epoch_and_all_later_ones(count, world, taken, seed):
    first, second = (Shuffled(range(count), seed=seed, rank=seed % world, world=world) for _ in range(2))
    epochs = 40
    left = (x for _ in range(epochs) for x in first)
    for _ in range(taken):
        next(left, None)
    second.restore(first.state())
    again = (x for _ in range(epochs) for x in second)
    assert [next(left, None) for _ in range(10)] == [next(again, None) for _ in range(10)]


@given(st.integers(0, 20), st.integers(1, 5))
def test_processes_share_each_epoch_out(count, world):
    shares = [list(Shuffled(range(count), rank=rank, world=world)) for rank in range(world)]
    assert sorted(x for share in shares for x in share) == list(range(count))
    assert [len(share) for share in shares] == [len(Shuffled(range(count), rank=r, world=world)) for r in range(world)]


def test_epochs_come_in_different_orders_by_the_seed():
    batches = Shuffled(range(20), seed=1)
    first, second = list(batches), list(batches)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == list(Shuffled(range(20), seed=1))
    assert first != list(Shuffled(range(20), seed=2))
    assert isinstance(batches, Epochs)


def test_rank_beyond_the_world_is_refused():
    with pytest.raises(ValueError, match="rank must be at least 0 and below world=2, got 2"):
        Shuffled([], rank=2, world=2)


def test_another_number_of_processes_goes_on_at_the_same_place():
    pair = [Shuffled(range(9), rank=rank, world=2) for rank in range(2)]
    behind = [batch for _, *both in zip(range(2), *pair, strict=False) for batch in both]
    alone = Shuffled(range(9))
    alone.restore(pair[0].state())
    assert sorted(behind + list(alone)) == list(range(9))
    with pytest.raises(
        ValueError, match="the state is after 4 batches, which 3 processes cannot share equally; resume with"
    ):
        Shuffled(range(9), world=3).restore(pair[0].state())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Shuffled(range(9), seed=2), "saved with seed=1, got seed=2; use the same"),
        (Shuffled(range(8), seed=1), "saved with batches=9, got batches=8; use the same"),
    ],
)
def test_a_state_of_other_batches_or_another_seed_is_refused(other, message):
    first = Shuffled(range(9), seed=1)
    next(iter(first))
    with pytest.raises(ValueError, match=message):
        other.restore(first.state())
    assert (other.epoch, other.position) == (0, 0)


def test_a_state_without_seed_and_number_is_taken_at_its_word():
    batches = Shuffled(range(9), seed=1)
    batches.restore({"epoch": 2, "position": 4, "world": 1})
    assert (batches.epoch, batches.position) == (2, 4)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Box:
    x: Any
    name: str


class Own:
    def to(self, device):
        return f"on {device}"


def test_every_tensor_of_a_batch_moves():
    meta = torch.device("meta")
    x = torch.ones(2)
    batch = {"a": [x, (x, "text")], "b": Pair(x, 3), "c": Box(x, "box"), "d": Own(), "e": None}
    result = move_to_device(batch, meta)
    assert result["a"][0].device == result["a"][1][0].device == meta
    assert result["a"][1][1] == "text"
    assert isinstance(result["b"], Pair)
    assert result["b"].x.device == meta
    assert result["c"].x.device == meta
    assert result["c"].name == "box"
    assert result["d"] == "on meta"
    assert result["e"] is None
    assert x.device.type == "cpu"


def test_batches_have_a_fingerprint_if_they_are_a_list():
    assert Shuffled([1, 2]).fingerprint() == Shuffled([1, 2]).fingerprint() != Shuffled([1, 3]).fingerprint()
    assert Shuffled(range(3)).fingerprint() is None


def test_data_loader_is_no_list():
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(TypeError, match=r"batches must be a list of batches, got DataLoader; write Shuffled\(list"):
        Shuffled(loader)
