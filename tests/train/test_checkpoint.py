"""Checkpoints: whole or not there, and never used when a byte of them has changed."""

import os
import random
import resource
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.train import CheckpointError, ResourceError, Shuffled, Silence, checkpoint, find, fit, load, training_state
from tests.train.small_run import FILES, RECIPE, Small, data, evaluate, remains, small

FIVE = ("config.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors")
ALL = (*FIVE, "manifest.sha256")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    small(folder)
    return folder


@pytest.fixture
def run(finished, scratch):
    return shutil.copytree(finished, scratch / "run", symlinks=True)


class Heard(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def mutate(path, draw):
    """Change a file in one of the ways in which disks and people do."""
    content = bytearray(path.read_bytes())
    match draw.choice(["flip", "flip", "flip", "truncate", "delete", "empty", "append", "swap"]):
        case "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case "truncate":
            del content[draw.randrange(len(content)) :]
        case "delete":
            return path.unlink()
        case "empty":
            content.clear()
        case "append":
            content += draw.randbytes(draw.randint(1, 9))
        case "swap":
            at = draw.randrange(len(content) - 1)
            if content[at] == content[at + 1]:
                content[at] ^= 255
            content[at], content[at + 1] = content[at + 1], content[at]
    return path.write_bytes(content)


def test_checkpoint_has_the_files_of_the_design(run):
    assert sorted(os.listdir(run / "step-00000024")) == sorted(ALL)
    assert (run / "step-00000024" / "config.json").read_text() == FILES["config.json"]
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=run / "step-00000024", check=True)


@pytest.mark.parametrize("name", ALL)
def test_every_mutation_of_a_file_is_detected(run, name):
    draw = random.Random(name)
    path = run / "step-00000024"
    original = (path / name).read_bytes()
    for _ in range(170):
        mutate(path / name, draw)
        with pytest.raises(CheckpointError) as error:
            checkpoint.verify(path)
        assert str(path) in str(error.value)
        (path / name).write_bytes(original)
    checkpoint.verify(path)


def test_damage_is_named(run):
    path = run / "step-00000024"
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000024 is corrupted: checksum mismatch of model.safetensors"):
        checkpoint.verify(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.sha256 names 'model.safetensors', which is not in the folder"):
        checkpoint.verify(path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        checkpoint.verify(path)
    path = run / "step-00000022"
    (path / "manifest.sha256").write_bytes((path / "manifest.sha256").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"corrupted: manifest.sha256 was changed"):
        checkpoint.verify(path)


@pytest.mark.parametrize("name", ALL)
def test_resume_falls_back_to_the_checkpoint_before_and_says_so(run, name, uninterrupted):
    mutate(run / "step-00000024" / name, random.Random(name))
    heard = Heard()
    small(run, resume=True, show=heard)
    assert "step-00000024 " in heard.lines[0]
    assert "falling back to the checkpoint before" in heard.lines[0]
    assert heard.lines[1] == f"resuming from {run / 'step-00000022'}"
    assert remains(run) == uninterrupted


def test_no_usable_checkpoint_is_an_error_that_changes_nothing(run):
    for path in run.glob("step-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"has no intact checkpoint: .*nothing was changed") as error:
        small(run, resume=True)
    assert error.value.exit_code == 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_whose_checkpoints_are_gone_is_not_started_again(run):
    for path in run.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="holds a run without checkpoints"):
        small(run, resume=True)


def test_folder_of_a_run_is_not_overwritten(run):
    with pytest.raises(ValueError, match=r"already holds a run, up to step-00000024; pass resume=True or another"):
        small(run)


def test_checkpoint_of_another_model_is_refused_and_the_model_left_alone(run):
    class Wider(Small):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(6, 7)

    model = Wider()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"holds 'hidden.bias' of shape \(6,\), the model's is \(7,\); build"):
        load(run / "step-00000024", model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.hidden = nn.Identity()
    with pytest.raises(CheckpointError, match=r"holds 'hidden.bias', which the model lacks; known: 'embedding.weight'"):
        load(run / "step-00000024", model)
    model = Small()
    model.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"lacks 'more.weight', which the model has"):
        load(run / "step-00000024", model)


def test_loaded_weights_are_the_saved_ones(run):
    model, best = Small(), Small()
    load(find(run), best)
    load(run / "step-00000024", model)
    saved = checkpoint.read_tensors(run / "step-00000024")
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    assert find(run).name == os.readlink(run / "best") == "step-00000018"
    assert find(run / "step-00000022") == run / "step-00000022"


def test_find_without_a_best_takes_the_newest_that_is_whole(run, scratch):
    (run / "best").unlink()
    assert find(run).name == "step-00000024"
    (run / "step-00000024" / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"step-00000024 is corrupted: .*; falling back to the checkpoint before"):
        assert find(run).name == "step-00000022"
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find(scratch / "nowhere")


def test_tied_weights_are_saved_once_and_stay_tied(scratch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.inner.weight
            self.register_buffer("even", torch.arange(8.0)[::2])

    tied, other = Tied(), Tied()
    checkpoint.write(scratch / "step-00000001", {"model.safetensors": checkpoint.tensors(tied)})
    load(scratch / "step-00000001", other)
    assert checkpoint.read_tensors(scratch / "step-00000001").keys() == {"inner.weight", "even"}
    assert other.out.weight is other.inner.weight
    assert torch.equal(other.out.weight, tied.inner.weight)
    assert torch.equal(other.even, tied.even)


def test_header_that_claims_too_much_is_not_read(scratch):
    (scratch / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="has a header of 1099511627776 bytes; the limit is 10000000"):
        checkpoint.read_tensors(scratch)


@pytest.mark.parametrize("name", ["../x", ".hidden", "a/b", "", "manifest.sha256"])
def test_file_names_stay_inside_the_checkpoint(scratch, name):
    with pytest.raises(ValueError, match=r"must have a plain name other than manifest.sha256"):
        checkpoint.write(scratch / "step-00000001", {name: "x"})


def test_full_disk_leaves_the_state_before_and_says_so(run):
    """The limit on the size of a file stands in for a disk that is full: the write fails halfway, for real."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    files = {"config.json": "{}", "model.safetensors": {"x": torch.zeros(40_000)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(ResourceError, match=r"step-00000030 could not be written: .*then resume") as error:
            checkpoint.write(run / "step-00000030", files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.exit_code == 5
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "links"
    checkpoint.write_text(path, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(ResourceError, match=r"links could not be written: .*then try again"):
            checkpoint.write_text(path, "x" * 100_000, then="try again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [found.name for found in tmp_path.iterdir()] == ["links"]
    assert path.read_text() == "before"


def test_links_and_pipes_stay_what_they_are_when_they_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    checkpoint.write_text(tmp_path / "link", "first")
    checkpoint.write_text(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "second"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    checkpoint.write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("call", range(1, 40, 5))
def test_disk_that_fills_up_during_a_run_leaves_it_resumable(scratch, monkeypatch, uninterrupted, call):
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left on device; make room on the disk, then resume"):
        small(scratch / "run")
    small(scratch / "run", resume=True)
    assert remains(scratch / "run") == uninterrupted


def test_what_a_killed_process_left_is_in_nobodys_way(scratch, uninterrupted):
    """In a container, the process after the one that was killed often has its number."""
    torn = scratch / "run" / f".step-00000002-writing-{os.getpid()}.regard"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"half")
    (scratch / "run" / ".best-linking-1.regard").symlink_to("nowhere")
    (scratch / "run" / ".log.csv-writing-1.regard").write_text("half")
    small(scratch / "run")
    assert remains(scratch / "run") == uninterrupted


def test_only_the_newest_and_the_best_stay(run):
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000018", "step-00000022", "step-00000024"]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(scratch):
    run, recipe = scratch / "run", replace(RECIPE, steps=7, save_every=3, keep=2)
    small(run, recipe=recipe)
    (run / "step-00000007" / checkpoint.MODEL).write_bytes(b"damaged")
    small(run, recipe=replace(recipe, steps=9), resume=True)
    assert {path.name for path in run.glob("step-*")} >= {f"step-0000000{step}" for step in (6, 7, 9)}
    small(run, recipe=replace(recipe, steps=12), resume=True)
    kept = {(run / "best").resolve().name, "step-00000009", "step-00000012"}
    assert {path.name for path in run.glob("step-*")} == kept


def test_checkpoints_of_a_compiled_model_have_the_names_of_the_plain_one(scratch):
    recipe, batches = replace(RECIPE, steps=2), Shuffled(data(), seed=3)
    told = {"folder": scratch / "run", "evaluate": evaluate, "show": Silence()}
    fit(torch.compile(Small(), backend="eager"), batches, recipe, **told)
    found = {name for file in (checkpoint.MODEL, training_state.TENSORS) for name in tensors_of(scratch / "run", file)}
    assert not [name for name in found if "_orig_mod" in name]
    model = Small()
    checkpoint.load(scratch / "run" / "step-00000002", model)
    again = torch.compile(Small(), backend="eager")
    checkpoint.load(scratch / "run" / "step-00000002", again)
    for x, y in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y)
    longer = replace(recipe, steps=4)
    fit(Small(), Shuffled(data(), seed=3), longer, resume=True, **told)
    fit(Small(), Shuffled(data(), seed=3), longer, **told | {"folder": scratch / "whole"})
    weights = [scratch / run / "step-00000004" / checkpoint.MODEL for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def tensors_of(run, name):
    return checkpoint.read_tensors(checkpoint.all_checkpoints(run)[-1], name)


def test_weights_under_the_names_of_a_compiled_model_are_taken():
    model, other = Small(), Small()
    values = {f"_orig_mod.{name}": x + 1 for name, x in checkpoint.tensors(model).items()}
    checkpoint.put(values, other, source="file")
    assert all(torch.equal(x + 1, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


def test_best_link_follows_a_fall_back(run):
    """The checkpoints after the one resumed from no longer count, and neither does a best among them."""
    for step in (22, 24):
        shutil.rmtree(run / f"step-000000{step}")
    small(run, resume=True)
    assert os.readlink(run / "best") == "step-00000018"


def test_weights_may_be_read_by_whoever_may_read_the_rest(tmp_path):
    checkpoint.write(tmp_path / "one", {"config.json": "{}", checkpoint.MODEL: {"x": torch.ones(2)}})
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "one").iterdir()}
    assert modes[checkpoint.MODEL] == modes["config.json"]
