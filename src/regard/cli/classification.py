"""`regard train classification` and `classify`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import regard

from ..data import (
    DataError,
    ImageFolder,
    Images,
    LabelledText,
    cifar10,
    cifar100,
    idx_images,
    labelled,
    labelled_tsv,
    npz_images,
    read_image,
)
from ..tasks import classification
from ..tasks.batching import Batching
from ..tasks.classification import Classifier, ExampleInputs, Prediction
from ..tasks.classifiers import ClassificationModelSettings
from ..tasks.image_inputs import ImageSettings
from ..tasks.text_inputs import TextInputs
from ..tasks.vocabulary import WordVocabulary
from ..train import Outcome
from ..train.dataclass_json import check_types
from ..train.failures import disk_errors
from .answering import PretrainedEncoder
from .attention_output import TAPE, check_fits, draw, max_examples
from .cleaning import Cleaning
from .device import Device
from .files import HEADER, IS_HEADER, Files, Header, as_column
from .fine_tuning_flags import FineTuningFlags
from .stdin_chunks import Stream, chunks_of_input
from .terminal import print_truncated, progress
from .training_flags import Training

CIFAR_RECORD_BYTES = {10: 3073, 100: 3074}  # one image with its labels, of CIFAR-10 and of CIFAR-100


@dataclass(frozen=True, kw_only=True)
class LabelledFiles:
    """Texts or images with their labels."""

    labelled: Annotated[Files | None, "Tab-separated or .csv file of texts and labels; may be repeated."] = None
    text: Annotated[Files | None, "File of texts, one per line; needs --labels; may be repeated."] = None
    images: Annotated[
        str | None,
        "Images: a folder or .tar file with one folder per class, an .npz file, an IDX file (needs --labels), or "
        "the .bin files of CIFAR.",
    ] = None
    labels: Annotated[Files | None, "File of labels, one per line, or an IDX file; may be repeated for texts."] = None
    text_column: Annotated[str, "Column of the texts in --labelled: a number from 0, or a name."] = "1"
    label_column: Annotated[str, "Column of the labels in --labelled."] = "0"
    header: Annotated[Header, HEADER] = "auto"
    image_array: Annotated[str, "Name of the array of images in an .npz file."] = "images"
    label_array: Annotated[str, "Name of the array of labels in an .npz file."] = "labels"

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def shows(self) -> str | None:
        """Whether the examples are texts or images; None if no file is given."""
        return "images" if self.images is not None else "texts" if self.labelled or self.text else None

    def read(self, *, prefix: str = "", classes: Sequence[str] | None = None) -> LabelledText | Images | ImageFolder:
        """Return the examples; `classes` are those of training, `prefix` is that of the flags in error messages."""
        given = [name for name in ("labelled", "text", "images") if getattr(self, name) is not None]
        if len(given) != 1:
            names = [f"--{prefix}{name}" for name in ("labelled", "text", "images")]
            raise ValueError(f"give exactly one of {names[0]} (texts), {names[1]} (texts) and {names[2]}")
        if self.labelled is not None:
            return labelled_tsv(
                self.labelled,
                text=as_column(self.text_column),
                label=as_column(self.label_column),
                header=IS_HEADER[self.header],
                classes=classes,
            )
        if self.text is not None:
            return labelled(self.text, self._labels(prefix), classes=classes)
        assert self.images is not None
        path = Path(self.images)
        if not path.exists():
            raise DataError("no such file or folder", file=path, hint="check the path")
        if path.is_dir() and (parts := sorted(path.glob("data_batch_*.bin"))):
            return cifar10(*parts)
        if path.is_dir() or path.suffix == ".tar":
            return ImageFolder(path, classes=classes)
        if path.suffix == ".npz":
            return npz_images(path, images=self.image_array, labels=self.label_array, classes=classes)
        if path.suffix == ".bin":
            hundred = path.stat().st_size % CIFAR_RECORD_BYTES[10] and not path.stat().st_size % CIFAR_RECORD_BYTES[100]
            return cifar100(path, classes=classes) if hundred else cifar10(path)
        labels = self._labels(prefix)
        if not isinstance(labels, str):
            raise ValueError(f"--{prefix}labels takes one IDX file, got {len(labels)}; give the one of {path}")
        return idx_images(path, labels, classes=classes)

    def _labels(self, prefix: str) -> Files:
        if self.labels is None:
            raise ValueError(
                f"--{prefix}labels is missing; give a file with a label for each example of {self.text or self.images}"
            )
        return self.labels


@dataclass(frozen=True, kw_only=True)
class ClassificationPlan:
    """The sections of `regard train classification`."""

    data: LabelledFiles
    valid: LabelledFiles | None
    cleaning: Cleaning
    vocabulary: WordVocabulary
    images: ImageSettings
    model: ClassificationModelSettings
    pretrained: PretrainedEncoder
    batching: Batching
    finetuning: FineTuningFlags
    training: Training


def train(plan: ClassificationPlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a classifier of texts or images.

    Examples:

        regard train classification --labelled reviews.tsv --valid-labelled more.tsv --out runs/reviews

        regard train classification --images pets/train --valid-images pets/valid --model vit --flip --out runs/pets

        regard train classification --images train-images.gz --labels train-labels.gz --shift 2 --out runs/mnist

    The best checkpoint has the highest accuracy on the validation data; without validation data it is the last one.
    """
    if plan.valid is not None and plan.valid.shows != plan.data.shows:
        raise ValueError(
            "training and validation data must both be texts or both be images, got "
            f"{plan.data.shows or 'no training data'} and {plan.valid.shows or 'no validation data'}"
        )
    data = plan.data.read()
    if plan.finetuning.run is not None:
        known = classification.classes_of(plan.finetuning.run)
        if set(data.classes) < set(known):  # the classification head is kept, with all its classes
            data = plan.data.read(classes=known)
    valid = None if plan.valid is None else plan.valid.read(prefix="valid-", classes=data.classes)
    shared: dict[str, Any] = {
        "valid": valid,
        "out": out,
        "recipe": plan.training.recipe("accuracy", "f1", "loss"),
        **plan.finetuning.unless_kept(model=plan.model),
        "base": plan.finetuning.tuning,
        "resume": resume,
        "files": files,
        "device": device,
    }
    if isinstance(data, LabelledText):
        return classification.train_texts(
            plan.cleaning.clean_labelled(data, valid),
            **plan.finetuning.unless_kept(vocabulary=plan.vocabulary, pretrained=plan.pretrained.folder),
            batching=plan.batching,
            **shared,
        )
    if plan.cleaning != Cleaning():
        raise ValueError("examples are dropped only from texts, got images; leave out --drop-...")
    if plan.pretrained.folder is not None:
        raise ValueError("--pretrained supports only texts, got images; remove it")
    return classification.train_images(data, seeing=plan.images, **shared)


@dataclass(frozen=True, kw_only=True)
class ClassificationEvaluation(LabelledFiles):
    """The flags of `regard evaluate` for a classifier."""

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute accuracy, F1, loss and the confusion matrix."""
        classifier = Classifier.load(only(folders), device=device)
        shown = "texts" if isinstance(classifier.reads, TextInputs) else "images"
        if self.shows not in (None, shown):
            raise ValueError(f"{folders[0]} classifies {shown}, got {self.shows}")
        examples = self.read(classes=classifier.classes)
        with progress("classifying") as show:
            found = classifier.evaluate(examples, show=show)
        long = sum(classifier.too_long(ExampleInputs(examples, "text")))
        print_truncated("texts", long, len(examples), classifier.limit)
        return {**found, "confusion": f"rows: true class, columns: predicted class\n{found['confusion']}"}


def classify(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Image files to classify. Default: classify the lines of standard input.", metavar="IMAGE"),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of most likely classes to print.")] = 1,
    attention: Annotated[
        Path | None,
        typer.Option(
            help="Write the attention to this file: .png (one text or image) or .safetensors for regard view."
        ),
    ] = None,
    stream: Stream = False,
    device: Device = None,
) -> None:
    """Classify the lines of standard input, or image files. Prints the label and its probability, after the image name.

    Examples:

        regard classify runs/reviews < reviews.txt

        regard classify runs/pets rex.jpg --top 3 --attention rex.png
    """
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    most = max_examples(attention, classification.MAX_CAPTURED_EXAMPLES, folder, *(images or []))
    classifier = Classifier.load(folder, device=device)
    reads_texts = isinstance(classifier.reads, TextInputs)
    if reads_texts == bool(images):
        wanted = (
            "texts from standard input, got image files" if reads_texts else "images, got no image files; name them"
        )
        raise ValueError(f"{folder} classifies {wanted}")
    if attention is not None:
        classifier.looks([])  # raises before classifying if the model has no attention to show
    captured: list[Any] = []
    predictions: list[Prediction] = []
    number = long = 0
    with progress("classifying") as show:
        for chunk in chunks_of_input(stream=stream) if reads_texts else [[read_image(path) for path in images or []]]:
            check_fits(attention, len(captured) + len(chunk), most)
            answers = classifier.classify(chunk, show=show)
            for n, prediction in enumerate(answers):
                likely = "\t".join(f"{name}\t{p:.4f}" for name, p in list(prediction.probabilities.items())[:top])
                print(likely if reads_texts else f"{(images or [])[n]}\t{likely}")
            sys.stdout.flush()
            number, long = number + len(chunk), long + sum(classifier.too_long(chunk))
            if attention is not None:
                captured, predictions = [*captured, *chunk], [*predictions, *answers]
    if attention is not None and captured:
        with disk_errors(attention, then="try again"):
            _save_attention(classifier, captured, predictions, attention)
    print_truncated("texts", long, number, classifier.limit)


def only(folders: Sequence[Path]) -> Path:
    """Return the only folder; raise if there are several."""
    if len(folders) != 1:
        raise ValueError(f"classifiers cannot be used as an ensemble, got {len(folders)} folders; name one")
    return folders[0]


def _save_attention(classifier: Classifier, examples: list[Any], predictions: list[Prediction], path: Path) -> None:
    if path.suffix == TAPE:
        classifier.tape(examples).save(path)
        return
    [look], [one], [first] = classifier.looks(examples), predictions, examples
    title = f"{one.label} ({one.probability:.0%})"
    if isinstance(classifier.reads, TextInputs):
        pieces = classifier.reads.pieces(first)
        figure = regard.views.text(look[None], pieces, title=title)
    else:
        y, x = look.shape
        figure = regard.views.image(look.view(1, -1), first, patches=(y, x), title=title)
    draw(figure, path)
