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


def write(path, model, config="{}", more=None):
    training = {"training.json": f'"{path.name}"', "training.safetensors": {"x": torch.ones(1)}}
    files = {"config.json": config, **training, **(more or {})}
    checkpoint.write(path, {**files, "model.safetensors": checkpoint.tensors(model)})
    return path


def test_average_is_the_mean_of_weights_and_the_last_of_the_rest(tmp_path):
    values = (0.1, 0.7, 0.4)
    paths = [write(tmp_path / f"step-{n:08d}", Counted(value), "[2]") for n, value in enumerate(values)]
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
    with pytest.raises(
        CheckpointError,
        match=r"different models: 'weight' has shapes \(3, 2\) and \(4, 2\); average checkpoints of one run",
    ):
        average([path, wider], tmp_path / "mean")
    other = write(tmp_path / "step-00000003", nn.Linear(1, 1, bias=False))
    with pytest.raises(CheckpointError, match="different models: only one has"):
        average([path, other], tmp_path / "mean")
    (wider / "config.json").write_text("x")
    with pytest.raises(CheckpointError, match=r"checksum mismatch of config.json"):
        average([path, wider], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokenizer.json": "[2]"}, "tokenizer.json differs"),
        ({"tokenizer.json": "[1]", "tokenizer.source.json": "[]"}, "only one has tokenizer.source.json"),
        ({}, "only one has tokenizer.json"),
    ],
)
def test_checkpoints_of_different_vocabularies_are_not_averaged(tmp_path, other, message):
    one = write(tmp_path / "a", Counted(0.3), more={"tokenizer.json": "[1]"})
    two = write(tmp_path / "b", Counted(0.7), more=other)
    beside = r"; average checkpoints of one run, or use models over one vocabulary as an ensemble \(regard translate"
    with pytest.raises(CheckpointError, match=f"b are of different models: {message}{beside}"):
        average([one, two], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_records_of_training_may_differ_and_are_the_last(tmp_path):
    paths = [write(tmp_path / name, Counted(0.3), more={"plan.json": name}) for name in "ab"]
    with pytest.raises(CheckpointError, match=r"plan.json differs"):
        average(paths, tmp_path / "mean")
    assert (average(paths, tmp_path / "mean", records=["plan.json"]) / "plan.json").read_text() == "b"
