"""Question answering: the stretch of a document that answers a question, cut out of it as it stands there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..data import Batches, DataError, Question, Tokenizer
from ..lens import Tape
from ..models import Bert, BertConfig, BertReader, Reader, ReaderConfig
from ..train import InverseSquareRoot, Outcome, Progress, Recipe, own_device
from ..train.dataclass_json import check_left_at_default, check_types
from . import run_folder
from .batching import TOO_LONG
from .character_inputs import ALPHABET_FILE, CharacterIds
from .document_windows import (
    InputLayout,
    OneRowLayout,
    QuestionWithContext,
    TwoRowLayout,
    WindowExamples,
    WindowSettings,
    check_questions,
    longest_row,
)
from .metrics import MetricValue, squad_scores
from .pretrained import encoder_of, places
from .seq2seq_task import ShowProgress
from .setup import Setup, Start, run
from .span_search import Span, SpanFinder
from .vocabulary import TOKENIZER, Vocabulary, WordVocabulary

TASK = "answering"
MAX_ALPHABET = 200  # different ones that words are spelled with, the most frequent
MAX_CAPTURED_QUESTIONS = 500  # questions on one tape
SORTING_POOL = 4096  # examples sorted by length together; spelled, they are large
Network = ReaderConfig | BertConfig
Sketch = Callable[[Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class AnsweringModelSettings:
    """A model that finds answers in a few words: called with a tokenizer, it gives the model's config.

    `reader` needs no pretraining: recurrent networks, and attention between question and document (`models.Reader`).
    `bert` is an encoder over both in one row (Devlin et al. 2019, section 4.2).
    """

    kind: Annotated[Literal["reader", "bert"], "what it is made of", "--model"] = "reader"
    dim: Annotated[int, "the width of word vectors, and of a Bert's states"] = 128
    hidden: Annotated[int | None, "the width of a reader's states (2 dim), or of feed-forwards (4 dim)"] = None
    depth: Annotated[int, "the layers of a Bert"] = 4
    heads: Annotated[int, "its attention heads"] = 4
    spelling: Annotated[bool, "whether a reader reads how words are spelled"] = True
    cell: Annotated[Literal["gru", "lstm"], "the cell of a reader"] = "gru"
    dropout: Annotated[float, "the share of activations left out while training"] = 0.2

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "bert":
            check_left_at_default(self, "spelling", "cell", whose="a reader", got="kind='bert'")
        else:
            check_left_at_default(self, "depth", whose="a Bert", got="kind='reader'")

    def __call__(self, tokenizer: Tokenizer) -> Network:
        """The config for this vocabulary."""
        if self.kind == "bert":
            return BertConfig(
                vocabulary=len(tokenizer),
                dim=self.dim,
                hidden=4 * self.dim if self.hidden is None else self.hidden,
                depth=self.depth,
                heads=self.heads,
                pooler=False,
                padding=tokenizer.pad,
                dropout=self.dropout,
                attention_dropout=0.0,  # which on a CPU costs more than all the rest
            )
        return ReaderConfig(
            vocabulary=len(tokenizer),
            characters=MAX_ALPHABET if self.spelling else None,
            dim=self.dim,
            character_dim=max(1, self.dim // 2),
            hidden=2 * self.dim if self.hidden is None else self.hidden,
            heads=self.heads,
            cell=self.cell,
            padding=tokenizer.pad,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True)
class AnsweringConfig:
    """What `config.json` says: the model, what it reads at once, and whether it has seen questions without answers."""

    model: Network
    windows: WindowSettings
    impossible: bool


Model = AnsweringModelSettings  # short, for `answering.Model(...)`
SMALL, LEARNED, SIZES = AnsweringModelSettings(), WordVocabulary(), WindowSettings()
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="f1",
    better="higher",
)


def train(
    questions: Iterable[Question],
    *,
    out: str | Path,
    valid: Iterable[Question] | None = None,
    recipe: Recipe = RECIPE,
    model: Sketch = SMALL,
    vocabulary: Vocabulary = LEARNED,
    pretrained: str | Path | None = None,
    windows: WindowSettings = SIZES,
    tokens: int = 8192,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
) -> Outcome:
    """Train a model that answers questions, into the folder `out`.

        train(questions("train.json"), valid=questions("dev.json"), out="runs/squad")
        Answerer.load("runs/squad").answer([Asking("When did it open?", document)])

    It learns where the first answer of each question starts and ends, in each window that holds all of it, and that
    the other windows hold none; a batch has as many windows as `tokens` hold, padding included. `pretrained` is the
    Hugging Face folder of a BERT, RoBERTa or DistilBERT to begin with, its tokenizer included, in place of `model` and
    `vocabulary`. An evaluation gives `f1` and `exact`. The rest is as in `translation.train`.
    """

    def prepare(start: Start) -> Setup:
        if recipe.forcing is not None:
            raise ValueError("forcing feeds a recurrent decoder its own words, got a model that writes none")
        asked = list(questions)
        if not asked:
            raise DataError("there are no questions", hint="expected at least one")
        if start.checkpoint is not None:
            answerer = Answerer.of(start.checkpoint)
        elif pretrained is None:
            answerer = _new(asked, model, vocabulary, windows)
        elif model != SMALL or vocabulary != LEARNED:
            raise ValueError("pretrained brings a model and a vocabulary of its own; leave out model and vocabulary")
        else:
            answerer = _begun(Path(pretrained), asked, windows)
        asked = _short(asked, answerer, say=start.say)
        examples = answerer.window_examples(asked, answers=[_first_answer(one) for one in asked])
        scale, longest = answerer.layout.scale, max(examples.lengths)
        if tokens < longest:
            raise ValueError(f"tokens of a batch must hold the longest row of {longest} tokens, got {tokens}")
        return Setup(
            model=answerer.model,
            batches=Batches(
                examples,
                tokens=tokens * scale,
                pool=SORTING_POOL,
                pad=answerer.layout.pad,
                seed=recipe.seed,
                shard=(start.group.rank, start.group.size),
            ),
            evaluate=None if valid is None else _judge(list(valid), answerer),
            files=answerer.files(),
            unit="windows",
        )

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show)


class Asking(NamedTuple):
    """A question, and the document to find its answer in."""

    question: str
    context: str


@dataclass(frozen=True, kw_only=True)
class FoundAnswer:
    """`text`, the document from character `start` to `end`; empty where the document is thought to hold no answer.

    The score is the log-odds of this answer against there being none in the window where it was found.
    """

    text: str
    start: int
    end: int
    score: float


class Answerer:
    """A trained model that finds answers.

        answerer = Answerer.load("runs/squad")
        [found] = answerer.answer([Asking("When did it open?", document)])
        print(found.text, document[found.start : found.end])

    A document longer than a window is read by windows that overlap, and the answer is the best of all of them.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, config: AnsweringConfig, alphabet: Tokenizer | None
    ) -> None:
        self.model, self.tokenizer, self.config, self.alphabet = model, tokenizer, config, alphabet
        self.spelling = None if alphabet is None else CharacterIds(alphabet)
        self.layout: InputLayout
        if isinstance(config.model, ReaderConfig):
            self.layout = TwoRowLayout(tokenizer, self.spelling)
        else:
            self.layout = OneRowLayout(tokenizer, types=config.model.types, first=config.model.first)
        self._finder = SpanFinder(model, self.layout, config.windows.answer)

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str | None = None) -> Answerer:
        """The model of a run."""
        path = run_folder.open_run(folder)
        answerer = cls.of(path)
        run_folder.load_weights(answerer.model, path)
        answerer.model.to(own_device(device))
        return answerer

    @classmethod
    def of(cls, checkpoint: Path) -> Answerer:
        """What a checkpoint describes, its weights not yet read."""
        config = run_folder.config_of(checkpoint, TASK, AnsweringConfig)
        tokenizer = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
        spelled = isinstance(config.model, ReaderConfig) and config.model.characters is not None
        alphabet = Tokenizer.from_json(run_folder.read_text(checkpoint, ALPHABET_FILE)) if spelled else None
        return cls(_build_model(config.model), tokenizer, config, alphabet)

    def files(self) -> dict[str, str]:
        """What a checkpoint keeps beside the weights."""
        files = {run_folder.CONFIG: run_folder.config_text(TASK, self.config), TOKENIZER: self.tokenizer.to_json()}
        return files if self.alphabet is None else {**files, ALPHABET_FILE: self.alphabet.to_json()}

    def answer(
        self, asked: Sequence[QuestionWithContext], *, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> list[FoundAnswer]:
        """The best answer to each question."""
        return [best[0] for best in self.n_best(asked, n=1, threshold=threshold, show=show)]

    def n_best(
        self, asked: Sequence[QuestionWithContext], *, n: int, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> list[list[FoundAnswer]]:
        """The n best answers to each question, best first.

        If the training has had questions without an answer, then to give none is an answer too, whose score is the
        threshold: the higher, the fewer questions are answered. To a blank question, none is the only answer.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if math.isnan(threshold):
            raise ValueError("threshold must be a number, got NaN; 0 is that of training")
        check_questions(asked := list(asked))
        found = iter(self._finder.spans(self.window_examples([one for one in asked if one.question.strip()]), n, show))
        return [self._ranked(one, next(found) if one.question.strip() else {}, n, threshold) for one in asked]

    def evaluate(
        self, questions: Sequence[Question], *, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> dict[str, MetricValue]:
        """`f1` and `exact` as SQuAD counts them, and more where some questions have no answer: see `squad.judged`."""
        answers = [one.text for one in self.answer(questions, threshold=threshold, show=show)]
        return squad_scores(answers, [[answer.text for answer in one.answers] for one in questions])

    def tape(self, asked: Sequence[QuestionWithContext]) -> Tape:
        """Every attention of the model while it reads each question, a batch row each, to be measured and viewed.

        Of a document longer than a window, it reads the window where the best answer is.
        """
        if not 0 < len(asked) <= MAX_CAPTURED_QUESTIONS:
            raise ValueError(f"a tape holds the attention of 1 to {MAX_CAPTURED_QUESTIONS} questions, got {len(asked)}")
        window_examples = self.window_examples(asked)
        return self._finder.tape(window_examples, self._finder.windows(window_examples))

    def look(self, asked: QuestionWithContext) -> tuple[Float[Tensor, "question window"], list[str]]:
        """How the words of a question look at the window where the best answer is, and the words of that.

        Heads are averaged. A Bert's is that of its last layer.
        """
        if not asked.question.strip():
            raise ValueError("the question is blank, and no word of it looks anywhere; ask one")
        window_examples = self.window_examples([asked])
        [number] = self._finder.windows(window_examples)
        window, first = window_examples.window(number), window_examples.place(number)
        if not len(window):
            raise ValueError("the document is empty; there is nothing to look at")
        A = self.layout.look(self._finder.tape(window_examples, [number]), first)[:, first : first + len(window)]
        places = zip(window.starts.tolist(), window.ends.tolist(), strict=True)
        return A.cpu(), [asked.context[start:end] for start, end in places]

    def too_long(self, asked: Sequence[QuestionWithContext]) -> list[bool]:
        """Of each question, whether it has more tokens than are read of it."""
        ids = self.tokenizer.encode_all([one.question for one in asked])
        return [len(row) > self.config.windows.question for row in ids]

    def window_examples(
        self, asked: Sequence[QuestionWithContext], *, answers: Sequence[tuple[int, int] | None] | None = None
    ) -> WindowExamples:
        """Questions and documents as the model reads them."""
        check_questions(asked)
        return WindowExamples(
            asked,
            self.tokenizer,
            layout=self.layout,
            windows=self.config.windows,
            spelling=self.spelling,
            answers=answers,
        )

    def _ranked(
        self, one: QuestionWithContext, spans: Mapping[Span, float], n: int, threshold: float
    ) -> list[FoundAnswer]:
        found = [
            FoundAnswer(text=one.context[start:end], start=start, end=end, score=score)
            for (start, end), score in spans.items()
        ]
        if self.config.impossible or not found:
            none = threshold if self.config.impossible else -math.inf
            found.insert(0, FoundAnswer(text="", start=0, end=0, score=none))
        return sorted(found, key=lambda answered: -answered.score)[:n]


def _new(asked: Sequence[Question], model: Sketch, vocabulary: Vocabulary, windows: WindowSettings) -> Answerer:
    """A model whose words are those of the questions and of their documents."""
    texts = [*dict.fromkeys(one.context for one in asked), *(one.question for one in asked)]
    tokenizer = vocabulary.learn(texts)
    network, alphabet = model(tokenizer), None
    if isinstance(network, ReaderConfig) and network.characters is not None:
        alphabet = Tokenizer.characters(texts, size=network.characters)
        network = replace(network, characters=len(alphabet))
    elif isinstance(network, BertConfig):
        layout = OneRowLayout(tokenizer, types=network.types, first=network.first)
        network = replace(network, length=max(network.length, network.first + longest_row(layout, windows)))
    config = AnsweringConfig(model=network, windows=windows, impossible=_impossible(asked))
    return Answerer(_build_model(network), tokenizer, config, alphabet)


def _begun(folder: Path, asked: Sequence[Question], windows: WindowSettings) -> Answerer:
    """A model with the weights and the tokenizer of a Hugging Face folder, and with its span head if it has one."""
    bert, model, tokenizer = encoder_of(folder)
    bert.config, bert.pool = replace(bert.config, pooler=False), None  # no answer reads it, so it would learn nothing
    config = AnsweringConfig(model=bert.config, windows=windows, impossible=_impossible(asked))
    reader = model if isinstance(model, BertReader) else BertReader(bert)
    answerer = Answerer(reader, tokenizer, config, None)
    longest = longest_row(answerer.layout, windows)
    if longest > places(bert):
        raise ValueError(
            f"a window of {windows.size} tokens behind a question of {windows.question} makes a row of {longest}, and "
            f"{folder} reads {places(bert)}; choose a smaller window"
        )
    return answerer


def _build_model(network: Network) -> nn.Module:
    return Reader(network) if isinstance(network, ReaderConfig) else BertReader(Bert(network))


def _impossible(asked: Iterable[Question]) -> bool:
    return any(not one.answers for one in asked)


def _first_answer(one: Question) -> tuple[int, int] | None:
    if not one.answers:
        return None
    text, start = one.answers[0]
    return start, start + len(text)


def _short(asked: list[Question], answerer: Answerer, *, say: Callable[[str], None]) -> list[Question]:
    """The questions that training reads: all, the end of long ones cut off, or all but these."""
    windows, long = answerer.config.windows, answerer.too_long(asked)
    if not any(long):
        return asked
    first, many = asked[long.index(True)], f"{sum(long):,} of {len(asked):,}"
    if windows.long == "error" or (windows.long == "drop" and all(long)):
        raise DataError(
            f"question {first.id!r} has more than {windows.question} tokens, as {many} have",
            hint=TOO_LONG[windows.long],
        )
    done = "dropped" if windows.long == "drop" else "truncated"
    say(f"{many} questions have more than {windows.question} tokens and are {done}")
    return asked if windows.long == "truncate" else [one for one, cut in zip(asked, long, strict=True) if not cut]


def _judge(valid: list[Question], trained: Answerer) -> Callable[[nn.Module], dict[str, float]]:
    if not valid:
        raise ValueError("valid must hold at least one question, got none; leave it out to train without validation")

    def evaluate(model: nn.Module) -> dict[str, float]:
        answerer = Answerer(model, trained.tokenizer, trained.config, trained.alphabet)
        return {name: measured.value for name, measured in answerer.evaluate(valid).items()}

    return evaluate
