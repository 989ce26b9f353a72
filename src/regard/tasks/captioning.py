"""Image captioning, and the attention of each word of a caption to the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import decode
from ..data import Tokenizer
from ..data.text import check_not_a_string
from ..decode import Ensemble, Hypothesis
from ..lens import Tape, capture
from ..models import Captioner, CaptionerConfig
from ..nn.losses import shift_right
from ..ops.weights import Weights
from ..train import InverseSquareRoot, Outcome, Progress, Recipe, own_device
from ..train.dataclass_json import check_left_at_default, check_types
from . import metrics, run_folder, word_alignment
from .caption_inputs import CaptionExamples, CaptionLengths, ExampleImages, Examples, texts_of
from .data_checks import report_images
from .dry_run import example_lines, length_line, unknown_line
from .fine_tuning import FineTuning, check_kept
from .image_inputs import Image, ImageSettings, ImageTransform
from .metrics import MetricValue
from .seq2seq_task import GREEDY_EVALUATIONS, GeneratedText, ShowProgress, check_beam, length_limit, search_n_best
from .setup import Setup, Start, run
from .vocabulary import TOKENIZER, Vocabulary, WordVocabulary

TASK = "captioning"
MAX_CAPTURED_IMAGES = 500


ModelConfigFunction = Callable[[Tokenizer, ImageTransform], CaptionerConfig]


@dataclass(frozen=True, kw_only=True)
class CaptioningModelSettings:
    """Settings of a captioner; called with the tokenizer and the image transform, they return the config of the model.

    `soft` attends to the weighted mean of all positions and `hard` to one sampled position, both recurrent (Xu et al.
    2015); `transformer` has multi-head attention.
    """

    kind: Annotated[
        Literal["soft", "hard", "transformer"],
        "How the decoder attends to the image: soft or hard attention of a recurrent decoder, or a Transformer.",
        "--model",
    ] = "soft"
    dim: Annotated[int, "Width of embeddings and of the image features that the decoder attends to."] = 256
    hidden: Annotated[
        int | None,
        "Width of recurrent states (default: 2 x --dim) or of feed-forward layers (transformer; default: 4 x --dim).",
    ] = None
    depth: Annotated[int | None, "Number of decoder layers. Default: 1 (soft, hard) or 3 (transformer)."] = None
    heads: Annotated[int, "Number of attention heads (transformer only)."] = 4
    channels: Annotated[int, "Channels of the last convolution stage of the image encoder.", "--features"] = 128
    stages: Annotated[int, "Number of convolution stages; each halves the width and height of the image."] = 3
    doubly: Annotated[
        float,
        "Weight of the penalty on positions attended to more or less than once (soft only; Xu et al. 2015, eq. 14).",
    ] = 0.0
    reinforce: Annotated[float, "Weight of the reward for a sampled position (hard only; Xu et al. 2015, eq. 12)."] = (
        1.0
    )
    entropy: Annotated[
        float, "Weight of the entropy bonus, which favours spread-out attention (hard only; Xu et al. 2015, eq. 12)."
    ] = 0.002
    dropout: Annotated[float, "Dropout probability in training."] = 0.1
    smoothing: Annotated[float, "Label smoothing; 0 for none."] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        got = "a Transformer" if self.kind == "transformer" else f"{self.kind} attention"
        if self.kind != "soft":
            check_left_at_default(self, "doubly", whose="soft attention", got=got)
        if self.kind != "hard":
            check_left_at_default(self, "reinforce", "entropy", whose="hard attention", got=got)
        if self.kind != "transformer":
            check_left_at_default(self, "heads", whose="a Transformer", got=got)

    def __call__(self, tokenizer: Tokenizer, sight: ImageTransform) -> CaptionerConfig:
        """Return the config for this vocabulary and these images."""
        if sight.size < 2**self.stages:
            raise ValueError(
                f"images of {sight.size} pixels per side cannot be halved {self.stages} times; pass fewer stages"
            )
        transformer = self.kind == "transformer"
        return CaptionerConfig(
            vocabulary=len(tokenizer),
            start=tokenizer.bos,
            channels=sight.channels,
            widths=tuple(max(1, self.channels >> n) for n in reversed(range(self.stages))),
            dim=self.dim,
            hidden=self.hidden or (4 if transformer else 2) * self.dim,
            layers=(3 if transformer else 1) if self.depth is None else self.depth,
            attention=self.kind,
            heads=self.heads,
            doubly=self.doubly,
            reinforce=self.reinforce,
            entropy=self.entropy,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )


@dataclass(frozen=True, kw_only=True)
class CaptioningConfig:
    """The content of `config.json`; `longest` is the longest caption in training, in tokens."""

    model: CaptionerConfig
    sight: ImageTransform
    longest: int


Model = CaptioningModelSettings  # short, for `captioning.Model(...)`
DEFAULT_MODEL, DEFAULT_IMAGES, DEFAULT_LENGTHS = CaptioningModelSettings(), ImageSettings(), CaptionLengths()
DEFAULT_VOCABULARY = WordVocabulary(size=10_000)
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="bleu4",
    better="higher",
)


def train(
    examples: Examples,
    *,
    out: str | Path,
    valid: Examples | None = None,
    recipe: Recipe = RECIPE,
    model: ModelConfigFunction = DEFAULT_MODEL,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    seeing: ImageSettings = DEFAULT_IMAGES,
    lengths: CaptionLengths = DEFAULT_LENGTHS,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a captioner on images with one or several captions each, into the folder `out`.

        train(captions_tsv("captions.tsv", "images"), out="runs/captions")
        Describer.load("runs/captions").describe([read_image("rex.jpg")])

    Each caption is one training example. An evaluation returns `bleu1` to `bleu4` of greedy captions against all
    references, `exact`, and the `loss` per token. Other arguments are as in `translation.train`.
    """

    check_kept(base, model=model != DEFAULT_MODEL, vocabulary=vocabulary != DEFAULT_VOCABULARY)

    def prepare(start: Start) -> Setup:
        begun = start.checkpoint
        tokenizer = vocabulary.learn(texts_of(examples)) if begun is None else _tokenizer_of(begun)
        captions_to_learn = CaptionExamples(examples, tokenizer, lengths, say=start.say)
        if begun is None:
            sight = seeing.transform_for(examples)
            config = CaptioningConfig(model=model(tokenizer, sight), sight=sight, longest=captions_to_learn.longest)
        else:
            config = _config_of(begun)
            if start.fresh:
                config = replace(config, longest=max(config.longest, captions_to_learn.longest))
                seeing.check_kept(config.sight)
        if recipe.forcing is not None:
            raise ValueError("forcing is not supported for captioners; leave it out")
        if valid is not None and not len(valid):
            raise ValueError("valid has no images; leave it out to train without validation")
        if valid is not None:
            start.say(GREEDY_EVALUATIONS)
        batches = seeing.batches(
            captions_to_learn,
            ExampleImages(examples),
            config.sight,
            owners=captions_to_learn.owners,
            pad=tokenizer.pad,
            seed=recipe.seed,
            start=start,
        )
        report_images(start, examples, valid)
        return Setup(
            model=Captioner(config.model),
            batches=batches,
            evaluate=None if valid is None else _judge(valid, tokenizer, config),
            files={run_folder.CONFIG: run_folder.config_text(TASK, config), TOKENIZER: tokenizer.to_json()},
            describe=lambda: _describe(examples, captions_to_learn, tokenizer),
        )

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


def _describe(examples: Examples, captions: CaptionExamples, tokenizer: Tokenizer) -> list[str]:
    """Return the lengths, the vocabulary and the first captions, for a dry run."""
    rows = [captions[n]["target"] for n in range(len(captions))]
    return [
        f"{len(examples):,} images",
        length_line("captions", "texts", [len(row) for row in rows]),
        unknown_line("captions", tokenizer, map(np.array, rows)),
        *example_lines("caption", rows, tokenizer),
    ]


class Describer:
    """A trained captioner, or an ensemble of several that share a vocabulary.

        describer = Describer.load("runs/captions")
        [found] = describer.describe([read_image("rex.jpg")], beam=3)

    Images are arrays (height, width[, 3]) of bytes, as `regard.data.read_image` returns them. Methods call
    `show(done, total)` to report progress.
    """

    def __init__(
        self, models: Sequence[nn.Module], tokenizer: Tokenizer, *, sight: ImageTransform, longest: int
    ) -> None:
        self.models, self.tokenizer, self.sight, self.longest = list(models), tokenizer, sight, longest
        self.device = next(models[0].parameters()).device
        steppers: Any = self.models
        self._stepper = steppers[0] if len(steppers) == 1 else Ensemble(steppers)

    @classmethod
    def load(cls, *folders: str | Path, device: torch.device | str | None = None) -> Describer:
        """Load the captioner of a run, or an ensemble of several with the same vocabulary and image size."""
        if not folders:
            raise ValueError("load needs at least one folder, got none")
        place = own_device(device)
        opened = [run_folder.open_run(folder) for folder in folders]
        configs, tokenizers = [_config_of(path) for path in opened], [_tokenizer_of(path) for path in opened]
        for path, config, tokenizer in zip(opened[1:], configs[1:], tokenizers[1:], strict=True):
            if tokenizer != tokenizers[0] or config.sight != configs[0].sight:
                raise ValueError(f"an ensemble must share vocabulary and image size, but {path} and {opened[0]} differ")
        models = [Captioner(config.model) for config in configs]
        for model, path in zip(models, opened, strict=True):
            run_folder.load_weights(model, path)
        longest = max(config.longest for config in configs)
        return cls([model.to(place) for model in models], tokenizers[0], sight=configs[0].sight, longest=longest)

    def describe(
        self,
        images: Sequence[Image],
        *,
        beam: int = 3,
        alpha: float = 0.6,
        max_length: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """Return the best caption for each image by beam search; a beam of 1 is greedy."""
        found = self.n_best(images, n=1, beam=beam, alpha=alpha, max_length=max_length, show=show)
        return [best[0] for best in found]

    def n_best(
        self,
        images: Sequence[Image],
        *,
        n: int,
        beam: int = 3,
        alpha: float = 0.6,
        max_length: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[list[GeneratedText]]:
        """Return the n best captions of each image, best first.

        `alpha` is the exponent of the length penalty of Wu et al. 2016. Captions have at most `max_length` tokens, by
        default `length_limit`.
        """
        check_beam(beam, n)
        found: list[list[GeneratedText]] = []
        limits: dict[str, Any] = {
            "end": self.tokenizer.eos,
            "max_length": length_limit(self.longest, max_length=max_length),
            "forbid": self.tokenizer.unwritten,
        }
        for rows, batch in self.sight.batches(images, self.device):
            prefix = torch.full((len(rows), 1), self.tokenizer.bos, device=self.device)
            best = search_n_best(self._stepper, batch, prefix, n=n, beam=beam, alpha=alpha, **limits)
            found += [[self._decode_text(one) for one in hypotheses] for hypotheses in best]
            if show is not None:
                show(len(found), len(images))
        return found

    def score(self, examples: Examples, *, show: ShowProgress | None = None) -> list[list[float]]:
        """Compute log p(caption | image) of each caption of each image, including the end token."""
        found: list[list[float]] = []
        for rows, batch in self.sight.batches(ExampleImages(examples), self.device):
            prefix = torch.full((len(rows), 1), self.tokenizer.bos, device=self.device)
            targets = [self.tokenizer.encode_all(examples[row].captions, eos=True) for row in rows]
            scored = decode.score(self._stepper, batch, prefix, targets)
            found += [[one.log_probability for one in some] for some in scored]
            if show is not None:
                show(len(found), len(examples))
        return found

    def evaluate(
        self,
        examples: Examples,
        *,
        beam: int = 3,
        alpha: float = 0.6,
        max_length: int | None = None,
        show: ShowProgress | None = None,
    ) -> dict[str, MetricValue]:
        """Compute `bleu1` to `bleu4` and `exact` of captions against all references, and their `loss` per token."""
        found = self.n_best(ExampleImages(examples), n=1, beam=beam, alpha=alpha, max_length=max_length, show=show)
        return self.measure([best[0].text for best in found], examples)

    def measure(self, written: Sequence[str], examples: Examples) -> dict[str, MetricValue]:
        """Compute the metrics of `evaluate` for given captions, one for each image."""
        references = [example.captions for example in examples]
        tokens = sum(map(len, self.tokenizer.encode_all([text for some in references for text in some], eos=True)))
        cost = -sum(value for values in self.score(examples) for value in values)
        return {
            **{f"bleu{n}": metrics.bleu_of_many(written, references, order=n) for n in (1, 2, 3, 4)},
            "exact": metrics.exact(written, references),
            "loss": MetricValue(cost / tokens, f"nats per token, {tokens:,} tokens"),
        }

    def looks(
        self, images: Sequence[Image], captions: Sequence[str], *, layer: int | None = None
    ) -> list[Float[Tensor, "words y x"]]:
        """Return the attention of each token of a caption and its end to the image, averaged over heads and models.

        For a Transformer it is the attention of one `layer`, by default the one above the middle.
        """
        _check_paired(images, captions)
        found: list[Tensor] = []
        for image, caption in zip(images, captions, strict=True):
            maps = []
            for model in self.models:
                name = word_alignment.layer_of(model, layer)
                A = self._capture(model, [image], [caption], layers=name)[name]
                assert isinstance(A, Weights)
                maps.append(A[...].mean((0, 1)).cpu())
            side = _side(maps[0].shape[-1])
            found.append(torch.stack(maps).mean(0).unflatten(-1, (side, side)))
        return found

    def tape(self, images: Sequence[Image], captions: Sequence[str]) -> Tape:
        """Capture all attention of the model while it writes these captions, one batch row per caption."""
        if len(self.models) > 1:
            raise ValueError(f"a capture needs exactly one model, got {len(self.models)}; load one of them")
        if not 0 < len(images) <= MAX_CAPTURED_IMAGES:
            raise ValueError(f"a capture holds 1 to {MAX_CAPTURED_IMAGES} images, got {len(images)}; give fewer")
        _check_paired(images, captions)
        return self._capture(self.models[0], images, captions)

    def tokens(self, caption: str) -> list[str]:
        """Return the tokens of a caption as text, and its end."""
        return [caption[one.start : one.end].strip() for one in self.tokenizer.spans(caption)] + ["<end>"]

    def _capture(
        self, model: Any, images: Sequence[Image], captions: Sequence[str], *, layers: str | None = None
    ) -> Tape:
        rows = self.tokenizer.encode_all(captions, eos=True)
        target = torch.full((len(rows), max(map(len, rows))), self.tokenizer.pad, device=self.device)
        for place, row in zip(target, rows, strict=True):
            place[: len(row)] = torch.tensor(row)
        inputs = shift_right(target, start=model.config.start)
        input_labels, written = ([self.tokenizer.labels(row) for row in x.tolist()] for x in (inputs, target))
        crossing = word_alignment.cross_layers(model)
        n = _count_positions(self.sight, model)
        places = [f"{place // _side(n)},{place % _side(n)}" for place in range(n)]
        named: dict[str, Any] = {"decoder.*": input_labels, **dict.fromkeys(crossing, (written, [places] * len(rows)))}
        batch = self.sight.batch(images, self.device)
        with capture(model, named, layers=layers) as tape, torch.no_grad():
            model(batch["image"], inputs)
        for name in crossing if layers is None else [layers]:
            tape.picture(batch["image"].cpu(), patches=(_side(n), _side(n)), special=0, layers=name)
        return tape

    def _decode_text(self, one: Hypothesis) -> GeneratedText:
        return GeneratedText.of(one, self.tokenizer.decode(one.tokens))


def _check_paired(images: Sequence[Image], captions: Sequence[str]) -> None:
    check_not_a_string(captions, "captions")
    if len(images) != len(captions):
        raise ValueError(f"each image needs one caption, got {len(captions)} captions for {len(images)} images")


def _count_positions(sight: ImageTransform, model: Any) -> int:
    """Return the number of image positions that a model attends to."""
    side = sight.size
    for _ in model.config.widths:
        side = -(-side // 2)
    return side * side


def _side(places: int) -> int:
    return math.isqrt(places)


def _config_of(checkpoint: Path) -> CaptioningConfig:
    return run_folder.config_of(checkpoint, TASK, CaptioningConfig)


def _tokenizer_of(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))


def _judge(valid: Examples, tokenizer: Tokenizer, config: CaptioningConfig) -> Callable[[nn.Module], dict[str, float]]:
    def evaluate(model: nn.Module) -> dict[str, float]:
        describer = Describer([model], tokenizer, sight=config.sight, longest=config.longest)
        return {name: measured.value for name, measured in describer.evaluate(valid, beam=1).items()}

    return evaluate
