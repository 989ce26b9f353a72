"""`--device`: every command that runs or trains a model goes where it is told."""

from __future__ import annotations

import shlex
from string import Formatter

import pytest
import torch

from tests.cli.commands import SMALL, run, well
from tests.cli.test_commands import TRAINED, USED

WITHOUT = {"average", "bench", "check"}  # run no model, or only a few made-up tokens of it
FEW = " ".join(map(str, SMALL))
LINES = {
    "train translation": "train translation --pairs {files}/a.tsv --valid-pairs {files}/a.tsv --heads 2 --out {out}",
    "train language": "train language --text {files}/a.en --length 8 --batch-tokens 16 --heads 2 --out {out}",
    "train summarization": "train summarization --documents {files}/news --summaries {files}/headlines --out {out}",
    "train answering": "train answering --data {files}/squad.json --valid-data {files}/squad.json --out {out}",
    "train classification": "train classification --labelled {files}/reviews.tsv --out {out}",
    "train images": "train classification --images {files}/digits.npz --batch 8 --out {out}",
    "train captioning": "train captioning --captions {files}/captions.tsv --images {files}/scenes --out {out}",
    "demo": "demo --steps 1 --out {out}",
    "translate": "translate {translator}",
    "align": "align {translator} --source {files}/a.de --target {files}/a.en --reverse {recurrent}",
    "generate": "generate {writer} --tokens 3",
    "summarize": "summarize {summarizer}",
    "answer": "answer {answerer} --document {files}/bridge.txt",
    "answer all": "answer {answerer} --data {files}/squad.json",
    "classify": "classify {critic}",
    "caption": "caption {captioner} {files}/scenes/0.png",
    "evaluate": "evaluate {translator} --pairs {files}/a.tsv",
    "evaluate language": "evaluate {writer} --text {files}/a.en",
    "evaluate summarization": "evaluate {summarizer} --documents {files}/news --summaries {files}/headlines",
    "evaluate answering": "evaluate {answerer} --data {files}/squad.json",
    "evaluate classification": "evaluate {critic} --labelled {files}/reviews.tsv",
    "evaluate captioning": "evaluate {captioner} --captions {files}/captions.tsv --images {files}/scenes",
    "score": "score {translator} --pairs {files}/a.tsv",
    "score language": "score {writer} --text {files}/a.en",
    "score summarization": "score {summarizer} --documents {files}/news --summaries {files}/headlines",
    "score captioning": "score {captioner} --captions {files}/captions.tsv --images {files}/scenes",
    "compare": "compare {translator} {recurrent} --pairs {files}/a.tsv --samples 100",
    "look": "look {translator} --text {files}/a.de --out {out}.safetensors",
    "look language": "look {writer} --text {files}/line --out {out}.safetensors",
    "look classification": "look {critic} --text {files}/line --out {out}.safetensors",
    "look captioning": "look {captioner} --image {files}/scenes/0.png --out {out}.safetensors",
    "explain": "explain --shape 1,2,3,4",
}


@pytest.mark.parametrize("command", [*TRAINED, *USED], ids=" ".join)
def test_commands_that_run_a_model_take_a_device(command):
    assert ("--device" in well(*command, "--help").out) == (command[0] not in WITHOUT)
    assert command[0] in WITHOUT | {"view", "serve"} or " ".join(command) in LINES


@pytest.mark.thorough
@pytest.mark.parametrize("name", LINES)
def test_a_command_goes_where_it_is_told_although_there_is_a_gpu(name, files, tmp_path, request, monkeypatch):
    line = LINES[name] + (f" {FEW}" if name.startswith("train") else "")
    (files / "line").write_text("a dog\n")
    for kind in ("TRAINING_DATES", "TRAINING_SCENES", "TEST_EXAMPLES"):
        monkeypatch.setattr(f"regard.cli.demo.{kind}", 20)
    places = {"files": files, "out": tmp_path / "out"}
    runs = {part for _, part, _, _ in Formatter().parse(line) if part and part not in places}
    places |= {part: request.getfixturevalue(part) for part in runs}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    well(*shlex.split(line.format(**places)), "--device", "cpu", stdin="ein Haus\n")


@pytest.mark.parametrize("name", ["train translation", "translate", "evaluate", "demo", "explain"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nothing = dict.fromkeys(("files", "translator"), tmp_path / "none") | {"out": tmp_path / "out"}
    ended = run(*shlex.split(LINES[name].format(**nothing)), "--device", "cuda")
    told = "error: device 'cuda' needs a GPU, and this machine has none; pass 'cpu' (--device cpu)\n"
    assert ended == (2, "", told)
    assert list(tmp_path.iterdir()) == []


def test_a_device_of_another_name_is_refused(translator):
    ended = run("translate", translator, "--device", "gpu")
    assert ended.code == 2
    assert ended.err == "error: Invalid value for '--device': 'gpu' is not one of 'cpu', 'cuda'; see --help\n"
