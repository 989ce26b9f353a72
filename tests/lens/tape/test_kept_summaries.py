"""Summaries beside a tape's file: found again, never those of another tape, and no error where none can be written."""

import dataclasses
import shutil

import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.lens.tape.kept_summaries import KeptSummaries

KEYS = ("a", 0), ("b", 0), ("b", 1)


def saved(path, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layers = {key: weights(*torch.randn(2, 1, 3, 40, 4, generator=generator), mask=Causal()) for key in KEYS}
    Tape(layers).save(path)
    return path


@pytest.fixture
def path(tmp_path):
    return saved(tmp_path / "look.safetensors")


def keep(path, *keys):
    """Open the tape, measure some layers, and keep their summaries."""
    tape, kept = Tape.open(path), KeptSummaries(path)
    for key in keys:
        for _ in kept.measuring(tape, key):
            pass
    return tape


def restored(path, tape=None):
    """The keys of the layers that have a summary when the tape is opened."""
    tape, kept = tape or Tape.open(path), KeptSummaries(path)
    for key in KEYS:
        kept.restore(tape, key)
    return [key for key in KEYS if tape.summarized(key)]


def test_a_summary_is_found_when_the_tape_is_opened_again(path):
    before = keep(path, ("a", 0), ("b", 1))
    tape = Tape.open(path)
    assert restored(path, tape) == [("a", 0), ("b", 1)]
    for key in (("a", 0), ("b", 1)):
        for field in dataclasses.fields(before.summary(key)):
            assert torch.equal(getattr(tape.summary(key), field.name), getattr(before.summary(key), field.name))
        for field in dataclasses.fields(before.overview(key)):
            assert torch.equal(getattr(tape.overview(key), field.name), getattr(before.overview(key), field.name))
        assert torch.equal(tape[key].known_statistic, before[key].known_statistic)
        assert (tape[key].dense() - before[key].dense()).abs().max() == 0
    files = sorted(file.name for file in (path.parent / "look.safetensors.summaries").iterdir())
    assert files == ["0.safetensors", "2.safetensors"]


def test_the_summary_of_another_tape_is_not_used_and_is_replaced(path):
    keep(path, *KEYS)
    saved(path, seed=1)
    assert restored(path) == []
    keep(path, ("b", 0))
    assert restored(path) == [("b", 0)]


def test_the_same_tape_under_another_name_uses_the_folder_of_its_name(path):
    keep(path, *KEYS)
    copy = path.with_name("copy.safetensors")
    shutil.copy(path, copy)
    assert restored(copy) == []
    shutil.copytree(path.with_name("look.safetensors.summaries"), copy.with_name("copy.safetensors.summaries"))
    assert restored(copy) == list(KEYS)


def test_the_summary_of_another_layer_is_not_used(path):
    keep(path, ("a", 0))
    folder = path.with_name("look.safetensors.summaries")
    shutil.copy(folder / "0.safetensors", folder / "1.safetensors")
    assert restored(path) == [("a", 0)]


def test_no_changed_byte_of_a_kept_summary_is_used(path):
    keep(path, ("a", 0))
    file = path.with_name("look.safetensors.summaries") / "0.safetensors"
    whole = file.read_bytes()
    for at in (*range(0, 2000, 97), *range(2000, len(whole), 1009)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert restored(path) == [], at
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert restored(path) == []
    file.write_bytes(whole)
    assert restored(path) == [("a", 0)]


def test_a_summary_of_damaged_tensors_is_not_kept(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    keep(path, ("a", 0))
    assert not path.with_name("look.safetensors.summaries").exists()


def test_a_tape_that_was_replaced_while_it_was_open_keeps_nothing(path):
    tape, kept = Tape.open(path), KeptSummaries(path)
    other = saved(path.with_name("other.safetensors"), seed=1)
    other.replace(path)
    for _ in kept.measuring(tape, ("a", 0)):
        pass
    assert tape.summarized(("a", 0))
    assert not path.with_name("look.safetensors.summaries").exists()


def test_a_folder_that_cannot_be_written_is_no_error(path, monkeypatch):
    in_the_way = path.with_name("look.safetensors.summaries")
    in_the_way.write_text("a file of this name")
    tape = keep(path, *KEYS)
    assert all(map(tape.summarized, KEYS))
    assert in_the_way.read_text() == "a file of this name"
    assert restored(path) == []
    in_the_way.unlink()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("regard.lens.tape.kept_summaries.save_tensors", full)
    keep(path, *KEYS)
    assert list(in_the_way.iterdir()) == []


def test_a_file_of_a_summary_is_no_tape(path):
    keep(path, ("a", 0))
    with pytest.raises(ValueError, match="it has format 'summary 1', but this version"):
        Tape.load(path.with_name("look.safetensors.summaries") / "0.safetensors")
