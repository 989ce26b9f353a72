"""Settings of classifiers: the config of each kind, and what means nothing for it."""

from __future__ import annotations

import pytest

from regard.data import Tokenizer
from regard.models import (
    AttentionConvNet,
    AttentionConvNetConfig,
    BertClassifier,
    BertConfig,
    TextClassifier,
    TextClassifierConfig,
    ViTClassifier,
    ViTConfig,
)
from regard.tasks.classifiers import ClassificationModelSettings, build_model
from regard.tasks.image_inputs import ImageTransform

WORDS = Tokenizer.words(["ein Haus"])


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (ClassificationModelSettings(), TextClassifierConfig),
        (ClassificationModelSettings(kind="pool"), TextClassifierConfig),
        (ClassificationModelSettings(kind="bert"), BertConfig),
    ],
)
def test_settings_of_text_models_make_the_config_of_their_kind(model, kind):
    network = model.texts(WORDS, None, classes=2, limit=50)
    assert type(network) is kind
    assert network.vocabulary == len(WORDS)
    assert getattr(network, "layers", 1) == (0 if model.kind == "pool" else 1)


@pytest.mark.parametrize(("size", "widths"), [(8, (64, 128)), (28, (32, 64, 128)), (4, (128,)), (224, (32, 64, 128))])
def test_a_convnet_has_as_many_stages_as_the_image_can_be_halved(size, widths):
    network = ClassificationModelSettings(attention="none").images(ImageTransform(size=size, channels=3), classes=5)
    assert type(network) is AttentionConvNetConfig
    assert (network.widths, network.attention, network.channels) == (widths, None, 3)


@pytest.mark.parametrize(("size", "patch"), [(8, 1), (28, 2), (32, 4), (224, 28), (7, 1), (64, 8)])
def test_patches_are_an_eighth_of_the_image_or_less(size, patch):
    network = ClassificationModelSettings(kind="vit").images(ImageTransform(size=size, channels=1), classes=5)
    assert type(network) is ViTConfig
    assert network.patch == patch
    assert ClassificationModelSettings(kind="vit", patch=size).images(
        ImageTransform(size=size, channels=1), classes=5
    ).grid == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bert", "smoothing": 0.1}, "smoothing is only for rnn, pool and convnet, got kind='bert'"),
        ({"kind": "vit", "spelling": True}, "spelling is only for rnn and pool, got kind='vit'"),
        ({"kind": "convnet", "pooling": "mean"}, "pooling is only for vit, got kind='convnet'; leave it out"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ClassificationModelSettings(**settings)


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
        ClassificationModelSettings(**given).texts(WORDS, None, classes=2, limit=9)


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
        ClassificationModelSettings(**given).images(ImageTransform(size=8, channels=1), classes=2)


@pytest.mark.parametrize(
    ("kind", "model"), [("rnn", TextClassifier), ("pool", TextClassifier), ("bert", BertClassifier)]
)
def test_a_config_of_texts_is_built_by_its_kind(kind, model):
    config = ClassificationModelSettings(kind=kind, dim=8, heads=2).texts(WORDS, None, classes=3, limit=5)
    built = build_model(config, classes=3)
    assert type(built) is model


@pytest.mark.parametrize(("kind", "model"), [("convnet", AttentionConvNet), ("vit", ViTClassifier)])
def test_a_config_of_images_is_built_by_its_kind(kind, model):
    config = ClassificationModelSettings(kind=kind, dim=8, heads=2).images(
        ImageTransform(size=8, channels=1), classes=3
    )
    assert type(build_model(config, classes=3)) is model


@pytest.mark.parametrize(
    ("kind", "hidden", "widths"), [("rnn", None, (16, 1)), ("rnn", 5, (5, 1)), ("pool", None, (16, 0))]
)
def test_widths_and_layers_that_are_left_out_depend_on_the_kind(kind, hidden, widths):
    config = ClassificationModelSettings(kind=kind, dim=8, hidden=hidden).texts(WORDS, None, classes=2, limit=5)
    assert (config.hidden, config.layers) == widths
    assert config.characters is None


def test_several_queries_are_kept_apart_and_letters_are_read_if_they_are_given():
    one, two = (ClassificationModelSettings(queries=n).texts(WORDS, WORDS, classes=2, limit=5) for n in (1, 2))
    assert (one.apart, two.apart) == (0.0, 0.03)
    assert one.characters == len(WORDS)


def test_a_bert_has_positions_for_the_longest_text_alone():
    config = ClassificationModelSettings(kind="bert", depth=3).texts(WORDS, None, classes=2, limit=57)
    assert (config.length, config.depth, config.hidden, config.vocabulary) == (57, 3, 512, len(WORDS))


def test_a_kind_of_the_other_medium_is_refused():
    with pytest.raises(ValueError, match="kind must be rnn or pool or bert for texts, got 'vit'"):
        ClassificationModelSettings(kind="vit").texts(WORDS, None, classes=2, limit=5)
    with pytest.raises(ValueError, match="kind must be convnet or vit for images, got 'bert'"):
        ClassificationModelSettings(kind="bert").images(ImageTransform(size=8, channels=1), classes=2)
