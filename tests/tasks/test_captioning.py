"""Captioning: what is learned of scenes, found again, measured and shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.data import Tokenizer
from regard.decode import score
from regard.models import CaptionerConfig
from regard.tasks import captioning, metrics
from regard.tasks.caption_inputs import CaptionLengths, texts_of
from regard.tasks.captioning import CaptioningModelSettings, Describer
from regard.tasks.image_inputs import ImageSettings, ImageTransform
from regard.train import Constant, Linear, Recipe, Silence, checkpoint
from tests.tasks.coloured_squares import SCENES

RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
KINDS = ("soft", "hard", "transformer")


TINY = CaptioningModelSettings(dim=16, depth=1, channels=16, stages=2, dropout=0.0)


def trained(out, kind="soft", recipe=RECIPE, **settings):
    settings = {
        "model": replace(TINY, kind=kind),
        "seeing": ImageSettings(size=16, rows=6),
        "show": Silence(),
    } | settings
    return captioning.train(settings.pop("examples", SCENES), out=out, recipe=recipe, **settings)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, request.param)
    return out


IMAGES = [scene.image for scene in SCENES]


@pytest.mark.parametrize("kind", [pytest.param("soft", marks=pytest.mark.slow), "transformer"])
def test_a_captioner_learns_what_there_is_to_see_and_where(kind, tmp_path):
    only = [scene._replace(captions=scene.captions[:1]) for scene in SCENES]
    steps = replace(RECIPE, steps=120, save_every=120, rate=Constant(5e-3))
    trained(tmp_path / "run", kind, steps, examples=only, seeing=ImageSettings(size=16, rows=12))
    describer = Describer.load(tmp_path / "run")
    assert [one.text for one in describer.describe(IMAGES)] == [scene.captions[0] for scene in only]
    found = describer.evaluate(only)
    assert found["exact"].value == 100
    assert found["bleu4"].value == pytest.approx(100)
    assert found["loss"].value < 0.2


def test_each_image_is_described_as_if_it_were_alone(folder):
    describer = Describer.load(folder)
    for beam in (1, 3):
        together = describer.n_best(IMAGES[:4], n=beam, beam=beam)
        for image, best in zip(IMAGES, together, strict=False):
            [alone] = describer.n_best([image], n=beam, beam=beam)
            assert [one.text for one in alone] == [one.text for one in best]


def test_scores_are_what_the_loss_of_the_model_says(folder):
    describer = Describer.load(folder)
    [model], tokenizer = describer.models, describer.tokenizer
    for scene, scores in zip(SCENES, describer.score(SCENES), strict=True):
        assert len(scores) == len(scene.captions)
        for caption, gain in zip(scene.captions, scores, strict=True):
            target = torch.tensor([tokenizer.encode(caption, eos=True)])
            batch = {**describer.sight.batch([scene.image], torch.device("cpu")), "target": target}
            assert gain == pytest.approx(-model.loss(batch).sum.item(), rel=1e-4)


def test_the_loss_of_an_evaluation_is_that_of_all_tokens_of_all_captions(folder):
    describer = Describer.load(folder)
    tokens = sum(len(caption.split()) + 1 for caption in texts_of(SCENES))
    cost = -sum(value for values in describer.score(SCENES) for value in values)
    assert describer.evaluate(SCENES, beam=1)["loss"].value == pytest.approx(cost / tokens)


def test_an_evaluation_is_of_captions_as_long_as_they_may_be(folder):
    describer = Describer.load(folder)
    short = describer.describe([scene.image for scene in SCENES], beam=2, max_length=1)
    expected = metrics.bleu_of_many([one.text for one in short], [scene.captions for scene in SCENES], order=1)
    assert describer.evaluate(SCENES, beam=2, max_length=1)["bleu1"] == expected


def test_looks_are_a_map_for_each_token_and_its_end(folder):
    describer = Describer.load(folder)
    captions = ["red at the top left", "blue"]
    for caption, maps in zip(captions, describer.looks(IMAGES[:2], captions), strict=True):
        assert describer.tokens(caption) == [*caption.split(), "<end>"]
        assert maps.shape == (len(caption.split()) + 1, 4, 4)
        assert torch.allclose(maps.sum((1, 2)), torch.ones(len(maps)), atol=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_looks_are_those_of_a_forced_decoding(kind, tmp_path):
    trained(tmp_path / "run", kind)
    describer = Describer.load(tmp_path / "run")
    ids = describer.tokenizer.encode("blue at the top right", eos=True)
    batch = describer.sight.batch(IMAGES[4:5], describer.device)
    [[found]] = score(describer.models[0], batch, [[describer.tokenizer.bos]], [[ids]])
    [maps] = describer.looks(IMAGES[4:5], ["blue at the top right"])
    torch.testing.assert_close(maps.flatten(1), found.attention["source"].mean(0))


def test_a_tape_shows_images_and_names_words(folder):
    describer = Describer.load(folder)
    tape = describer.tape(IMAGES[:2], ["red at the top left", "blue"])
    layer = "decoder.attention" if "decoder.attention" in tape.layers else "decoder.blocks.0.cross"
    words, places = tape.tokens_of(layer, batch=1)
    assert words[:3] == ["▁blue", "<eos>", "<pad>"]
    assert (places[0], places[5]) == ("0,0", "1,1")
    assert tape.pictures_of(layer, batch=1)[1].pixels.shape == (16, 16, 3)
    assert tape.pictures_of(layer)[0] is None


def test_several_copies_of_a_model_write_as_the_model(folder):
    alone, twice = Describer.load(folder), Describer.load(folder, folder)
    assert [one.text for one in twice.describe(IMAGES[:3])] == [one.text for one in alone.describe(IMAGES[:3])]
    [one], [other] = (some.looks(IMAGES[:1], ["blue"]) for some in (alone, twice))
    assert torch.allclose(one, other)
    with pytest.raises(ValueError, match="a capture needs exactly one model, got 2"):
        twice.tape(IMAGES[:1], ["blue"])


def test_models_that_see_otherwise_are_no_ensemble(folder, tmp_path):
    trained(tmp_path / "other", seeing=ImageSettings(size=8))
    with pytest.raises(ValueError, match=r"an ensemble must share vocabulary and image size, but .*other.* differ"):
        Describer.load(folder, tmp_path / "other")
    with pytest.raises(ValueError, match="load needs at least one folder, got none"):
        Describer.load()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = trained(tmp_path / "whole", kind)
    trained(tmp_path / "parts", kind, replace(RECIPE, steps=2))
    parts = trained(tmp_path / "parts", kind, resume=True, model=replace(TINY, dim=8))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_other_processes_may_read_the_images_and_change_nothing(tmp_path):
    one, other = (trained(tmp_path / str(n), seeing=ImageSettings(size=16, rows=6, workers=n)) for n in (0, 1))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (one, other))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_best_checkpoint_has_the_highest_bleu(tmp_path):
    recipe = replace(RECIPE, evaluate_every=2, metric="bleu1", better="higher")
    outcome = trained(tmp_path / "run", recipe=recipe, valid=SCENES)
    assert outcome.score == Describer.load(tmp_path / "run").evaluate(SCENES, beam=1)["bleu1"].value


def test_a_sketch_is_a_config():
    tokenizer = Tokenizer.words(["a b"])
    config = CaptioningModelSettings(kind="transformer", channels=64, stages=3)(
        tokenizer, ImageTransform(size=32, channels=1)
    )
    assert type(config) is CaptionerConfig
    assert (config.widths, config.channels, config.hidden, config.layers) == ((16, 32, 64), 1, 1024, 3)
    assert CaptioningModelSettings(dim=32)(tokenizer, ImageTransform(size=32, channels=3)).hidden == 64


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="images of 2 pixels per side cannot be halved 2 times; pass fewer stages"):
        trained(out, seeing=ImageSettings(size=2))
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        CaptioningModelSettings(stages=0)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        CaptionLengths(limit=0)
    with pytest.raises(ValueError, match="valid has no images"):
        trained(out, valid=[])
    with pytest.raises(ValueError, match="forcing is not supported for captioners"):
        trained(out, recipe=replace(RECIPE, forcing=Linear(steps=9)))
    assert not out.exists()


def test_a_tape_holds_so_many_and_no_more(folder):
    with pytest.raises(ValueError, match="a capture holds 1 to 500 images, got 0"):
        Describer.load(folder).tape([], [])


def test_one_image_is_not_taken_for_many(folder):
    with pytest.raises(
        TypeError, match=r"images must be a sequence of images, got one image of shape \(32, 32, 3\); pass \[image\]"
    ):
        Describer.load(folder).describe(np.zeros((32, 32, 3), np.uint8))


def test_captions_of_another_number_than_the_images_are_counted(folder):
    describer = Describer.load(folder)
    for show in (describer.looks, describer.tape):
        with pytest.raises(ValueError, match="each image needs one caption, got 1 captions for 2 images"):
            show(IMAGES[:2], ["blue"])
        with pytest.raises(TypeError, match=r"captions must be a list of texts, got a single text; pass \[text\]"):
            show(IMAGES[:2], "hi")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "transformer", "doubly": 1.0}, "doubly is only for soft attention, got a Transformer"),
        ({"kind": "hard", "doubly": 1.0}, "doubly is only for soft attention, got hard attention"),
        ({"kind": "soft", "reinforce": 0.5}, "reinforce is only for hard attention, got soft attention"),
        ({"kind": "transformer", "entropy": 0.1}, "entropy is only for hard attention, got a Transformer"),
        ({"kind": "soft", "heads": 8}, "heads is only for a Transformer, got soft attention"),
    ],
)
def test_settings_that_mean_nothing_for_a_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*; leave it out"):
        CaptioningModelSettings(**settings)
