"""`regard train answering`, `answer`, and `evaluate` of a model that answers."""

from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from regard.data import questions
from regard.lens import Tape
from regard.tasks.answering import Answerer, Asking
from tests.cli.commands import SMALL, TEXTS, run, well

pytestmark = pytest.mark.commands

BRIDGE = TEXTS[1][0]


def test_a_question_about_a_document_has_an_answer_cut_out_of_it(answerer, files):
    asked = ["--document", files / "bridge.txt", "--threshold", -1e9]
    printed = well("answer", answerer, *asked, "--question", "When or what?", "--question", "Who?").lines
    pairs = [Asking(one, BRIDGE) for one in ("When or what?", "Who?")]
    found = Answerer.load(answerer).answer(pairs, threshold=-1e9)
    assert printed == [" ".join(one.text.split()) for one in found]
    assert all(one.text and one.text in BRIDGE for one in found)


def test_no_answer_is_an_empty_line(answerer, files):
    asked = ["--document", files / "bridge.txt", "--threshold", 1e9]
    assert well("answer", answerer, *asked, "--question", "When or what?").out == "\n"


def test_questions_come_line_by_line_as_well(answerer, files):
    document = ["--document", files / "bridge.txt"]
    by_flag = well("answer", answerer, *document, "--question", "Who?", "--question", "What?").out
    assert well("answer", answerer, *document, stdin="Who?\nWhat?\n").out == by_flag
    assert well("answer", answerer, *document).out == ""


def test_several_answers_have_numbers_and_scores(answerer, files):
    asked = ["--document", files / "bridge.txt", "--question", "Who?", "--question", "What?", "--nbest", 3]
    printed = [line.split(" ||| ") for line in well("answer", answerer, *asked).lines]
    assert [row[0] for row in printed] == ["0"] * 3 + ["1"] * 3
    best = Answerer.load(answerer).n_best([Asking("Who?", BRIDGE)], n=3)[0]
    assert [row[1:] for row in printed[:3]] == [[" ".join(one.text.split()), f"{one.score:.4f}"] for one in best]


def test_a_file_of_questions_has_its_answers_by_id(answerer, files, tmp_path):
    data = ["--data", files / "squad.json", "--threshold", -1e9]
    printed = well("answer", answerer, *data).out
    well("answer", answerer, *data, "--out", tmp_path / "predictions.json")
    assert (tmp_path / "predictions.json").read_text() == printed
    asked = questions(files / "squad.json")
    found = Answerer.load(answerer).answer(asked, threshold=-1e9)
    assert json.loads(printed) == {one.id: answer.text for one, answer in zip(asked, found, strict=True)}
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.json"]


def test_where_questions_looked_is_a_picture_or_a_tape(answerer, files, tmp_path):
    asked = ["--document", files / "bridge.txt", "--question", "Who is it?"]
    well("answer", answerer, *asked, "--attention", tmp_path / "a.png")
    assert imread(tmp_path / "a.png").ndim == 3
    well("answer", answerer, *asked, "--question", "What?", "--attention", tmp_path / "a.safetensors")
    expected = Answerer.load(answerer).tape([Asking(one, BRIDGE) for one in ("Who is it?", "What?")])
    tape = Tape.load(tmp_path / "a.safetensors")
    assert tape.layers == expected.layers
    assert tape["both.to_document"][...].equal(expected["both.to_document"][...])
    well("answer", answerer, "--data", files / "squad.json", "--attention", tmp_path / "b.safetensors")
    assert len(Tape.load(tmp_path / "b.safetensors")["itself"].shape) == 4
    ended = run("answer", answerer, "--data", files / "squad.json", "--attention", tmp_path / "b.png")
    assert "error: --attention b.png is a picture of one example, got more; give one example, or write" in ended.err


def test_an_empty_document_has_no_picture(answerer, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    asked = ["--document", tmp_path / "empty.txt", "--question", "Who?", "--attention", tmp_path / "a.png"]
    assert run("answer", answerer, *asked).err == "error: the document is empty\n"


def test_questions_that_are_cut_are_counted(answerer, files):
    long = "What " * 10
    asked = ["--document", files / "bridge.txt", "--question", long, "--question", "Who?"]
    long = "1 of 2 questions have more than 9 tokens; only the first 9 were read\n"
    assert well("answer", answerer, *asked).err == long


def test_an_evaluation_prints_each_number_with_what_it_counts(answerer, files):
    ended = well("evaluate", answerer, "--data", files / "squad.json", "--threshold", 0.5)
    measured = Answerer.load(answerer).evaluate(questions(files / "squad.json"), threshold=0.5)
    assert [line.split()[:2] for line in ended.lines] == [[k, f"{v.value:.2f}"] for k, v in measured.items()]
    assert "SQuAD, 4 questions" in ended.lines[0]


def test_flags_reach_the_model_and_the_windows(files, tmp_path):
    flags = [
        *("--model", "bert", "--dim", 16, "--hidden", 24, "--depth", 2, "--heads", 2, "--dropout", 0.3),
        *("--tokenizer", "char", "--window", 12, "--overlap", 3, "--question-limit", 5, "--answer-limit", 4),
        *("--long", "truncate", "--batch-tokens", 64, "--steps", 1, "--seed", 3),
    ]
    ended = well("train", "answering", "--data", files / "squad.json", *flags, "--out", tmp_path / "run")
    assert ended.lines == [str(tmp_path / "run" / "step-00000001")]
    assert "4 of 4 questions have more than 5 tokens and were truncated" in ended.err
    config = json.loads((tmp_path / "run" / "step-00000001" / "config.json").read_text())
    expected = {"kind": "BertConfig", "dim": 16, "hidden": 24, "depth": 2, "heads": 2, "dropout": 0.3}
    assert expected.items() <= config["model"].items()
    windows = {"kind": "Windows", "size": 12, "overlap": 3, "question": 5, "long": "truncate", "answer": 4}
    assert config["windows"] == windows
    assert config["impossible"] is True


def test_a_run_goes_on_by_its_name_alone(files, tmp_path):
    flags = ["--data", files / "squad.json", "--heads", 2, *SMALL, "--dim", 8, "--no-spelling"]
    well("train", "answering", *flags, "--steps", 1, "--out", tmp_path / "run")
    ended = well("train", "answering", "--out", tmp_path / "run", "--resume", "--steps", 2)
    assert ended.lines == [str(tmp_path / "run" / "step-00000002")]
    ended = run("train", "answering", "--out", tmp_path / "run", "--resume", "--window", 9)
    assert "error: a resumed run cannot change its windows: size was 384, got 9; give --out a new folder" in ended.err
