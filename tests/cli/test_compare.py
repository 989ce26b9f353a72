"""`regard compare`: the table of metrics, the examples, the attention, and what it refuses."""

import re

import pytest

from tests.cli.commands import run, well

pytestmark = pytest.mark.commands


@pytest.fixture
def pairs(files):
    return ["--source", files / "a.de", "--target", files / "a.en"]


def test_translators_are_compared_by_metrics_examples_and_attention(translator, recurrent, files, pairs, tmp_path):
    shown = ["--gold", files / "gold", "--examples", 2, "--samples", 100, "--attention", tmp_path / "both.png"]
    out = well("compare", translator, recurrent, *pairs, *shown).out
    assert re.search(
        rf"^A  {re.escape(str(translator))}  [\d,]+ parameters · [\d.]+ kB · [\d,.]+ examples/s$", out, re.MULTILINE
    )
    rows = {line.split("  ")[0]: line for line in out.splitlines() if " to " in line}
    assert list(rows) == ["bleu", "chrf", "loss per character", "alignment error"]
    evaluated = well("evaluate", recurrent, *pairs).out
    [chrf] = re.findall(r"^chrf +(\S+)", evaluated, re.MULTILINE)
    assert float(rows["chrf"].split()[2]) == pytest.approx(float(chrf), abs=0.01)
    assert out.count("is better: chrF of the line") == 2
    assert "8 examples, " in out
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_page_holds_the_attention_of_both_runs(translator, recurrent, pairs, tmp_path):
    page = tmp_path / "both.html"
    well("compare", translator, recurrent, *pairs, "--examples", 1, "--samples", 100, "--attention", page)
    assert page.stat().st_size > 100_000


def test_run_beside_itself_has_no_difference(critic, files):
    out = well("compare", critic, critic, "--labelled", files / "reviews.tsv", "--samples", 100).out
    rows = [line for line in out.splitlines() if " to " in line]
    assert [row.split()[0] for row in rows] == ["accuracy", "loss"]
    assert all(row.endswith("1.000  -") for row in rows)
    assert "is better" not in out


@pytest.mark.parametrize(
    ("name", "data", "metrics"),
    [
        ("summarizer", ("--documents", "news", "--summaries", "headlines"), ["rouge1", "rouge2", "rougeL", "loss"]),
        ("answerer", ("--data", "squad.json"), ["f1", "exact"]),
        ("writer", ("--text", "a.en"), ["bits"]),
        ("captioner", ("--captions", "captions.tsv", "--images", "scenes"), ["bleu4", "chrf"]),
        ("seer", ("--images", "digits.npz"), ["accuracy", "loss"]),
    ],
)
def test_every_task_is_compared(name, data, metrics, files, request):
    folder = request.getfixturevalue(name)
    given = [files / value if not value.startswith("--") else value for value in data]
    out = well("compare", folder, folder, *given, "--samples", 100).out
    assert [line.split()[0] for line in out.splitlines() if " to " in line] == metrics


def test_other_numbers_of_runs_and_other_tasks_are_refused(translator, writer, pairs, tmp_path):
    for arguments, message in (
        ([translator], "regard compare takes two runs, got 1; name two folders"),
        ([translator, writer], "both runs must have one task, got 'translation' and 'language'"),
        ([translator, translator, "--samples", 5], "--samples must be at least 100, got 5"),
        ([translator, translator, "--examples", 0, "--attention", tmp_path / "a.png"], "got --examples 0; print one"),
        ([translator, translator, "--attention", tmp_path / "a.gif"], "--attention must end in .png or .html"),
    ):
        ended = run("compare", *arguments, *pairs)
        assert ended.code == 2
        assert message in ended.err
