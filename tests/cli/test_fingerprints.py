"""A resumed run goes on with the data it began with, wherever that lies, or says what has changed."""

from __future__ import annotations

import json
import shutil

import pytest

from regard.cli import fingerprints
from regard.cli.fingerprints import digest
from tests.cli.commands import SMALL, run, well

pytestmark = pytest.mark.commands

KEPT = "error: a resumed run must continue with the same training data, but this differs: "
ANEW = "; give the same data, or give --out a new folder to train another model\n"


@pytest.fixture
def begun(files, tmp_path):
    """A folder with the data of a run, and the run."""
    for name in ("a.de", "a.en"):
        shutil.copy(files / name, tmp_path / name)
    data = ["--source", tmp_path / "a.de", "--target", tmp_path / "a.en"]
    valid = ["--valid-source", tmp_path / "a.de", "--valid-target", tmp_path / "a.en"]
    flags = [*SMALL, "--steps", 2, "--evaluate-every", 1, "--model", "rnn", "--out", tmp_path / "run"]
    well("train", "translation", *data, *valid, *flags)
    return tmp_path


def resumed(folder, *flags):
    return run("train", "translation", "--out", folder / "run", "--resume", "--steps", 4, *flags)


def test_files_in_each_others_place_are_refused(begun):
    ended = resumed(begun, "--source", begun / "a.en", "--target", begun / "a.de")
    assert ended == (2, "", f"{KEPT}--source {begun / 'a.en'}, --target {begun / 'a.de'}{ANEW}")
    assert not (begun / "run" / "step-00000004").exists()


def test_a_file_with_other_content_is_refused(begun):
    text = (begun / "a.en").read_text()
    (begun / "a.en").write_text(text.replace("dog", "cat"))
    assert resumed(begun) == (2, "", f"{KEPT}--target {begun / 'a.en'}{ANEW}")
    (begun / "a.en").write_text(text)
    assert resumed(begun).code == 0


def test_files_may_be_moved(begun):
    (begun / "moved").mkdir()
    for name in ("a.de", "a.en"):
        (begun / name).rename(begun / "moved" / name)
    flags = [("--source", "a.de"), ("--target", "a.en"), ("--valid-source", "a.de"), ("--valid-target", "a.en")]
    ended = resumed(begun, *(part for flag, name in flags for part in (flag, begun / "moved" / name)))
    assert ended.code == 0, ended.err
    assert "validate" not in ended.err


def test_a_file_that_is_gone_is_named_as_such(begun):
    (begun / "a.en").unlink()
    assert resumed(begun) == (2, "", f"error: {begun / 'a.en'}: no such file; check the path\n")


def test_other_data_to_validate_by_is_told(begun):
    ended = resumed(begun, "--valid-source", begun / "a.en")
    assert ended.code == 0
    told = f"the validation data differs from that of the checkpoint: --valid-source {begun / 'a.en'}\n"
    assert ended.err.startswith(told)
    assert "earlier scores (on other data) are not comparable with new ones" in ended.err


def test_data_of_another_kind_are_refused(begun, files, tmp_path):
    told = {"data": {"source": None, "target": None, "pairs": str(files / "a.tsv")}}
    (tmp_path / "plan.json").write_text(json.dumps(told))
    ended = resumed(begun, "--config", tmp_path / "plan.json")
    assert ended == (2, "", f"{KEPT}no --source, no --target, --pairs {files / 'a.tsv'}{ANEW}")


def test_how_files_are_read_counts(files, tmp_path):
    train = ["train", "classification", "--out", tmp_path / "run"]
    columns = ["--text-column", "text", "--label-column", "class"]
    well(*train, "--labelled", files / "named.tsv", *columns, *SMALL, "--steps", 2)
    ended = run(*train, "--resume", "--steps", 4, "--text-column", "class")
    assert ended == (2, "", f"{KEPT}--text-column class{ANEW}")
    well(*train, "--resume", "--steps", 4)


def test_a_run_without_a_record_goes_on_and_has_one_then(begun):
    for step in (begun / "run").glob("step-*"):
        (step / "data.json").unlink()
        manifest = (step / "manifest.sha256").read_text().splitlines(keepends=True)
        (step / "manifest.sha256").write_text("".join(line for line in manifest if "data.json" not in line))
    assert resumed(begun, "--source", begun / "a.en", "--target", begun / "a.de").code == 2  # other tokens
    assert resumed(begun).code == 0
    assert (begun / "run" / "step-00000004" / "data.json").exists()


def test_every_byte_of_a_file_counts(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789" * 5)
    (tmp_path / "b").write_bytes(b"0123456789" * 5)
    before = digest(str(tmp_path / "a"))
    assert digest(str(tmp_path / "b")) == before
    for at in (0, 33, 49):
        changed = bytearray(b"0123456789" * 5)
        changed[at] = 0
        (tmp_path / "b").write_bytes(changed)
        assert digest(str(tmp_path / "b")) != before
    assert digest(str(tmp_path / "none")) is None


def test_of_a_large_file_stretches_from_first_to_last_count_and_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "BLOCK_BYTES", 10)
    monkeypatch.setattr(fingerprints, "MAX_BLOCKS", 3)
    path, content = tmp_path / "a", b"0123456789" * 5
    path.write_bytes(content)
    before = digest(str(path))
    for at, counts in ((0, True), (15, False), (25, True), (35, False), (49, True)):
        path.write_bytes(content[:at] + b"x" + content[at + 1 :])
        assert (digest(str(path)) != before) == counts
    path.write_bytes(content[:30] + content[20:])
    assert digest(str(path)) != before


def test_of_a_folder_the_images_count(files, tmp_path):
    folder = tmp_path / "scenes"
    shutil.copytree(files / "scenes", folder)
    before = digest(str(folder))
    assert before == digest(str(files / "scenes"))
    (folder / "run").mkdir()
    (folder / "run" / "model.safetensors").write_bytes(b"")
    assert digest(str(folder)) == before
    content = (folder / "0.png").read_bytes()
    (folder / "0.png").write_bytes(content[:-1] + b"x")
    assert digest(str(folder)) != before
    (folder / "0.png").write_bytes(content)
    assert digest(str(folder)) == before
    (folder / "0.png").rename(folder / "00.png")
    assert digest(str(folder)) != before
