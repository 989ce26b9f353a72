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
    with pytest.raises(
        ValueError, match="graphs replay the kernels of a GPU, and the model is on cpu; leave graphs out"
    ):
        fit(Small(), batches, Recipe(steps=3, graphs=True), folder=tmp_path)
    assert not list(tmp_path.glob("step-*"))


def test_graphs_are_for_one_process():
    with pytest.raises(ValueError, match="graphs are for a process that trains alone, and this is one of 2"):
        Replayed(nothing, Group(rank=1, size=2, device=torch.device("cuda")))


@pytest.mark.parametrize("other", [{"compile": True}, {"shard": True}, {"forcing": Linear(steps=4)}])
def test_graphs_go_without_what_changes_from_step_to_step(other):
    with pytest.raises(ValueError, match="graphs go without compile, shard and forcing; choose one"):
        Recipe(steps=1, graphs=True, **other)
