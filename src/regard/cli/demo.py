"""`regard demo`: four models with attention, trained on data made on the spot, and what they look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

import regard

from ..data import Captioned, Dates, Generated, Pair, Scenes, digits
from ..lens import Tape
from ..ops.weights import Weights
from ..tasks import Batching, PairVocabulary, captioning, classification, translation
from ..tasks.captioning import Describer
from ..tasks.classification import Classifier
from ..tasks.classifiers import Model as ClassifierModel
from ..tasks.image_inputs import Seeing
from ..tasks.translation import Translator
from ..tasks.word_alignment import layer_of
from ..train import Cosine, Recipe
from . import gallery
from .device import Device
from .gallery import Chapter, Example
from .terminal import said

DATES, SCENES = 40_000, 20_000  # to train on
TESTED = 500  # of each, never seen
LANGUAGES = ("de", "fr", "ru", "ja")  # of the dates that are shown


def demo(
    out: Annotated[Path, typer.Option(help="the folder for runs, pictures and pages")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="train each model for at most so many steps: a quick look")] = None,
    device: Device = None,
) -> None:
    """Train four small models with attention on built-in data, and show what they look at.

    Example:

        regard demo --out runs/demo

    Dates in 27 languages are translated to ISO 8601 by a recurrent network with Bahdanau's attention and by a
    Transformer, handwritten digits are told apart, and scenes of shapes described: less than five minutes on two
    cores. A demo that was stopped goes on where it was.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}; leave it out to train in full")
    began, chapters = time.monotonic(), []
    for name, chapter in CHAPTERS.items():
        said(f"\n{name}")
        chapters.append(chapter(out, steps, device))
        print(f"\n{chapters[-1].title}\n{chapters[-1]}\n", flush=True)
    page = gallery.save(chapters, out)
    print(f"{time.monotonic() - began:,.0f} seconds in all. Runs, pictures and pages are in {out}; to see them:\n")
    print(f"    python -m webbrowser -t {page.resolve().as_uri()}")


def recurrent_dates(out: Path, steps: int | None, device: str | None) -> Chapter:
    """Dates, by a recurrent network."""
    model = translation.Model(kind="rnn", dim=32, hidden=64, dropout=0.0, smoothing=0.0)
    recipe = _recipe(600, 7e-3, steps)
    return _dates("Dates, by a recurrent network with Bahdanau's attention", model, recipe, out / "dates-rnn", device)


def transformed_dates(out: Path, steps: int | None, device: str | None) -> Chapter:
    """Dates, by a Transformer."""
    model = translation.Model(dim=64, hidden=128, depth=2, heads=4, dropout=0.0, smoothing=0.0)
    return _dates("Dates, by a Transformer", model, _recipe(1100, 3.5e-3, steps), out / "dates-transformer", device)


def told_digits(out: Path, steps: int | None, device: str | None) -> Chapter:
    """Digits, by a convolutional network whose places look at each other."""
    run, test = out / "digits", digits("test")
    classification.train_images(
        digits("train"),
        out=run,
        recipe=_recipe(200, 3e-3, steps, weight_decay=0.05),
        model=ClassifierModel(kind="convnet", dim=64, attention="self", dropout=0.0),
        resume=True,
        device=device,
    )
    classifier = Classifier.load(run, device=device)
    measured = classifier.evaluate(test)
    print(measured["confusion"])
    chosen = [int((test.labels == label).argmax()) for label in (3, 5, 8)]
    images = [test.images[n] for n in chosen]
    found = classifier.classify(images)
    pictures = [out / f"digits-{test.classes[test.labels[n]]}.png" for n in chosen]
    for path, image, one, look in zip(pictures, images, found, classifier.looks(images), strict=True):
        y, x = look.shape
        title = f"{one.label}, by {one.probability:.0%}"
        regard.views.image(look.view(1, -1), image, patches=(y, x), title=title).savefig(path)
    return Chapter(
        title="Digits, by a convolutional network with attention between places",
        quality=f"accuracy {measured['accuracy'].value:.1f} % of {len(test)} digits it has never seen",
        examples=[
            Example(given=f"digit number {n}", found=one.label, right=test.classes[test.labels[n]])
            for n, one in zip(chosen, found, strict=True)
        ],
        pictures=pictures,
        page=_page(classifier.tape(images), out / "digits.html"),
    )


def described_scenes(out: Path, steps: int | None, device: str | None) -> Chapter:
    """Scenes of shapes, by a captioner."""
    run = out / "shapes"
    scenes, test = (
        [Captioned(scene.image, (scene.caption,), "") for scene in Generated(Scenes(), size=size, seed=seed)]
        for size, seed in ((SCENES, 1), (TESTED, 2))
    )
    captioning.train(
        scenes,
        out=run,
        recipe=_recipe(900, 2e-3, steps),
        model=captioning.Model(kind="transformer", dim=64, hidden=128, depth=2, channels=64, dropout=0.0),
        seeing=Seeing(size=32, rows=32),
        resume=True,
        device=device,
    )
    describer = Describer.load(run, device=device)
    measured = describer.evaluate(test, beam=1)
    shown = [scene for scene in test if " of " in scene.captions[0] or " above " in scene.captions[0]][:3]
    images = [scene.image for scene in shown]
    written = [one.text for one in describer.describe(images)]
    pictures = [out / f"shapes-{n}.png" for n in range(1, 4)]
    for path, image, text, look in zip(pictures, images, written, describer.looks(images, written), strict=True):
        _, y, x = look.shape
        regard.views.caption(look.flatten(1), image, describer.tokens(text), patches=(y, x)).savefig(path)
    return Chapter(
        title="Scenes, described by a captioner",
        quality=f"{measured['exact'].value:.1f} % of {TESTED} captions of new scenes are exactly right, "
        f"BLEU-4 {measured['bleu4'].value:.1f}",
        examples=[
            Example(given=f"scene {n}", found=text, right=scene.captions[0])
            for n, (scene, text) in enumerate(zip(shown, written, strict=True), 1)
        ],
        pictures=pictures,
        page=_page(describer.tape(images, written), out / "shapes.html"),
    )


CHAPTERS: dict[str, Callable[[Path, int | None, str | None], Chapter]] = {
    "1 of 4: dates, recurrent": recurrent_dates,
    "2 of 4: dates, Transformer": transformed_dates,
    "3 of 4: digits": told_digits,
    "4 of 4: shapes": described_scenes,
}


def _dates(title: str, model: translation.Model, recipe: Recipe, run: Path, device: str | None) -> Chapter:
    test = list(Generated(Dates(part="test"), size=TESTED, seed=2))
    translation.train(
        list(Generated(Dates(), size=DATES, seed=1)),
        out=run,
        recipe=recipe,
        model=model,
        vocabulary=PairVocabulary(kind="char", joint=False),
        batching=Batching(tokens=1536),
        resume=True,
        device=device,
    )
    translator = Translator.load(run, device=device)
    exact = translator.evaluate(test, beam=1)["exact"].value
    shown = [
        Generated(Dates(part="test", locales=(locale,), formats=("full",)), size=1, seed=seed)[0]
        for seed, locale in enumerate(LANGUAGES)
    ]
    written = [one.text for one in translator.translate([one.source for one in shown])]
    tape = translator.tape([Pair(one.source, text) for one, text in zip(shown, written, strict=True)])
    maps = _map(tape, layer_of(translator.models[0]))
    pictures = [run.with_name(f"{run.name}-{one.locale}.png") for one in shown]
    for path, one, text, look in zip(pictures, shown, written, maps, strict=True):
        rows, columns = [*text, "<end>"], [*one.source, "<end>"]
        look = look[: len(rows), : len(columns)]
        regard.views.heatmap(look, rows, columns, title=f"{one.source} is {text}").savefig(path)
    return Chapter(
        title=title,
        quality=f"{exact:.1f} % of {TESTED} dates it has never seen are exactly right",
        examples=[
            Example(given=one.source, found=text, right=one.target) for one, text in zip(shown, written, strict=True)
        ],
        pictures=pictures,
        page=_page(tape, run.with_name(f"{run.name}.html")),
    )


def _recipe(most: int, rate: float, steps: int | None, *, weight_decay: float = 0.0) -> Recipe:
    last = most if steps is None else min(steps, most)
    schedule = Cosine(rate, steps=last, warmup=min(50, last - 1))
    return Recipe(steps=last, rate=schedule, weight_decay=weight_decay, save_every=last, keep=1, log_every=100)


def _map(tape: Tape, layer: str) -> Tensor:
    """The weights of a layer, b i j, the mean over its heads."""
    A = tape[layer]
    assert isinstance(A, Weights)
    return A[...].mean(1)


def _page(tape: Tape, path: Path) -> Path:
    tape.page(name=path.stem).save(path)
    return path
