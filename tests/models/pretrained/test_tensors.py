"""Files of tensors: listed by their headers, in one file or several, and refused if damaged."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch

from regard.models.pretrained import load
from tests.models.pretrained.peers import GPT2, peer, saved


def test_shards_are_read(tmp_path):
    theirs = peer("GPT2LMHeadModel", GPT2)
    theirs.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    theirs.save_pretrained(tmp_path / "one")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    expected = load(tmp_path / "one").state_dict()
    for name, x in load(tmp_path / "many").state_dict().items():
        assert torch.equal(x, expected[name])


def test_a_pickle_is_refused_with_the_reason(tmp_path):
    saved(tmp_path)
    shutil.move(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle, and opening it would run its code; if"):
        load(tmp_path)


def damaged(data, how):
    if how == "header":
        return struct.pack("<Q", 10**7 + 1) + data[8:] + b"\0" * 10**7
    return {"short": data[:-7], "long": data + b"\0" * 8, "empty": b"", "text": b"not tensors at all"}[how]


@pytest.mark.parametrize("how", ["short", "long", "empty", "text", "header"])
def test_files_of_another_size_than_their_header_says_are_refused(how, tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(damaged(file.read_bytes(), how))
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": "weights.bin"}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": 3}}, "must name safetensors files of the same folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not in the folder"),
        ([], "must hold a weight_map"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(index, message, tmp_path):
    (saved(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_two_files_with_the_same_tensor_are_refused(tmp_path):
    saved(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "a.safetensors")
    shutil.move(tmp_path / "model.safetensors", tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="both hold"):
        load(tmp_path)
