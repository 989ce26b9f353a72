"""`--attention`: a picture of one example or a capture of several, never half a file and never too many."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from matplotlib.image import imread

from regard.cli.attention_output import check_fits, check_single_input, max_examples
from tests.cli.commands import SOURCE, run, well

pytestmark = pytest.mark.commands

LINES = "".join(f"{line}\n" for line in SOURCE)


def test_a_picture_that_cannot_be_written_leaves_the_one_before(translator, tmp_path, monkeypatch):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ended = run("translate", translator, "--attention", picture, stdin="ein Haus\n")
    assert ended.code == 5
    assert "a.png could not be written: No space left on device; make room on the disk, then try again" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert picture.read_bytes() == b"before"


@pytest.mark.parametrize("kind", ["translator", "recurrent"])
def test_the_attention_of_one_sentence_is_a_picture(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    well("translate", folder, "--attention", tmp_path / "a.png", stdin="ein Haus\n")
    assert imread(tmp_path / "a.png").ndim == 3
    ended = run("translate", folder, "--attention", tmp_path / "b.png", stdin=LINES)
    assert "error: --attention b.png is a picture of one example, got more; give one example, or write" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_attention_is_that_of_one_model(translator, recurrent, tmp_path):
    ended = run("translate", translator, recurrent, "--attention", tmp_path / "a.png", stdin=LINES)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: --attention needs exactly one run, got 2; name one folder\n"


def test_more_attention_than_a_tape_holds_is_refused_before_anything_is_printed(translator, tmp_path):
    ended = run("translate", translator, "--attention", tmp_path / "a.safetensors", stdin="das\n" * 501)
    assert ended.code == 2
    assert ended.err == "error: --attention a.safetensors can hold 500 examples, got more; process fewer at a time\n"
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "most"), [(None, 500), ("a.png", 1), ("a.safetensors", 500)])
def test_a_picture_holds_one_example_and_a_capture_many(name, most, tmp_path):
    path = None if name is None else tmp_path / name
    assert max_examples(path, 500) == most
    check_fits(path, most, most)


def test_files_of_another_kind_and_inputs_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"--attention must end in \.png or \.safetensors, got .*a\.pdf"):
        max_examples(tmp_path / "a.pdf", 500)
    with pytest.raises(ValueError, match=r"a\.png is an input of this command and would be overwritten"):
        max_examples(tmp_path / "a.png", 500, tmp_path / "a.png")


def test_more_examples_than_fit_are_refused_with_what_to_write_instead():
    with pytest.raises(
        ValueError, match=r"a\.png is a picture of one example, got more; .* --attention a\.safetensors "
    ):
        check_fits(Path("a.png"), 2, 1)
    with pytest.raises(ValueError, match=r"a\.safetensors can hold 500 examples, got more; process fewer at a time"):
        check_fits(Path("a.safetensors"), 501, 500)
    check_fits(None, 501, 1)


def test_several_runs_are_only_refused_where_attention_is_written():
    check_single_input(None, [Path("a"), Path("b")])
    check_single_input(Path("a.png"), [Path("a")])
    with pytest.raises(ValueError, match="--attention needs exactly one run, got 2; name one folder"):
        check_single_input(Path("a.png"), [Path("a"), Path("b")])
