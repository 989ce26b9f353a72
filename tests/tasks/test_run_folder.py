"""Folders of runs: what is resumed, used, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from regard.tasks import run_folder
from regard.tasks.translation import Translator
from regard.train import CheckpointError, checkpoint
from tests.tasks.tiny_translators import trained


def test_a_folder_that_holds_a_run_is_refused(translator_folder):
    before = sorted(translator_folder.rglob("*"))
    with pytest.raises(ValueError, match=r"run already has a run; resume it \(resume=True, --resume\)"):
        trained(translator_folder)
    assert sorted(translator_folder.rglob("*")) == before


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="is not empty; name another folder"):
        trained(tmp_path)
    with pytest.raises(ValueError, match=r"out must be a folder, but .*letter.txt is a file"):
        trained(tmp_path / "letter.txt")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.source.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_not_used(name, tmp_path):
    outcome = trained(tmp_path / "run")
    file = outcome.best / name
    file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(CheckpointError, match=f"is corrupted: checksum mismatch of {name}"):
        Translator.load(outcome.best)


def test_a_config_of_another_shape_is_named(translator_folder, tmp_path):
    best = run_folder.open_run(translator_folder)
    texts = {path.name: path.read_text() for path in best.glob("*.json") if path.name != "training.json"}
    tensors = checkpoint.read_tensors(best)
    for old, new, message in (
        ('"longest"', '"longset"', r"config.json: unknown key 'longset'; did you mean 'longest'\?; it may"),
        ('"translation"', '"painting"', r"is a checkpoint of the task 'painting', expected 'translation'"),
        ('"format": 1', '"format": 2', "config.json does not have format 1"),
        ('"start": 2', '"start": "two"', "start must be a whole number"),
        ('"format": 1,', "", "config.json does not have format 1"),
        ('"format": 1,', "'", "config.json is not valid JSON"),
    ):
        config = texts["config.json"].replace(old, new)
        assert config != texts["config.json"]
        checkpoint.write(tmp_path / "step-1", {**texts, "config.json": config, "model.safetensors": tensors})
        with pytest.raises((CheckpointError, ValueError), match=message):
            Translator.load(tmp_path / "step-1")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder; expected a run written by regard train"):
        Translator.load(tmp_path / "nowhere")


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int
    name: str = "a"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)


def save(path, text):
    checkpoint.write(
        path, {"config.json": text, "notes.txt": "ein Häuschen", "model.safetensors": Plain().state_dict()}
    )
    return path


def test_the_config_of_a_task_comes_back(tmp_path):
    text = run_folder.config_text("painting", Config(size=3, name="ä"))
    assert json.loads(text) == {"format": 1, "task": "painting", "size": 3, "name": "ä"}
    assert "ä" in text
    path = save(tmp_path / "step-1", text)
    assert run_folder.task_of(path) == "painting"
    assert run_folder.config_of(path, "painting", Config) == Config(size=3, name="ä")
    with pytest.raises(ValueError, match="is a checkpoint of the task 'painting', expected 'music'"):
        run_folder.config_of(path, "music", Config)


@pytest.mark.parametrize("text", ["[]", "3", '{"format": 1}', '{"format": 1, "task": 3}', '{"task": "painting"}'])
def test_a_config_without_format_or_task_is_refused(text, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not have format 1; it may have been written by"):
        run_folder.task_of(save(tmp_path / "step-1", text))


def test_nesting_without_end_is_not_valid_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON, so the checkpoint was not written by"):
        run_folder.task_of(save(tmp_path / "step-1", "[" * 100_000))


def test_weights_are_loaded_into_a_model_that_is_then_evaluated(tmp_path):
    path = save(tmp_path / "step-1", run_folder.config_text("painting", Config(size=3)))
    model = Plain()
    run_folder.load_weights(model, path)
    assert not model.training
    assert all(torch.equal(x, checkpoint.read_tensors(path)[name]) for name, x in model.state_dict().items())
    assert run_folder.read_text(path, "notes.txt") == "ein Häuschen"


def test_a_checkpoint_is_used_as_a_run_is(tmp_path):
    text = run_folder.config_text("painting", Config(size=3))
    path = save(tmp_path / "run" / "step-00000001", text)
    assert run_folder.open_run(path) == run_folder.open_run(str(path)) == path
    assert run_folder.open_run(tmp_path / "run").resolve() == path


def test_a_folder_without_checkpoints_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoints; expected a run written by regard train"):
        run_folder.open_run(tmp_path)


def test_a_folder_that_is_new_or_empty_holds_nothing_to_resume(tmp_path):
    for resume in (False, True):
        for out in (tmp_path / "new", tmp_path):
            assert run_folder.checkpoint_to_resume(out, resume=resume, say=pytest.fail) is None
    assert not (tmp_path / "new").exists()
