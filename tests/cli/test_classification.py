"""`regard train classification`, `classify`, and `evaluate` of a classifier."""

from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from regard.data import labelled_tsv, npz_images, read_image
from regard.lens import Tape
from regard.tasks.classification import Classifier
from tests.cli.commands import SMALL, run, well
from tests.cli.tiny_datasets import REVIEWS

pytestmark = pytest.mark.commands

DIGITS = ("--images", "{files}/digits.npz")


def test_lines_have_a_class_and_its_probability_each(critic):
    lines = well("classify", critic, stdin="\n".join(REVIEWS)).lines
    found = Classifier.load(critic).classify(REVIEWS)
    assert lines == [f"{one.label}\t{one.probability:.4f}" for one in found]


def test_the_likeliest_classes_come_in_order(critic):
    [line] = well("classify", critic, "--top", 2, stdin="a great film\n").lines
    first, p, second, q = line.split("\t")
    assert {first, second} == {"good", "bad"}
    assert float(p) >= float(q)
    assert float(p) + float(q) == pytest.approx(1, abs=2e-4)


def test_images_are_named_with_their_class(seer, files):
    paths = sorted((files / "scenes").iterdir())[:3]
    lines = well("classify", seer, *paths).lines
    found = Classifier.load(seer).classify([read_image(path) for path in paths])
    expected = [f"{path}\t{one.label}\t{one.probability:.4f}" for path, one in zip(paths, found, strict=True)]
    assert lines == expected


def test_what_was_looked_at_is_a_picture_or_a_tape(critic, seer, files, tmp_path):
    well("classify", critic, "--attention", tmp_path / "text.png", stdin="a great film\n")
    well("classify", seer, files / "scenes" / "0.png", "--attention", tmp_path / "image.png")
    assert all(imread(tmp_path / name).ndim == 3 for name in ("text.png", "image.png"))
    well("classify", critic, "--attention", tmp_path / "a.safetensors", stdin="a great film\nwit\n")
    tape = Tape.load(tmp_path / "a.safetensors")
    assert tape.tokens_of("pool", batch=1)[1] == ["wit", "<pad>", "<pad>"]
    well("classify", seer, files / "scenes" / "0.png", "--attention", tmp_path / "b.safetensors")
    tape = Tape.load(tmp_path / "b.safetensors")
    assert tape.pictures_of(tape.layers[0])[0].pixels.shape == (8, 8, 3)


def test_an_evaluation_prints_the_numbers_and_who_was_taken_for_whom(critic, files):
    lines = well("evaluate", critic, "--labelled", files / "reviews.tsv").lines
    classifier = Classifier.load(critic)
    found = classifier.evaluate(labelled_tsv(files / "reviews.tsv", classes=classifier.classes))
    assert [line.split()[:2] for line in lines[:3]] == [
        [name, f"{found[name].value:.2f}"] for name in ("accuracy", "f1", "loss")
    ]
    assert lines[3].startswith("confusion   rows: true class")
    assert "\n".join(lines[4:]) == str(found["confusion"])


@pytest.mark.parametrize(
    "given",
    [
        ["--text", "{files}/reviews.txt", "--labels", "{files}/reviews.labels"],
        ["--labelled", "{files}/named.tsv", "--text-column", "text", "--label-column", "class"],
    ],
)
def test_labelled_texts_come_in_two_files_or_with_named_columns(given, critic, files):
    told = well("evaluate", critic, *(one.format(files=files) for one in given)).out
    assert told == well("evaluate", critic, "--labelled", files / "reviews.tsv").out


@pytest.mark.parametrize(
    ("given", "classes", "channels"),
    [
        (["--images", "{files}/digits.idx", "--labels", "{files}/digits.labels"], 10, 1),
        (["--images", "{files}/cifar"], 10, 3),
        (["--images", "{files}/hundred.bin"], 100, 3),
        (["--images", "{files}/forms", "--size", "16"], 3, 3),
        (["--images", "{files}/digits.npz", "--model", "vit", "--heads", "2", "--shift", "1", "--flip"], 10, 1),
        (["--images", "{files}/digits.npz", "--attention", "squeeze", "--channels", "3"], 10, 3),
    ],
)
def test_images_come_in_many_formats(given, classes, channels, files, tmp_path):
    flags = [one.format(files=files) for one in given]
    well("train", "classification", *flags, "--batch", 8, *SMALL, "--steps", 1, "--out", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "step-00000001" / "config.json").read_text())
    assert len(config["classes"]) == classes
    assert config["sight"]["channels"] == channels


def test_a_run_goes_on_by_its_name_alone(files, tmp_path):
    flags = ["--images", files / "digits.npz", "--batch", 8, "--shift", 1, *SMALL]
    well("train", "classification", *flags, "--out", tmp_path / "whole")
    well("train", "classification", *flags, "--steps", 2, "--out", tmp_path / "parts")
    well("train", "classification", "--out", tmp_path / "parts", "--resume", "--steps", 4)
    weights = [tmp_path / run / "step-00000004" / "model.safetensors" for run in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


LONG = "dull " * 10


def test_what_is_not_read_of_texts_is_counted(critic, files, tmp_path):
    told = "1 of 2 texts have more than 9 tokens; only the first 9 were read"
    assert told in well("classify", critic, stdin=f"{LONG}\nso dull\n").err
    assert "tokens" not in well("classify", critic, stdin="so dull\n").err
    (tmp_path / "long.tsv").write_text(f"bad\t{LONG}\ngood\twit\n")
    assert told in well("evaluate", critic, "--labelled", tmp_path / "long.tsv").err
    assert "tokens" not in well("evaluate", critic, "--labelled", files / "reviews.tsv").err


def test_what_is_not_read_of_texts_to_validate_by_is_counted_once(files, tmp_path):
    (tmp_path / "long.tsv").write_text(f"bad\t{LONG}\ngood\twit\n")
    data = ["--labelled", files / "reviews.tsv", "--valid-labelled", tmp_path / "long.tsv", "--limit", 9]
    ended = well("train", "classification", *data, *SMALL, "--out", tmp_path / "run")
    told = "1 of 2 validation texts have more than 9 tokens; only the first 9 are read"
    assert ended.err.count(told) == 1


def test_images_are_seen_whole(seer, files):
    assert "tokens" not in well("classify", seer, files / "scenes" / "0.png").err
    assert "tokens" not in well("evaluate", seer, "--images", files / "digits.npz").err


def test_attention_of_several_fits_no_picture(critic, tmp_path):
    ended = run("classify", critic, "--attention", tmp_path / "a.png", stdin="a\nb\n")
    assert ended.code == 2
    assert "error: --attention a.png is a picture of one example, got more; give one example, or write" in ended.err
    assert "a capture with --attention a.safetensors and open it with regard view\n" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_the_classes_of_a_run_are_those_of_its_training(seer, files):
    classifier = Classifier.load(seer)
    assert classifier.classes == npz_images(files / "digits.npz").classes
