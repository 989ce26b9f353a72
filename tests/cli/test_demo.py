"""`regard demo`: from nothing to four models, their figures and pages."""

from __future__ import annotations

import re

import pytest
from matplotlib.image import imread

from regard.cli.demo import CHAPTERS, DemoChapter, DemoExample, DemoPicture, save_page
from tests.cli.commands import run, well

NAMES = ("dates-rnn", "dates-transformer", "digits", "shapes")
BARS = {"dates-rnn": 95, "dates-transformer": 95, "digits": 97, "shapes": 95}


@pytest.fixture
def quick(monkeypatch):
    """Little data to make and to test on."""
    for kind in ("TRAINING_DATES", "TRAINING_SCENES"):
        monkeypatch.setattr(f"regard.cli.demo.{kind}", 200)
    monkeypatch.setattr("regard.cli.demo.TEST_EXAMPLES", 20)


@pytest.mark.processes
def test_a_quick_look_runs_from_end_to_end_and_goes_on_where_it_was(quick, tmp_path):
    out = tmp_path / "demo"
    ended = well("demo", "--out", out, "--steps", 2)
    assert len(re.findall(r"\d % of \d+ ", ended.out)) == 4
    assert ended.lines[-3] == f"    python -m webbrowser -t {(out / 'index.html').as_uri()}"
    assert ended.lines[-1].startswith("Look first at the dates: ")
    index = (out / "index.html").read_text()
    for name in NAMES:
        assert (out / name / "step-00000002").is_dir()
        assert f'href="{name}.html"' in index
        assert (out / f"{name}.html").read_text().startswith("<!doctype html>")
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) == 4 + 4 + 3 + 3
    assert all(imread(path).ndim == 3 for path in pictures)
    assert all(f'src="{path.name}"' in index for path in pictures)
    captions = re.findall(r"<img [^>]*><figcaption>([^<]{60,})\.</figcaption>", index)
    assert len(captions) == len(pictures)
    again = well("demo", "--out", out, "--steps", 2)
    assert again.err.count("resuming from") == 4
    assert _numbers(again.out) == _numbers(ended.out)


def test_a_demo_of_no_steps_is_refused(tmp_path):
    ended = run("demo", "--out", tmp_path / "demo", "--steps", 0)
    assert (ended.code, ended.err) == (2, "error: --steps must be at least 1, got 0; leave it out to train in full\n")
    assert list(tmp_path.iterdir()) == []


def test_whatever_a_model_writes_is_text_on_the_page(tmp_path):
    hostile = '<script>alert("1")</script>'
    example = DemoExample(given=hostile, found=hostile, right="a")
    made = {"title": hostile, "quality": hostile, "page": tmp_path / 'a".html'}
    picture = DemoPicture(path=tmp_path / "<b>.png", caption=hostile)
    chapter = DemoChapter(**made, examples=[example], pictures=[picture])
    page = save_page([chapter], tmp_path).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert 'href="a&quot;.html"' in page
    assert "<td class=wrong>&lt;script&gt;" in page
    assert "default-src 'none'" in page


class Stop(Exception):
    """Raised in place of training."""


@pytest.mark.parametrize("name", CHAPTERS)
def test_no_model_of_the_demo_warms_up_for_more_than_a_fifth_of_its_steps(name, quick, monkeypatch, tmp_path):
    recipes = []

    def train(*_, recipe, **__):
        recipes.append(recipe)
        raise Stop

    for task in ("translation.train", "classification.train_images", "captioning.train"):
        monkeypatch.setattr(f"regard.cli.demo.{task}", train)
    for steps in (None, 200, 20, 2):
        with pytest.raises(Stop):
            CHAPTERS[name](tmp_path, steps, None)
        assert recipes[-1].rate.warmup <= recipes[-1].steps / 5


@pytest.mark.slow
def test_the_demo_keeps_what_it_promises(tmp_path):
    ended = well("demo", "--out", tmp_path / "demo")
    found, [seconds] = _numbers(ended.out), re.findall(r"(\d+) seconds in all", ended.out)
    assert len(found) == len(BARS)
    assert int(seconds) <= 300, "more than five minutes; were two cores free?"
    for (name, least), value in zip(BARS.items(), found, strict=True):
        assert value >= least, name


def _numbers(out):
    """The quality of each model, in the order they are trained."""
    return [float(value) for value in re.findall(r"(\d+\.\d) % of \d+ ", out)]
