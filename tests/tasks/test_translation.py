"""Translation: what is learned, found again, scored and aligned."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from regard.data import Pair, Tokenizer
from regard.decode import Gnmt
from regard.lens import Links
from regard.models import Seq2SeqConfig, TransformerConfig
from regard.tasks import PairVocabulary, metrics, translation
from regard.tasks.pairs import Draft
from regard.tasks.translation import TranslationModelSettings, Translator
from regard.train import Constant
from tests.tasks.tiny_translators import PAIRS, RECIPE, trained


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A recurrent translator that has learned its numbers."""
    out = tmp_path_factory.mktemp("learned") / "run"
    model = TranslationModelSettings(kind="rnn", dim=32, dropout=0.0, smoothing=0.0)
    trained(out, model=model, recipe=replace(RECIPE, steps=250, rate=Constant(5e-3), save_every=250))
    return Translator.load(out)


@pytest.mark.learning
def test_a_translator_learns_to_translate(learned):
    found = learned.translate([pair.source for pair in PAIRS])
    assert [one.text for one in found] == [pair.target for pair in PAIRS]
    assert all(one.finished for one in found)
    measured = learned.evaluate(PAIRS)
    assert measured["exact"].value == 100
    assert measured["chrf"].value == pytest.approx(100)
    assert measured["loss"].value < 0.2


def test_a_translator_that_has_learned_aligns_words(learned):
    links = learned.align(PAIRS)
    right = [Links([(2, 0), (1, 1), (0, 2)])] * len(PAIRS)
    shared = sum(len(one.sure & other.sure) for one, other in zip(links, right, strict=True))
    assert shared / sum(map(len, links)) > 0.6  # by chance one in three


def test_each_line_is_translated_as_if_it_were_alone(translator_folder):
    translator = Translator.load(translator_folder)
    lines = ["eins", "", "zwei und drei und vier", "fünf fünf", "und"]
    for beam in (1, 3):
        together = translator.n_best(lines, n=beam, beam=beam)
        for line, best in zip(lines, together, strict=True):
            [alone] = translator.n_best([line], n=beam, beam=beam)
            assert [one.text for one in alone] == [one.text for one in best]
            assert [one.score for one in alone] == pytest.approx([one.score for one in best], abs=1e-4)


@pytest.mark.parametrize("beam", [1, 3])
def test_of_a_blank_line_comes_an_empty_one_and_no_model_is_asked(beam, translator_folder, monkeypatch):
    translator = Translator.load(translator_folder)
    [[alone]] = translator.n_best(["eins und zwei"], n=1, beam=beam)
    found = translator.n_best(["", "eins und zwei", " \t\u3000"], n=beam, beam=beam)
    assert [len(best) for best in found] == [1, beam, 1]
    assert [(best[0].text, best[0].tokens, best[0].finished) for best in (found[0], found[2])] == [("", (), True)] * 2
    assert found[1][0].text == alone.text
    monkeypatch.setattr(translator, "_stepper", None)
    assert [one.text for one in translator.translate(["", " "], beam=beam)] == ["", ""]
    with pytest.raises(TypeError, match=r"a line must be text, got 3 \(int\)"):
        translator.translate([3])


def test_lines_may_be_read_once(translator_folder):
    translator = Translator.load(translator_folder)
    assert translator.translate(iter(["eins und zwei"])) == translator.translate(["eins und zwei"])


@pytest.mark.parametrize("beam", [1, 3])
def test_a_score_has_the_length_penalty_whatever_the_beam(beam, translator_folder):
    [one] = Translator.load(translator_folder).translate(["drei und vier"], beam=beam, alpha=0.9)
    assert one.score == pytest.approx(one.log_probability / Gnmt(0.9)(len(one.tokens)))
    with pytest.raises(ValueError, match="Gnmt alpha must be from -50 to 50, got 99"):
        Translator.load(translator_folder).translate(["eins"], beam=beam, alpha=99)


def test_n_best_are_sorted_and_the_first_is_the_best(translator_folder):
    translator = Translator.load(translator_folder)
    [best] = translator.n_best(["eins und zwei"], n=3, beam=4)
    assert len(best) == 3
    assert best == sorted(best, key=lambda one: -one.score)
    assert translator.translate(["eins und zwei"], beam=4) == best[:1]


class Loud:
    """A stepper that finds some tokens likelier than all others."""

    def __init__(self, inner, tokens):
        self.inner, self.tokens = inner, list(tokens)

    def start(self, source):
        return self.inner.start(source)

    def step(self, tokens, state):
        logits, state = self.inner.step(tokens, state)
        logits[..., self.tokens] += 50
        return logits, state


@pytest.mark.parametrize("beam", [1, 3])
def test_what_no_text_holds_is_never_written(beam, translator_folder, monkeypatch):
    translator, seen = Translator.load(translator_folder), []
    words = translator.tokenizers.target
    translator._stepper = Loud(translator.models[0], (words.pad, words.bos))
    written = translator._decode_text
    monkeypatch.setattr(translator, "_decode_text", lambda one, *rest: seen.append(one.tokens) or written(one, *rest))
    translator.translate(["eins", "zwei und drei"], beam=beam)
    assert len(seen) == 2
    assert all(tokens and not {words.pad, words.bos} & set(tokens) for tokens in seen)


def test_scores_are_what_the_loss_of_the_model_says(translator_folder):
    translator = Translator.load(translator_folder)
    scores = translator.score(PAIRS)
    assert len(scores) == len(PAIRS)
    for pair, score in zip(PAIRS[:5], scores, strict=False):
        batch = translator.tokenizers.encode([pair]).batch([0], pad={}, device=torch.device("cpu"))
        assert score == pytest.approx(-translator.models[0].loss(batch).sum.item(), rel=1e-5)


def test_the_loss_of_an_evaluation_is_that_of_all_tokens(translator_folder):
    translator = Translator.load(translator_folder)
    tokens = sum(len(pair.target.split()) + 1 for pair in PAIRS)
    expected = -sum(translator.score(PAIRS)) / tokens
    assert translator.evaluate(PAIRS, beam=1)["loss"].value == pytest.approx(expected)


def test_an_evaluation_is_of_translations_as_long_as_they_may_be(translator_folder):
    translator = Translator.load(translator_folder)
    short = translator.translate([pair.source for pair in PAIRS], beam=2, max_length=1)
    expected = metrics.chrf([one.text for one in short], [pair.target for pair in PAIRS])
    assert translator.evaluate(PAIRS, beam=2, max_length=1)["chrf"] == expected


def test_a_tokenizer_that_cannot_measure_is_refused_before_the_work(translator_folder, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("translated in vain"))
    with pytest.raises(ValueError, match=r"tokenize must be one of .*, got 'spBLEU-1K'"):
        Translator.load(translator_folder).evaluate(PAIRS, tokenize="spBLEU-1K")


def test_several_copies_of_a_model_decode_as_the_model(translator_folder):
    lines = [pair.source for pair in PAIRS[:5]]
    alone, twice = Translator.load(translator_folder), Translator.load(translator_folder, translator_folder)
    assert [one.text for one in twice.translate(lines)] == [one.text for one in alone.translate(lines)]
    assert twice.align(PAIRS[:5]) == alone.align(PAIRS[:5])


def test_models_of_other_vocabularies_are_no_ensemble(translator_folder, tmp_path):
    trained(tmp_path / "other", vocabulary=PairVocabulary(kind="char"))
    with pytest.raises(ValueError, match=r"an ensemble must share its vocabularies, but those of .*other.* differ"):
        Translator.load(translator_folder, tmp_path / "other")


def test_a_pair_is_no_tuple(translator_folder, tmp_path):
    told = r"a pair must have a source and a target, got \('eins', 'one'\); use Pair\("
    translator = Translator.load(translator_folder)
    with pytest.raises(TypeError, match=told):
        translation.train([("eins", "one")], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for ask in (translator.score, translator.align, translator.tape, translator.evaluate):
        with pytest.raises(TypeError, match=told):
            ask([("eins", "one")])


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("rnn", "bahdanau"),
        ("rnn-plain", None),
        ("luong-dot", "dot"),
        ("luong-general", "general"),
        ("luong-concat", "concat"),
        ("luong-location", "location"),
        ("luong-local-m", "local_monotonic"),
        ("luong-local-p", "local_predictive"),
    ],
)
def test_every_recurrent_kind_has_the_attention_of_its_name(kind, attention, tmp_path):
    outcome = trained(
        tmp_path / "run", model=TranslationModelSettings(kind=kind, dim=8), recipe=replace(RECIPE, steps=1)
    )
    config = json.loads((outcome.best / "config.json").read_text())
    assert config["task"] == "translation"
    assert config["model"]["attention"] == attention
    translator = Translator.load(tmp_path / "run")
    assert len(translator.translate(["eins und zwei"], beam=2)) == 1
    if attention is None:
        with pytest.raises(ValueError, match="the model has no attention to its source"):
            translator.align(PAIRS[:1])


def test_any_function_from_tokenizers_to_a_config_is_a_model(tmp_path):
    def rotary(source, target):
        sizes = {"source_vocabulary": len(source), "target_vocabulary": len(target), "start": target.bos}
        return TransformerConfig(**sizes, dim=16, heads=2, encoder_layers=1, decoder_layers=1, positions="rotary")

    trained(tmp_path / "run", model=rotary)
    assert Translator.load(tmp_path / "run").models[0].config.positions == "rotary"


def test_tables_are_tied_as_the_vocabularies_allow():
    one, other = (Tokenizer.characters([letters]) for letters in ("abc", "abcd"))
    assert TranslationModelSettings()(one, one).tied == "all"
    assert TranslationModelSettings()(one, other).tied == "output"
    assert TranslationModelSettings(kind="rnn", tied="none")(one, one).tied == "none"
    assert isinstance(TranslationModelSettings(kind="rnn")(one, other), Seq2SeqConfig)
    with pytest.raises(ValueError, match="tied='all' needs one vocabulary for both sides"):
        TranslationModelSettings(tied="all")(one, other)


def test_a_tokenizer_of_others_serves_both_sides(tmp_path):
    Tokenizer.characters([" ".join(pair) for pair in PAIRS]).save(tmp_path / "own.json")
    trained(tmp_path / "run", vocabulary=PairVocabulary(load=str(tmp_path / "own.json")))
    assert Translator.load(tmp_path / "run").tokenizers.source == Tokenizer.load(tmp_path / "own.json")


def test_only_links_that_both_directions_agree_on_are_kept(translator_folder):
    translator = Translator.load(translator_folder)
    pairs = PAIRS[:3]
    both = translator.align(pairs, reverse=translator)
    there = translator.align(pairs)
    back = translator.align([Pair(pair.target, pair.source) for pair in pairs])
    assert both == [one & other.flip() for one, other in zip(there, back, strict=True)]


def test_a_tape_is_of_one_model_and_of_few_sentences(translator_folder):
    with pytest.raises(ValueError, match="a capture needs exactly one model, got 2; load one of them"):
        Translator.load(translator_folder, translator_folder).tape(PAIRS[:1])
    for pairs in ([], PAIRS * 30):
        with pytest.raises(ValueError, match=f"a capture holds 1 to 500 pairs, got {len(pairs)}"):
            Translator.load(translator_folder).tape(pairs)


def test_one_line_is_not_many(translator_folder):
    translator = Translator.load(translator_folder)
    for call in (translator.translate, partial(translator.n_best, n=2)):
        with pytest.raises(TypeError, match=r"lines must be a list of texts, got a single text; pass \[text\]"):
            call("eins und zwei")
    with pytest.raises(TypeError, match=r"sources must be a list of texts, got a single text; pass \[text\]"):
        translator.too_long("eins und zwei")


def test_the_loss_is_that_of_a_pair_or_more(translator_folder):
    with pytest.raises(ValueError, match="loss needs at least one pair, got none"):
        Translator.load(translator_folder).loss([])


def test_a_draft_is_scored_and_aligned_by_its_own_tokens(translator_folder):
    translator = Translator.load(translator_folder)
    words = translator.tokenizers.target
    tokens = (*words.encode("two"), words.unk, *words.encode("one"), words.eos)
    drafts = [Draft("eins und zwei", "two <unk> one", ids) for ids in (tokens, tokens[:-1])]
    assert [row["target"].tolist() for row in translator.tokenizers.encode(drafts)] == [[*tokens]] * 2
    assert [one.shape for one in translator.word_maps(drafts)] == [(3, 3)] * 2
    assert all((one.sum(1) > 0).all() for one in translator.word_maps(drafts))
    found = translator.translate([pair.source for pair in PAIRS])
    drafts = [Draft(pair.source, one.text, one.tokens) for pair, one in zip(PAIRS, found, strict=True) if one.finished]
    expected = [one.log_probability for one in found if one.finished]
    assert translator.score(drafts) == pytest.approx(expected, rel=1e-4)


def test_progress_is_told_up_to_the_last_line(translator_folder):
    told = []
    Translator.load(translator_folder).translate(
        [pair.source for pair in PAIRS], beam=1, show=lambda *both: told.append(both)
    )
    assert told[-1] == (20, 20)


def test_a_translator_is_loaded_from_a_folder():
    with pytest.raises(ValueError, match="load needs at least one folder, got none"):
        Translator.load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cell": "lstm"}, "cell is only for recurrent models, got a Transformer"),
        ({"kind": "rnn", "heads": 3}, "heads is only for a Transformer, got kind='rnn'"),
    ],
)
def test_settings_that_mean_nothing_for_a_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        TranslationModelSettings(**settings)
