"""Long documents as overlapping windows, each encoded with its question for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Tokenizer
from ..data.padding import collate
from ..lens import Tape
from ..ops.weights import Weights
from ..train.batches import move_to_device
from ..train.dataclass_json import check_types
from .batching import Long
from .character_inputs import CharacterIds

Array = np.ndarray[Any, np.dtype[Any]]


class QuestionWithContext(Protocol):
    """A question and the text that may contain its answer, such as `regard.data.Question`."""

    @property
    def question(self) -> str: ...
    @property
    def context(self) -> str: ...


def check_questions(asked: Sequence[QuestionWithContext]) -> None:
    """Raise unless each item has a question and a context; a plain tuple has neither."""
    for one in asked:
        if not (hasattr(one, "question") and hasattr(one, "context")):
            raise TypeError(f"each item must have a question and a context, got {one!r}; use Asking(question, context)")


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Lengths of windows and questions. Windows overlap, so that an answer cut by one is whole in the next.

    >>> WindowSettings(size=6, overlap=2).starts(15)
    [0, 4, 8, 12]
    """

    stored_name: ClassVar[str] = "Windows"

    size: Annotated[int, "Number of document tokens that the model reads at once.", "--window"] = 384
    overlap: Annotated[int, "Number of tokens that consecutive windows share."] = 128
    question: Annotated[int, "Maximum number of tokens of a question.", "--question-limit"] = 64
    long: Annotated[
        Long,
        "Handling of longer questions in training: drop them, truncate them, or stop with an error. Their number is "
        "printed.",
    ] = "truncate"
    answer: Annotated[int, "Maximum number of tokens of a predicted answer.", "--answer-limit"] = 30

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("size", "question", "answer"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        if not 0 <= self.overlap < self.size:
            raise ValueError(f"overlap must be at least 0 and below the window of {self.size}, got {self.overlap}")

    def starts(self, tokens: int) -> list[int]:
        """Return the first token of each window over a document of `tokens` tokens; at least one window."""
        return list(range(0, max(1, tokens - self.overlap), self.size - self.overlap))


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """The tokens of a text, each with its characters `text[start:end]` without surrounding spaces."""

    ids: Array
    starts: Array
    ends: Array
    letters: Array | None = None  # n letters, if the model reads characters

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer, spelling: CharacterIds | None = None) -> TokenizedText:
        """Tokenize a text, and encode the characters of its tokens if `spelling` is given."""
        ids, starts, words = [], [], []
        for id, start, end in tokenizer.spans(text):
            whole = text[start:end]
            ids.append(id)
            starts.append(start + len(whole) - len(whole.lstrip()))
            words.append(whole.strip())
        begins = np.array(starts, np.int64)
        ends = begins + np.array([len(word) for word in words], np.int64)
        return cls(np.array(ids, np.int64), begins, ends, None if spelling is None else spelling(words))

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, first: int, count: int) -> TokenizedText:
        """Return at most `count` tokens from `first` on."""
        chosen = slice(first, first + count)
        letters = None if self.letters is None else self.letters[chosen]
        return TokenizedText(self.ids[chosen], self.starts[chosen], self.ends[chosen], letters)

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last token that overlap these characters; None if no token does."""
        inside = np.flatnonzero((self.ends > start) & (self.starts < end))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None


class InputLayout(Protocol):
    """How a question and a window become the input rows of a model; position 0 of a row stands for no answer."""

    pad: dict[str, int]
    scale: int  # numbers per token in the longest row

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]: ...
    def length(self, question: int, window: int) -> int: ...
    def first(self, question: int) -> int: ...
    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...
    def labels_by_layer(self, batch: Mapping[str, Tensor]) -> Any: ...
    def look(self, tape: Tape, first: int) -> Tensor: ...


class TwoRowLayout:
    """Two rows, as a `Reader` takes them; the document begins with a token that stands for no answer.

    The question ends with a token, so that there is something to attend to even if it is empty.
    """

    def __init__(self, tokenizer: Tokenizer, spelling: CharacterIds | None) -> None:
        self.bos, self.eos, self.labels = tokenizer.bos, tokenizer.eos, tokenizer.labels
        self.pad = {"document": tokenizer.pad, "question": tokenizer.pad}
        self.scale = 1 if spelling is None else spelling.letters

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]:
        """Return the document and the question, and their characters in one row each."""
        row = {
            "document": np.concatenate([[self.bos], window.ids]),
            "question": np.concatenate([question.ids, [self.eos]]),
        }
        if window.letters is not None and question.letters is not None:
            row["document_characters"] = np.pad(window.letters, ((1, 0), (0, 0))).ravel()
            row["question_characters"] = np.pad(question.letters, ((0, 1), (0, 0))).ravel()
        return row

    def length(self, question: int, window: int) -> int:
        """Return the length of the longer row."""
        return 1 + max(question, window)

    def first(self, question: int) -> int:
        """Return the position of the first token of the window."""
        return 1

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the logits of each document position as start and as end."""
        names = ("document_lengths", "question_lengths", "document_characters", "question_characters")
        return model(batch["document"], batch["question"], **{name: batch.get(name) for name in names})

    def labels_by_layer(self, batch: Mapping[str, Tensor]) -> Any:
        """Return the tokens of each layer, as `capture` takes them."""
        document, question = ([self.labels(row) for row in batch[name].tolist()] for name in ("document", "question"))
        return {"both.to_document": (question, document), "both.to_question": (document, question), "itself": document}

    def look(self, tape: Tape, first: int) -> Tensor:
        """Return the attention of the question's words to the document, averaged over heads."""
        return _weights(tape["both.to_document"])[0].mean(0)


class OneRowLayout:
    """One row, as a `BertReader` takes it: start token, question, end token, document, end token.

    RoBERTa, whose positions begin at 2 and which has no token types, puts two end tokens after the question.
    """

    def __init__(self, tokenizer: Tokenizer, *, types: int, first: int) -> None:
        self.bos, self.ends, self.labels = tokenizer.bos, [tokenizer.eos] * (2 if first else 1), tokenizer.labels
        self.types = types
        self.pad = {"ids": tokenizer.pad, "types": 0}
        self.scale = 1

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]:
        """Return the row, and its token types if the model has them (1 for the document)."""
        row = {"ids": np.concatenate([[self.bos], question.ids, self.ends, window.ids, self.ends[:1]])}
        if self.types > 1:
            row["types"] = (np.arange(len(row["ids"])) >= self.first(len(question))).astype(np.int64)
        return row

    def length(self, question: int, window: int) -> int:
        """Return the length of the row."""
        return self.first(question) + window + 1

    def first(self, question: int) -> int:
        """Return the position of the first token of the window."""
        return 1 + question + len(self.ends)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the logits of each position in the row as start and as end."""
        return model(batch["ids"], batch.get("types"), keep=batch["ids_lengths"])

    def labels_by_layer(self, batch: Mapping[str, Tensor]) -> Any:
        """Return the tokens of all layers, as `capture` takes them."""
        return [self.labels(row) for row in batch["ids"].tolist()]

    def look(self, tape: Tape, first: int) -> Tensor:
        """Return the attention of the question's words to the row in the last layer, averaged over heads."""
        return _weights(tape[-1])[0].mean(0)[1 : first - len(self.ends)]


class WindowExamples:
    """One example per question and window of its document.

    A document shared by several questions is tokenized once. `answers` are the characters (start, end) of the answer in
    each document, or None; with it, an example also has the tokens `start` and `end` of the answer, both 0 if the
    window does not contain all of it.
    """

    def __init__(
        self,
        asked: Sequence[QuestionWithContext],
        tokenizer: Tokenizer,
        *,
        layout: InputLayout,
        windows: WindowSettings,
        spelling: CharacterIds | None = None,
        answers: Sequence[tuple[int, int] | None] | None = None,
    ) -> None:
        self.layout, self.windows = layout, windows
        contexts = {
            text: TokenizedText.of(text, tokenizer, spelling) for text in dict.fromkeys(one.context for one in asked)
        }
        self.documents = [contexts[one.context] for one in asked]
        self.questions = [
            TokenizedText.of(one.question, tokenizer, spelling).part(0, windows.question) for one in asked
        ]
        self._spans = None
        if answers is not None:
            self._spans = [
                None if span is None else document.tokens(*span)
                for document, span in zip(self.documents, answers, strict=True)
            ]
        each = [windows.starts(len(document)) for document in self.documents]
        self.owners = [number for number, firsts in enumerate(each) for _ in firsts]  # the question of each window
        self.firsts = [first for firsts in each for first in firsts]  # the first document token of each window

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, number: int) -> dict[str, Array]:
        question, window = self.questions[self.owners[number]], self.window(number)
        row = self.layout.row(question, window)
        if self._spans is not None:
            start, end = self._target(number)
            row |= {"start": np.array(start), "end": np.array(end)}
        return row

    def window(self, number: int) -> TokenizedText:
        """Return the tokens of a window."""
        return self.documents[self.owners[number]].part(self.firsts[number], self.windows.size)

    @property
    def lengths(self) -> list[int]:
        """The length of each row in tokens."""
        return [
            self.layout.length(len(self.questions[owner]), min(len(self.documents[owner]) - first, self.windows.size))
            for owner, first in zip(self.owners, self.firsts, strict=True)
        ]

    def batch(self, numbers: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples; `first` and `behind` are the row positions of each window's first token and end."""
        batch = collate([self[number] for number in numbers], self.layout.pad)
        batch["first"] = torch.tensor([self.place(number) for number in numbers])
        batch["behind"] = batch["first"] + torch.tensor([len(self.window(number)) for number in numbers])
        return move_to_device(batch, device)

    def place(self, number: int) -> int:
        """Return the position in its row at which a window begins."""
        return self.layout.first(len(self.questions[self.owners[number]]))

    def _target(self, number: int) -> tuple[int, int]:
        assert self._spans is not None
        span, first = self._spans[self.owners[number]], self.firsts[number]
        if span is None or not first <= span[0] <= span[1] < first + self.windows.size:
            return 0, 0
        moved_by = self.place(number) - first
        return span[0] + moved_by, span[1] + moved_by


def _weights(A: object) -> Weights:
    assert isinstance(A, Weights)
    return A


def longest_row(layout: InputLayout, windows: WindowSettings) -> int:
    """Return the maximum number of tokens of a row."""
    return layout.length(windows.question, windows.size)
