"""`regard train captioning` and `caption`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import regard

from ..data import Captions, captions_json, captions_tsv, read_image
from ..tasks import captioning
from ..tasks.caption_inputs import CaptionLengths, ExampleImages
from ..tasks.captioning import CaptioningModelSettings, Describer
from ..tasks.image_inputs import Image, ImageSettings
from ..tasks.vocabulary import WordVocabulary
from ..train import Outcome
from ..train.dataclass_json import check_types
from ..train.failures import disk_errors
from .attention_output import TAPE, check_fits, draw, max_examples
from .decoding_flags import LENGTH, LENGTH_PENALTY, Beam, MaxLength, Search
from .device import Device
from .evaluation_files import OUT, check_out, write_outputs
from .fine_tuning_flags import FineTuningFlags
from .terminal import one_line, progress
from .training_flags import Training


@dataclass(frozen=True, kw_only=True)
class CaptionFiles:
    """Images and their captions."""

    captions: Annotated[
        str | None, "File of image names and captions: tab-separated, or .json (a list, or COCO format)."
    ] = None
    images: Annotated[str | None, "Folder or .tar file that contains the images."] = None
    image_column: Annotated[int, "Column of the image names in a tab-separated file, from 0."] = 0
    caption_column: Annotated[int, "Column of the captions in a tab-separated file."] = 1

    def __post_init__(self) -> None:
        check_types(self)

    def read(self, *, prefix: str = "") -> Captions:
        """Return the images with their captions; raise if an image is missing."""
        if self.captions is None or self.images is None:
            raise ValueError(f"give --{prefix}captions and --{prefix}images")
        if ".json" in Path(self.captions).suffixes:
            return captions_json(self.captions, self.images)
        if min(self.image_column, self.caption_column) < 0:
            raise ValueError(f"columns count from 0, got {self.image_column} and {self.caption_column}")
        return captions_tsv(self.captions, self.images, name=self.image_column, caption=self.caption_column)


@dataclass(frozen=True, kw_only=True)
class CaptionVocabulary(WordVocabulary):
    """The vocabulary of captions."""

    size: Annotated[int, "Maximum number of tokens in the vocabulary.", "--vocabulary"] = 10_000


@dataclass(frozen=True, kw_only=True)
class CaptioningPlan:
    """The sections of `regard train captioning`."""

    data: CaptionFiles
    valid: CaptionFiles | None
    vocabulary: CaptionVocabulary
    images: ImageSettings
    model: CaptioningModelSettings
    batching: CaptionLengths
    finetuning: FineTuningFlags
    training: Training


def train(plan: CaptioningPlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train an image captioner on images and captions.

    Examples:

        regard train captioning --captions train.tsv --images pictures --out runs/captions

        regard train captioning --captions train.json --images train2014 --valid-captions valid.json \\
            --valid-images val2014 --model transformer --size 128 --stages 4 --flip --workers 4 --out runs/coco

    The best checkpoint has the highest BLEU-4 on the validation data; without validation data it is the last one.
    """
    return captioning.train(
        plan.data.read(),
        valid=None if plan.valid is None else plan.valid.read(prefix="valid-"),
        out=out,
        recipe=plan.training.recipe("bleu4", "bleu3", "bleu2", "bleu1", "exact", "loss"),
        **plan.finetuning.unless_kept(model=plan.model, vocabulary=plan.vocabulary),
        base=plan.finetuning.tuning,
        seeing=plan.images,
        lengths=plan.batching,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class CaptioningEvaluation(CaptionFiles):
    """The flags of `regard evaluate` for a captioner."""

    beam: Annotated[int, "Beam size; 1 is greedy search."] = 3
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    max_length: Annotated[int | None, LENGTH] = None
    out: Annotated[str | None, OUT] = None

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute BLEU-1 to BLEU-4 and exact matches against all references, and the loss.

        Several run folders are one ensemble.
        """
        search = Search(beam=self.beam, penalty=self.length_penalty, max_length=self.max_length)
        examples = self.read()
        check_out(self.out, *folders, self.captions, self.images)
        describer = Describer.load(*folders, device=device)
        with progress("describing") as show:
            found = describer.n_best(
                ExampleImages(examples),
                n=1,
                beam=self.beam,
                alpha=self.length_penalty,
                max_length=self.max_length,
                show=show,
            )
        written = [best[0].text for best in found]
        write_outputs(self.out, written)
        search.print_method()
        return dict(describer.measure(written, examples))


@dataclass(frozen=True, kw_only=True)
class CaptioningScoring(CaptionFiles):
    """The flags of `regard score` for a captioner."""

    def run(self, folders: Sequence[Path], device: str | None) -> list[float]:
        """Compute log p(caption | image) of each caption, image by image; several run folders are one ensemble."""
        examples = self.read()
        describer = Describer.load(*folders, device=device)
        with progress("scoring") as show:
            return [score for scores in describer.score(examples, show=show) for score in scores]


def caption(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    images: Annotated[list[Path], typer.Argument(help="Image files to describe.", metavar="IMAGE")],
    beam: Beam = 3,
    nbest: Annotated[int, typer.Option(help="Number of captions to print for each image, with their scores.")] = 1,
    max_length: MaxLength = None,
    attention: Annotated[
        Path | None,
        typer.Option(
            help="Write the attention of each word to this file: .png (one image) or .safetensors for regard view."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Print a caption for each image, after the name of the file and a tab.

    Examples:

        regard caption runs/captions rex.jpg

        regard caption runs/captions rex.jpg --beam 5 --attention rex.png
    """
    search = Search(beam=beam, nbest=nbest, max_length=max_length)
    check_fits(attention, len(images), max_examples(attention, captioning.MAX_CAPTURED_IMAGES, folder, *images))
    describer = Describer.load(folder, device=device)
    pictures = [read_image(path) for path in images]
    with progress("describing") as show:
        found = describer.n_best(pictures, n=nbest, beam=beam, max_length=max_length, show=show)
    for path, best in zip(images, found, strict=True):
        for one in best:
            print(f"{path}\t{one_line(one.text)}" + (f"\t{one.score:.4f}" if nbest > 1 else ""))
    if attention is not None:
        with disk_errors(attention, then="try again"):
            _save_attention(describer, pictures, [one_line(best[0].text) for best in found], attention)
    cut = sum(not best[0].finished for best in found)
    search.print_unfinished("captions", cut, len(found), longest=describer.longest)


def _save_attention(describer: Describer, pictures: list[Image], texts: list[str], path: Path) -> None:
    if path.suffix == TAPE:
        describer.tape(pictures, texts).save(path)
        return
    [look], [picture], [text] = describer.looks(pictures, texts), pictures, texts
    _, y, x = look.shape
    draw(regard.views.caption(look.flatten(1), picture, describer.tokens(text), patches=(y, x)), path)
