"""Classification: what is learned of texts and images, found again, measured and shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regard.data import Images, Labelled, Tokenizer
from regard.models import (
    Bert,
    BertConfig,
    BertPretraining,
    Gpt,
    GptConfig,
    pretrained,
)
from regard.tasks import Batching, classification, run_folder
from regard.tasks.classification import Classifier
from regard.tasks.classifiers import ClassificationModelSettings
from regard.tasks.image_inputs import ImageSettings
from regard.train import Constant, Linear, Recipe, Silence, checkpoint

RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
WORDS = {"good": ("fine", "great", "witty"), "bad": ("dull", "poor", "long")}
SENTENCES = [
    (f"the {a} {thing} was {b}", label)
    for label, words in WORDS.items()
    for a in words
    for b in words
    for thing in ("film", "play")
]


class Reviews:
    """Labelled texts in memory."""

    classes = ("bad", "good")

    def __init__(self, texts=SENTENCES):
        self.texts = texts
        self.labels = np.array([self.classes.index(label) for _, label in texts])

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        return Labelled(self.texts[number][0], int(self.labels[number]))

    def where(self, number):
        return f"review {number}"


def bars(count=60, side=8, seed=0):
    """Bright bars on a dim ground: lying (0), standing (1), or none (2)."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = generator.integers(0, 60, (count, side, side)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        at = generator.integers(0, side)
        image[(at,) if label == 0 else (slice(None), at)] += 190 * np.uint8(label < 2)
    return Images(images, labels, classes=("lying", "standing", "none"))


def read(out, recipe=RECIPE, model=None, **settings):
    settings = {"model": model or ClassificationModelSettings(dim=16, dropout=0.0), "show": Silence()} | settings
    return classification.train_texts(settings.pop("examples", Reviews()), out=out, recipe=recipe, **settings)


def seen(out, recipe=RECIPE, model=None, **settings):
    settings = {
        "model": model or ClassificationModelSettings(dim=16, dropout=0.0),
        "seeing": ImageSettings(rows=20),
        "show": Silence(),
    } | settings
    return classification.train_images(settings.pop("examples", bars()), out=out, recipe=recipe, **settings)


TEXTS = {
    "rnn": ClassificationModelSettings(kind="rnn", dim=16, dropout=0.0),
    "spelled": ClassificationModelSettings(kind="rnn", dim=16, dropout=0.0, spelling=True, queries=2),
    "pool": ClassificationModelSettings(kind="pool", dim=16, dropout=0.0),
    "bert": ClassificationModelSettings(kind="bert", dim=16, heads=2, depth=2, dropout=0.0),
}
IMAGES = {
    "convnet": ClassificationModelSettings(kind="convnet", dim=16, dropout=0.0),
    "vit": ClassificationModelSettings(kind="vit", dim=32, heads=2, depth=2, patch=2, dropout=0.0),
    "mean": ClassificationModelSettings(kind="vit", dim=32, heads=2, depth=2, patch=2, dropout=0.0, pooling="mean"),
}
MORE = ["the great film was fine", "", "dull", "an unheard-of play, long and long and long", "witty"]


@pytest.fixture(scope="module", params=TEXTS)
def reader(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    read(out, model=TEXTS[request.param])
    return Classifier.load(out)


@pytest.fixture(scope="module", params=IMAGES)
def seer(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    seen(out, model=IMAGES[request.param])
    return Classifier.load(out)


@pytest.mark.learning
@pytest.mark.parametrize("kind", TEXTS)
def test_a_classifier_learns_to_tell_texts_apart_by_their_words(kind, tmp_path):
    steps = replace(RECIPE, steps=40, save_every=40, rate=Constant(5e-3))
    read(tmp_path / "run", steps, model=TEXTS[kind])
    classifier = Classifier.load(tmp_path / "run")
    assert classifier.evaluate(Reviews())["accuracy"].value == 100
    [found] = classifier.classify(["the great play was fine"])
    assert (found.label, list(found.probabilities)) == ("good", ["good", "bad"])
    assert found.probability == found.probabilities["good"] > 0.5


def test_attention_falls_on_the_words_that_tell(tmp_path):
    steps = replace(RECIPE, steps=150, save_every=150, rate=Constant(5e-3))
    read(tmp_path / "run", steps, model=TEXTS["pool"])
    classifier = Classifier.load(tmp_path / "run")
    for text, look in zip(["the great film was fine", "the film was dull"], [{1, 4}, {3}], strict=True):
        [weights] = classifier.looks([text])
        assert weights[list(look)].sum() > 1.2 * len(look) / len(weights)


@pytest.mark.learning
@pytest.mark.parametrize("kind", IMAGES)
def test_a_classifier_learns_to_tell_images_apart(kind, tmp_path):
    steps = replace(RECIPE, steps=100, save_every=100, rate=Constant(2e-3))
    seen(tmp_path / "run", steps, model=IMAGES[kind])
    found = Classifier.load(tmp_path / "run").evaluate(bars())
    assert found["accuracy"].value > 90
    assert found["loss"].value < 0.5


def test_each_text_is_classified_as_if_it_were_alone(reader):
    together = reader.classify(MORE)
    for text, found in zip(MORE, together, strict=True):
        [alone] = reader.classify([text])
        assert alone.probabilities == pytest.approx(found.probabilities, abs=1e-5)


def test_each_image_is_classified_as_if_it_were_alone(seer):
    images = list(bars().images[:5])
    for image, found in zip(images, seer.classify(images), strict=True):
        assert seer.classify([image])[0].probabilities == pytest.approx(found.probabilities, abs=1e-5)


def test_looks_are_shares_of_what_there_is_to_look_at(reader, seer):
    for text, look in zip(MORE, reader.looks(MORE), strict=True):
        assert len(look) == len(reader.reads.pieces(text))
        assert (look.sum().item(), look.min().item() >= 0) == (pytest.approx(1, abs=1e-5), True)
    for look in seer.looks(list(bars().images[:3])):
        assert look.shape[0] == look.shape[1]
        assert look.sum().item() == pytest.approx(1, abs=1e-5)


def test_pieces_are_what_tokens_stand_for(reader):
    start = ["<bos>"] if reader.reads.start else []
    assert reader.reads.pieces("the  dull film!") == [*start, "the", "dull", "film", "!"]
    assert reader.reads.pieces("") == (start or ["<eos>"])


def test_tapes_name_their_tokens_and_show_their_images(reader, seer):
    tape = reader.tape(["dull", "the great film"])
    start = ["<bos>"] if reader.reads.start else []
    for layer in tape.layers:
        assert tape.tokens_of(layer, batch=1)[1] == [*start, "the", "great", "film"]
        assert tape.tokens_of(layer, batch=0)[1] == [*start, "dull", "<pad>", "<pad>"]
    tape = seer.tape(list(bars().images[:2]))
    for layer in tape.layers:
        queries, keys = tape.pictures_of(layer, batch=1)
        assert queries.pixels.shape == keys.pixels.shape == (8, 8, 3)


def test_an_evaluation_is_what_the_logits_say(reader):
    reviews = Reviews()
    found = reader.evaluate(reviews)
    chances = [reader.classify([text])[0].probabilities for text, _ in SENTENCES]
    logits = torch.tensor([[one[name] for name in reviews.classes] for one in chances]).log()
    labels = torch.from_numpy(reviews.labels)
    right = (logits.argmax(1) == labels).double().mean().item()
    assert found["accuracy"].value == pytest.approx(100 * right)
    assert found["loss"].value == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-4)
    assert found["confusion"].counts.sum().item() == len(reviews)


@pytest.mark.parametrize("kind", ["spelled", "bert"])
def test_a_resumed_run_of_texts_ends_with_the_same_weights(kind, tmp_path):
    whole = read(tmp_path / "whole", model=TEXTS[kind])
    read(tmp_path / "parts", replace(RECIPE, steps=2), model=TEXTS[kind])
    parts = read(tmp_path / "parts", resume=True, model=replace(TEXTS[kind], dim=8))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_resumed_run_of_images_ends_with_the_same_weights(tmp_path):
    varied = ImageSettings(rows=20, shift=2, flip=True)
    whole = seen(tmp_path / "whole", seeing=varied)
    seen(tmp_path / "parts", replace(RECIPE, steps=2), seeing=varied)
    parts = seen(tmp_path / "parts", seeing=varied, resume=True)
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_spelling_changes_what_a_classifier_makes_of_an_unknown_word(tmp_path):
    read(tmp_path / "spelled", model=TEXTS["spelled"])
    read(tmp_path / "words", model=TEXTS["rnn"])
    one, other = (Classifier.load(tmp_path / name).classify(["wit", "greatest"]) for name in ("spelled", "words"))
    assert one[0].probabilities != one[1].probabilities
    assert other[0].probabilities == other[1].probabilities


def test_the_best_checkpoint_is_the_most_accurate(tmp_path):
    recipe = replace(RECIPE, evaluate_every=2, metric="accuracy", better="higher")
    outcome = read(tmp_path / "run", recipe, valid=Reviews(), model=TEXTS["pool"])
    assert outcome.score == Classifier.load(tmp_path / "run").evaluate(Reviews())["accuracy"].value


def test_a_text_is_read_as_far_as_texts_went_in_training(tmp_path):
    read(tmp_path / "run", model=TEXTS["bert"], batching=Batching(limit=6))
    classifier = Classifier.load(tmp_path / "run")
    cut, longer = classifier.classify(["the great film was fine", "the great film was fine " * 9])
    assert cut.probabilities == pytest.approx(longer.probabilities, abs=1e-5)


def test_attention_that_looks_nowhere_is_refused(tmp_path):
    seen(
        tmp_path / "run",
        model=ClassificationModelSettings(attention="squeeze", dim=16),
        recipe=replace(RECIPE, steps=1),
    )
    classifier = Classifier.load(tmp_path / "run")
    for show in (classifier.looks, classifier.tape):
        with pytest.raises(ValueError, match=r"no attention between positions, only attention='squeeze'; .*='self'"):
            show(list(bars().images[:1]))


def test_one_text_is_not_many(reader):
    for call in (reader.classify, reader.looks, reader.tape, reader.too_long):
        with pytest.raises(TypeError, match=r"examples must be a list of texts, got a single text; pass \[text\]"):
            call("a cat")


def test_a_reader_takes_texts_and_a_seer_images(reader, seer):
    for call in (reader.classify, reader.tape):
        with pytest.raises(TypeError, match=r"(?s)text must be text, got array.*\(ndarray\)"):
            call([np.zeros((2, 2), np.uint8)])
    for call in (seer.classify, seer.looks, seer.tape):
        with pytest.raises(
            TypeError, match=r"an image must be an array \(height, width\[, 3\]\), got str; see read_image"
        ):
            call(["a cat"])


def test_a_tape_holds_so_many_and_no_more(reader):
    for count in (0, 501):
        with pytest.raises(ValueError, match=f"a capture holds 1 to 500 examples, got {count}"):
            reader.tape(["dull"] * count)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    other = bars()
    other.classes = ("a", "b", "c")
    with pytest.raises(ValueError, match="kind must be rnn or pool or bert for texts, got 'vit'"):
        read(out, model=ClassificationModelSettings(kind="vit"))
    with pytest.raises(ValueError, match="kind must be convnet or vit for images, got 'rnn'"):
        seen(out, model=ClassificationModelSettings(kind="rnn"))
    with pytest.raises(
        ValueError, match="classes must be the same as in training: expected lying, standing, none, got a, b, c"
    ):
        seen(out, valid=other)
    with pytest.raises(ValueError, match="forcing needs a recurrent decoder, and classifiers have none"):
        read(out, replace(RECIPE, forcing=Linear(steps=9)))
    with pytest.raises(ValueError, match="there are no labelled examples"):
        read(out, valid=Reviews([]))
    assert not out.exists()


def test_a_run_of_texts_is_not_gone_on_with_images(tmp_path):
    read(tmp_path / "run", model=TEXTS["pool"])
    images = bars(20)
    with pytest.raises(ValueError, match="the run is a classifier of texts, got images; name another folder"):
        seen(tmp_path / "run", examples=images, resume=True)
    two = Images(images.images, images.labels % 2, classes=("bad", "good"))
    with pytest.raises(ValueError, match="the run is a classifier of texts, got images"):
        seen(tmp_path / "run", examples=two, resume=True)
    seen(tmp_path / "images", examples=two)
    with pytest.raises(ValueError, match="the run is a classifier of images, got texts"):
        read(tmp_path / "images", resume=True)


@pytest.fixture
def published(tmp_path):
    """A BERT and its tokenizer, as others publish them."""
    pieces = Tokenizer.wordpiece([text for text, _ in SENTENCES], size=90)
    sizes = {"dim": 16, "depth": 1, "heads": 2, "hidden": 32, "length": 40}
    bert = Bert(BertConfig(vocabulary=len(pieces), padding=pieces.pad, **sizes))
    pretrained.save(BertPretraining(bert), tmp_path / "bert")
    pieces.save(tmp_path / "bert" / "tokenizer.json")
    return tmp_path / "bert", bert, pieces


def test_a_pretrained_bert_is_begun_with(published, tmp_path):
    folder, bert, pieces = published
    told = {"out": tmp_path / "run", "pretrained": folder, "batching": Batching(limit=40), "show": Silence()}
    classification.train_texts(Reviews(), recipe=replace(RECIPE, steps=0), **told)
    classifier = Classifier.load(tmp_path / "run")
    assert classifier.reads.words == pieces
    for name, x in bert.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[f"bert.{name}"], x)
    outcome = classification.train_texts(Reviews(), recipe=RECIPE, resume=True, **told)
    assert outcome.step == 4


def theirs(folder, kind, *, labels):
    """A classifier that transformers has saved, small and never trained."""
    transformers = pytest.importorskip("transformers")
    pieces = Tokenizer.wordpiece([text for text, _ in SENTENCES], size=90)
    sizes = {"vocab_size": len(pieces), "num_labels": labels, "pad_token_id": pieces.pad}
    if kind == "DistilBert":
        sizes |= {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40}
    else:
        sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        sizes |= {"max_position_embeddings": 42}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(initializer_range=0.5, **sizes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    pieces.save(folder / "tokenizer.json")
    return model, pieces


class Told(Silence):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_a_classifier_of_others_says_what_it_said_there(kind, tmp_path):
    model, pieces = theirs(tmp_path / kind, kind, labels=2)
    told, reviews = Told(), Reviews()
    classification.train_texts(
        reviews,
        out=tmp_path / "run",
        pretrained=tmp_path / kind,
        recipe=replace(RECIPE, steps=0),
        batching=Batching(limit=40),
        show=told,
    )
    classifier = Classifier.load(tmp_path / "run")
    for text in ("the witty film was fine", ""):
        ids = torch.tensor([pieces.encode(text, bos=True, eos=True)])
        with torch.no_grad():
            expected = model(ids).logits.softmax(-1)[0]
        [found] = classifier.classify([text])
        assert torch.allclose(
            torch.tensor([found.probabilities[name] for name in reviews.classes]), expected, atol=1e-5
        )
    assert f"using the classification head of {tmp_path / kind}; its classes are, in order: bad, good" in told.lines


def test_texts_that_were_taken_for_labels_are_told_of(tmp_path):
    class Swapped(Reviews):
        classes = tuple(f"the film was {n}" for n in range(30))

    swapped, usual = Told(), Told()
    texts = Swapped([("good", name) for name in Swapped.classes])
    for examples, told in ((texts, swapped), (Reviews(), usual)):
        out = tmp_path / str(len(examples.classes))
        classification.train_texts(examples, out=out, recipe=replace(RECIPE, steps=0), show=told)
    what = "30 texts have 30 different labels; if the column of the texts was read as labels, name both columns"
    assert what in swapped.lines
    assert not any("read as labels" in line for line in usual.lines)


def test_a_single_class_is_told_of(tmp_path):
    class Praise(Reviews):
        classes = ("good",)

    told = Told()
    texts = Praise([("all heart", "good")])
    classification.train_texts(texts, out=tmp_path / "run", recipe=replace(RECIPE, steps=0), show=told)
    assert "all examples have the same label, good; give examples of at least two classes" in told.lines


def test_a_classifier_of_other_classes_is_said_to_be_new(published, tmp_path):
    theirs(tmp_path / "three", "Bert", labels=3)
    for folder, why in ((tmp_path / "three", "that of .*three has 3 classes"), (published[0], ".*bert has none")):
        told, out = Told(), tmp_path / f"{folder.name}-run"
        classification.train_texts(
            Reviews(),
            out=out,
            pretrained=folder,
            recipe=replace(RECIPE, steps=0),
            batching=Batching(limit=40),
            show=told,
        )
        assert any(re.fullmatch(f"the classification head for 2 classes is new: {why}", line) for line in told.lines)


def test_texts_end_as_they_did_in_training(published, tmp_path):
    told = {"pretrained": published[0], "batching": Batching(limit=6, long="truncate"), "show": Silence()}
    classification.train_texts(Reviews(), out=tmp_path / "run", recipe=replace(RECIPE, steps=1), **told)
    reads = Classifier.load(tmp_path / "run").reads
    assert [row[-1] for row in reads.read(["the film", ""])["ids"]] == [reads.words.eos] * 2
    said = json.loads((checkpoint.find(tmp_path / "run") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: said[key] for key in said.keys() - {"end", "pooler"}}))
    assert not run_folder.config_of(tmp_path, classification.TASK, classification.ClassificationConfig).end


def test_what_cannot_be_begun_with_is_named(published, tmp_path):
    folder, _, pieces = published
    few = Bert(BertConfig(vocabulary=9, dim=16, depth=1, heads=2, hidden=32))
    pretrained.save(few, tmp_path / "few")
    pieces.save(tmp_path / "few" / "tokenizer.json")
    pretrained.save(Gpt(GptConfig(vocabulary=9, dim=16, depth=1, heads=2)), tmp_path / "gpt")
    for settings, message in (
        (
            {"pretrained": folder, "batching": Batching(limit=41)},
            "limit must be at most 40, the maximum of .*bert, got",
        ),
        (
            {"pretrained": folder, "model": ClassificationModelSettings(kind="bert")},
            "pretrained includes its own model and vocabulary",
        ),
        ({"pretrained": tmp_path / "few"}, rf"tokenizer.json has {len(pieces)} tokens, but the model has 9 embeddings"),
        ({"pretrained": tmp_path / "gpt"}, "gpt must contain a BERT, RoBERTa or DistilBERT, got a Gpt"),
    ):
        with pytest.raises(ValueError, match=message):
            classification.train_texts(Reviews(), out=tmp_path / "run", recipe=RECIPE, **settings)
    assert not (tmp_path / "run").exists()
