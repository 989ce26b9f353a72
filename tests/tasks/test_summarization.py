"""Summarization: what is learned, copied, cut and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from regard import decode
from regard.data import Pair
from regard.models import PointerConfig, Seq2SeqConfig, TransformerConfig
from regard.tasks import summarization
from regard.tasks.copy_vocabulary import CopyTokenizers
from regard.tasks.summarization import DocumentBatching, SummarizationModelSettings, Summarizer
from regard.tasks.vocabulary import Vocabulary, WordVocabulary
from regard.train import Constant, Linear, Recipe, Silence, checkpoint

# The news is whom the fox met. Names are many and the vocabulary is small: almost all of them are outside of it.
NAMES = [f"{first}{last}" for first in ("Bel", "Kor", "Mir", "Tal", "Zun") for last in ("an", "ek", "il", "os", "ut")]
PAIRS = [
    Pair(f"The fox met {one} . {other} slept .", f"met {one}") for one, other in zip(NAMES, NAMES[7:], strict=False)
]
PAIRS += [
    Pair(f"{other} slept . The fox met {one} .", f"met {one}") for one, other in zip(NAMES, NAMES[5:], strict=False)
]
FEW = WordVocabulary(size=9, split="space")
RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
TINY = {
    "pointer": SummarizationModelSettings(dim=12, dropout=0.0),
    "rnn": SummarizationModelSettings(kind="rnn", dim=12, coverage=1.0, dropout=0.0),
    "transformer": SummarizationModelSettings(kind="transformer", dim=12, heads=2, depth=1, dropout=0.0),
}
SIZES = DocumentBatching(tokens=256, limit=20)


def trained(out, kind="pointer", recipe=RECIPE, **settings):
    settings = {"model": TINY[kind], "vocabulary": FEW, "batching": SIZES, "show": Silence()} | settings
    return summarization.train(settings.pop("pairs", PAIRS), out=out, recipe=recipe, **settings)


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, request.param)
    return out


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    out = tmp_path_factory.mktemp("learned") / "run"
    trained(
        out,
        model=SummarizationModelSettings(dim=24, dropout=0.0),
        recipe=replace(RECIPE, steps=100, rate=Constant(1e-2), save_every=100),
    )
    return Summarizer.load(out)


@pytest.mark.learning
def test_a_pointer_copies_names_it_has_never_seen(learned):
    tokenizer = learned.tokenizers.source
    documents = ["The fox met Wolfram . Adele slept .", "Adele slept . The fox met Wolfram ."]
    assert all(tokenizer.id(name) is None for name in ("Wolfram", "Adele"))
    for beam in (1, 4):
        assert [one.text for one in learned.summarize(documents, beam=beam)] == ["met Wolfram"] * 2
    measured = learned.evaluate(PAIRS)
    assert measured["rouge1"].value > 95
    assert measured["loss"].value < 0.3


def test_each_document_is_summarized_as_if_it_were_alone(folder):
    summarizer = Summarizer.load(folder)
    documents = ["The fox", "", "Wolfram met Adele . Wolfram slept .", "Adele"]
    for beam in (1, 3):
        together = summarizer.n_best(documents, n=beam, beam=beam)
        for document, best in zip(documents, together, strict=True):
            [alone] = summarizer.n_best([document], n=beam, beam=beam)
            assert [one.text for one in alone] == [one.text for one in best]
            assert [one.score for one in alone] == pytest.approx([one.score for one in best], abs=1e-4)


def test_scores_are_what_the_loss_of_the_model_says(folder):
    summarizer = Summarizer.load(folder)
    coverage = getattr(summarizer.models[0].config, "coverage", None)
    pairs = [*PAIRS[:3], Pair("Wolfram met Adele", "Adele met Crow")]
    if coverage is not None:
        summarizer.models[0].config = replace(summarizer.models[0].config, coverage=None)  # its price is no probability
    for pair, score in zip(pairs, summarizer.score(pairs), strict=True):
        encoded = summarizer.tokenizers.encode([pair])
        batch = encoded.batch([0], pad=summarizer.tokenizers.pad, device=torch.device("cpu"))
        assert score == pytest.approx(-summarizer.models[0].loss(batch).sum.item(), rel=1e-5)


def test_the_loss_of_an_evaluation_is_that_of_all_tokens(folder):
    summarizer = Summarizer.load(folder)
    tokens = sum(len(pair.target.split()) + 1 for pair in PAIRS)
    found = summarizer.evaluate(PAIRS, beam=1)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "loss"]
    assert found["loss"].value == pytest.approx(-sum(summarizer.score(PAIRS)) / tokens)


def test_an_evaluation_is_of_summaries_as_long_as_they_may_be(learned):
    assert learned.evaluate(PAIRS, max_length=1)["rouge1"].value == pytest.approx(200 / 3, abs=5)  # a word of two


def test_several_copies_of_a_model_decode_as_the_model(folder):
    documents = [pair.source for pair in PAIRS[:5]]
    alone, twice = Summarizer.load(folder), Summarizer.load(folder, folder)
    assert [one.text for one in twice.summarize(documents)] == [one.text for one in alone.summarize(documents)]


def test_a_tape_names_words_as_they_stand_in_the_document(folder):
    summarizer = Summarizer.load(folder)
    tape = summarizer.tape(PAIRS[:3])
    key = next(key for key in tape if key[0].startswith("decoder") and key[0].endswith(("decoder.attention", "cross")))
    _, keys = tape.tokens_of(key, batch=1)
    assert (PAIRS[1].source.split()[3] in keys) == isinstance(summarizer.tokenizers, CopyTokenizers)
    assert len(keys) == tape[key].shape[3]


def test_models_that_do_not_match_are_no_ensemble(tmp_path):
    trained(tmp_path / "pointer")
    trained(tmp_path / "rnn", "rnn")
    trained(tmp_path / "other", vocabulary=replace(FEW, size=8))
    with pytest.raises(
        ValueError, match=r"all models of an ensemble must copy words, or none, but .*rnn.* and .*pointer.* differ"
    ):
        Summarizer.load(tmp_path / "pointer", tmp_path / "rnn")
    with pytest.raises(ValueError, match=r"an ensemble must share its vocabularies, but those of .*other.* differ"):
        Summarizer.load(tmp_path / "pointer", tmp_path / "other")
    with pytest.raises(ValueError, match="load needs at least one folder, got none"):
        Summarizer.load()


@pytest.mark.parametrize("beam", [1, 3])
def test_summaries_are_those_of_a_search_within_the_same_limits(beam, folder):
    summarizer, document = Summarizer.load(folder), PAIRS[0].source
    [found] = summarizer.summarize([document], beam=beam, alpha=0.3, min_length=6, no_repeat=2)
    tokenizers = summarizer.tokenizers
    batch = tokenizers.sources([document]).batch([0], pad=tokenizers.pad, device=torch.device("cpu"))
    limits = {"end": tokenizers.target.eos, "max_length": 3 * 3 // 2 + 10, "min_length": 6, "no_repeat": 2}
    limits["forbid"] = (tokenizers.target.pad, tokenizers.target.bos)
    start, [model] = [[tokenizers.target.bos]], summarizer.models
    best = (
        decode.greedy(model, batch, start, **limits)[0]
        if beam == 1
        else decode.beam(model, batch, start, width=beam, length=decode.Gnmt(0.3), **limits)[0][0]
    )
    assert found.text == tokenizers.text(best.tokens, document)
    assert len(best.tokens) >= 6
    assert len({*pairwise(best.tokens)}) == len(best.tokens) - 1


@pytest.mark.parametrize("beam", [1, 3])
def test_no_summary_is_longer_than_it_may_be(beam, folder):
    summarizer, documents = Summarizer.load(folder), [pair.source for pair in PAIRS[:3]]
    for most in (1, 4, 40):
        for one in summarizer.summarize(documents, beam=beam, min_length=most, max_length=most):
            assert not one.finished
            assert len(one.text.split()) == most
    with pytest.raises(ValueError, match="min_length must be at most max_length"):
        summarizer.summarize(documents, min_length=3, max_length=2)


def test_what_training_does_not_read_is_not_read_later(folder):
    summarizer = Summarizer.load(folder)
    assert summarizer.limit == 20
    long, short = "The fox met Talos . " * 4 + "Crow", "The fox met Talos . " * 3 + "The fox met Talos"
    assert summarizer.read(long) == long.removesuffix(" . Crow")
    assert summarizer.too_long([long, short, ""]) == [True, False, False]
    assert summarizer.summarize([long])[0].text == summarizer.summarize([short])[0].text
    assert summarizer.score([Pair(long, "met")]) == pytest.approx(summarizer.score([Pair(short, "met")]))
    summarizer.limit = 1
    assert summarizer.read("The fox") == ""


def test_what_is_dropped_in_training_is_read_later(tmp_path):
    trained(tmp_path / "run", batching=replace(SIZES, long="drop"))
    assert Summarizer.load(tmp_path / "run").limit is None


def test_a_document_that_is_cut_loses_what_can_be_copied(tmp_path):
    """Where the name is cut off, the target is unknown, and the loss stays finite."""
    outcome = trained(
        tmp_path / "run", batching=DocumentBatching(tokens=64, limit=3), recipe=replace(RECIPE, metric="loss")
    )
    log = (outcome.best.parent / "log.csv").read_text().splitlines()
    place = log[0].split(",").index("loss")
    assert all(float(line.split(",")[place]) < 10 for line in log[1:])


@pytest.mark.parametrize("kind", TINY)
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = trained(tmp_path / "whole", kind)
    trained(tmp_path / "parts", kind, replace(RECIPE, steps=2))
    other = {"model": replace(TINY["rnn"], dim=8), "vocabulary": Vocabulary(kind="char")}
    parts = trained(tmp_path / "parts", kind, resume=True, **other)
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_scheduled_sampling_works_with_a_pointer(tmp_path):
    trained(tmp_path / "run", recipe=replace(RECIPE, forcing=Linear(steps=2)))


def test_a_validation_chooses_the_best(tmp_path):
    recipe = replace(RECIPE, metric="rougeL", better="higher", evaluate_every=2)
    outcome = trained(tmp_path / "run", recipe=recipe, valid=PAIRS[:5])
    expected = Summarizer.load(outcome.best).evaluate(PAIRS[:5], beam=1)["rougeL"].value
    assert outcome.score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": []}, "there is nothing to learn a vocabulary from"),
        ({"valid": []}, "valid has no pairs"),
        ({"batching": replace(SIZES, limit=2, long="error")}, "example 0: the example has more than 2 tokens"),
        ({"model": SummarizationModelSettings(dim=0)}, "dim must be 1 or more, got 0"),
        ({"model": SummarizationModelSettings(smoothing=0.1)}, r"smoothing must be 0 where words are copied, got 0.1"),
        (
            {"model": SummarizationModelSettings(kind="transformer", dim=8, encoder_mask="Widow(3)")},
            "did you mean 'Window'",
        ),
        (
            {"model": TINY["transformer"], "recipe": replace(RECIPE, forcing=Linear(steps=9))},
            "forcing needs a recurrent",
        ),
    ],
)
def test_what_is_wrong_shows_before_anything_is_written(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "transformer", "coverage": 1.0}, "coverage is only for recurrent models, got a Transformer"),
        (
            {"encoder_mask": "Window(3)"},
            "encoder_mask, segment and memory are only for a Transformer, got kind='pointer'",
        ),
        ({"kind": "rnn", "segment": 3}, "got kind='rnn'; leave them out, or choose kind='transformer'"),
    ],
)
def test_what_a_kind_does_not_have_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SummarizationModelSettings(**settings)


def test_every_kind_has_its_config(tmp_path):
    tokenizer = FEW.learn([" ".join(pair) for pair in PAIRS])
    pointer = SummarizationModelSettings(coverage=0.5)(tokenizer)
    assert isinstance(pointer, PointerConfig)
    assert (pointer.unknown, pointer.smoothing, pointer.coverage, pointer.tied) == (tokenizer.unk, 0, 0.5, "all")
    plain = SummarizationModelSettings(kind="rnn")(tokenizer)
    assert type(plain) is Seq2SeqConfig
    assert plain.smoothing == 0.1
    sparse = SummarizationModelSettings(
        kind="transformer", encoder_mask="Window(8) & ~Diagonal()", segment=64, memory=16
    )(tokenizer)
    assert isinstance(sparse, TransformerConfig)
    assert (sparse.encoder_mask, sparse.segment, sparse.memory) == ("Window(8) & ~Diagonal()", 64, 16)
    outcome = trained(
        tmp_path / "run", model=SummarizationModelSettings(kind="transformer", dim=8, heads=2, encoder_mask="Window(3)")
    )
    assert json.loads((outcome.best / "config.json").read_text())["model"]["encoder_mask"] == "Window(3)"
    assert len(Summarizer.load(tmp_path / "run").summarize(["The fox"])) == 1


def test_byte_pairs_are_copied_too(tmp_path):
    """They may come from a tokenizer that knows no unknown."""
    own = Vocabulary(kind="bpe", size=280).learn([" ".join(pair) for pair in PAIRS])
    (tmp_path / "own.json").write_text(own.to_json().replace("<unk>", "<other>"))
    vocabulary = Vocabulary(load=str(tmp_path / "own.json"))
    trained(tmp_path / "run", vocabulary=vocabulary, batching=replace(SIZES, limit=60))
    summarizer = Summarizer.load(tmp_path / "run")
    assert isinstance(summarizer.tokenizers, CopyTokenizers)
    assert summarizer.tokenizers.source.unk is None
    assert len(summarizer.summarize([PAIRS[0].source])) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 2}, "heads is only for a Transformer, got kind='pointer'"),
        ({"kind": "transformer", "cell": "gru"}, "cell is only for recurrent models, got a Transformer"),
        ({"kind": "transformer", "coverage": 1.0}, "coverage is only for recurrent models, got a Transformer"),
    ],
)
def test_settings_that_mean_nothing_for_a_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        SummarizationModelSettings(**settings)
