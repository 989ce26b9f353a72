"""Reading: documents by windows that overlap, each beside its question, as a model reads them."""

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
    """A question and the text to find its answer in, as `regard.data.Question` has them."""

    @property
    def question(self) -> str: ...
    @property
    def context(self) -> str: ...


def check_questions(asked: Sequence[QuestionWithContext]) -> None:
    """Raise unless each has a question and a context, as a plain tuple has not."""
    for one in asked:
        if not (hasattr(one, "question") and hasattr(one, "context")):
            raise TypeError(f"each must have a question and a context, got {one!r}; write Asking(question, context)")


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """How much is read at once. Windows overlap, so that an answer at the edge of one is whole in the next.

    >>> Windows(size=6, overlap=2).firsts(15)
    [0, 4, 8, 12]
    """

    stored_name: ClassVar[str] = "Windows"

    size: Annotated[int, "the tokens of a document that are read at once", "--window"] = 384
    overlap: Annotated[int, "the tokens that a window shares with the next"] = 128
    question: Annotated[int, "the most tokens a question may have", "--question-limit"] = 64
    long: Annotated[Long, "what becomes of longer questions in training; how many there are is said"] = "truncate"
    answer: Annotated[int, "the most tokens of an answer that is given", "--answer-limit"] = 30

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("size", "question", "answer"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        if not 0 <= self.overlap < self.size:
            raise ValueError(f"overlap must be at least 0 and below the window of {self.size}, got {self.overlap}")

    def firsts(self, tokens: int) -> list[int]:
        """Where the windows over a document of so many tokens begin; one that is empty has one."""
        return list(range(0, max(1, tokens - self.overlap), self.size - self.overlap))


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """The tokens of a text, each with the characters `text[start:end]` it stands for, spaces at their ends left out."""

    ids: Array
    starts: Array
    ends: Array
    letters: Array | None = None  # n letters, where spelling is read

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer, spelling: CharacterIds | None = None) -> TokenizedText:
        """A text cut into tokens, and these spelled."""
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
        """So many of its tokens, or as many as there are."""
        chosen = slice(first, first + count)
        letters = None if self.letters is None else self.letters[chosen]
        return TokenizedText(self.ids[chosen], self.starts[chosen], self.ends[chosen], letters)

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last token that have a share in these characters, None if none has."""
        inside = np.flatnonzero((self.ends > start) & (self.starts < end))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None


class InputLayout(Protocol):
    """How question and window become the rows of a model, in which the place 0 stands for no answer."""

    pad: dict[str, int]
    scale: int  # numbers to a token, in the longest of the rows

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]: ...
    def length(self, question: int, window: int) -> int: ...
    def first(self, question: int) -> int: ...
    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...
    def named(self, batch: Mapping[str, Tensor]) -> Any: ...
    def look(self, tape: Tape, first: int) -> Tensor: ...


class TwoRowLayout:
    """Two rows, as a `Reader` takes them; the document begins with a token that means no answer.

    The question has an end, so that even an empty one has something to attend to.
    """

    def __init__(self, tokenizer: Tokenizer, spelling: CharacterIds | None) -> None:
        self.bos, self.eos, self.labels = tokenizer.bos, tokenizer.eos, tokenizer.labels
        self.pad = {"document": tokenizer.pad, "question": tokenizer.pad}
        self.scale = 1 if spelling is None else spelling.letters

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]:
        """The document and the question, and their letters in one row each."""
        row = {
            "document": np.concatenate([[self.bos], window.ids]),
            "question": np.concatenate([question.ids, [self.eos]]),
        }
        if window.letters is not None and question.letters is not None:
            row["document_characters"] = np.pad(window.letters, ((1, 0), (0, 0))).ravel()
            row["question_characters"] = np.pad(question.letters, ((0, 1), (0, 0))).ravel()
        return row

    def length(self, question: int, window: int) -> int:
        """The longer of the two rows."""
        return 1 + max(question, window)

    def first(self, question: int) -> int:
        """Where the window begins."""
        return 1

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of each place in the document, as the start and as the end."""
        names = ("document_lengths", "question_lengths", "document_characters", "question_characters")
        return model(batch["document"], batch["question"], **{name: batch.get(name) for name in names})

    def named(self, batch: Mapping[str, Tensor]) -> Any:
        """The tokens of each layer, as `capture` takes them."""
        document, question = ([self.labels(row) for row in batch[name].tolist()] for name in ("document", "question"))
        return {"both.to_document": (question, document), "both.to_question": (document, question), "itself": document}

    def look(self, tape: Tape, first: int) -> Tensor:
        """How the words of a question look at the document, heads averaged."""
        return _weights(tape["both.to_document"])[0].mean(0)


class OneRowLayout:
    """One row, as a `BertReader` takes it: the start, the question, its end, the document, its end.

    RoBERTa, which counts places from 2 and has no types, sets two ends behind the question.
    """

    def __init__(self, tokenizer: Tokenizer, *, types: int, first: int) -> None:
        self.bos, self.ends, self.labels = tokenizer.bos, [tokenizer.eos] * (2 if first else 1), tokenizer.labels
        self.types = types
        self.pad = {"ids": tokenizer.pad, "types": 0}
        self.scale = 1

    def row(self, question: TokenizedText, window: TokenizedText) -> dict[str, Array]:
        """The row, and which of its tokens are of the document, where the model tells them apart."""
        row = {"ids": np.concatenate([[self.bos], question.ids, self.ends, window.ids, self.ends[:1]])}
        if self.types > 1:
            row["types"] = (np.arange(len(row["ids"])) >= self.first(len(question))).astype(np.int64)
        return row

    def length(self, question: int, window: int) -> int:
        """The tokens of the row."""
        return self.first(question) + window + 1

    def first(self, question: int) -> int:
        """Where the window begins."""
        return 1 + question + len(self.ends)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of each place in the row, as the start and as the end."""
        return model(batch["ids"], batch.get("types"), padding=batch["ids_lengths"])

    def named(self, batch: Mapping[str, Tensor]) -> Any:
        """The tokens of every layer, as `capture` takes them."""
        return [self.labels(row) for row in batch["ids"].tolist()]

    def look(self, tape: Tape, first: int) -> Tensor:
        """How the words of a question, before the place where the window begins, look at the row in the last layer."""
        return _weights(tape[-1])[0].mean(0)[1 : first - len(self.ends)]


class WindowExamples:
    """Every window of every document, once for each question about it: examples by number.

    A document that many questions share is cut into tokens once. With `answers`, the characters of one in each
    document, or None, an example also says where it is: its `start` and its `end`, both 0 where the window does not
    hold all of it.
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
        each = [windows.firsts(len(document)) for document in self.documents]
        self.owners = [number for number, firsts in enumerate(each) for _ in firsts]  # which question, of each window
        self.firsts = [first for firsts in each for first in firsts]  # which token of the document it begins with

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
        """The tokens of a window."""
        return self.documents[self.owners[number]].part(self.firsts[number], self.windows.size)

    @property
    def lengths(self) -> list[int]:
        """How long each row is, in tokens."""
        return [
            self.layout.length(len(self.questions[owner]), min(len(self.documents[owner]) - first, self.windows.size))
            for owner, first in zip(self.owners, self.firsts, strict=True)
        ]

    def batch(self, numbers: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """These examples side by side, with the places of the `first` token of each window and `behind` its last."""
        batch = collate([self[number] for number in numbers], self.layout.pad)
        batch["first"] = torch.tensor([self.place(number) for number in numbers])
        batch["behind"] = batch["first"] + torch.tensor([len(self.window(number)) for number in numbers])
        return move_to_device(batch, device)

    def place(self, number: int) -> int:
        """Where in its row a window begins."""
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
    """The tokens of the longest row there can be."""
    return layout.length(windows.question, windows.size)
