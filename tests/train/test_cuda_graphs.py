"""What training by CUDA graphs asks for; what it computes is tested where there is a GPU (tests/gpu)."""

import pytest
import torch

from regard.train import Group, Linear, Recipe, Shuffled, fit
from regard.train.cuda_graphs import Replayed
from tests.train.small_run import Small


def nothing(batch, weight):
    return torch.zeros(()), torch.ones(())


def test_without_a_gpu_graphs_are_refused_before_a_step(tmp_path):
    batches = Shuffled([torch.ones(3, 4).long()])
    with pytest.raises(ValueError, match="graphs=True needs a model on a GPU, got one on cpu; leave graphs out"):
        fit(Small(), batches, Recipe(steps=3, graphs=True), folder=tmp_path)
    assert not list(tmp_path.glob("step-*"))


def test_graphs_are_for_one_process():
    with pytest.raises(ValueError, match="graphs=True needs a single process, got 2; leave graphs out"):
        Replayed(nothing, Group(rank=1, size=2, device=torch.device("cuda")))


@pytest.mark.parametrize("other", [{"compile": True}, {"shard": True}, {"forcing": Linear(steps=4)}])
def test_graphs_go_without_what_changes_from_step_to_step(other):
    with pytest.raises(ValueError, match="graphs cannot be combined with compile, shard or forcing; choose one"):
        Recipe(steps=1, graphs=True, **other)
