"""Language modelling: what is foretold, how well, and what is written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.data import DataError, Tokenizer
from regard.models import Gpt
from regard.tasks import Vocabulary, language
from regard.tasks.language import LanguageModel, LanguageModelSettings
from regard.train import Constant, Linear, Recipe, Silence, checkpoint

LINES = ["the cat sat on the mat", "", "the dog sat on the cat", "a mat"] * 3
RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2)
TINY = LanguageModelSettings(length=16, dim=16, depth=1, heads=2, dropout=0.0)


def trained(out, recipe=RECIPE, **settings):
    settings = {"model": TINY, "vocabulary": Vocabulary(kind="char"), "tokens": 64, "show": Silence()} | settings
    return language.train(LINES, out=out, recipe=recipe, **settings)


@pytest.fixture(scope="module", params=["gpt", "llama"])
def model(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, model=replace(TINY, kind=request.param))
    return LanguageModel.load(out)


def oracle(model, ids):
    """-log p of each token but the first, each with all those before it that the model can see."""
    costs = []
    for n in range(1, len(ids)):
        seen = torch.tensor([ids[max(0, n - model.length) : n]])
        costs.append(-model.model(seen)[0, -1].double().log_softmax(-1)[ids[n]].item())
    return costs


def row(model, lines):
    ids = [model.tokenizer.eos]
    for line in lines:
        ids += [*model.tokenizer.encode(line), model.tokenizer.eos]
    return ids


def test_one_line_is_not_many(model):
    for call in (model.evaluate, model.score):
        with pytest.raises(TypeError, match=r"lines must be a list of texts, got a single text; pass \[text\]"):
            call("a line")
    with pytest.raises(TypeError, match=r"text must be text, got \['the'\]"):
        model.generate(["the"])


def test_lines_are_many_and_come_again(tmp_path):
    with pytest.raises(TypeError, match="lines must be readable more than once, got a generator; pass a list"):
        language.train((line for line in LINES), out=tmp_path / "run")
    with pytest.raises(TypeError, match=r"valid must be a list of texts, got a single text; pass \[text\]"):
        trained(tmp_path / "run", valid="a line")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_no_text_holds_is_never_written(temperature, model, monkeypatch):
    words, step, seen = model.tokenizer, Gpt.step, []

    def loud(self, tokens, state):
        seen.extend(tokens.flatten().tolist())
        logits, state = step(self, tokens, state)
        logits[..., [words.pad, words.bos]] += 50
        return logits, state

    monkeypatch.setattr(Gpt, "step", loud)
    model.generate("the", tokens=20, samples=3, temperature=temperature)
    assert len(seen) > 40
    assert not {words.pad, words.bos} & set(seen)


@torch.no_grad()
def test_with_the_largest_overlap_every_token_sees_all_it_can(model):
    lines = LINES[:4]
    costs = oracle(model, row(model, lines))
    measured = model.evaluate(lines, overlap=model.length - 1)
    words, characters = sum(len(line.split()) for line in lines) + 4, sum(map(len, lines)) + 4
    assert measured["loss"].value == pytest.approx(sum(costs) / len(costs), rel=1e-5)
    assert measured["perplexity"].value == pytest.approx(math.exp(sum(costs) / words), rel=1e-4)
    assert measured["bits"].value == pytest.approx(sum(costs) / math.log(2) / characters, rel=1e-5)
    assert "per word, 18 words" in measured["perplexity"].signature


@torch.no_grad()
@pytest.mark.parametrize("overlap", [0, 1, 7, 8])
def test_windows_foretell_every_token_once_with_the_context_they_have(model, overlap):
    ids = row(model, LINES[:4])
    total = 0.0
    start = 0
    while start == 0 or start + overlap < len(ids) - 1:
        window = ids[start : start + model.length + 1]
        logits = model.model(torch.tensor([window[:-1]]))[0].double().log_softmax(-1)
        for place in range(overlap if start else 0, len(window) - 1):
            total -= logits[place, window[place + 1]].item()
        start += model.length - overlap
    found = model.evaluate(LINES[:4], overlap=overlap)["loss"].value
    assert found == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_an_overlap_leaves_something_to_foretell(model):
    for overlap in (-1, 16):
        message = f"overlap must be at least 0 and less than the model's length of 16, got {overlap}"
        with pytest.raises(ValueError, match=message):
            model.evaluate(LINES, overlap=overlap)


@torch.no_grad()
def test_lines_are_scored_each_for_itself_whatever_their_lengths(model):
    lines = ["a cat", "", "the dog", "t"]
    scores = model.score(lines)
    for line, score in zip(lines, scores, strict=True):
        assert score == pytest.approx(-sum(oracle(model, row(model, [line]))), rel=1e-5)
    long = "the cat sat on the mat the cat"
    assert model.score([long]) == pytest.approx(model.score([long, "a", long])[2:], rel=1e-6)


def test_perplexity_does_not_depend_on_how_text_is_cut(tmp_path):
    words = {}
    for kind in ("word", "char", "bpe"):
        trained(tmp_path / kind, vocabulary=Vocabulary(kind=kind, size=300), recipe=replace(RECIPE, steps=1))
        measured = LanguageModel.load(tmp_path / kind).evaluate(LINES)
        words[kind] = measured["perplexity"].signature
    assert len(set(words.values())) == 1


def test_the_best_of_a_text_without_spaces_is_the_one_with_the_lowest_loss(tmp_path):
    """Each line is one word of a thousand letters, so that the perplexity a word is beyond all numbers."""
    text = ["ab" * 500, "ba" * 500]
    recipe = replace(language.RECIPE, steps=4, evaluate_every=1, save_every=1, rate=Constant(3e-3), patience=2)
    given = {"model": TINY, "vocabulary": Vocabulary(kind="char"), "tokens": 64, "show": Silence()}
    outcome = language.train(text, valid=text, out=tmp_path / "run", recipe=recipe, **given)
    lines = (tmp_path / "run" / "evaluations.csv").read_text().splitlines()
    table = [dict(zip(lines[0].split(","), map(float, line.split(",")), strict=True)) for line in lines[1:]]
    perplexities, losses = ([row[name] for row in table] for name in ("perplexity", "loss"))
    assert perplexities == [math.exp(700)] * 4
    assert losses == sorted(losses, reverse=True)
    assert (outcome.best.name, outcome.reason) == ("step-00000004", "steps")
    assert outcome.score == losses[-1]


def test_a_text_is_learned_by_heart(tmp_path):
    recipe = replace(RECIPE, steps=150, rate=Constant(1e-2), save_every=150)
    trained(tmp_path / "run", recipe, model=replace(TINY, dim=32), vocabulary=Vocabulary(kind="word", split="space"))
    model = LanguageModel.load(tmp_path / "run")
    assert model.generate("a", tokens=30, temperature=0, until_line_end=True) == [" mat\n"]
    [text] = model.generate("a mat\nthe dog", tokens=6, temperature=0)
    assert text.startswith(" sat on the ")
    assert model.evaluate(LINES)["perplexity"].value < 3


def test_the_likeliest_tokens_are_written_at_temperature_0(model):
    ids = row(model, [])
    with torch.no_grad():
        for _ in range(9):
            logits = model.model(torch.tensor([ids]))[0, -1]
            logits[[*model.tokenizer.unwritten]] = -torch.inf
            ids.append(int(logits.argmax()))
    [text] = model.generate(tokens=9, temperature=0)
    assert text == model._text([], ids[1:])


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kept", [{"top_k": 0}, {"top_p": 1.5}])
def test_no_tokens_to_draw_from_are_refused_at_every_temperature(temperature, kept, model):
    with pytest.raises(ValueError, match=next(iter(kept))):
        model.generate(tokens=2, temperature=temperature, **kept)


def test_seeds_behind_the_last_are_the_first(model):
    last = 2**64 - 1
    assert len(model.generate("the", tokens=4 * model.length, samples=2, seed=last)) == 2
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed must be"):
            model.generate("the", tokens=4, seed=seed)


def test_the_same_seed_writes_the_same_and_another_something_else(model):
    one, again, other = (model.generate("the", tokens=12, samples=3, seed=seed) for seed in (5, 5, 8))
    assert one == again != other
    assert len(set(one)) == 3


def test_more_is_written_than_the_model_can_see(model, monkeypatch):
    monkeypatch.setattr(model, "_text", lambda begun, tokens: len(tokens))
    for tokens in (1, 9, 16, 100):
        assert model.generate("the cat", tokens=tokens, samples=2, temperature=1.5, top_k=9) == [tokens, tokens]
    assert model.generate("the cat sat on the mat", tokens=33) == [33]
    for name in ("tokens", "samples"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            model.generate(**{name: 0})


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path):
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "parts", replace(RECIPE, steps=2))
    parts = trained(tmp_path / "parts", resume=True, model=replace(TINY, dim=8), vocabulary=Vocabulary(kind="word"))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 15}, "room for a window of 16 tokens, got tokens=15"),
        ({"model": replace(TINY, heads=3)}, "heads"),
        ({"valid": []}, "valid has no lines"),
        ({"recipe": replace(RECIPE, forcing=Linear(steps=9))}, "forcing needs a recurrent decoder"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_written(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


def test_no_text_at_all_is_an_error(tmp_path):
    with pytest.raises(DataError, match="there is nothing to learn a vocabulary from"):
        language.train([], out=tmp_path / "run")


def test_the_sketch_names_both_families():
    tokenizer = Tokenizer.characters(["abc"])
    assert LanguageModelSettings(kind="gpt")(tokenizer).positions == "learned"
    llama = LanguageModelSettings(kind="llama", kv_heads=2, dropout=0.3)(tokenizer)
    assert (llama.positions, llama.norm, llama.kv_heads, llama.dropout) == ("rotary", "rms", 2, 0.3)
    for kind in ("gpt", "llama"):
        assert LanguageModelSettings(kind=kind)(tokenizer).attention_dropout == 0.0
        assert LanguageModelSettings(kind=kind, attention_dropout=0.2)(tokenizer).attention_dropout == 0.2


def test_windows_begin_a_stride_apart_and_show_each_token_behind_other_beginnings():
    row = np.arange(23)
    found = [window.tolist() for window in language._windows(row, 8, 3)]
    assert found[:3] == [list(range(9)), list(range(8, 17)), list(range(16, 23))]
    firsts = [window[0] for window in found]
    assert firsts == [0, 8, 16, 3, 11, 19, 6, 14]
    assert all(window == list(range(window[0], window[0] + len(window))) for window in found)
    assert [window.tolist() for window in language._windows(row, 8, None)] == found[:3]


def test_a_stride_makes_an_epoch_longer(tmp_path):
    recipe = replace(RECIPE, steps=None, epochs=1)
    whole, half = (trained(tmp_path / str(stride), recipe, stride=stride) for stride in (None, 8))
    assert half.step == pytest.approx(2 * whole.step, abs=1)


def test_a_stride_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="stride must be at least 1 token, got 0"):
        trained(tmp_path / "run", stride=0)
    assert not (tmp_path / "run").exists()
