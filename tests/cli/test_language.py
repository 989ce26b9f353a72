"""`regard train language`, `generate`, and `evaluate` and `score` of a language model."""

from __future__ import annotations

import json

import pytest
import torch

from regard.lens import Tape
from regard.tasks.language import LanguageModel
from tests.cli.commands import SMALL, TARGET, run, well

pytestmark = pytest.mark.commands


def test_a_text_goes_on_from_its_prompt(writer):
    flags = ["--prompt", "the ", "--tokens", 9, "--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--seed", 3]
    printed = well("generate", writer, *flags, "--samples", 2).out
    drawn = {"tokens": 9, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    found = LanguageModel.load(writer).generate("the ", samples=2, **drawn)
    assert printed == "".join(f"the {text}\n" for text in found)


def test_a_line_is_written_to_its_end(writer):
    assert len(well("generate", writer, "--prompt", "a", "--line", "--tokens", 50).lines) == 1


def test_what_a_text_looked_at_is_drawn_and_kept(writer, tmp_path):
    flags = ["generate", writer, "--prompt", "the", "--tokens", 4, "--temperature", 0]
    drawn = well(*flags, "--attention", tmp_path / "heads.png")
    kept = well(*flags, "--attention", tmp_path / "heads.safetensors")
    assert drawn.out == kept.out == well(*flags).out
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    tape, again = Tape.load(tmp_path / "heads.safetensors"), LanguageModel.load(writer).tape(drawn.out.rstrip("\n"))
    assert list(tape.keys()) == list(again.keys())
    for key in again:
        torch.testing.assert_close(tape[key][...], again[key][...])


def test_an_evaluation_prints_each_number(writer, files):
    ended = well("evaluate", writer, "--text", files / "a.en", "--overlap", 3)
    measured = LanguageModel.load(writer).evaluate(TARGET, overlap=3)
    assert [line.split()[:2] for line in ended.lines] == [[k, f"{v.value:.2f}"] for k, v in measured.items()]
    assert "per word, 24 words including line ends" in ended.lines[0]


def test_scores_are_log_probabilities_a_line(writer, files):
    printed = [float(line) for line in well("score", writer, "--text", files / "a.en").lines]
    assert printed == pytest.approx(LanguageModel.load(writer).score(TARGET), abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["--dim", 30], "got --dim 30 and --heads 4; pass --heads 1, 2, 3, 5, 6, 10, 15 or 30"),
        (["--dim", 32, "--kv-heads", 3], "got --heads 4 and --kv-heads 3; pass --kv-heads 1, 2 or 4"),
        (["--dim", 30, "--model", "llama"], "got --dim 30 and --heads 4; pass --dim 32"),
        (["--dim", 12, "--model", "llama"], "got --dim 12 and --heads 4; pass --dim 16"),
    ],
)
def test_widths_that_heads_cannot_share_are_refused_with_a_flag_to_pass(flags, end, files, tmp_path):
    ended = run("train", "language", "--text", files / "a.en", "--heads", 4, *flags, "--out", tmp_path / "run")
    assert ended.code == 2
    assert ended.err.endswith(f"{end}\n")


def test_a_run_goes_on_by_its_name_alone(files, tmp_path):
    size = ["--length", 8, "--batch-tokens", 16, "--depth", 1, "--heads", 2, "--dim", 16, "--tokenizer", "char"]
    well("train", "language", "--text", files / "a.en", *size, "--steps", 1, "--out", tmp_path / "run")
    ended = well("train", "language", "--out", tmp_path / "run", "--resume", "--steps", 2)
    assert ended.lines == [str(tmp_path / "run" / "step-00000002")]


@pytest.mark.parametrize(("flags", "metric"), [([], "loss"), (["--metric", "bits"], "bits")])
def test_the_best_checkpoint_has_the_lowest_loss_or_bits(flags, metric, files, tmp_path):
    text = ["--text", files / "a.en", "--valid-text", files / "a.en", "--tokenizer", "char"]
    size = ["--length", 8, "--batch-tokens", 16, "--depth", 1, "--heads", 2]
    well("train", "language", *text, *size, *SMALL, *flags, "--out", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (recipe["metric"], recipe["better"]) == (metric, "lower")
