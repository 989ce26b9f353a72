"""`regard train captioning`, `caption`, and `evaluate` and `score` of a captioner."""

from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from regard.data import captions_tsv, read_image
from regard.lens import Tape
from regard.tasks.captioning import Describer
from tests.cli.commands import SMALL, run, well

pytestmark = pytest.mark.commands


def test_images_have_a_caption_each(captioner, files):
    paths = [files / "scenes" / f"{n}.png" for n in range(3)]
    lines = well("caption", captioner, *paths, "--beam", 2).lines
    found = Describer.load(captioner).describe([read_image(path) for path in paths], beam=2)
    assert lines == [f"{path}\t{one.text}" for path, one in zip(paths, found, strict=True)]


def test_the_best_few_come_with_their_scores(captioner, files):
    path = files / "scenes" / "0.png"
    lines = well("caption", captioner, path, "--beam", 3, "--nbest", 2).lines
    [best] = Describer.load(captioner).n_best([read_image(path)], n=2, beam=3)
    assert lines == [f"{path}\t{one.text}\t{one.score:.4f}" for one in best]


def test_captions_that_do_not_end_are_counted(captioner, files):
    path, describer = files / "scenes" / "0.png", Describer.load(captioner)
    for flags, most in (((), describer.longest * 3 // 2 + 10), (("--max-length", 1), 1)):
        ended = well("caption", captioner, path, "--beam", 1, *flags)
        [found] = describer.describe([read_image(path)], beam=1, max_length=most)
        told = f"1 of 1 captions reached the maximum of {most} tokens before they ended; raise it with --max-length"
        assert (told in ended.err) == (not found.finished)
        assert ended.lines == [f"{path}\t{found.text}"]
    assert not found.finished


def test_where_words_looked_is_a_picture_or_a_tape(captioner, files, tmp_path):
    path = files / "scenes" / "0.png"
    well("caption", captioner, path, "--attention", tmp_path / "a.png")
    assert imread(tmp_path / "a.png").ndim == 3
    well("caption", captioner, path, "--attention", tmp_path / "a.safetensors")
    tape = Tape.load(tmp_path / "a.safetensors")
    assert tape.pictures_of("decoder.attention")[1].pixels.shape == (32, 32, 3)


def test_an_evaluation_prints_each_number(captioner, files):
    flags = ["--captions", files / "captions.tsv", "--images", files / "scenes", "--beam", 2, "--max-length", 1]
    lines = well("evaluate", captioner, *flags).lines
    examples = captions_tsv(files / "captions.tsv", files / "scenes")
    found = Describer.load(captioner).evaluate(examples, beam=2, max_length=1)
    assert [line.split()[:2] for line in lines] == [[name, f"{x.value:.2f}"] for name, x in found.items()]
    assert list(found) == ["bleu1", "bleu2", "bleu3", "bleu4", "exact", "loss"]
    assert "nrefs:2" in lines[0]


def test_scores_are_log_probabilities_a_caption(captioner, files):
    flags = ["--captions", files / "captions.tsv", "--images", files / "scenes"]
    printed = [float(line) for line in well("score", captioner, *flags).lines]
    found = Describer.load(captioner).score(captions_tsv(files / "captions.tsv", files / "scenes"))
    assert printed == pytest.approx([value for some in found for value in some], abs=1e-4)
    assert len(printed) == 16


def test_captions_come_as_json_too(files, tmp_path):
    records = [{"image": f"{n}.png", "caption": ["a shape", "shapes"]} for n in range(4)]
    (tmp_path / "captions.json").write_text(json.dumps(records))
    data = ["--captions", tmp_path / "captions.json", "--images", files / "scenes", "--size", 16, "--stages", 2]
    for kind, own in (("hard", ["--reinforce", 0.5, "--entropy", 0.01]), ("transformer", ["--heads", 2])):
        flags = [*data, "--features", 8, "--model", kind, *own, *SMALL, "--steps", 1]
        well("train", "captioning", *flags, "--out", tmp_path / kind)
        config = json.loads((tmp_path / kind / "step-00000001" / "config.json").read_text())
        assert config["model"]["attention"] == kind
        assert config["model"]["widths"] == [4, 8]
        assert all(config["model"][flag[2:]] == value for flag, value in zip(own[::2], own[1::2], strict=True))


def test_a_run_goes_on_by_its_name_alone(files, tmp_path):
    flags = ["--captions", files / "captions.tsv", "--images", files / "scenes", "--size", 16, "--batch", 5]
    size = ["--features", 8, *SMALL]
    well("train", "captioning", *flags, *size, "--out", tmp_path / "whole")
    well("train", "captioning", *flags, *size, "--steps", 2, "--out", tmp_path / "parts")
    well("train", "captioning", "--out", tmp_path / "parts", "--resume", "--steps", 4)
    weights = [tmp_path / run / "step-00000004" / "model.safetensors" for run in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_several_images_fit_no_picture(captioner, files, tmp_path):
    path = files / "scenes" / "0.png"
    ended = run("caption", captioner, path, path, "--attention", tmp_path / "a.png")
    assert ended.code == 2
    assert "error: --attention a.png is a picture of one example, got more; give one example, or write" in ended.err
    assert list(tmp_path.iterdir()) == []
