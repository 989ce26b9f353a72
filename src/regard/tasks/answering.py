"""Question answering: find the span of a document that answers a question (extractive, as in SQuAD)."""

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
from .data_checks import question_key, report_rows
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
from .dry_run import example_lines, length_line, unknown_line
from .fine_tuning import FineTuning, check_kept
from .metrics import MetricValue, squad_scores
from .pretrained import encoder_of, max_positions
from .seq2seq_task import ShowProgress
from .setup import Setup, Start, run
from .span_search import Span, SpanFinder
from .vocabulary import TOKENIZER, Vocabulary, WordVocabulary

TASK = "answering"
MAX_ALPHABET = 200  # characters that a reader distinguishes, the most frequent ones
MAX_CAPTURED_QUESTIONS = 500
SORTING_POOL = 4096  # examples sorted by length together; few, since rows of characters are large
Network = ReaderConfig | BertConfig
ModelConfigFunction = Callable[[Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class AnsweringModelSettings:
    """Settings of a model that answers questions; called with a tokenizer, they return the config of the model.

    `reader` needs no pretraining: recurrent networks with attention between question and document (`models.Reader`).
    `bert` encodes both in one row (Devlin et al. 2019, section 4.2).
    """

    kind: Annotated[Literal["reader", "bert"], "Architecture: a recurrent reader, or a BERT.", "--model"] = "reader"
    dim: Annotated[int, "Width of word vectors (reader) or of hidden states (bert)."] = 128
    hidden: Annotated[
        int | None,
        "Width of recurrent states (reader; default: 2 x --dim) or of feed-forward layers (bert; default: 4 x --dim).",
    ] = None
    depth: Annotated[int, "Number of layers (bert only)."] = 4
    heads: Annotated[int, "Number of attention heads."] = 4
    spelling: Annotated[bool, "Also read the characters of each word (reader only)."] = True
    cell: Annotated[Literal["gru", "lstm"], "Recurrent cell (reader only)."] = "gru"
    dropout: Annotated[float, "Dropout probability in training."] = 0.2

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "bert":
            check_left_at_default(self, "spelling", "cell", whose="a reader", got="kind='bert'")
        else:
            check_left_at_default(self, "depth", whose="a Bert", got="kind='reader'")

    def __call__(self, tokenizer: Tokenizer) -> Network:
        """Return the config for this vocabulary."""
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
                attention_dropout=0.0,  # on a CPU it would cost more than the rest of the step
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
    """The content of `config.json`; `impossible` says whether training included questions without answers."""

    model: Network
    windows: WindowSettings
    impossible: bool


Model = AnsweringModelSettings  # short, for `answering.Model(...)`
DEFAULT_MODEL, DEFAULT_VOCABULARY, DEFAULT_WINDOWS = AnsweringModelSettings(), WordVocabulary(), WindowSettings()
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
    model: ModelConfigFunction = DEFAULT_MODEL,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    pretrained: str | Path | None = None,
    windows: WindowSettings = DEFAULT_WINDOWS,
    tokens: int = 8192,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a model that answers questions, into the folder `out`.

        train(questions("train.json"), valid=questions("dev.json"), out="runs/squad")
        Answerer.load("runs/squad").answer([Asking("When did it open?", document)])

    The model learns the start and end of the first answer of each question in every window that contains all of it,
    and that other windows contain no answer. A batch has as many windows as fit into `tokens`, padding included.
    `pretrained` is the Hugging Face folder of a BERT, RoBERTa or DistilBERT to fine-tune, with its tokenizer; it
    replaces `model` and `vocabulary`. An evaluation returns `f1` and `exact`. Other arguments are as in
    `translation.train`.
    """

    check_kept(
        base,
        model=model != DEFAULT_MODEL,
        vocabulary=vocabulary != DEFAULT_VOCABULARY,
        windows=windows != DEFAULT_WINDOWS,
        pretrained=pretrained is not None,
    )

    def prepare(start: Start) -> Setup:
        if recipe.forcing is not None:
            raise ValueError("forcing needs a recurrent decoder, which this task does not have; leave it out")
        asked = list(questions)
        if not asked:
            raise DataError("there are no questions", hint="expected at least one")
        if start.checkpoint is not None:
            answerer = Answerer.of(start.checkpoint)
            if start.fresh and _impossible(asked):
                answerer.config = replace(answerer.config, impossible=True)
        elif pretrained is None:
            answerer = _new_answerer(asked, model, vocabulary, windows)
        elif model != DEFAULT_MODEL or vocabulary != DEFAULT_VOCABULARY:
            raise ValueError("pretrained includes its own model and vocabulary; leave out model and vocabulary")
        else:
            answerer = _from_pretrained(Path(pretrained), asked, windows)
        judged = None if valid is None else list(valid)
        asked = _handle_long_questions(asked, answerer, say=start.say)
        examples = answerer.window_examples(asked, answers=[_first_answer(one) for one in asked])
        scale, longest = answerer.layout.scale, max(examples.lengths)
        if tokens < longest:
            raise ValueError(f"a batch must have room for the longest row of {longest} tokens, got tokens={tokens}")
        setup = Setup(
            model=answerer.model,
            batches=Batches(
                examples,
                tokens=tokens * scale,
                pool=SORTING_POOL,
                pad=answerer.layout.pad,
                seed=recipe.seed,
                shard=(start.group.rank, start.group.size),
            ),
            evaluate=None if judged is None else _judge(judged, answerer),
            files=answerer.files(),
            unit="windows",
            describe=lambda: _describe(asked, examples, answerer.tokenizer),
        )
        report_rows(start, map(question_key, asked), None if judged is None else map(question_key, judged), "questions")
        return setup

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


class Asking(NamedTuple):
    """A question and the document that may contain its answer."""

    question: str
    context: str


@dataclass(frozen=True, kw_only=True)
class FoundAnswer:
    """An answer: `text` is the document from character `start` to `end`, or empty if the model finds no answer.

    The score is the log-odds of this answer against no answer, in the window that contains it.
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

    A long document is read in overlapping windows; the answer is the best over all windows.
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
        """Load the model of a run."""
        path = run_folder.open_run(folder)
        answerer = cls.of(path)
        run_folder.load_weights(answerer.model, path)
        answerer.model.to(own_device(device))
        return answerer

    @classmethod
    def of(cls, checkpoint: Path) -> Answerer:
        """Build the model of a checkpoint, without loading its weights."""
        config = run_folder.config_of(checkpoint, TASK, AnsweringConfig)
        tokenizer = Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))
        spelled = isinstance(config.model, ReaderConfig) and config.model.characters is not None
        alphabet = Tokenizer.from_json(run_folder.read_text(checkpoint, ALPHABET_FILE)) if spelled else None
        return cls(_build_model(config.model), tokenizer, config, alphabet)

    def files(self) -> dict[str, str]:
        """Return the files of a checkpoint besides the weights, by name."""
        files = {run_folder.CONFIG: run_folder.config_text(TASK, self.config), TOKENIZER: self.tokenizer.to_json()}
        return files if self.alphabet is None else {**files, ALPHABET_FILE: self.alphabet.to_json()}

    def answer(
        self, asked: Sequence[QuestionWithContext], *, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> list[FoundAnswer]:
        """Return the best answer to each question."""
        return [best[0] for best in self.n_best(asked, n=1, threshold=threshold, show=show)]

    def n_best(
        self, asked: Sequence[QuestionWithContext], *, n: int, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> list[list[FoundAnswer]]:
        """Return the n best answers to each question, best first.

        If training included questions without answers, the empty answer competes with `threshold` as its score: a
        higher threshold answers fewer questions. A blank question gets only the empty answer.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if math.isnan(threshold):
            raise ValueError("threshold must be a number, got NaN; training uses 0")
        check_questions(asked := list(asked))
        found = iter(self._finder.spans(self.window_examples([one for one in asked if one.question.strip()]), n, show))
        return [self._rank_answers(one, next(found) if one.question.strip() else {}, n, threshold) for one in asked]

    def evaluate(
        self, questions: Sequence[Question], *, threshold: float = 0.0, show: ShowProgress | None = None
    ) -> dict[str, MetricValue]:
        """Compute `f1` and `exact` as SQuAD does, and more if some questions have no answer: see `squad_scores`."""
        answers = [one.text for one in self.answer(questions, threshold=threshold, show=show)]
        return squad_scores(answers, [[answer.text for answer in one.answers] for one in questions])

    def tape(self, asked: Sequence[QuestionWithContext]) -> Tape:
        """Capture all attention while the model reads each question, one batch row per question.

        If a document is longer than a window, the model reads the window with the best answer.
        """
        if not 0 < len(asked) <= MAX_CAPTURED_QUESTIONS:
            raise ValueError(f"a capture holds 1 to {MAX_CAPTURED_QUESTIONS} questions, got {len(asked)}; give fewer")
        window_examples = self.window_examples(asked)
        return self._finder.tape(window_examples, self._finder.windows(window_examples))

    def look(self, asked: QuestionWithContext) -> tuple[Float[Tensor, "question window"], list[str]]:
        """Return the attention of the question's words to the window with the best answer, and the window's words.

        Heads are averaged; for a BERT it is the attention of the last layer.
        """
        if not asked.question.strip():
            raise ValueError("the question is empty")
        window_examples = self.window_examples([asked])
        [number] = self._finder.windows(window_examples)
        window, first = window_examples.window(number), window_examples.place(number)
        if not len(window):
            raise ValueError("the document is empty")
        A = self.layout.look(self._finder.tape(window_examples, [number]), first)[:, first : first + len(window)]
        places = zip(window.starts.tolist(), window.ends.tolist(), strict=True)
        return A.cpu(), [asked.context[start:end] for start, end in places]

    def too_long(self, asked: Sequence[QuestionWithContext]) -> list[bool]:
        """Return for each question whether it has more tokens than the model reads."""
        ids = self.tokenizer.encode_all([one.question for one in asked])
        return [len(row) > self.config.windows.question for row in ids]

    def window_examples(
        self, asked: Sequence[QuestionWithContext], *, answers: Sequence[tuple[int, int] | None] | None = None
    ) -> WindowExamples:
        """Encode questions and documents into the windows that the model reads."""
        check_questions(asked)
        return WindowExamples(
            asked,
            self.tokenizer,
            layout=self.layout,
            windows=self.config.windows,
            spelling=self.spelling,
            answers=answers,
        )

    def _rank_answers(
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


def _new_answerer(
    asked: Sequence[Question], model: ModelConfigFunction, vocabulary: Vocabulary, windows: WindowSettings
) -> Answerer:
    """Build a new model, with a vocabulary learned from the questions and their documents."""
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


def _from_pretrained(folder: Path, asked: Sequence[Question], windows: WindowSettings) -> Answerer:
    """Build a model from the weights and the tokenizer of a Hugging Face folder, with its span head if it has one."""
    bert, model, tokenizer = encoder_of(folder)
    bert.config, bert.pool = replace(bert.config, pooler=False), None  # unused here, so it would stay untrained
    config = AnsweringConfig(model=bert.config, windows=windows, impossible=_impossible(asked))
    reader = model if isinstance(model, BertReader) else BertReader(bert)
    answerer = Answerer(reader, tokenizer, config, None)
    longest = longest_row(answerer.layout, windows)
    if longest > max_positions(bert):
        raise ValueError(
            f"a question of {windows.question} tokens and a window of {windows.size} make a row of {longest} tokens, "
            f"but {folder} reads at most {max_positions(bert)}; choose a smaller window"
        )
    return answerer


def _describe(asked: Sequence[Question], examples: WindowExamples, tokenizer: Tokenizer) -> list[str]:
    """Return the lengths, the vocabulary and the first questions, for a dry run."""
    answered = sum(bool(one.answers) for one in asked)
    texts = [*examples.documents, *examples.questions]
    return [
        f"{len(asked):,} questions, {answered:,} with an answer, in {len(examples):,} windows",
        length_line("documents", "texts", [len(document) for document in examples.documents]),
        length_line("questions", "texts", [len(question) for question in examples.questions]),
        unknown_line("documents and questions", tokenizer, (text.ids for text in texts)),
        *example_lines("question", [question.ids.tolist() for question in examples.questions[:2]], tokenizer),
    ]


def _build_model(network: Network) -> nn.Module:
    return Reader(network) if isinstance(network, ReaderConfig) else BertReader(Bert(network))


def _impossible(asked: Iterable[Question]) -> bool:
    return any(not one.answers for one in asked)


def _first_answer(one: Question) -> tuple[int, int] | None:
    if not one.answers:
        return None
    text, start = one.answers[0]
    return start, start + len(text)


def _handle_long_questions(asked: list[Question], answerer: Answerer, *, say: Callable[[str], None]) -> list[Question]:
    """Apply `windows.long` to the questions: drop those that are too long, keep them to be truncated, or raise."""
    windows, long = answerer.config.windows, answerer.too_long(asked)
    if not any(long):
        return asked
    first, many = asked[long.index(True)], f"{sum(long):,} of {len(asked):,}"
    if windows.long == "error" or (windows.long == "drop" and all(long)):
        raise DataError(
            f"question {first.id!r} has more than {windows.question} tokens, like {many} questions",
            hint=TOO_LONG[windows.long],
        )
    done = "dropped" if windows.long == "drop" else "truncated"
    say(f"{many} questions have more than {windows.question} tokens and were {done}")
    return asked if windows.long == "truncate" else [one for one, cut in zip(asked, long, strict=True) if not cut]


def _judge(valid: list[Question], trained: Answerer) -> Callable[[nn.Module], dict[str, float]]:
    if not valid:
        raise ValueError("valid has no questions; leave it out to train without validation")

    def evaluate(model: nn.Module) -> dict[str, float]:
        answerer = Answerer(model, trained.tokenizer, trained.config, trained.alphabet)
        return {name: measured.value for name, measured in answerer.evaluate(valid).items()}

    return evaluate
