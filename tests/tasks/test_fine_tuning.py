"""Fine-tuning: a run begins with the weights and tokenizers of another, on other data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from regard.data import Pair, labelled_tsv
from regard.tasks import Batching, PairVocabulary, classification, language, translation
from regard.tasks.fine_tuning import BASE, FineTuning, check_kept
from regard.train import Constant, Recipe, Silence, checkpoint

DE, EN = ["ein Haus", "ein Hund", "das Haus", "der Hund"], ["a house", "a dog", "the house", "the dog"]
PAIRS = [Pair(*both) for both in zip(DE, EN, strict=True)] * 4
OTHER = [Pair("der Hund", "the hound"), Pair("ein Hund", "a hound"), Pair("das Haus", "the dog")] * 4
RECIPE = Recipe(steps=3, rate=Constant(0.01), log_every=1, save_every=3)
SHAPE = translation.Model(kind="transformer", dim=16, heads=2, depth=1, dropout=0.0)


class Said(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def train(pairs, out, recipe=RECIPE, show=None, **settings):
    return translation.train(
        pairs, out=out, recipe=recipe, batching=Batching(tokens=256), show=show or Silence(), **settings
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    train(PAIRS, out, model=SHAPE, vocabulary=PairVocabulary(kind="word"))
    return out


def weights(folder, step=3):
    return checkpoint.read_tensors(folder / f"step-{step:08d}")


def test_run_begins_with_weights_and_tokenizers_of_another_on_other_data(base, tmp_path):
    said = Said()
    train(OTHER, tmp_path / "run", base=base, show=said)
    first = weights(tmp_path / "run", step=0)
    assert first.keys() == weights(base).keys()
    assert all(torch.equal(x, weights(base)[name]) for name, x in first.items())
    one, other = (folder / "step-00000003" for folder in (base, tmp_path / "run"))
    assert (one / "tokenizer.json").read_text() == (other / "tokenizer.json").read_text()
    record = json.loads((other / BASE).read_text())
    assert record["checkpoint"] == str(one.resolve())
    assert record["kept"] == ["model.safetensors", "config.json", "tokenizer.json"]
    assert record["tuning"] == {"run": str(base), "freeze": [], "lora": None}
    assert record["frozen"] == 0
    [line] = [line for line in said.lines if line.startswith("fine-tuning ")]
    assert line.startswith(f"fine-tuning {one}: all weights and config.json, tokenizer.json are kept; training ")
    assert line.endswith(" parameters with a new optimizer")
    translation.Translator.load(tmp_path / "run").translate(["der Hund"])


def test_frozen_parts_stay_also_when_the_run_is_resumed(base, tmp_path):
    train(OTHER, tmp_path / "run", base=FineTuning(run=str(base), freeze=("encoder.*",)))
    longer = Recipe(steps=6, rate=Constant(0.01), log_every=1, save_every=3)
    train(OTHER, tmp_path / "run", recipe=longer, resume=True)
    before, after = weights(base), weights(tmp_path / "run", step=6)
    same = {name for name, x in after.items() if torch.equal(x, before[name])}
    assert same == {name for name in after if name.startswith("encoder.")}
    assert (tmp_path / "run" / "step-00000006" / BASE).exists()
    with pytest.raises(ValueError, match="a resumed run cannot change its fine-tuning"):
        train(OTHER, tmp_path / "run", recipe=longer, resume=True, base=FineTuning(run=str(base)))


def test_lora_is_merged_in_checkpoints_and_resumes_as_the_unbroken_run(base, tmp_path):
    tuning = FineTuning(run=str(base), lora=2)
    longer = Recipe(steps=6, rate=Constant(0.01), log_every=1, save_every=3)
    train(OTHER, tmp_path / "a", recipe=longer, base=tuning)
    train(OTHER, tmp_path / "b", base=tuning)
    train(OTHER, tmp_path / "b", recipe=longer, resume=True)
    unbroken, resumed, before = weights(tmp_path / "a", 6), weights(tmp_path / "b", 6), weights(base)
    assert unbroken.keys() == before.keys()
    assert all(torch.equal(x, resumed[name]) for name, x in unbroken.items())
    changed = {name for name, x in unbroken.items() if not torch.equal(x, before[name])}
    assert changed
    assert {name.split(".")[-2] for name in changed} <= {"query", "key", "value", "out"}
    for name in changed:
        assert np.linalg.matrix_rank((unbroken[name] - before[name]).double().numpy(), tol=1e-5) <= 2
    translation.Translator.load(tmp_path / "a").translate(["der Hund"])


def test_longest_output_is_that_of_both_data_sets(base, tmp_path):
    long = [Pair("der Hund", "the dog " * 20)] * 4
    train(long, tmp_path / "run", base=base)
    longest = [
        json.loads((run / "step-00000003" / "config.json").read_text())["longest"] for run in (base, tmp_path / "run")
    ]
    assert longest[1] > longest[0]


def test_settings_of_a_new_model_are_refused(base, tmp_path):
    with pytest.raises(ValueError, match="a fine-tuned run keeps the model of its base; leave model out"):
        train(OTHER, tmp_path / "run", base=base, model=SHAPE)
    with pytest.raises(ValueError, match="a fine-tuned run keeps the vocabulary of its base; leave vocabulary out"):
        train(OTHER, tmp_path / "run", base=base, vocabulary=PairVocabulary(kind="char"))
    check_kept(None, model=True)
    assert not (tmp_path / "run").exists()


def test_run_of_another_task_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="is a checkpoint of the task 'translation', expected 'language'"):
        language.train(["a text"], out=tmp_path / "run", recipe=RECIPE, base=base, show=Silence())


@pytest.mark.parametrize("settings", [{"lora": 0}, {"lora": 2, "freeze": ("a.*",)}])
def test_settings_that_contradict_are_refused(settings):
    with pytest.raises(ValueError, match="lora "):
        FineTuning(run="a", **settings)


def test_classifier_keeps_its_head_for_the_same_classes_and_gets_a_new_one_for_others(tmp_path):
    (tmp_path / "a.tsv").write_text("good\tall heart\nbad\tno wit\n" * 4)
    (tmp_path / "b.tsv").write_text("good\tgreat heart\nbad\tdull\nmixed\twit\n" * 4)
    settings = {"recipe": RECIPE, "batching": Batching(tokens=256), "show": Silence()}
    first, second = (labelled_tsv(tmp_path / name) for name in ("a.tsv", "b.tsv"))
    shape = classification.ClassificationModelSettings(dim=8)
    classification.train_texts(first, out=tmp_path / "base", model=shape, **settings)
    classification.train_texts(first, out=tmp_path / "same", base=tmp_path / "base", **settings)
    before, same = weights(tmp_path / "base"), weights(tmp_path / "same", 0)
    assert all(torch.equal(x, before[name]) for name, x in same.items())
    said = Said()
    classification.train_texts(second, out=tmp_path / "more", base=tmp_path / "base", **{**settings, "show": said})
    more = weights(tmp_path / "more", 0)
    assert {name for name, x in more.items() if not torch.equal(x, before[name])} == {"classes.weight", "classes.bias"}
    assert "the classification head is new, for bad, good, mixed: the run to begin with has bad, good" in said.lines
    assert classification.Classifier.load(tmp_path / "more").classes == ("bad", "good", "mixed")
    record = json.loads((tmp_path / "more" / "step-00000003" / BASE).read_text())
    assert (record["new"], record["kept"]) == ("classes.", ["model.safetensors", "tokenizer.json"])


def test_few_steps_from_another_run_give_a_lower_loss_than_from_scratch(tmp_path):
    model = translation.Model(kind="rnn", dim=16, hidden=32, dropout=0.0, smoothing=0.0)
    words = {"model": model, "vocabulary": PairVocabulary(kind="word")}

    def recipe(steps):
        return Recipe(steps=steps, rate=Constant(0.01), log_every=99, save_every=99)

    train([*PAIRS, *OTHER], tmp_path / "base", recipe=recipe(60), **words)
    train(OTHER, tmp_path / "tuned", recipe=recipe(4), base=tmp_path / "base")
    train(OTHER, tmp_path / "scratch", recipe=recipe(4), **words)
    tuned, scratch = (translation.Translator.load(tmp_path / run).loss(OTHER).value for run in ("tuned", "scratch"))
    assert tuned < scratch / 2
