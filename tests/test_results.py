"""Results: recipes whose commands exist, a runner that measures what it trains, and the table of it."""

from __future__ import annotations

import gzip
import itertools
import json
import signal
import struct
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn
from typer.main import get_command

from regard.cli.commands import app
from regard.data import Tokenizer
from regard.models import pretrained
from regard.train import Stopped, checkpoint
from results import heads, pretraining, recall, recalled, script, table
from results.data import prepare
from results.ledger import Ledger, Row
from results.lengths import by_length
from results.recipe import Measure, Recipe, Step, recipes, with_flags
from results.runner import Runner, found, in_order
from results.validation import validated
from tests.cli.commands import SOURCE, TARGET

RECIPES = recipes()
TINY = Recipe(
    name="tiny",
    task="a task",
    data="a few lines",
    folders=("pairs",),
    train="train translation --source {data}/pairs/a.de --target {data}/pairs/a.en",
    smoke="--dim 16 --heads 2 --tokenizer word --steps 2 --save-every 1 --log-every 1",
    then=(Step(command="translate {run} --beam 1", input="{data}/pairs/a.de", output="{run}/out.en"),),
    measure=(
        Measure(
            command="evaluate {run} --source {data}/pairs/a.de --target {data}/pairs/a.en --beam 1",
            metric="bleu",
            name="BLEU",
            bar=101,
            published="a lot",
        ),
    ),
)
# A training that makes a step and goes on until it is asked to stop, as `regard train` does.
PATIENT = """
import pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
run.mkdir()
(run / "log.csv").write_text("step,loss,tokens_per_second\\n1,2.5,1234.5\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(run / "ready").touch()
time.sleep(60)
"""


def options_of(words):
    """The names of the options that the command of these words takes."""
    command = get_command(app)
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def commands_of(recipe):
    train = [] if recipe.train is None else [f"{with_flags(recipe.train, recipe.smoke)} --seed 0 --out {{run}}"]
    return [*train, *(step.command for step in (*recipe.then, *recipe.measure))]


@pytest.mark.recipes
@pytest.mark.parametrize("name", RECIPES)
def test_the_options_of_every_recipe_exist(name):
    places = {"run": "r", "runs": "rs", "data": "d", "texts": "t"}
    for text in commands_of(RECIPES[name]):
        words = Step(command=text).arguments(places)[2:]
        if words[0] == "regard":
            asked = {word for word in words if word.startswith("--")}
            assert asked <= options_of(words[1:]), text


@pytest.mark.parametrize("name", RECIPES)
def test_no_flag_of_training_comes_twice(name):
    for text in commands_of(RECIPES[name])[:1]:
        given = [word.replace("--no-", "--") for word in text.split() if word.startswith("--")]
        assert sorted(given) == sorted(set(given)), text


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_needs_is_there(name):
    recipe = RECIPES[name]
    assert set(recipe.needs) <= RECIPES.keys()
    for text in commands_of(recipe):
        for word in text.split():
            if word.startswith("{runs}/"):
                other, _, seed = word.split("/")[1].rpartition("-")
                assert other in recipe.needs
                assert int(seed) in RECIPES[other].seeds


def test_a_key_that_no_recipe_has_is_named(tmp_path):
    (tmp_path / "a.toml").write_text('task = "a"\nepochs = 3\n')
    with pytest.raises(ValueError, match=r"a\.toml: unknown key 'epochs'"):
        Recipe.load(tmp_path / "a.toml")


def test_recipes_come_behind_what_they_need():
    last, first = replace(TINY, name="last", needs=("first",)), replace(TINY, name="first")
    ordered = in_order([(last, 0), (first, 0), (first, 1)])
    assert [(recipe.name, seed) for recipe, seed in ordered] == [("first", 0), ("first", 1), ("last", 0)]


def test_the_last_number_of_a_metric_is_found():
    assert found("bleu", "bleu 1.5\nsaid: bleu 3\nbleu        41.20  nrefs:1") == 41.2
    assert found("perplexity", "perplexity  1.0e+304  a word") == 1e304
    assert found("alignment error rate", "alignment error rate 0.4512 · precision 0.5") == 0.4512
    with pytest.raises(ValueError, match=r"expected a line .chrf. and a number, got .bleu 1\.5."):
        found("chrf", "bleu 1.5")


@pytest.fixture
def pairs(tmp_path):
    """The data set of TINY, packed."""
    folder = tmp_path / "data" / "pairs"
    folder.mkdir(parents=True)
    for name, lines in (("a.de", SOURCE), ("a.en", TARGET)):
        (folder / f"{name}.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return tmp_path / "data"


@pytest.mark.recipes
def test_a_recipe_is_trained_measured_and_kept(pairs, tmp_path, capsys):
    prepare(pairs, tmp_path / "work" / "data", TINY.folders)
    ledger = Ledger(tmp_path / "results.csv")
    assert Runner(tmp_path / "work", ledger, smoke=True, commit="abc").run([(TINY, 7)]) == []
    [row] = ledger.rows()
    assert (row.recipe, row.seed, row.metric, row.bar, row.steps) == ("tiny", 7, "BLEU", ">= 101", 2)
    assert (row.commit, row.note) == ("abc", "")
    assert 0 <= row.value <= 100
    assert row.speed.endswith("tokens/s")
    assert row.command.startswith("regard train translation --source {data}/pairs/a.de")
    assert "--seed 7 --out {run} && regard evaluate {run}" in row.command
    assert len((tmp_path / "work" / "runs" / "tiny-7" / "out.en").read_text().splitlines()) == len(SOURCE)
    assert "tiny-7: BLEU" in capsys.readouterr().out


def scripted(monkeypatch, scripts):
    """Let commands be scripts by their first word, which are told the folder of the run."""

    def arguments(step, places):
        return [sys.executable, "-c", scripts[step.command.split()[0]], str(places["run"])]

    monkeypatch.setattr(Step, "arguments", arguments)


def test_at_the_deadline_trainings_are_stopped_and_measured_and_others_left_out(tmp_path, monkeypatch, capsys):
    scripted(monkeypatch, {"train": PATIENT, "evaluate": "print('bleu 12.5')"})
    recipe = replace(TINY, then=(), smoke="")
    ledger = Ledger(tmp_path / "results.csv")
    runner = Runner(tmp_path, ledger, jobs=1, deadline=1.5)
    assert runner.run([(recipe, 0), (recipe, 1)]) == ["tiny-1"]
    [row] = ledger.rows()
    assert (row.value, row.note, row.steps, row.speed) == (12.5, "stopped by the deadline", 1, "1,234 tokens/s")
    assert "tiny-1: left out: the deadline has passed" in capsys.readouterr().out


def test_what_fails_says_why_and_takes_along_what_needs_it(tmp_path, monkeypatch, capsys):
    scripted(monkeypatch, {"train": "import sys; sys.exit('error: no such file')", "evaluate": "print('bleu 1')"})
    other = replace(TINY, name="other", train=None, then=(), needs=("tiny",))
    ledger = Ledger(tmp_path / "results.csv")
    assert Runner(tmp_path, ledger).run([(TINY, 0), (other, 0)]) == ["tiny-0", "other-0"]
    assert ledger.rows() == []
    said = capsys.readouterr().out
    assert "tiny-0: failed: error: no such file" in said
    assert "other-0: left out: what it needs has failed" in said


ROW = Row(
    recipe="tiny",
    seed=0,
    metric="BLEU",
    value=40.0,
    bar=">= 41",
    published="",
    steps=2000,
    seconds=61.2,
    speed="9 tokens/s",
    note="",
    command='regard train "a, b"',
    machine="m",
    versions="v",
    commit="c",
)


def test_what_a_recipe_needs_is_named_where_it_has_not_run(tmp_path, capsys):
    late = replace(TINY, name="late", needs=("early",))
    assert Runner(tmp_path, Ledger(tmp_path / "rows.csv")).run([(late, 0)]) == ["late-0"]
    assert "late-0: left out: it needs early, which has not run here; run early late" in capsys.readouterr().out
    assert not list((tmp_path / "runs").iterdir())


def test_rows_come_back_as_they_were_written(tmp_path):
    ledger = Ledger(tmp_path / "a.csv")
    rows = [ROW, replace(ROW, seed=1, value=0.1234)]
    for row in rows:
        ledger.add(row)
    assert ledger.rows() == rows


def test_the_table_has_means_spreads_and_whether_bars_are_reached(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    rows = [replace(ROW, value=1.0), ROW, replace(ROW, seed=1, value=42.0, note="stopped")]
    measure = replace(TINY.measure[0], bar=41)
    table.write({"tiny": replace(TINY, measure=(measure,))}, rows, page)
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n\n## A task\n\n| model |")
    assert text.endswith(f"{table.END}\nafter\n")
    assert "| 41.00 ± 1.41 (2 seeds) | 41 reached | a lot | 2,000 steps, 61 s, 9 tokens/s; stopped |" in text
    assert "old" not in text
    table.write({"tiny": replace(TINY, measure=(replace(measure, better="lower", bar=40.5),))}, rows, page)
    assert "40.5 **missed**" in page.read_text()


def test_tables_are_those_of_chapters_and_say_whose_a_row_is_once(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\nafter\n")
    both = (TINY.measure[0], replace(TINY.measure[0], name="BLEU, averaged"))
    recipes = {
        name: replace(TINY, name=name, task=task, measure=both)
        for name, task in (("a", "captioning, one that looks"), ("b", "translation, a small one"))
    }
    rows = [replace(ROW, recipe=name, metric=measure.name) for name in "ba" for measure in both]
    table.write(recipes, rows, page)
    lines = [line for line in page.read_text().splitlines() if line.startswith(("#", "| "))]
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert [line.split(" | ")[0] for line in first] == ["## Translation", "| model", "| a small one", "| "]
    assert [line.split(" | ")[0] for line in second] == ["## Captioning", "| model", "| one that looks", "| "]


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("no marks")
    with pytest.raises(ValueError, match=r"a\.md must hold the lines <!-- results: begin -->"):
        table.write({}, [], tmp_path / "a.md")


def packed(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(content))


def test_data_is_unpacked_as_commands_take_it(tmp_path):
    source, to = tmp_path / "from", tmp_path / "to"
    packed(source / "tinyshakespeare", "input.txt.gz", b"0123456789" * 10)
    idx = b"\0\0\x08\x03" + struct.pack(">3I", 5, 2, 3) + bytes(range(30))
    packed(source / "fashion-mnist", "train-images-idx3-ubyte.gz", idx)
    packed(source / "flickr8k", "captions.tsv.gz", b"train\ta.jpg\tone\ndev\tb.jpg\ttwo\n")
    packed(source / "europarl", "train.de.gz", b"Ja, E-Mail!\n")
    packed(source / "multi30k", "train.de.gz", b"Ein Hund.\nZwei Hunde.\nDrei.\n")
    tree = {"data": [{"paragraphs": [1, 2, 3]}] * 3}
    packed(source / "squad", "dev-v1.1.json.gz", json.dumps(tree).encode())
    folders = ("tinyshakespeare", "fashion-mnist", "flickr8k", "europarl", "multi30k", "squad")
    prepare(source, to / "all", folders)
    prepare(source, to / "few", folders, few=2)
    assert [(to / "all" / "tinyshakespeare" / name).stat().st_size for name in ("train.txt", "valid.txt")] == [90, 10]
    assert (to / "all" / "fashion-mnist" / "train-images-idx3-ubyte").read_bytes() == idx
    few = (to / "few" / "fashion-mnist" / "train-images-idx3-ubyte").read_bytes()
    assert few == b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 3) + bytes(range(12))
    assert (to / "all" / "flickr8k" / "dev.tsv").read_text() == "dev/b.jpg\ttwo\n"
    assert (to / "all" / "europarl" / "tokenized.de").read_text() == "ja , e-mail !\n"
    assert (to / "all" / "europarl" / "train.de").read_text() == "Ja, E-Mail!\n"
    assert (to / "few" / "multi30k" / "first.de").read_text() == "Ein Hund.\nZwei Hunde.\n"
    assert json.loads((to / "few" / "squad" / "dev-v1.1.json").read_text())["data"] == [{"paragraphs": [1, 2]}] * 2


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .* is no folder; expected the data set 'squad'"):
        prepare(tmp_path, tmp_path / "to", ["squad"])


def test_the_best_validation_counts_where_lower_is_better_and_else_the_last(tmp_path):
    (tmp_path / "evaluations.csv").write_text("step,loss,accuracy\n1,3.0,90\n2,2.0,80\n3,2.5,85\n")
    assert (validated(tmp_path, "loss"), validated(tmp_path, "accuracy")) == (2.0, 85.0)


def test_most_batches_of_the_pretraining_are_short_with_as_many_tokens():
    tokenizer = Tokenizer.words([" ".join(SOURCE)], specials=(pretraining.MASK,))
    rows = pretraining.Rows([" ".join(SOURCE * 2000)], tokenizer, rows=2)
    [long], [short] = {x.shape for x in rows.long}, {x.shape for x in rows.short}
    assert (long, short) == ((2, 2, 180), (5, 2, 62))
    assert abs(len(rows.short) - len(rows.long)) <= 0.2 * len(rows.long)  # so that a ninth of the long ones is a tenth
    assert [rows.masked(pairs)["ids"].shape[1] for pairs in (rows.long[0], rows.short[0])] == [363, 127]
    with pytest.raises(ValueError, match="too few for 9000 rows; give more text"):
        pretraining.Rows(SOURCE, tokenizer, rows=9000)


@pytest.mark.recipes
@pytest.mark.parametrize(("stop", "code"), [(None, 0), (2, 143)])
def test_pretraining_leaves_its_best_weights_also_where_it_is_stopped(stop, code, tmp_path, monkeypatch):
    losses = itertools.count()

    def evaluate(model):
        if (loss := next(losses)) == stop:
            signal.raise_signal(signal.SIGTERM)
        return {"loss": loss}

    def train(given, model, batches, _, *, rate, evaluate_every):
        script.train(given, model, batches, evaluate, rate=rate, evaluate_every=1)

    text, run, smoke = tmp_path / "a.txt", tmp_path / "run", RECIPES["bert-pretraining"].smoke
    text.write_text("".join(f"{line}\n" for line in SOURCE * 20))
    flags = f"--text {text} --valid-text {text} --out {run} {smoke} --steps 4"
    monkeypatch.setattr(sys, "argv", ["pretraining", *flags.split()])
    monkeypatch.setattr(pretraining, "train", train)
    ended = 0
    try:
        pretraining.main()
    except Stopped as stopped:
        ended = stopped.code
    assert ended == code
    best, held = run / "step-00000001", pretrained.load(run / "huggingface")
    for name, x in checkpoint.read_tensors(best).items():
        assert torch.equal(x, held.get_parameter(name)), name
    assert len(Tokenizer.load(run / "huggingface" / "tokenizer.json")) == held.bert.config.vocabulary


def test_bleu_is_counted_apart_for_short_and_long_sources():
    sources = ["a b c d"] * 2 + ["a b c d e f g h i j"] * 2
    found = by_length(sources, sources, [*sources[:2], "z", "z"])
    assert found == [(4.0, pytest.approx(100.0)), (10.0, 0.0)]


@pytest.mark.recipes
def test_a_model_of_recall_is_trained_and_where_it_looks_is_drawn(tmp_path, monkeypatch, capsys):
    run, picture = str(tmp_path / "run"), tmp_path / "looked.png"
    shared = ["--attention", "global", "--window", "4", "--length", "64"]
    monkeypatch.setattr(sys, "argv", ["recall", *shared, "--steps", "2", "--out", run])
    recall.main()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["recalled", run, *shared, "--words", "0", "-1", "--out", str(picture)])
    recalled.main()
    said = capsys.readouterr().out.splitlines()
    place = int((recall.texts(64, 1, 10**6)["ids"][0] == recall.KEY).nonzero()[0])
    assert said[0].startswith(f"the key is word {place} of 64")
    assert len(said) == 1 + 3 * 2 * 2  # layers, words and heads
    assert said[-1].startswith("layer 3, head 2: word 63 looks at word ")
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 500


def test_texts_hold_their_key_twice_and_the_value_behind_the_first():
    batch = recall.texts(100, 5, 7)
    for ids, value in zip(batch["ids"], batch["value"], strict=True):
        first, last = (ids == recall.KEY).nonzero()[:, 0].tolist()
        assert last == 99
        assert ids[first + 1] == value


class Known:
    """A translator whose heads are right about some of the sentences, each about others."""

    def __init__(self, right):
        self.right = right
        cross = nn.Module()
        cross.heads = len(right)
        block, model = nn.Module(), nn.Module()
        block.cross = cross
        model.decoder = nn.Module()
        model.decoder.blocks = nn.ModuleList([block])
        self.models = [model]

    def word_maps(self, pairs, *, layer, head, when):
        assert layer == 0
        rows = self.right[head] if when == "written" else ()
        straight, crossed = torch.eye(2), torch.eye(2).flip(0)
        return [straight if row in rows else crossed for row in range(len(pairs))]


@pytest.mark.parametrize(
    ("right", "reverse", "best", "chosen", "named"),
    [
        ([(0,), (0, 1, 2, 3)], False, 0.0, 0.0, "layer 0, head 1, when written"),
        ([(0,), (0, 1, 2, 3)], True, 0.0, 0.0, "layer 0, head 1, when written"),
        # What is best on one half is wrong on the other.
        ([(0, 2), (1, 3)], False, 0.5, 1.0, "layer 0, head 0, when written"),
        ([(0, 2), (1, 3)], True, 0.3333, 1.0, "layer 0, head 0, when written"),
    ],
)
def test_the_best_head_is_found_and_judged_by_sentences_it_was_not_chosen_by(
    right, reverse, best, chosen, named, tmp_path, monkeypatch, capsys
):
    for name, line in (("a.de", "ein Haus"), ("a.en", "a house"), ("gold", "0-0 1-1")):
        (tmp_path / name).write_text(4 * f"{line}\n")
    loaded = {"there": Known(right), "back": Known([(0, 1, 2, 3)])}
    monkeypatch.setattr(heads.Translator, "load", lambda path: loaded[path.name])
    files = [f"--{name}={tmp_path / file}" for name, file in (("source", "a.de"), ("target", "a.en"), ("gold", "gold"))]
    monkeypatch.setattr(sys, "argv", ["heads", "there", *files, *(["--reverse", "back"] if reverse else [])])
    heads.main()
    said = capsys.readouterr().out
    assert (found("best", said), found("chosen", said)) == (best, chosen)
    assert f"({named})" in said.splitlines()[0]
