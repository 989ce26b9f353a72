"""`regard train translation`, `translate`, `align`, and `evaluate` and `score` of a translator."""

from __future__ import annotations

import json

import pytest

from regard.data import Pair
from regard.lens import Links, Tape, alignment_score
from regard.models import Seq2Seq, Transformer
from regard.tasks import word_alignment
from regard.tasks.pairs import Draft
from regard.tasks.translation import Translator
from tests.cli.commands import SMALL, SOURCE, TARGET, run, well

pytestmark = pytest.mark.commands

LINES = "".join(f"{line}\n" for line in SOURCE)


def test_a_run_holds_all_it_takes_to_use_it(translator):
    names = {path.name for path in (translator / "best").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "manifest.sha256", "plan.json"} <= names
    assert {path.name for path in translator.iterdir()} >= {"recipe.json", "log.csv", "evaluations.csv", "best"}


def test_blank_lines_stay_blank_and_in_their_place(translator, tmp_path):
    links, lines = tmp_path / "links", "\nein Haus\n  \r\n"
    printed = well("translate", translator, "--beam", 2, "--alignments", links, stdin=lines).lines
    [found] = Translator.load(translator).translate(["ein Haus"], beam=2)
    assert printed == ["", found.text, ""]
    assert [bool(line) for line in links.read_text().split("\n")] == [False, bool(found.text), False, False]


def test_several_runs_decode_as_one(translator, recurrent):
    printed = well("translate", translator, recurrent, stdin=LINES).lines
    found = Translator.load(translator, recurrent).translate(SOURCE)
    assert printed == [" ".join(one.text.splitlines()) for one in found]


@pytest.mark.parametrize("kind", ["translator", "recurrent"])
def test_alignments_and_attention_are_of_what_was_printed(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    links, attention = tmp_path / "links", tmp_path / "attention.safetensors"
    printed = well("translate", folder, "--alignments", links, "--attention", attention, stdin=LINES).lines
    loaded = Translator.load(folder)
    pairs = [Draft(line, one.text, one.tokens) for line, one in zip(SOURCE, loaded.translate(SOURCE), strict=True)]
    assert printed == [pair.target for pair in pairs]
    assert links.read_text().splitlines() == [str(one) for one in loaded.align(pairs)]
    tape, expected = Tape.load(attention), loaded.tape(pairs)
    assert tape.layers == expected.layers
    for key in expected:
        assert tape[key][...].equal(expected[key][...])
        assert tape.tokens_of(key, batch=1) == expected.tokens_of(key, batch=1)
    assert {path.name for path in tmp_path.iterdir()} == {"links", "attention.safetensors"}


@pytest.mark.parametrize(("kind", "model"), [("translator", Transformer), ("recurrent", Seq2Seq)])
def test_unknown_words_are_aligned_and_shown_as_they_were_written(kind, model, request, tmp_path, monkeypatch):
    step = model.step

    def unsure(self, tokens, state):
        logits, state = step(self, tokens, state)
        logits[..., 1] += 50
        return logits, state

    monkeypatch.setattr(model, "step", unsure)
    links, attention = tmp_path / "links", tmp_path / "attention.safetensors"
    flags = ["--alignments", links, "--attention", attention, "--max-length", 3, "--beam", 1]
    ended = well("translate", request.getfixturevalue(kind), *flags, stdin="ein Haus\n")
    assert ended.out == "<unk> <unk> <unk>\n"
    assert sorted(link.split("-")[1] for link in links.read_text().split()) == ["0", "1", "2"]
    tape = Tape.load(attention)
    name = word_alignment.layer_of(Translator.load(request.getfixturevalue(kind)).models[0])
    [key, *_] = [key for key in tape if key == name or key[0] == name]
    assert tape.tokens_of(key)[0] == ["<unk>", "<unk>", "<unk>", "<eos>"]


def test_a_translation_is_as_long_as_it_may_be(translator):
    for most in (1, 30):
        printed = well("translate", translator, "--max-length", most, stdin=LINES).lines
        found = Translator.load(translator).translate(SOURCE, max_length=most)
        assert printed == [" ".join(one.text.splitlines()) for one in found]
        assert all(one.finished or len(one.text.split()) == most for one in found)


def test_an_evaluation_prints_each_number_with_its_signature(translator, files):
    data = ["--source", files / "a.de", "--target", files / "a.en"]
    ended = well("evaluate", translator, *data, "--beam", 2, "--max-length", 1, "--tokenize", "char")
    pairs = [Pair(*both) for both in zip(SOURCE, TARGET, strict=True)]
    measured = Translator.load(translator).evaluate(pairs, beam=2, max_length=1, tokenize="char")
    assert [line.split()[:2] for line in ended.lines] == [[k, f"{v.value:.2f}"] for k, v in measured.items()]
    assert "tok:char|smooth:exp" in ended.lines[0]


def test_scores_are_log_probabilities_a_line(translator, files):
    printed = [float(line) for line in well("score", translator, "--pairs", files / "a.tsv").lines]
    pairs = [Pair(*both) for both in zip(SOURCE, TARGET, strict=True)]
    assert printed == pytest.approx(Translator.load(translator).score(pairs), abs=1e-4)


def test_links_are_printed_and_judged_by_gold_ones(recurrent, files):
    data = ["--source", files / "a.de", "--target", files / "a.en", "--gold", files / "gold"]
    ended = well("align", recurrent, *data)
    links = [Links.parse(line) for line in ended.lines]
    gold = [Links.parse(line) for line in (files / "gold").read_text().splitlines()]
    score = alignment_score(links, gold)
    assert len(links) == 8
    assert ended.err.strip() == (
        f"alignment error rate {score.error:.4f} · precision {score.precision:.4f} · recall {score.recall:.4f}"
    )


def test_links_of_both_directions_are_those_they_share(translator, recurrent, files):
    data = ["--source", files / "a.de", "--target", files / "a.en"]
    printed = well("align", translator, *data, "--reverse", recurrent, "--layer", 0, "--when", "read").lines
    pairs = [Pair(*both) for both in zip(SOURCE, TARGET, strict=True)]
    found = Translator.load(translator).align(pairs, layer=0, when="read", reverse=Translator.load(recurrent))
    assert printed == [str(one) for one in found]


def test_links_may_be_those_of_one_head(translator, files, tmp_path):
    data = ["--source", files / "a.de", "--target", files / "a.en"]
    pairs = [Pair(*both) for both in zip(SOURCE, TARGET, strict=True)]
    loaded = Translator.load(translator)
    for head in (0, 1):
        printed = well("align", translator, *data, "--head", head).lines
        assert printed == [str(one) for one in loaded.align(pairs, head=head)]
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    well("translate", translator, "--head", 0, "--attention", one, stdin="ein Haus\n")
    well("translate", translator, "--head", 1, "--attention", other, stdin="ein Haus\n")
    assert one.read_bytes() != other.read_bytes()
    ended = run("translate", translator, "--head", 9, "--alignments", tmp_path / "links", stdin="ein Haus\n")
    assert (ended.code, ended.err) == (2, "error: head must be between 0 and 1, got 9\n")


def test_flags_reach_the_model_and_the_recipe(files, tmp_path):
    flags = [
        *("--model", "luong-general", "--dim", 8, "--hidden", 12, "--depth", 2, "--cell", "lstm", "--dropout", 0.2),
        *("--smoothing", 0.05, "--tied", "none", "--no-joint", "--tokenizer", "char"),
        *("--epochs", 1, "--rate", 0.01, "--schedule", "constant", "--warmup", 3, "--clip", 0.5, "--accumulate", 2),
        *("--forcing", "exponential", "--forcing-k", 0.5, "--weight-decay", 0.1, "--seed", 7, "--precision", "float32"),
        *("--batch-tokens", 64, "--limit", 10, "--long", "truncate", "--keep", 3, "--save-every", 1, "--average", 2),
    ]
    ended = well("train", "translation", "--pairs", files / "a.tsv", *flags, "--out", tmp_path / "run")
    assert ended.lines == [str(tmp_path / "run" / "averaged")]
    config = json.loads((tmp_path / "run" / "averaged" / "config.json").read_text())["model"]
    expected = {"dim": 8, "hidden": 12, "layers": 2, "cell": "lstm", "attention": "general", "tied": "none"}
    assert expected.items() <= config.items()
    assert (config["dropout"], config["smoothing"]) == (0.2, 0.05)
    assert (tmp_path / "run" / "averaged" / "tokenizer.source.json").exists()
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["rate"] == {"kind": "Constant", "peak": 0.01, "warmup": 3}
    assert recipe["forcing"] == {"kind": "Exponential", "k": 0.5}
    simple = {"epochs": 1, "clip": 0.5, "accumulate": 2, "weight_decay": 0.1, "seed": 7, "precision": "float32"}
    assert simple.items() <= recipe.items()
    assert recipe["steps"] is None
    assert "truncated" in ended.err
    assert len(well("translate", tmp_path / "run" / "averaged", stdin="ein Haus\n").lines) == 1


def test_data_alone_is_enough_to_begin(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--out", tmp_path / "run"]
    ended = well("train", "translation", *flags, "--steps", 1)
    assert ended.lines == [str(tmp_path / "run" / "step-00000001")]
    config = json.loads((tmp_path / "run" / "step-00000001" / "config.json").read_text())
    assert config["model"]["kind"] == "TransformerConfig"
    assert config["model"]["tied"] == "all"


def test_a_run_goes_on_by_its_name_alone(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", *SMALL]
    whole = well("train", "translation", *flags, "--out", tmp_path / "whole").lines[0]
    well("train", "translation", *flags, "--steps", 2, "--out", tmp_path / "parts")
    parts = well("train", "translation", "--out", tmp_path / "parts", "--resume", "--steps", 4)
    assert "resuming from" in parts.err
    weights = [(tmp_path / run / "step-00000004" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert whole.endswith("step-00000004")
