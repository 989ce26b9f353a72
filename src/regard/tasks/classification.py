"""Classification of texts and images, and the attention that led to each class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Tokenizer
from ..data.row_checks import label_key
from ..data.text import check_not_a_string
from ..lens import Tape
from ..models import AttentionConvNetConfig, BertClassifier, BertConfig, TextClassifierConfig
from ..models.named_choices import Activation
from ..train import Epochs, InverseSquareRoot, Outcome, Progress, Recipe, own_device
from . import attention_maps, run_folder
from .batching import Batching
from .classifiers import ClassificationModelSettings, Network, build_model
from .data_checks import report_images, report_rows
from .dry_run import class_line, example_lines, length_line, unknown_line
from .encoded_dataset import EncodedExamples
from .fine_tuning import FineTuning, check_kept
from .image_inputs import ImageSettings, ImageTransform, MappedBatches
from .metrics import Confusion, MetricValue
from .pretrained import class_names, class_numbers, encoder_of, max_positions
from .seq2seq_task import ShowProgress
from .setup import Setup, Start, run
from .text_inputs import TextInputs
from .vocabulary import Vocabulary, WordVocabulary

TASK = "classification"
MAX_CAPTURED_EXAMPLES = 500
HEAD = "classes."  # beginning of the names of the parameters of every classification head
MIN_TEXTS_FOR_LABEL_WARNING = 40  # with fewer texts, many classes are no sign of a mistake


class Examples(Protocol):
    """Examples with an `image` or a `text`, and the number of their class, such as those of `regard.data`."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig:
    """The content of `config.json`: the model, the class names, and the token limit of texts or the size of images.

    `end` says whether texts end with `eos`; `pooler` is the activation of a BERT's pooler if it is not tanh.
    """

    model: Network
    classes: tuple[str, ...]
    limit: int | None
    sight: ImageTransform | None
    end: bool = False
    pooler: Activation | None = None


DEFAULT_MODEL, DEFAULT_BATCHING, DEFAULT_IMAGES = ClassificationModelSettings(), Batching(), ImageSettings()
DEFAULT_VOCABULARY = WordVocabulary()
RECIPE = Recipe(
    steps=5_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="accuracy",
    better="higher",
)


def train_texts(
    examples: Examples,
    *,
    out: str | Path,
    valid: Examples | None = None,
    recipe: Recipe = RECIPE,
    model: ClassificationModelSettings = DEFAULT_MODEL,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    pretrained: str | Path | None = None,
    batching: Batching = DEFAULT_BATCHING,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a classifier of texts, into the folder `out`.

        train_texts(labelled_tsv("reviews.tsv"), out="runs/reviews")
        Classifier.load("runs/reviews").classify(["no wit at all"])

    `pretrained` is the Hugging Face folder of a BERT, RoBERTa or DistilBERT to fine-tune, with its tokenizer; it
    replaces `model` and `vocabulary`. Its classification head is kept if its `id2label` has the same class names, or
    has no names and the same number of classes. An evaluation returns `accuracy`, `f1` and `loss`. Other arguments are
    as in `translation.train`.
    """

    check_kept(
        base,
        model=model != DEFAULT_MODEL,
        vocabulary=vocabulary != DEFAULT_VOCABULARY,
        pretrained=pretrained is not None,
    )

    def prepare(start: Start) -> Setup:
        begun, learned, new = start.checkpoint, None, None
        if begun is None and pretrained is not None:
            if model != DEFAULT_MODEL or vocabulary != DEFAULT_VOCABULARY:
                raise ValueError("pretrained includes its own model and vocabulary; leave out model and vocabulary")
            classes = tuple(examples.classes)
            learned, words = _from_pretrained(Path(pretrained), classes, limit=batching.limit, say=start.say)
            config = ClassificationConfig(
                model=learned.bert.config,
                classes=classes,
                limit=batching.limit,
                sight=None,
                end=True,
                pooler=None if learned.pooler == "tanh" else learned.pooler,
            )
            inputs = TextInputs(words, None, True, batching.limit, end=True)
        elif begun is None:
            texts = [example.text for example in examples]
            words = vocabulary.learn(texts)
            letters = Tokenizer.characters(texts, size=1000) if model.spelling else None
            network = model.texts(words, letters, classes=len(examples.classes), limit=batching.limit)
            config = ClassificationConfig(
                model=network, classes=tuple(examples.classes), limit=batching.limit, sight=None
            )
            inputs = TextInputs(words, letters, isinstance(network, BertConfig), batching.limit)
        else:
            config, inputs = _config_of(begun), _texts_of(begun)
            if start.fresh:
                config, new = _with_classes(config, examples.classes, say=start.say)
        _check_shared_classes(examples, config.classes)
        _warn_single_class(config.classes, start.say)
        if 2 * len(config.classes) > max(len(examples), MIN_TEXTS_FOR_LABEL_WARNING):
            start.say(
                f"{len(examples):,} texts have {len(config.classes):,} different labels; if the column of the texts "
                "was read as labels, name both columns"
            )
        read = EncodedExamples(examples, lambda some: inputs.read([example.text for example in some]))
        batches = batching.over(read, pad=inputs.pad, seed=recipe.seed, group=start.group, say=start.say)
        spelling = inputs.spelling(example.text for example in examples)
        labels = torch.as_tensor(examples.labels)
        if valid is not None and (long := sum(inputs.too_long(ExampleInputs(valid, "text")))):
            start.say(
                f"{long:,} of {len(valid):,} validation texts have more than {inputs.limit} tokens; only the first "
                f"{inputs.limit} are read"
            )

        def add_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return spelling(batch["index"].tolist(), {**inputs.with_ends(batch), "label": labels[batch["index"]]})

        prepared = _setup(config, inputs, MappedBatches(batches, add_labels), valid, recipe, unit="texts")
        prepared = replace(prepared, new=new, describe=lambda: _describe_texts(read, inputs, examples, valid))
        report_rows(start, map(label_key, examples), None if valid is None else map(label_key, valid), "texts")
        return prepared if learned is None else replace(prepared, model=learned)

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


def train_images(
    examples: Examples,
    *,
    out: str | Path,
    valid: Examples | None = None,
    recipe: Recipe = RECIPE,
    model: ClassificationModelSettings = DEFAULT_MODEL,
    seeing: ImageSettings = DEFAULT_IMAGES,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a classifier of images, into the folder `out`.

        train_images(ImageFolder("pets/train"), valid=ImageFolder("pets/valid"), out="runs/pets")
        Classifier.load("runs/pets").classify([read_image("rex.jpg")])

    An evaluation returns `accuracy`, `f1` and `loss`. Other arguments are as in `translation.train`.
    """

    check_kept(base, model=model != DEFAULT_MODEL)

    def prepare(start: Start) -> Setup:
        begun, new = start.checkpoint, None
        if begun is None:
            sight = seeing.transform_for(examples)
            network = model.images(sight, classes=len(examples.classes))
            config = ClassificationConfig(model=network, classes=tuple(examples.classes), limit=None, sight=sight)
        else:
            config = _config_of(begun)
            if config.sight is None:
                raise ValueError("the run is a classifier of texts, got images; name another folder")
            if start.fresh:
                seeing.check_kept(config.sight)
                config, new = _with_classes(config, examples.classes, say=start.say)
        assert config.sight is not None
        _check_shared_classes(examples, config.classes)
        _warn_single_class(config.classes, start.say)
        labels = [{"label": int(label)} for label in examples.labels]
        batches = seeing.batches(labels, ExampleInputs(examples, "image"), config.sight, seed=recipe.seed, start=start)
        prepared = _setup(config, config.sight, batches, valid, recipe, unit="images")
        report_images(start, examples, valid)
        return replace(prepared, new=new, describe=lambda: _class_lines(examples, valid))

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The most likely class, and the probabilities of all classes, most likely first."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class Classifier:
    """A trained classifier of texts or images.

        classifier = Classifier.load("runs/reviews")
        [found] = classifier.classify(["no wit at all"])
        found.label, found.probability

    Images are arrays (height, width[, 3]) of bytes, as `regard.data.read_image` returns them. Only the first `limit`
    tokens of a text are read, as in training; `too_long` finds longer texts. Methods call `show(done, total)` to
    report progress.
    """

    def __init__(self, model: nn.Module, reads: TextInputs | ImageTransform, classes: Sequence[str]) -> None:
        self.model, self.reads, self.classes = model, reads, tuple(classes)
        self.limit = reads.limit if isinstance(reads, TextInputs) else None
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str | None = None) -> Classifier:
        """Load the classifier of a run."""
        path = run_folder.open_run(folder)
        config = _config_of(path)
        model = _build_model(config)
        run_folder.load_weights(model, path)
        reads = config.sight or _texts_of(path)
        return cls(model.to(own_device(device)), reads, config.classes)

    def classify(self, examples: Sequence[Any], *, show: ShowProgress | None = None) -> list[Prediction]:
        """Classify each text or image."""
        check_not_a_string(examples, "examples")
        found = []
        for row in self._logits(examples, show).softmax(-1):
            values, order = row.sort(descending=True, stable=True)
            names = [self.classes[n] for n in order.tolist()]
            likely = dict(zip(names, values.tolist(), strict=True))
            found.append(Prediction(label=names[0], probability=likely[names[0]], probabilities=likely))
        return found

    def evaluate(self, examples: Examples, *, show: ShowProgress | None = None) -> dict[str, Any]:
        """Compute `accuracy`, `f1` and `loss` against the labels, and the `confusion` matrix."""
        _check_shared_classes(examples, self.classes)
        logits = self._logits(
            ExampleInputs(examples, "image" if isinstance(self.reads, ImageTransform) else "text"), show
        )
        labels = torch.as_tensor(examples.labels)
        confusion = Confusion.of(labels.tolist(), logits.argmax(-1).tolist(), self.classes)
        loss = float(F.cross_entropy(logits, labels))
        return {
            "accuracy": confusion.accuracy,
            "f1": confusion.f1,
            "loss": MetricValue(loss, f"nats, {len(labels):,} examples"),
            "confusion": confusion,
        }

    def looks(self, examples: Sequence[Any]) -> list[Tensor]:
        """Return the relevance of each token of a text, `n`, or position of an image, `y x`; see `input_maps`."""
        check_not_a_string(examples, "examples")
        attention_maps.check_attends(self.model)
        found = [torch.empty(0)] * len(examples)
        for rows, batch in self.reads.batches(examples, self.device):
            for row, look in zip(rows, attention_maps.input_maps(self.model, batch), strict=True):
                found[row] = look
        return found

    def tape(self, examples: Sequence[Any]) -> Tape:
        """Capture all attention of the model over the examples, one batch row per example."""
        check_not_a_string(examples, "examples")
        attention_maps.check_attends(self.model)
        if not 0 < len(examples) <= MAX_CAPTURED_EXAMPLES:
            raise ValueError(f"a capture holds 1 to {MAX_CAPTURED_EXAMPLES} examples, got {len(examples)}; give fewer")
        if isinstance(self.reads, ImageTransform):
            return attention_maps.capture_batch(self.model, self.reads.batch(list(examples), self.device))
        return attention_maps.capture_batch(self.model, *self.reads.whole(list(examples), self.device))

    def too_long(self, examples: Sequence[Any]) -> list[bool]:
        """Return for each text whether it has more tokens than are read; False for images."""
        check_not_a_string(examples, "examples")
        return self.reads.too_long(examples) if isinstance(self.reads, TextInputs) else [False] * len(examples)

    def _logits(self, examples: Any, show: ShowProgress | None) -> Tensor:
        found, done = torch.empty(len(examples), len(self.classes)), 0
        for rows, batch in self.reads.batches(examples, self.device):
            with torch.no_grad():
                found[rows] = attention_maps.logits(self.model, batch).float().cpu()
            done += len(rows)
            if show is not None:
                show(done, len(examples))
        return found


@dataclass(frozen=True)
class ExampleInputs(Sequence[Any]):
    """The `text` or `image` of labelled examples, read when it is indexed."""

    examples: Examples
    field: str

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: Any) -> Any:
        return getattr(self.examples[number], self.field)


def _setup(
    config: ClassificationConfig,
    reads: TextInputs | ImageTransform,
    batches: Epochs,
    valid: Examples | None,
    recipe: Recipe,
    *,
    unit: str,
) -> Setup:
    if recipe.forcing is not None:
        raise ValueError("forcing needs a recurrent decoder, and classifiers have none; leave it out")
    if valid is not None:
        _check_shared_classes(valid, config.classes)
    kept = reads.files() if isinstance(reads, TextInputs) else {}
    return Setup(
        model=_build_model(config),
        batches=batches,
        evaluate=None if valid is None else _judge(valid, reads, config),
        files={run_folder.CONFIG: run_folder.config_text(TASK, config), **kept},
        unit=unit,
    )


def _from_pretrained(
    folder: Path, classes: Sequence[str], *, limit: int, say: Callable[[str], None]
) -> tuple[BertClassifier, Tokenizer]:
    """Build a model from a Hugging Face folder, with its tokenizer, and with its classification head if it fits."""
    bert, model, tokenizer = encoder_of(folder)
    if limit > max_positions(bert):
        raise ValueError(f"limit must be at most {max_positions(bert)}, the maximum of {folder}, got {limit}")
    reason = f"{folder} has none"
    if isinstance(model, BertClassifier):
        count = model.classes.out_features
        names = class_names(folder, count)
        numbers = class_numbers(classes, names) if count == len(classes) else None
        if numbers is not None:
            order = ", ".join(classes[numbers.index(n)] for n in range(count))
            say(f"using the classification head of {folder}; its classes are, in order: {order}")
            for x in model.classes.parameters():
                x.data = x.data[numbers]
            return model, tokenizer
        theirs = f"{count} classes" if count != len(classes) else f"the classes {', '.join(names[:8])}"
        reason = f"that of {folder} has {theirs}"
    say(f"the classification head for {len(classes)} classes is new: {reason}")
    return BertClassifier(bert, classes=len(classes)), tokenizer


def _class_lines(examples: Examples, valid: Examples | None) -> list[str]:
    """Return the number of examples of each class, for a dry run."""
    data = {"training": examples} if valid is None else {"training": examples, "validation": valid}
    return [class_line(name, some.labels, some.classes) for name, some in data.items()]


def _describe_texts(read: EncodedExamples, inputs: TextInputs, examples: Examples, valid: Examples | None) -> list[str]:
    """Return the lengths, the vocabulary, the classes and the first examples of the data, for a dry run."""
    lines = [length_line("training", "texts", read.lengths["ids"])]
    lines.append(unknown_line("training", inputs.words, (read[n]["ids"] for n in range(len(read)))))
    if valid is not None:
        rows = inputs.read([example.text for example in valid])["ids"]
        lines.append(length_line("validation", "texts", [len(row) for row in rows]))
        lines.append(unknown_line("validation", inputs.words, map(np.array, rows)))
    shown = [read[n]["ids"].tolist() for n in range(min(2, len(read)))]
    return [*lines, *_class_lines(examples, valid), *example_lines("text", shown, inputs.words)]


def classes_of(folder: str | Path) -> tuple[str, ...]:
    """Return the names of the classes of a run."""
    return _config_of(run_folder.open_run(folder)).classes


def _with_classes(
    config: ClassificationConfig, classes: Sequence[str], *, say: Callable[[str], None]
) -> tuple[ClassificationConfig, str | None]:
    """Return the config of a run to fine-tune for these classes, and the parameters that are new if they differ."""
    if tuple(classes) == config.classes:
        return config, None
    say(
        f"the classification head is new, for {', '.join(classes[:8])}: the run to begin with has "
        f"{', '.join(config.classes[:8])}"
    )
    network = config.model
    if isinstance(network, (TextClassifierConfig, AttentionConvNetConfig)):
        network = replace(network, classes=len(classes))
    return replace(config, classes=tuple(classes), model=network), HEAD


def _build_model(config: ClassificationConfig) -> nn.Module:
    return build_model(config.model, classes=len(config.classes), pooler=config.pooler)


def _config_of(checkpoint: Path) -> ClassificationConfig:
    return run_folder.config_of(checkpoint, TASK, ClassificationConfig)


def _texts_of(checkpoint: Path) -> TextInputs:
    config = _config_of(checkpoint)
    if config.limit is None:
        raise ValueError("the run is a classifier of images, got texts; name another folder")
    return TextInputs.load(checkpoint, start=isinstance(config.model, BertConfig), limit=config.limit, end=config.end)


def _check_shared_classes(examples: Examples, classes: Sequence[str]) -> None:
    if not len(examples):
        raise ValueError("there are no labelled examples; give at least one")
    if tuple(examples.classes) != tuple(classes):
        there, known = (", ".join(some[:8]) for some in (examples.classes, tuple(classes)))
        raise ValueError(
            f"the classes must be the same as in training: expected {known}, got {there}; pass classes= to the reader"
        )


def _warn_single_class(classes: Sequence[str], say: Callable[[str], None]) -> None:
    if len(classes) == 1:
        say(f"all examples have the same label, {classes[0]}; give examples of at least two classes")


def _judge(
    valid: Examples, reads: TextInputs | ImageTransform, config: ClassificationConfig
) -> Callable[[nn.Module], dict[str, float]]:
    def evaluate(model: nn.Module) -> dict[str, float]:
        found = Classifier(model, reads, config.classes).evaluate(valid)
        return {name: found[name].value for name in ("accuracy", "f1", "loss")}

    return evaluate
