"""`regard train summarization`, `summarize`, and `evaluate` and `score` of a summarizer."""

from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from regard.data import Pair
from regard.lens import Tape
from regard.tasks.summarization import Summarizer
from tests.cli.commands import HEADLINES, NEWS, SMALL, well

pytestmark = pytest.mark.commands

LINES = "".join(f"{line}\n" for line in NEWS)
PAIRS = [Pair(*both) for both in zip(NEWS, HEADLINES, strict=True)]


def test_every_document_has_a_summary_in_its_place(summarizer):
    printed = well("summarize", summarizer, "--beam", 2, "--no-repeat", 2, "--min-length", 3, stdin=LINES).lines
    found = Summarizer.load(summarizer).summarize(NEWS, beam=2, no_repeat=2, min_length=3)
    assert printed == [" ".join(one.text.splitlines()) for one in found]


def test_a_summary_is_as_long_as_it_may_be(summarizer):
    ended = well("summarize", summarizer, "--min-length", 2, "--max-length", 2, stdin=LINES)
    assert ended.lines == [one.text for one in Summarizer.load(summarizer).summarize(NEWS, min_length=2, max_length=2)]
    assert f"{len(NEWS)} of {len(NEWS)} summaries reached the maximum of 2 tokens before they ended" in ended.err


def test_no_input_is_no_output(summarizer):
    assert well("summarize", summarizer).out == ""


def test_n_best_lists_have_numbers_and_scores(summarizer):
    printed = [line.split(" ||| ") for line in well("summarize", summarizer, "--nbest", 2, stdin=LINES).lines]
    assert [row[0] for row in printed] == [str(n) for n in range(len(NEWS)) for _ in range(2)]
    [best] = Summarizer.load(summarizer).n_best(NEWS[:1], n=2, beam=4)
    assert [row[1:] for row in printed[:2]] == [[" ".join(one.text.splitlines()), f"{one.score:.4f}"] for one in best]


def test_several_runs_decode_as_one(summarizer):
    assert well("summarize", summarizer, summarizer, stdin=LINES).out == well("summarize", summarizer, stdin=LINES).out


def test_what_was_looked_at_is_a_picture_or_a_tape(summarizer, tmp_path):
    well("summarize", summarizer, "--attention", tmp_path / "a.png", stdin=f"{NEWS[0]}\n")
    assert imread(tmp_path / "a.png").ndim == 3
    printed = well("summarize", summarizer, "--attention", tmp_path / "a.safetensors", stdin=LINES).lines
    pairs = [Pair(*both) for both in zip(NEWS, printed, strict=True)]
    tape, expected = Tape.load(tmp_path / "a.safetensors"), Summarizer.load(summarizer).tape(pairs)
    [name] = expected.layers
    assert tape[name][...].equal(expected[name][...])
    assert tape.tokens_of(name, batch=1) == expected.tokens_of(name, batch=1)
    assert "Bela" in "".join(tape.tokens_of(name, batch=1)[1])


def test_a_model_that_knows_where_it_looked_has_a_picture_too(files, tmp_path):
    data = ["--documents", files / "news", "--summaries", files / "headlines", "--coverage", 1]
    well("train", "summarization", *data, *SMALL, "--steps", 1, "--out", tmp_path / "run")
    well("summarize", tmp_path / "run", "--attention", tmp_path / "a.png", stdin=f"{NEWS[0]}\n")
    assert imread(tmp_path / "a.png").ndim == 3


def test_what_is_not_read_is_counted(summarizer):
    told = "1 of 2 documents have more than 8 tokens; only the first 8 were read"
    assert told in well("summarize", summarizer, stdin=f"{'The fox ' * 9}\nThe fox\n").err
    assert "documents have more than" not in well("summarize", summarizer, stdin="The fox\n").err


def test_what_is_not_read_of_documents_to_train_and_to_validate_by_is_counted_once(files, tmp_path):
    (tmp_path / "long.tsv").write_text(f"{'The fox ' * 9}\tfox\nThe fox\tfox\n")
    data = ["--pairs", tmp_path / "long.tsv", "--valid-pairs", tmp_path / "long.tsv", "--batch-tokens", 64]
    ended = well("train", "summarization", *data, *SMALL, "--limit", 8, "--out", tmp_path / "run")
    assert ended.err.count("1 of 2 examples have more than 8 tokens and were truncated") == 1
    told = "1 of 2 validation documents have more than 8 tokens; only the first 8 are read"
    assert ended.err.count(told) == 1
    ended = well("train", "summarization", *data, *SMALL, "--limit", 19, "--out", tmp_path / "whole")
    assert "more than" not in ended.err


def test_an_evaluation_prints_each_number_with_its_signature(summarizer, files):
    data = ["--documents", files / "news", "--summaries", files / "headlines"]
    flags = ["--beam", 2, "--max-length", 1, "--no-repeat", 3, "--rouge", "unicode"]
    ended = well("evaluate", summarizer, *data, *flags)
    measured = Summarizer.load(summarizer).evaluate(PAIRS, beam=2, max_length=1, no_repeat=3, words="unicode")
    assert [line.split()[:2] for line in ended.lines] == [[k, f"{v.value:.2f}"] for k, v in measured.items()]
    assert "F1|unicode+marks|nfc|rouge-score:" in ended.lines[0]
    assert f"{len(NEWS)} of {len(NEWS)} documents have more than 8 tokens" in ended.err


def test_scores_are_log_probabilities_a_document(summarizer, files):
    data = ["--jsonl", files / "news.jsonl", "--document-field", "body", "--summary-field", "head"]
    printed = [float(line) for line in well("score", summarizer, *data).lines]
    assert printed == pytest.approx(Summarizer.load(summarizer).score(PAIRS), abs=1e-4)


def test_flags_reach_the_model_and_the_batches(files, tmp_path):
    flags = [
        *("--model", "transformer", "--dim", 16, "--hidden", 24, "--depth", 1, "--heads", 2, "--dropout", 0.2),
        *("--encoder-mask", "Window(3) | Dilated(2, 3)", "--segment", 6, "--memory", 2, "--smoothing", 0.05),
        *("--tokenizer", "bpe", "--vocabulary", 300, "--limit", 30, "--long", "drop", "--batch-tokens", 64),
    ]
    data = ["--jsonl", files / "news.jsonl", "--document-field", "body", "--summary-field", "head"]
    well("train", "summarization", *data, *flags, "--steps", 1, "--out", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "step-00000001" / "config.json").read_text())
    expected = {"kind": "TransformerConfig", "dim": 16, "hidden": 24, "encoder_layers": 1, "heads": 2, "dropout": 0.2}
    expected |= {"encoder_mask": "Window(3) | Dilated(2, 3)", "segment": 6, "memory": 2, "smoothing": 0.05}
    assert expected.items() <= config["model"].items()
    assert config["limit"] is None
    assert len(well("summarize", tmp_path / "run", stdin="The fox\n").lines) == 1


def test_documents_alone_are_enough_to_begin_and_a_run_goes_on_by_its_name_alone(files, tmp_path):
    data = ["--documents", files / "news", "--summaries", files / "headlines", "--coverage", 1]
    well("train", "summarization", *data, *SMALL, "--steps", 1, "--out", tmp_path / "run")
    ended = well("train", "summarization", "--out", tmp_path / "run", "--resume", "--steps", 2)
    assert ended.lines == [str(tmp_path / "run" / "step-00000002")]
    config = json.loads((tmp_path / "run" / "step-00000002" / "config.json").read_text())
    assert (config["model"]["kind"], config["model"]["coverage"], config["limit"]) == ("PointerConfig", 1.0, 400)
