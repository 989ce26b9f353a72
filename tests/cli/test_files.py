"""Input files of every kind, and output files that overwrite no input."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from string import Formatter

import pytest

from regard.cli.files import PairFiles, QuestionFile, SummaryFiles, TextFile, check_writable
from regard.data import DataWarning
from regard.train import ResourceError
from tests.cli.commands import HEADLINES, NEWS, SOURCE, TARGET, run

pytestmark = pytest.mark.commands

ONTO = {
    "an image with where a classifier looked": "classify {seer} {tmp}/0.png --attention {tmp}/0.png",
    "an image with where words looked": "caption {captioner} {tmp}/0.png --attention {tmp}/0.png",
    "questions with their answers": "answer {answerer} --data {tmp}/squad.json --out {tmp}/squad.json",
    "weights with where sentences looked": "translate {translator} --attention {translator}/{weights}",
    "weights with links": "translate {translator} --alignments {translator}/{weights}",
    "weights with where documents looked": "summarize {summarizer} --attention {summarizer}/{weights}",
    "weights with where a text looked": "generate {writer} --attention {writer}/{weights}",
    "weights with where questions looked": "answer {answerer} --data {tmp}/squad.json --attention {answerer}/{weights}",
}


@pytest.mark.parametrize("line", ONTO.values(), ids=ONTO)
def test_what_is_read_is_not_written_over(line, files, tmp_path, request):
    for name in ("scenes/0.png", "squad.json"):
        shutil.copy(files / name, tmp_path)
    runs = [name for _, name, _, _ in Formatter().parse(line) if name not in (None, "tmp", "weights")]
    places = {name: request.getfixturevalue(name) for name in runs}
    folder = places[runs[0]]
    places |= {"tmp": tmp_path, "weights": next(folder.rglob("model.safetensors")).relative_to(folder)}
    before = {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")}
    ended = run(*shlex.split(line.format(**places)), stdin="ein Haus\n")
    assert ended.code == 2, ended
    refused = "(is an input of this command|exists already in .*, an input of this command)"
    assert re.fullmatch(f"error: .* {refused}.*\n", ended.err)
    assert {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")} == before


def test_standard_input_is_not_written_over(translator, tmp_path):
    (tmp_path / "in.de").write_text("ein Haus\n")
    command = [sys.executable, "-m", "regard", "translate", translator, "--alignments", tmp_path / "in.de"]
    with (tmp_path / "in.de").open() as lines:
        ended = subprocess.run(command, stdin=lines, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch("error: .*in.de is the standard input of this command and would be .*\n", ended.stderr)
    assert (tmp_path / "in.de").read_text() == "ein Haus\n"


@pytest.mark.parametrize("given", [{"source": "a.de", "target": "a.en"}, {"pairs": "a.tsv"}])
def test_parallel_text_is_two_files_or_one_of_two_columns(given, files):
    rows = PairFiles(**{name: str(files / file) for name, file in given.items()}).read()
    assert [tuple(pair) for pair in rows] == list(zip(SOURCE, TARGET, strict=True))


@pytest.mark.parametrize(
    "given",
    [
        {"documents": "news", "summaries": "headlines"},
        {"jsonl": "news.jsonl", "document_field": "body", "summary_field": "head"},
    ],
)
def test_documents_and_summaries_are_two_files_or_one_of_json(given, files):
    named = {name: str(files / value) if not name.endswith("_field") else value for name, value in given.items()}
    assert [tuple(pair) for pair in SummaryFiles(**named).read()] == list(zip(NEWS, HEADLINES, strict=True))


def test_documents_and_summaries_may_be_columns(files):
    assert [pair.source for pair in SummaryFiles(pairs=str(files / "a.tsv")).read()] == SOURCE


def test_text_and_questions_are_read_and_checked(files):
    assert list(TextFile(text=str(files / "a.en")).read()) == TARGET
    assert [question.id for question in QuestionFile(data=str(files / "squad.json")).read()] == ["0a", "0b", "1a", "1b"]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (PairFiles, {}, "give --valid-source and --valid-target, or --valid-pairs"),
        (PairFiles, {"source": "a"}, "give --valid-source and --valid-target, or --valid-pairs"),
        (PairFiles, {"target": "a", "pairs": "b"}, "give --valid-source and --valid-target, or --valid-pairs"),
        (PairFiles, {"source": "a", "target": "b", "pairs": "c"}, "give --valid-source and --valid-target, or"),
        (SummaryFiles, {}, "give --valid-documents and --valid-summaries, or --valid-pairs, or --valid-jsonl"),
        (SummaryFiles, {"documents": "a", "jsonl": "b"}, "give --valid-documents and --valid-summaries, or"),
        (SummaryFiles, {"pairs": "a", "jsonl": "b"}, "give --valid-documents and --valid-summaries, or"),
        (TextFile, {}, "--valid-text is missing; give a file of plain text"),
        (QuestionFile, {}, "--valid-data is missing; give a JSON file in the format of SQuAD"),
    ],
)
def test_files_that_are_no_set_are_refused_with_the_flags_to_give(kind, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**given).read(prefix="valid-")


def test_a_new_file_in_a_folder_that_is_read_can_be_written(tmp_path):
    check_writable(None, tmp_path)
    check_writable(tmp_path / "new.json", tmp_path, None)
    for name in ("old.png", "old.html"):
        (tmp_path / name).write_bytes(b"")
        check_writable(tmp_path / name, tmp_path)


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    read, outside = tmp_path / "read", tmp_path / "link"
    read.mkdir()
    (read / "a.json").write_text("{}")
    outside.symlink_to(read / "a.json")
    for path, message in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "none" / "a.png", r"none is not a folder; create it before you save a\.png there"),
        (tmp_path / "a.pdf", r"--out must end in \.png or \.json, got .*a\.pdf"),
    ):
        with pytest.raises((OSError, ValueError), match=message):
            check_writable(path, flag="--out", ends=(".png", ".json"))
    for path in (read / "a.json", outside):
        with pytest.raises(ValueError, match=r"exists already in .*read, an input of this command; name another file"):
            check_writable(path, read)
        with pytest.raises(ValueError, match="is an input of this command and would be overwritten; name another file"):
            check_writable(path, str(read / "a.json"))


def test_ids_of_questions_are_unique_over_files(files):
    both = (str(files / "squad.json"),) * 2
    with pytest.raises(ValueError, match="the id '0a' is in more than one file of --valid-data; give unique ids"):
        QuestionFile(data=both).read(prefix="valid-")


def test_tables_have_columns_by_number_or_name(tmp_path):
    (tmp_path / "a.csv").write_text('en,de\n"a house, a dog",ein Haus\n')
    named = PairFiles(pairs=str(tmp_path / "a.csv"), source_column="de", target_column="en")
    assert list(named.read()) == [("ein Haus", "a house, a dog")]
    for header, count in (("yes", 1), ("no", 2)):
        assert len(PairFiles(pairs=str(tmp_path / "a.csv"), header=header).read()) == count
    with pytest.warns(DataWarning, match="line 1 was read as a header"):
        assert len(SummaryFiles(pairs=str(tmp_path / "a.csv"), document_column="1", summary_column="0").read()) == 1


def test_read_only_folder_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ResourceError, match=r"is read-only; save out\.align in another folder"):
        check_writable(tmp_path / "out.align")
