"""Images as models take them: sizes, channels, augmentation, batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from regard.data import DataError, Images
from regard.tasks import image_inputs
from regard.tasks.classification import ExampleInputs
from regard.tasks.document_windows import WindowSettings
from regard.tasks.image_inputs import ImageSettings, ImageTransform, MappedBatches, shift_images
from regard.tasks.setup import Start
from regard.train import Group, Shuffled
from regard.train.dataclass_json import from_json, to_json

ALONE = Start(None, Group(), say=lambda line: None)


def images(shape=(5, 8, 8)):
    return Images(np.arange(np.prod(shape)).reshape(shape).astype(np.uint8), np.zeros(shape[0]))


class Files:
    """Images one by one, of any size."""

    def __getitem__(self, number):
        return SimpleNamespace(image=np.zeros((20, 30), np.uint8))


@pytest.mark.parametrize(
    ("seeing", "examples", "sight"),
    [
        (ImageSettings(), images(), ImageTransform(size=8, channels=1)),
        (ImageSettings(), images((5, 8, 8, 3)), ImageTransform(size=8, channels=3)),
        (ImageSettings(size=4, channels=3), images(), ImageTransform(size=4, channels=3)),
        (ImageSettings(), Files(), ImageTransform(size=64, channels=3)),
        (ImageSettings(size=16, channels=1), Files(), ImageTransform(size=16, channels=1)),
        (ImageSettings(size=6), images((5, 6, 9)), ImageTransform(size=6, channels=1)),
    ],
)
def test_a_sight_is_what_the_images_are_unless_told(seeing, examples, sight):
    assert seeing.transform_for(examples) == sight


def test_images_that_are_no_squares_want_a_size():
    with pytest.raises(DataError, match="the images have 6 x 9 pixels, but models need square images; pass size=6"):
        ImageSettings().transform_for(images((5, 6, 9)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"shift": -1}, "shift must be at least 0, got -1"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"channels": 2}, "channels must be 1 .grey. or 3 .colour., got 2"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ImageSettings(**settings)


def test_shifted_images_are_moved_and_black_comes_in():
    x = torch.rand(7, 3, 5, 6)
    by = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -2], [2, -1], [-2, 2]])
    expected = torch.zeros_like(x)
    for n, (down, right) in enumerate(by.tolist()):
        for y in range(5):
            for column in range(6):
                if 0 <= y - down < 5 and 0 <= column - right < 6:
                    expected[n, :, y, column] = x[n, :, y - down, column - right]
    assert torch.equal(shift_images(x, by), expected)
    assert torch.equal(shift_images(x, torch.zeros(7, 2, dtype=torch.long)), x)


def over(seeing, examples, **settings):
    """Batches of these images, their labels beside them."""
    labels = [{"label": int(label)} for label in examples.labels]
    pictures = ExampleInputs(examples, "image")
    return seeing.batches(labels, pictures, seeing.transform_for(examples), seed=0, start=ALONE, **settings)


def test_variation_moves_and_mirrors_and_changes_nothing_else():
    examples = images((200, 8, 8))
    torch.manual_seed(0)
    [plain] = over(ImageSettings(rows=200), examples)
    [varied] = over(ImageSettings(rows=200, shift=1, flip=True), examples)
    assert plain.keys() == varied.keys()
    assert torch.equal(plain["index"], varied["index"])
    assert plain["image"].shape == varied["image"].shape
    moves = [(down, right, flip) for down in (-1, 0, 1) for right in (-1, 0, 1) for flip in (False, True)]
    found = set()
    for one, other in zip(plain["image"], varied["image"], strict=True):
        for move in moves:
            made = shift_images(one[None], torch.tensor([move[:2]]))[0]
            if torch.equal(made.flip(-1) if move[2] else made, other):
                found.add(move)
                break
        else:
            pytest.fail("an image was neither moved nor mirrored")
    assert found == set(moves)


def test_there_must_be_examples():
    with pytest.raises(DataError, match="there are no examples; expected at least one"):
        ImageSettings().batches([], [], ImageTransform(size=8, channels=1), seed=0, start=ALONE)


@pytest.mark.parametrize("held", [0, 2**30])
def test_a_batch_shows_the_images_of_its_examples_whether_they_are_held_or_read_at_each_turn(held, monkeypatch):
    monkeypatch.setattr(image_inputs, "MAX_CACHED_BYTES", held)
    examples = images((7, 8, 8))
    owners = [3, 0, 6, 6, 1]
    fields = [{"target": [n] * (n + 1)} for n in range(5)]
    dealt = ImageSettings(rows=2).batches(
        fields, ExampleInputs(examples, "image"), ImageTransform(size=8, channels=1), owners=owners, seed=4, start=ALONE
    )
    seen = 0
    for batch in dealt:
        for index, image, target, length in zip(
            batch["index"], batch["image"], batch["target"], batch["target_lengths"], strict=True
        ):
            expected = torch.from_numpy(examples[owners[index]].image)[None].float() / 255
            assert torch.equal(image, expected)
            assert target[:length].tolist() == fields[index]["target"]
            seen += 1
    assert seen == 5


def test_images_that_are_held_are_read_once():
    class Counted(list):
        asked = 0

        def __getitem__(self, number):
            Counted.asked += 1
            return super().__getitem__(number)

    pictures = Counted(np.zeros((4, 8, 8), np.uint8))
    dealt = ImageSettings(rows=2).batches(
        [{"label": 0}] * 4, pictures, ImageTransform(size=8, channels=1), seed=0, start=ALONE
    )
    for _ in range(3):
        list(dealt)
    assert Counted.asked == 4


def test_changed_batches_stand_where_theirs_stand():
    batches = MappedBatches(Shuffled([1, 2, 3], seed=1), lambda batch: -batch)
    first = next(iter(batches))
    rest = MappedBatches(Shuffled([1, 2, 3], seed=1), lambda batch: -batch)
    rest.restore(batches.state())
    assert sorted([first, *rest]) == [-3, -2, -1]


@dataclass(frozen=True)
class Config:
    """A config as a checkpoint holds it."""

    transform: ImageTransform | None = None
    windows: WindowSettings | None = None


def test_renamed_classes_keep_the_names_that_earlier_runs_have_stored():
    assert to_json(Config(windows=WindowSettings()))["windows"]["kind"] == "Windows"
    written = {"transform": {"kind": "Sight", "size": 8, "channels": 1}, "windows": None}
    assert to_json(Config(transform=ImageTransform(size=8, channels=1))) == written
    assert from_json(Config, json.dumps(written), source="test").transform == ImageTransform(size=8, channels=1)
