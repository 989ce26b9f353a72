"""Files that are written atomically: whole or not there, with the usual permissions."""

import os

import pytest
import torch
from safetensors.torch import load_file

from regard.atomic_files import atomic_path, check_parent_folder, save_tensors, temporary_path


def test_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def write_half(path):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise KeyError


def test_file_stays_as_it_was_when_the_block_raises(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyError):
        write_half(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.exists()))
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert synced == [False]


def test_tensors_have_the_permissions_of_other_files(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"x": torch.ones(2)}, {"format": "pt"})
    (tmp_path / "text").write_text("")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "text").stat().st_mode
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [1, 1]


def test_a_folder_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        check_parent_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none is not a folder; create it before you save x\.html there"):
        check_parent_folder(tmp_path / "none" / "x.html")
    assert temporary_path(tmp_path / "x").name == f".x-writing-{os.getpid()}.regard"


def test_read_only_folder_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"is read-only; save a\.txt in another folder"):
        check_parent_folder(tmp_path / "a.txt")
