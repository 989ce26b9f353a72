"""Training examples of captioners: one for each caption, as long as it may be."""

from __future__ import annotations

import pytest
from PIL import Image

from regard.data import DataError, captions_tsv
from regard.tasks.caption_inputs import CaptionExamples, CaptionLengths, ExampleImages, texts_of
from regard.tasks.vocabulary import WordVocabulary
from tests.tasks.coloured_squares import SCENES


def test_every_caption_has_a_turn(tmp_path):
    tokenizer = WordVocabulary().learn(texts_of(SCENES))
    turns = CaptionExamples(SCENES, tokenizer, CaptionLengths(), say=print)
    said = [tokenizer.decode(turn["target"]) for turn in turns]
    assert said == list(texts_of(SCENES))
    assert len(turns) == len(turns.owners) == 15
    assert turns.longest == 6
    assert turns.owners[4] == 3
    assert all(turn["target"][-1] == tokenizer.eos for turn in turns)


def test_turns_of_files_are_those_of_their_pictures(tmp_path):
    for n, scene in enumerate(SCENES[:4]):
        Image.fromarray(scene.image).save(tmp_path / f"{n}.png")
    lines = [f"{n}.png\t{text}\n" for n, scene in enumerate(SCENES[:4]) for text in scene.captions]
    (tmp_path / "captions.tsv").write_text("".join(lines))
    files = captions_tsv(tmp_path / "captions.tsv", tmp_path)
    tokenizer = WordVocabulary().learn(texts_of(files))
    one, other = (CaptionExamples(some, tokenizer, CaptionLengths(), say=print) for some in (files, SCENES[:4]))
    assert len(one) == len(other) == 5
    assert list(one) == list(other)
    assert one.owners == other.owners


@pytest.mark.parametrize(("long", "count", "longest"), [("drop", 3, 4), ("truncate", 15, 4)])
def test_captions_that_are_too_long_are_dropped_or_cut_and_counted(long, count, longest):
    said = []
    tokenizer = WordVocabulary().learn(texts_of(SCENES))
    turns = CaptionExamples(SCENES, tokenizer, CaptionLengths(limit=4, long=long), say=said.append)
    assert (len(turns), turns.longest) == (count, longest)
    done = "dropped" if long == "drop" else "truncated"
    assert said == [f"12 of 15 captions have more than 4 tokens and were {done}"]


@pytest.mark.parametrize("lengths", [CaptionLengths(limit=4, long="error"), CaptionLengths(limit=2)])
def test_captions_that_may_not_be_so_long_are_named(lengths):
    tokenizer = WordVocabulary().learn(texts_of(SCENES))
    with pytest.raises(DataError, match=r"image 0: the caption has 6 tokens, more than \d, like 1\d of 15 captions; r"):
        CaptionExamples(SCENES, tokenizer, lengths, say=print)


def test_images_are_opened_only_when_they_are_asked_for():
    class Closed:
        def __len__(self):
            return 3

        def __getitem__(self, number):
            opened.append(number)
            return SCENES[number]

    opened = []
    images = ExampleImages(Closed())
    assert len(images) == 3
    assert opened == []
    assert images[2] is SCENES[2].image
    assert opened == [2]


def test_captions_of_files_are_read_without_their_images(tmp_path):
    for n in range(2):
        Image.fromarray(SCENES[n].image).save(tmp_path / f"{n}.png")
    (tmp_path / "captions.tsv").write_text("0.png\tone\n1.png\ttwo\n0.png\tthree\n")
    files = captions_tsv(tmp_path / "captions.tsv", tmp_path)
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(b"no image any more")
    assert sorted(texts_of(files)) == ["one", "three", "two"]
    tokenizer = WordVocabulary().learn(texts_of(files))
    turns = CaptionExamples(files, tokenizer, CaptionLengths(), say=print)
    names = {"one": 0, "two": 1, "three": 0}
    assert turns.owners == [names[tokenizer.decode(turn["target"])] for turn in turns]


def test_a_limit_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        CaptionLengths(limit=0)
    with pytest.raises(TypeError, match="long must be"):
        CaptionLengths(long="cut")
