"""The mean of checkpoints."""

import pytest
import torch
from torch import nn

from regard.train import CheckpointError, average, checkpoint, load


class Counted(nn.Module):
    def __init__(self, value, width=3):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, 2), value))
        self.low = nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor(int(value * 10)))


def write(path, model, config="{}"):
    files = {"config.json": config, "training.json": "{}", "training.safetensors": {"x": torch.ones(1)}}
    checkpoint.write(path, {**files, "model.safetensors": checkpoint.tensors(model)})
    return path


def test_average_is_the_mean_of_weights_and_the_last_of_the_rest(tmp_path):
    values = (0.1, 0.7, 0.4)
    paths = [write(tmp_path / f"step-{n:08d}", Counted(value), f"[{n}]") for n, value in enumerate(values)]
    out = average(paths, tmp_path / "mean")
    model = Counted(0.0)
    load(out, model)
    mean = sum(torch.full((3, 2), value, dtype=torch.float64) for value in torch.tensor(values).tolist()) / 3
    assert torch.equal(model.weight.detach(), mean.float())
    assert model.low.dtype == torch.bfloat16
    assert model.seen == 4
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "manifest.sha256", "model.safetensors"]
    assert (out / "config.json").read_text() == "[2]"


def test_average_of_one_is_itself(tmp_path):
    path = write(tmp_path / "step-00000001", Counted(0.3))
    average([path], tmp_path / "mean")
    one, other = checkpoint.read_tensors(path), checkpoint.read_tensors(tmp_path / "mean")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bad_averages_are_answered(tmp_path):
    path = write(tmp_path / "step-00000001", Counted(0.3))
    with pytest.raises(ValueError, match="folders must name at least one checkpoint"):
        average([], tmp_path / "mean")
    with pytest.raises(ValueError, match="out must be a new folder"):
        average([path], path)
    wider = write(tmp_path / "step-00000002", Counted(0.3, width=4))
    with pytest.raises(CheckpointError, match=r"different models: 'weight' has shapes \(3, 2\) and \(4, 2\)"):
        average([path, wider], tmp_path / "mean")
    other = write(tmp_path / "step-00000003", nn.Linear(1, 1, bias=False))
    with pytest.raises(CheckpointError, match="different models: only one has"):
        average([path, other], tmp_path / "mean")
    (wider / "config.json").write_text("x")
    with pytest.raises(CheckpointError, match=r"config.json is not what was written"):
        average([path, wider], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
