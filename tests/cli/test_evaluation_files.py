"""More references, and the outputs that an evaluation measured."""

import pytest

from tests.cli.commands import run, well

pytestmark = pytest.mark.commands


@pytest.fixture
def pairs(files):
    return ["--source", files / "a.de", "--target", files / "a.en"]


def test_outputs_are_written_and_are_those_of_translate(translator, files, pairs, tmp_path):
    well("evaluate", translator, *pairs, "--length-penalty", 2, "--beam", 3, "--out", tmp_path / "out.en")
    again = well("translate", translator, "--length-penalty", 2, "--beam", 3, stdin=(files / "a.de").read_text())
    assert (tmp_path / "out.en").read_text() == again.out


def test_output_equal_to_a_second_reference_is_exact(translator, pairs, tmp_path):
    well("evaluate", translator, *pairs, "--out", tmp_path / "out.en")
    out = well("evaluate", translator, *pairs, "--reference", tmp_path / "out.en").out
    assert "exact       100.00" in out
    assert "nrefs:2|" in out


def test_summaries_and_captions_are_written_too(summarizer, captioner, files, tmp_path):
    data = ["--documents", files / "news", "--summaries", files / "headlines"]
    well("evaluate", summarizer, *data, "--out", tmp_path / "short")
    assert "|nrefs:2|" in well("evaluate", summarizer, *data, "--reference", tmp_path / "short").out
    data = ["--captions", files / "captions.tsv", "--images", files / "scenes"]
    well("evaluate", captioner, *data, "--length-penalty", 1, "--out", tmp_path / "captions")
    assert (tmp_path / "captions").read_text().count("\n") == len(list((files / "scenes").glob("*.png")))


def test_references_of_another_length_and_files_that_are_read_are_refused(translator, files, pairs, tmp_path):
    (tmp_path / "few").write_text("one\n")
    ended = run("evaluate", translator, *pairs, "--reference", tmp_path / "few")
    assert "has 1 lines, expected one for each of the 8 pairs" in ended.err
    (tmp_path / "same").write_bytes((files / "a.en").read_bytes())
    for name in (tmp_path / "same", files / "a.en"):
        ended = run("evaluate", translator, *pairs, "--reference", tmp_path / "same", "--out", name)
        assert "is an input of this command and would be overwritten" in ended.err


def test_drawn_and_forced_translations_from_the_command_line(translator, files, tmp_path):
    lines = (files / "a.de").read_text()
    drawn = [well("translate", translator, "--temperature", 2, "--seed", 3, "--nbest", 2, stdin=lines).out] * 2
    drawn.append(
        well("translate", translator, "--temperature", 2, "--seed", 3, "--nbest", 2, "--stream", stdin=lines).out
    )
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0].splitlines()) == 16
    forced = well("translate", translator, "--prefix", "a dog", "--coverage-penalty", 0.3, stdin=lines).lines
    assert all(line.startswith("a dog") for line in forced)
    (tmp_path / "starts").write_text("the\n\n" * 4)
    forced = well("translate", translator, "--prefixes", tmp_path / "starts", stdin=lines).lines
    assert all(line.startswith("the") for line in forced[::2])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", 3], "--seed is for outputs drawn at random; add --temperature 1"),
        (["--temperature", 0], "--temperature must be above 0 and at most 100, got 0; for the most likely"),
        (["--top-p", 2], "--top-p must be above 0 and at most 1, got 2"),
        (["--top-k", 0], "--top-k must be at least 1, got 0"),
        (["--coverage-penalty", -1], "--coverage-penalty must be between 0 and 100, got -1"),
        (["--coverage-penalty", 1, "--top-k", 3], "draw; leave it out"),
        (["--prefix", "zebra"], "the prefix 'zebra' has a token that the target vocabulary lacks"),
    ],
)
def test_flags_that_do_not_fit_are_refused(translator, flags, message):
    ended = run("translate", translator, *flags, stdin="ein Haus\n")
    assert ended.code == 2
    assert message in ended.err


def test_prefixes_of_another_number_than_the_lines_are_refused(translator, tmp_path):
    (tmp_path / "starts").write_text("the\n" * 2)
    for lines, message in (("ein Haus\n" * 3, "has 2 lines, and the input has more"), ("ein Haus\n", "input has 1")):
        ended = run("translate", translator, "--prefixes", tmp_path / "starts", stdin=lines)
        assert ended.code == 2
        assert message in ended.err
