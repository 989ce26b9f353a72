"""Sketches of models and vocabularies: what means nothing for a kind is refused, not passed over."""

from __future__ import annotations

import pytest

from regard.data import Tokenizer
from regard.tasks import answering, captioning, classifiers, summarization, translation
from regard.tasks.image_inputs import ImageTransform
from regard.tasks.pairs import PairVocabulary
from regard.tasks.vocabulary import Vocabulary, WordVocabulary

WORDS = Tokenizer.words(["ein Haus"])


@pytest.mark.parametrize(
    ("sketch", "given", "message"),
    [
        (
            translation.TranslationModelSettings,
            {"cell": "lstm"},
            "cell is only for recurrent models, got a Transformer",
        ),
        (
            translation.TranslationModelSettings,
            {"kind": "rnn", "heads": 3},
            "heads is only for a Transformer, got kind='rnn'",
        ),
        (summarization.SummarizationModelSettings, {"heads": 2}, "heads is only for a Transformer, got kind='pointer'"),
        (
            summarization.SummarizationModelSettings,
            {"kind": "transformer", "cell": "gru"},
            "cell is only for recurrent models, got a Transformer",
        ),
        (
            summarization.SummarizationModelSettings,
            {"kind": "transformer", "coverage": 1.0},
            "coverage is only for recurrent models, got a Tra",
        ),
        (answering.AnsweringModelSettings, {"depth": 2}, "depth is only for a Bert, got kind='reader'"),
        (
            answering.AnsweringModelSettings,
            {"kind": "bert", "cell": "lstm"},
            "cell is only for a reader, got kind='bert'",
        ),
        (
            answering.AnsweringModelSettings,
            {"kind": "bert", "spelling": False},
            "spelling is only for a reader, got kind='bert'",
        ),
        (
            captioning.CaptioningModelSettings,
            {"kind": "transformer", "doubly": 1.0},
            "doubly is only for soft attention, got a Transformer",
        ),
        (
            captioning.CaptioningModelSettings,
            {"kind": "hard", "doubly": 1.0},
            "doubly is only for soft attention, got hard attention",
        ),
        (
            captioning.CaptioningModelSettings,
            {"kind": "soft", "reinforce": 0.5},
            "reinforce is only for hard attention, got soft attention",
        ),
        (
            captioning.CaptioningModelSettings,
            {"kind": "transformer", "entropy": 0.1},
            "entropy is only for hard attention, got a Transformer",
        ),
        (
            captioning.CaptioningModelSettings,
            {"kind": "soft", "heads": 8},
            "heads is only for a Transformer, got soft attention",
        ),
        (Vocabulary, {"split": "space"}, "split is only for words, got kind='bpe'"),
        (WordVocabulary, {"kind": "char", "split": "space"}, "split is only for words, got kind='char'"),
        (Vocabulary, {"load": "t.json", "size": 5}, "size is only for a vocabulary that is learned, got load='t.json'"),
        (
            WordVocabulary,
            {"load": "t.json", "kind": "bpe"},
            "kind is only for a vocabulary that is learned, got load='t.js",
        ),
        (
            PairVocabulary,
            {"load": "t.json", "joint": False},
            "joint is only for a vocabulary that is learned, got load='t",
        ),
    ],
)
def test_what_means_nothing_for_a_kind_is_refused(sketch, given, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        sketch(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention": "cbam"}, "attention is only for models of images, got texts"),
        ({"patch": 2}, "patch is only for models of images, got texts"),
        ({"kind": "pool", "depth": 5}, "depth is only for models with layers, got kind='pool'"),
        ({"kind": "bert", "queries": 2}, "queries is only for an rnn or a pool, got kind='bert'"),
    ],
)
def test_a_classifier_of_texts_takes_nothing_that_is_of_images(given, message):
    with pytest.raises(ValueError, match=f"{message}; leave it out"):
        classifiers.ClassificationModelSettings(**given).texts(WORDS, None, classes=2, limit=9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queries": 2}, "queries is only for models of texts, got images"),
        ({"spelling": True}, "spelling is only for models of texts, got images"),
        ({"kind": "vit", "attention": "cbam"}, "attention is only for a convnet, got kind='vit'"),
        ({"patch": 2}, "patch is only for a vit, got a convnet"),
    ],
)
def test_a_classifier_of_images_takes_nothing_that_is_of_texts(given, message):
    with pytest.raises(ValueError, match=f"{message}; leave it out"):
        classifiers.ClassificationModelSettings(**given).images(ImageTransform(size=8, channels=1), classes=2)


def test_one_table_for_both_sides_needs_one_vocabulary():
    other = Tokenizer.words(["a house"])
    assert translation.TranslationModelSettings(tied="all")(WORDS, WORDS).tied == "all"
    with pytest.raises(ValueError, match="tied='all' needs one vocabulary for both sides, got two; lea"):
        translation.TranslationModelSettings(tied="all")(WORDS, other)
