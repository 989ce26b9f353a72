"""`regard demo`: train four small models on generated data, and show their attention on one HTML page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
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
from ..tasks.classifiers import ClassificationModelSettings
from ..tasks.image_inputs import ImageSettings
from ..tasks.translation import Translator
from ..tasks.word_alignment import layer_of
from ..train import Cosine, Recipe
from ..train.checkpoint import write_text
from .device import Device
from .terminal import print_status

TRAINING_DATES, TRAINING_SCENES = 40_000, 20_000  # numbers of training examples
TEST_EXAMPLES = 500  # for each model
SHOWN_LOCALES = ("de", "fr", "ru", "ja")

POLICY = "default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin-top:3rem}img{max-width:100%;border:1px solid #ddd}"
    "figure{margin:1rem 0}figcaption{color:#555;max-width:45rem}"
    "td{padding:.1rem 1.5rem .1rem 0}td.wrong{color:#b00}"
)


@dataclass(frozen=True, kw_only=True)
class DemoExample:
    """The input of a model, its output, and the right answer."""

    given: str
    found: str
    right: str

    def __str__(self) -> str:
        aside = "" if self.found == self.right else f"   (right: {self.right})"
        return f"  {self.given}  ->  {self.found}{aside}"


@dataclass(frozen=True, kw_only=True)
class DemoPicture:
    """A picture of attention, and a sentence on what to see in it."""

    path: Path
    caption: str

    def html(self, folder: Path) -> str:
        """Return the picture over its sentence, with a link relative to `folder`."""
        source, caption = escape(self.path.relative_to(folder).as_posix()), escape(self.caption)
        return f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


@dataclass(frozen=True, kw_only=True)
class DemoChapter:
    """One model: its quality, a few examples, pictures of its attention, and the page that shows all of it."""

    title: str
    quality: str
    examples: Sequence[DemoExample]
    pictures: Sequence[DemoPicture]
    page: Path

    def __str__(self) -> str:
        return "\n".join([self.quality, *map(str, self.examples)])

    def html(self, folder: Path) -> str:
        """Return the chapter as HTML, with links relative to `folder`."""
        rows = "".join(
            f"<tr><td>{escape(one.given)}</td><td{'' if one.found == one.right else ' class=wrong'}>"
            f"{escape(one.found)}</td></tr>"
            for one in self.examples
        )
        shown = "".join(picture.html(folder) for picture in self.pictures)
        link = escape(self.page.relative_to(folder).as_posix())
        return (
            f"<h2>{escape(self.title)}</h2><p>{escape(self.quality)}</p><table>{rows}</table>{shown}"
            f'<p><a href="{link}">Open the viewer: every layer, head and token</a></p>'
        )


def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, pictures and pages.")] = Path("runs/demo"),
    steps: Annotated[
        int | None,
        typer.Option(
            help="Train each model for at most this number of steps, for a quick look. Default: full training."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Train four small models with attention on built-in data, and show their attention.

    Example:

        regard demo --out runs/demo

    A recurrent network with Bahdanau's attention and a Transformer translate dates from 27 languages to ISO 8601, a
    convolutional network classifies handwritten digits, and a captioner describes scenes of shapes. Training takes less
    than five minutes on two CPU cores. Run the command again to resume a demo that was interrupted.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}; leave it out to train in full")
    began, chapters = time.monotonic(), []
    for name, chapter in CHAPTERS.items():
        print_status(f"\n{name}")
        chapters.append(chapter(out, steps, device))
        print(f"\n{chapters[-1].title}\n{chapters[-1]}\n", flush=True)
    page = save_page(chapters, out)
    print(
        f"{time.monotonic() - began:,.0f} seconds in total. Runs, pictures and pages are in {out}. To see them, run:\n"
    )
    print(f"    python -m webbrowser -t {page.resolve().as_uri()}\n")
    print("Look first at the dates: each row is dark at the year, month or day that it writes.")


def recurrent_dates_chapter(out: Path, steps: int | None, device: str | None) -> DemoChapter:
    """Train a recurrent network to translate dates."""
    model = translation.TranslationModelSettings(kind="rnn", dim=32, hidden=64, dropout=0.0, smoothing=0.0)
    recipe = _recipe(600, 7e-3, steps)
    return _dates_chapter(
        "Dates, by a recurrent network with Bahdanau's attention", model, recipe, out / "dates-rnn", device
    )


def transformer_dates_chapter(out: Path, steps: int | None, device: str | None) -> DemoChapter:
    """Train a Transformer to translate dates."""
    model = translation.TranslationModelSettings(dim=64, hidden=128, depth=2, heads=4, dropout=0.0, smoothing=0.0)
    return _dates_chapter(
        "Dates, by a Transformer", model, _recipe(1100, 3.5e-3, steps), out / "dates-transformer", device
    )


def digits_chapter(out: Path, steps: int | None, device: str | None) -> DemoChapter:
    """Train a convolutional network with self-attention to classify digits."""
    run, test = out / "digits", digits("test")
    classification.train_images(
        digits("train"),
        out=run,
        recipe=_recipe(200, 3e-3, steps, weight_decay=0.05),
        model=ClassificationModelSettings(kind="convnet", dim=64, attention="self", dropout=0.0),
        resume=True,
        device=device,
    )
    classifier = Classifier.load(run, device=device)
    measured = classifier.evaluate(test)
    print(measured["confusion"])
    chosen = [int((test.labels == label).argmax()) for label in (3, 5, 8)]
    images = [test.images[n] for n in chosen]
    found = classifier.classify(images)
    pictures = []
    for n, image, one, look in zip(chosen, images, found, classifier.looks(images), strict=True):
        path, (y, x) = out / f"digits-{test.classes[test.labels[n]]}.png", look.shape
        title = f"read as {one.label}, with a probability of {one.probability:.0%}"
        regard.views.image(look.view(1, -1), image, patches=(y, x), title=title).savefig(path)
        caption = (
            f"On the left the digit, on the right its {y} x {x} places, coloured by the attention that reaches them: "
            "look for the strokes that set this digit apart."
        )
        pictures.append(DemoPicture(path=path, caption=caption))
    return DemoChapter(
        title="Digits, by a convolutional network with self-attention",
        quality=f"accuracy {measured['accuracy'].value:.1f} % of {len(test)} test digits",
        examples=[
            DemoExample(given=f"digit number {n}", found=one.label, right=test.classes[test.labels[n]])
            for n, one in zip(chosen, found, strict=True)
        ],
        pictures=pictures,
        page=_save_page(classifier.tape(images), out / "digits.html"),
    )


def scenes_chapter(out: Path, steps: int | None, device: str | None) -> DemoChapter:
    """Train a captioner on scenes of shapes."""
    run = out / "shapes"
    scenes, test = (
        [Captioned(scene.image, (scene.caption,), "") for scene in Generated(Scenes(), size=size, seed=seed)]
        for size, seed in ((TRAINING_SCENES, 1), (TEST_EXAMPLES, 2))
    )
    captioning.train(
        scenes,
        out=run,
        recipe=_recipe(900, 2e-3, steps),
        model=captioning.CaptioningModelSettings(
            kind="transformer", dim=64, hidden=128, depth=2, channels=64, dropout=0.0
        ),
        seeing=ImageSettings(size=32, rows=32),
        resume=True,
        device=device,
    )
    describer = Describer.load(run, device=device)
    measured = describer.evaluate(test, beam=1)
    shown = [scene for scene in test if " of " in scene.captions[0] or " above " in scene.captions[0]][:3]
    images = [scene.image for scene in shown]
    written = [one.text for one in describer.describe(images)]
    pictures = []
    for n, (image, text, look) in enumerate(zip(images, written, describer.looks(images, written), strict=True), 1):
        path, (_, y, x) = out / f"shapes-{n}.png", look.shape
        regard.views.caption(look.flatten(1), image, describer.tokens(text), patches=(y, x)).savefig(path)
        caption = (
            "First the scene, then for each word the places that the captioner looked at to write it: a colour or a "
            "shape should light up on its own object."
        )
        pictures.append(DemoPicture(path=path, caption=caption))
    return DemoChapter(
        title="Scenes, described by a captioner",
        quality=f"{measured['exact'].value:.1f} % of {TEST_EXAMPLES} captions of test scenes are exactly right, "
        f"BLEU-4 {measured['bleu4'].value:.1f}",
        examples=[
            DemoExample(given=f"scene {n}", found=text, right=scene.captions[0])
            for n, (scene, text) in enumerate(zip(shown, written, strict=True), 1)
        ],
        pictures=pictures,
        page=_save_page(describer.tape(images, written), out / "shapes.html"),
    )


CHAPTERS: dict[str, Callable[[Path, int | None, str | None], DemoChapter]] = {
    "1 of 4: dates, recurrent": recurrent_dates_chapter,
    "2 of 4: dates, Transformer": transformer_dates_chapter,
    "3 of 4: digits": digits_chapter,
    "4 of 4: shapes": scenes_chapter,
}


def _dates_chapter(
    title: str, model: translation.TranslationModelSettings, recipe: Recipe, run: Path, device: str | None
) -> DemoChapter:
    test = list(Generated(Dates(part="test"), size=TEST_EXAMPLES, seed=2))
    translation.train(
        list(Generated(Dates(), size=TRAINING_DATES, seed=1)),
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
        for seed, locale in enumerate(SHOWN_LOCALES)
    ]
    written = [one.text for one in translator.translate([one.source for one in shown])]
    tape = translator.tape([Pair(one.source, text) for one, text in zip(shown, written, strict=True)])
    maps = _mean_map(tape, layer_of(translator.models[0]))
    pictures = []
    for one, text, look in zip(shown, written, maps, strict=True):
        path, rows, columns = run.with_name(f"{run.name}-{one.locale}.png"), [*text, "<end>"], [*one.source, "<end>"]
        look = look[: len(rows), : len(columns)]
        figure = regard.views.heatmap(look, rows, columns, axes=("written", "read"), title=f"{one.source} is {text}")
        figure.savefig(path)
        caption = (
            "Each row is a character that the model wrote, dark where it looked to write it. The first four rows "
            f"should be dark at the year in {one.source}, those between the dashes at the month, the last two at the "
            "day."
        )
        pictures.append(DemoPicture(path=path, caption=caption))
    return DemoChapter(
        title=title,
        quality=f"{exact:.1f} % of {TEST_EXAMPLES} test dates are exactly right",
        examples=[
            DemoExample(given=one.source, found=text, right=one.target)
            for one, text in zip(shown, written, strict=True)
        ],
        pictures=pictures,
        page=_save_page(tape, run.with_name(f"{run.name}.html")),
    )


def _recipe(most: int, rate: float, steps: int | None, *, weight_decay: float = 0.0) -> Recipe:
    last = most if steps is None else min(steps, most)
    schedule = Cosine(rate, steps=last, warmup=min(50, last // 5))
    return Recipe(steps=last, rate=schedule, weight_decay=weight_decay, save_every=last, keep=1, log_every=100)


def _mean_map(tape: Tape, layer: str) -> Tensor:
    """Return the weights of a layer averaged over heads, b i j."""
    A = tape[layer]
    assert isinstance(A, Weights)
    return A[...].mean(1)


def _save_page(tape: Tape, path: Path) -> Path:
    tape.page(name=path.stem).save(path)
    return path


def save_page(chapters: Sequence[DemoChapter], folder: Path) -> Path:
    """Write the page of all chapters, and return its path."""
    path = folder / "index.html"
    inside = "".join(chapter.html(folder) for chapter in chapters)
    write_text(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf8"><title>regard demo</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head>'
        f"<body><h1>The attention of four models</h1>{inside}</body></html>\n",
    )
    return path
