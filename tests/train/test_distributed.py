"""Two processes with gloo against one process with the joined batch."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.train import Group, checkpoint, own_device, process_group
from tests.train import distributed_run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Everything the two processes saw; they are started once, as a user would."""
    out = tmp_path_factory.mktemp("pair")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["--module", distributed_run.__name__, str(out)]
    run = subprocess.run([*command, *module], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return out, [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses and weights of one process whose steps take the batches of both."""
    out = tmp_path_factory.mktemp("alone")
    losses = {}
    for name, accumulate in (("ddp", 2), ("accumulate", 4)):
        recipe = replace(distributed_run.RECIPE, accumulate=accumulate)
        losses[name] = distributed_run.train(out / name, recipe, rank=0, world=1)
    return out, losses


def last(folder):
    return checkpoint.read_tensors(folder / "step-00000011")


@pytest.mark.parametrize(("theirs", "ours"), [("ddp", "ddp"), ("accumulate", "accumulate"), ("fsdp", "ddp")])
def test_two_processes_train_as_one_with_the_joined_batch(pair, alone, theirs, ours):
    """Nine batches over two processes: the last step of an epoch has one for the first process only."""
    (out, (lead, _)), (single, losses) = pair, alone
    assert lead[theirs] == pytest.approx(losses[ours], rel=1e-12)
    expected, found = last(single / ours), last(out / theirs)
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert torch.allclose(found[name], x, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_resume_where_they_were(pair, name):
    out, (lead, _) = pair
    assert lead[f"{name}-cut"] == lead[name][6:]
    whole, cut = last(out / name), last(out / f"{name}-cut")
    assert all(torch.equal(cut[key], x) for key, x in whole.items())


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_run_of_two_processes_is_resumed_by_one(pair, alone, name):
    """Checkpoints hold whole tensors and a place in the data, whoever wrote them."""
    (out, _), (_, losses) = pair, alone
    recipe = replace(distributed_run.RECIPE, accumulate=2)
    found = distributed_run.train(out / f"{name}-half", recipe, rank=0, world=1, resume=True)
    assert found == pytest.approx(losses["ddp"][6:], rel=1e-12)


def test_signal_to_one_process_stops_both_at_the_same_step(pair):
    out, records = pair
    assert [record["stopped"] for record in records] == [[143, "stopped at step 3"]] * 2
    checkpoint.verify(out / "signalled" / "step-00000003")


def test_loss_that_is_not_finite_in_one_process_stops_both(pair):
    _, (lead, other) = pair
    assert "loss nan" in lead["broken"]
    assert "every module's output is finite, but the loss is not" in other["broken"]


def test_process_without_torchrun_is_alone():
    with process_group(torch.device("cpu")) as group:
        assert group == Group()
        assert group.leads
        assert group.sum([1.0, 2.0]) == group.same([1.0, 2.0]) == [1.0, 2.0]
        assert group.largest(3.0) == 3.0
        group.wait()
    assert own_device().type in ("cpu", "cuda")


def test_a_process_computes_where_it_is_asked_to_or_on_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_device() == own_device("cuda") == torch.device("cuda:3")
    assert own_device("cuda:1") == torch.device("cuda:1")
    assert own_device("cpu") == own_device(torch.device("cpu")) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=rf"device '{name}' needs a GPU, and this machine has none; pass 'cpu'"):
            own_device(name)


def test_the_gpu_of_a_process_is_the_current_one_while_it_trains(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    with process_group("cuda:1") as group:
        assert entered == [group.device] == [torch.device("cuda:1")]
    with process_group("cpu"):
        assert len(entered) == 1
