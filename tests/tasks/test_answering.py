"""Answering: what is learned, found in long documents, cut out of them and counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import cycle, permutations

import pytest
import torch

from regard.data import Answer, DataError, Question, Tokenizer
from regard.models import Bert, BertConfig, BertReader, BertTagger, Gpt, GptConfig, ReaderConfig, save
from regard.tasks import answering
from regard.tasks.answering import Answerer, AnsweringModelSettings, Asking
from regard.tasks.document_windows import WindowSettings
from regard.tasks.vocabulary import Vocabulary, WordVocabulary
from regard.train import CheckpointError, Constant, Linear, Recipe, Silence, checkpoint

COLOURS, THINGS = ["red", "blue", "green"], ["house", "dog", "door", "boat"]


def question(number, thing, **told):
    """What a thing is, among others; the answer is the word behind its name."""
    context = "  ".join(f"The {name}\tis {colour}." for name, colour in told.items())
    answers = () if thing not in told else (Answer(told[thing], context.index(f"{thing}\tis ") + len(thing) + 4),)
    return Question(id=str(number), title="", context=context, question=f"What is the {thing}?", answers=answers)


ORDERED = list(zip(permutations(THINGS, 2), cycle(permutations(COLOURS, 2)), strict=False))
QUESTIONS = [
    question(n, thing, **({thing: one, other: two} if n % 2 else {other: two, thing: one}))
    for n, ((thing, other), (one, two)) in enumerate(ORDERED)
]
NONE = [question(f"none {n}", thing, **{other: one}) for n, ((thing, other), (one, _)) in enumerate(ORDERED)]
RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
TINY = {
    "reader": AnsweringModelSettings(dim=8, heads=2, dropout=0.0),
    "words": AnsweringModelSettings(dim=8, heads=1, spelling=False, cell="lstm", dropout=0.0),
    "bert": AnsweringModelSettings(kind="bert", dim=16, heads=2, depth=1, dropout=0.0),
}
NARROW = WindowSettings(size=7, overlap=5, question=6, answer=3)


def trained(out, kind="reader", recipe=RECIPE, questions=QUESTIONS, **settings):
    settings = {"model": TINY[kind], "windows": NARROW, "show": Silence()} | settings
    return answering.train(questions, out=out, recipe=recipe, **settings)


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, request.param)
    return out


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A reader that has learned what is what, and that some things are not told."""
    out = tmp_path_factory.mktemp("learned") / "run"
    model = AnsweringModelSettings(dim=16, heads=2, spelling=False, dropout=0.0)
    recipe = replace(RECIPE, steps=60, rate=Constant(1e-2), save_every=60)
    trained(out, model=model, recipe=recipe, questions=QUESTIONS + NONE)
    return Answerer.load(out)


def test_a_reader_learns_to_answer_and_when_there_is_no_answer(learned):
    found = learned.answer(QUESTIONS + NONE)
    assert [one.text for one in found] == [one.answers[0].text for one in QUESTIONS] + [""] * len(NONE)
    for asked, one in zip(QUESTIONS, found, strict=False):
        assert (one.start, one.text) == (asked.answers[0].start, asked.context[one.start : one.end])
        assert one.score > 0
    measured = learned.evaluate(QUESTIONS + NONE)
    assert {name: one.value for name, one in measured.items()} == {
        "f1": 100,
        "exact": 100,
        "possible": 100,
        "impossible": 100,
    }


def test_a_higher_threshold_answers_less(learned):
    scores = [one.score for one in learned.answer(QUESTIONS)]
    between = sorted(scores)[len(scores) // 2]
    found = learned.answer(QUESTIONS, threshold=between)
    assert [bool(one.text) for one in found] == [score > between for score in scores]
    assert {one.score for one in found if not one.text} == {between}
    assert not any(one.text for one in learned.answer(QUESTIONS, threshold=math.inf))
    assert all(one.text for one in learned.answer(NONE, threshold=-math.inf))
    with pytest.raises(ValueError, match="threshold must be a number, got NaN; training uses 0"):
        learned.answer(QUESTIONS, threshold=math.nan)


def test_an_answer_far_into_a_long_document_is_found(learned):
    filler = "The boat\tis green.  " * 40
    for asked in QUESTIONS[:5]:
        assert "boat" not in asked.question
        [found] = learned.answer([Asking(asked.question, filler + asked.context)])
        assert found.text == asked.answers[0].text
        assert found.start == len(filler) + asked.answers[0].start


def loop(answerer, asked):
    """Every span of every window, one by one: its characters and its log-odds against the place 0."""
    window_examples = answerer.window_examples([asked])
    found = {}
    for number in range(len(window_examples)):
        window, batch = window_examples.window(number), window_examples.batch([number], torch.device("cpu"))
        start, end = (x[0] for x in answerer.layout.logits(answerer.model, batch))
        place = int(batch["first"])
        for i in range(len(window)):
            for j in range(i, min(i + answerer.config.windows.answer, len(window))):
                score = float(start[place + i] + end[place + j] - start[0] - end[0])
                span = int(window.starts[i]), int(window.ends[j])
                found[span] = max(score, found.get(span, -math.inf))
    return sorted(found.items(), key=lambda item: -item[1])


@torch.no_grad()
def test_the_best_answers_are_those_of_all_spans_of_all_windows(folder):
    answerer = Answerer.load(folder)
    asked = [QUESTIONS[0], Asking("What?", " ".join(one.context for one in QUESTIONS[:4])), Asking("Which?", "red")]
    for one, best in zip(asked, answerer.n_best(asked, n=6), strict=True):
        expected = loop(answerer, one)[:6]
        assert [found.score for found in best] == pytest.approx([score for _, score in expected], abs=1e-4)
        for found in best:
            assert found.text == one.context[found.start : found.end]
    assert [one[0] for one in answerer.n_best(asked, n=6)] == answerer.answer(asked)


def test_a_document_without_words_holds_no_answer(folder):
    found = Answerer.load(folder).answer([Asking("What?", ""), Asking("What?", " \n")])
    assert [(one.text, one.score) for one in found] == [("", -math.inf)] * 2


def test_a_question_is_no_tuple(folder):
    answerer = Answerer.load(folder)
    for ask in (answerer.answer, answerer.tape):
        with pytest.raises(TypeError, match=r"a question and a context, got \('What\?', 'red'\); use Asking\("):
            ask([("What?", "red")])


def test_a_blank_question_has_no_answer_and_no_look(folder):
    answerer = Answerer.load(folder)
    found = answerer.n_best([Asking(" \t", QUESTIONS[0].context), QUESTIONS[0], Asking("", "red")], n=2)
    assert [[(one.text, one.score) for one in best] for best in (found[0], found[2])] == [[("", -math.inf)]] * 2
    assert found[1] == answerer.n_best(iter([QUESTIONS[0]]), n=2)[0]
    with pytest.raises(ValueError, match="the question is empty"):
        answerer.look(Asking(" ", "red"))


def test_a_look_is_that_of_the_window_with_the_best_answer(folder):
    answerer, asked = Answerer.load(folder), QUESTIONS[1]
    [[best]] = answerer.n_best([asked], n=1)
    A, words = answerer.look(asked)
    assert set(best.text.split()) <= set(" ".join(words).split())
    assert A.shape[1] == len(words) <= NARROW.size
    assert A.shape[0] in (5, 6)  # what is the house ? and, beside a document, the end
    assert bool((A >= 0).all())
    assert bool((A.sum(1) <= 1 + 1e-5).all())


def test_a_tape_holds_a_row_for_each_question(folder):
    answerer = Answerer.load(folder)
    tape = answerer.tape(QUESTIONS[:3])
    for key in tape:
        assert tape[key].shape[0] == 3
        assert all(names is not None for names in tape.tokens_of(key, batch=2))
    for asked in ([], QUESTIONS * 50):
        with pytest.raises(ValueError, match=f"a capture holds 1 to 500 questions, got {len(asked)}"):
            answerer.tape(asked)


def test_no_questions_have_no_answers(folder):
    answerer = Answerer.load(folder)
    assert answerer.answer([]) == []
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        answerer.n_best([], n=0)


def test_progress_is_told(folder):
    heard = []
    Answerer.load(folder).answer(QUESTIONS, show=lambda done, all: heard.append((done, all)))
    assert heard[-1][0] == heard[-1][1] > len(QUESTIONS)


@torch.no_grad()
def test_the_loss_is_that_of_the_windows(folder):
    """A hand-written pass over all windows, each by itself."""
    answerer = Answerer.load(folder)
    asked = QUESTIONS[:3]
    spans = [(one.answers[0].start, one.answers[0].start + len(one.answers[0].text)) for one in asked]
    window_examples = answerer.window_examples(asked, answers=spans)
    together = answerer.model.loss(window_examples.batch(range(len(window_examples)), torch.device("cpu")))
    total = 0.0
    for number in range(len(window_examples)):
        batch = window_examples.batch([number], torch.device("cpu"))
        for logits, name in zip(answerer.layout.logits(answerer.model, batch), ("start", "end"), strict=True):
            total -= float(logits.log_softmax(-1)[0, batch[name][0]]) / 2
    assert together.sum.item() == pytest.approx(total, rel=1e-5)
    assert together.count == len(window_examples)


@pytest.mark.parametrize("kind", ["reader", "bert"])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = trained(tmp_path / "whole", kind)
    trained(tmp_path / "parts", kind, replace(RECIPE, steps=2))
    other = {"model": TINY["words"], "vocabulary": Vocabulary(kind="char"), "windows": WindowSettings()}
    parts = trained(tmp_path / "parts", resume=True, **other)
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_run_holds_what_it_reads_by(tmp_path):
    outcome = trained(tmp_path / "run", questions=QUESTIONS[:4] + NONE)
    config = json.loads((outcome.best / "config.json").read_text())
    assert config["task"] == "answering"
    assert config["impossible"] is True
    assert config["windows"] == {
        "kind": "Windows",
        "size": 7,
        "overlap": 5,
        "question": 6,
        "long": "truncate",
        "answer": 3,
    }
    assert config["model"]["kind"] == "ReaderConfig"
    answerer = Answerer.load(tmp_path / "run")
    assert config["model"]["characters"] == len(answerer.alphabet)
    assert answerer.config.windows == NARROW


def test_a_validation_chooses_the_best(tmp_path):
    recipe = replace(RECIPE, metric="f1", better="higher", evaluate_every=2)
    outcome = trained(tmp_path / "run", recipe=recipe, valid=QUESTIONS[:5])
    expected = Answerer.load(outcome.best).evaluate(QUESTIONS[:5])["f1"].value
    assert outcome.score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"questions": []}, "there are no questions; expected at least one"),
        ({"valid": []}, "valid has no questions"),
        ({"windows": replace(NARROW, question=2, long="error")}, r"question '\d+' has more than 2 tokens, like \d+ of"),
        ({"windows": replace(NARROW, question=2, long="drop")}, "raise the limit, or choose long='truncate'"),
        ({"tokens": 5}, "room for the longest row of 8 tokens, got tokens=5"),
        ({"recipe": replace(RECIPE, forcing=Linear(steps=9))}, "forcing needs a recurrent decoder"),
        ({"model": AnsweringModelSettings(dim=0)}, "dim must be 1 or more, got 0"),
        ({"pretrained": "somewhere"}, "pretrained includes its own model and vocabulary; leave out"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_written(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("long", ["drop", "truncate"])
def test_how_many_questions_are_too_long_is_said(long, tmp_path):
    heard = []

    class Heard(Silence):
        def say(self, line):
            heard.append(line)

    wordy = replace(QUESTIONS[0], question="What is it that the house is?")
    questions = [*QUESTIONS[:4], wordy]
    trained(tmp_path / "run", questions=questions, windows=replace(NARROW, long=long), show=Heard())
    assert f"1 of 5 questions have more than 6 tokens and were {long.rstrip('e')}{'p' * (long == 'drop')}ed" in heard
    assert Answerer.load(tmp_path / "run").too_long(questions) == [False] * 4 + [True]


def test_a_damaged_checkpoint_is_not_used(tmp_path):
    outcome = trained(tmp_path / "run")
    file = outcome.best / "characters.json"
    file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(CheckpointError, match=r"is corrupted: checksum mismatch of characters.json"):
        Answerer.load(outcome.best)


@pytest.fixture(scope="module")
def pieces():
    texts = [text for one in QUESTIONS for text in (one.context, one.question)]
    return Tokenizer.wordpiece(texts, size=120, lower=True)


def published(folder, model, tokenizer):
    save(model, folder)
    tokenizer.save(folder / "tokenizer.json")


@pytest.mark.parametrize("head", [Bert, BertReader])
def test_a_pretrained_bert_is_begun_with(head, pieces, tmp_path):
    bert = Bert(BertConfig(vocabulary=len(pieces), length=40, dim=16, depth=1, heads=2, hidden=32))
    model = bert if head is Bert else head(bert)
    published(tmp_path / "bert", model, pieces)
    begun = {"pretrained": tmp_path / "bert", "model": answering.DEFAULT_MODEL}
    trained(tmp_path / "run", recipe=replace(RECIPE, steps=0), **begun)
    answerer = Answerer.load(tmp_path / "run")
    assert answerer.tokenizer == Tokenizer.load(tmp_path / "bert" / "tokenizer.json")
    assert answerer.model.bert.pool is None
    found = answerer.model.state_dict()
    expected = {name: x for name, x in model.state_dict().items() if ".pool." not in f".{name}"}
    for name, x in expected.items():
        torch.testing.assert_close(found[name if head is BertReader else f"bert.{name}"], x)
    trained(tmp_path / "run", resume=True, **begun)


def test_a_folder_that_holds_no_bert_cannot_be_begun_with(pieces, tmp_path):
    gpt = Gpt(GptConfig(vocabulary=len(pieces), length=40, dim=16, depth=1, heads=2))
    published(tmp_path / "gpt", gpt, pieces)
    small = Bert(BertConfig(vocabulary=len(pieces), length=15, dim=16, depth=1, heads=2, hidden=32))
    published(tmp_path / "small", small, pieces)
    few = Bert(BertConfig(vocabulary=50, length=40, dim=16, depth=1, heads=2, hidden=32))
    published(tmp_path / "few", BertTagger(few, tags=3), pieces)
    for name, message in (
        ("gpt", "gpt must contain a BERT, RoBERTa or DistilBERT, got a Gpt"),
        ("small", "a question of 6 tokens and a window of 7 make a row of 16 tokens, but .*small reads at most 15"),
        ("few", rf"tokenizer.json has {len(pieces)} tokens, but the model has 50 embeddings"),
        ("none", "none"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(tmp_path / "run", model=answering.DEFAULT_MODEL, pretrained=tmp_path / name)
    (tmp_path / "small" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json: no such file; expected a tokenizer.json"):
        trained(
            tmp_path / "run",
            model=answering.DEFAULT_MODEL,
            pretrained=tmp_path / "small",
            windows=replace(NARROW, size=5, overlap=1),
        )
    assert not (tmp_path / "run").exists()


def test_any_function_from_a_tokenizer_to_a_config_is_a_model(tmp_path):
    def wide(tokenizer):
        return ReaderConfig(vocabulary=len(tokenizer), dim=4, hidden=12, heads=3)

    trained(tmp_path / "run", model=wide, vocabulary=WordVocabulary(size=9))
    answerer = Answerer.load(tmp_path / "run")
    assert answerer.model.config.hidden == 12
    assert answerer.alphabet is None
    assert len(answerer.tokenizer) == 9


def test_a_bert_has_places_for_the_longest_row(tmp_path):
    trained(tmp_path / "run", "bert", windows=WindowSettings(size=600, overlap=1))
    assert Answerer.load(tmp_path / "run").model.bert.config.length == 600 + 64 + 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 2}, "depth is only for a Bert, got kind='reader'"),
        ({"kind": "bert", "cell": "lstm"}, "cell is only for a reader, got kind='bert'"),
        ({"kind": "bert", "spelling": False}, "spelling is only for a reader, got kind='bert'"),
    ],
)
def test_settings_that_mean_nothing_for_a_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        AnsweringModelSettings(**settings)
