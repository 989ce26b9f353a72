"""Questions about a text, in the format of SQuAD 1.1 and 2.0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import DataError
from .json_files import read_json
from .text import check_text


class Answer(NamedTuple):
    """A span of the context: its text, and its start in characters."""

    text: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, the text that may hold its answer, and every answer accepted; none if there is no answer."""

    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]


def questions(path: str | Path) -> list[Question]:
    """Read every question of a SQuAD-format JSON file, plain or gzip.

    Each answer must occur in its context at its `answer_start`, and ids must be unique; the error names the place in
    the file, such as `data[3].paragraphs[0].qas[1].answers[0]`. In SQuAD 2.0 a question marked `is_impossible` has no
    answers.
    """
    found, places = [], dict[str, str]()
    root = _Node(read_json(path), "", path)
    for article in root.each("data"):
        title = article.text("title") if article.has("title") else ""
        for paragraph in article.each("paragraphs"):
            context = paragraph.text("context")
            for qa in paragraph.each("qas"):
                impossible = qa.has("is_impossible") and qa.value["is_impossible"] is True
                answers = () if impossible else tuple(_answer(node, context) for node in qa.each("answers"))
                if (first := places.setdefault(qa.text("id"), qa.place)) != qa.place:
                    raise qa.error(
                        f"the id {qa.text('id')!r} is already used by {first}; give each question a unique id"
                    )
                found.append(
                    Question(
                        id=qa.text("id"),
                        title=title,
                        context=context,
                        question=qa.text("question"),
                        answers=answers,
                    )
                )
    if not found:
        raise DataError("holds no questions", file=path, hint="expected the format of SQuAD")
    return found


def _answer(node: _Node, context: str) -> Answer:
    text, start = node.text("text"), node.value.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int):
        raise node.error(f"expected a whole number in 'answer_start', got {start!r}")
    if start < 0 or context[start : start + len(text)] != text or not text:
        raise node.error(f"the context does not contain {text!r} at character {start}")
    return Answer(text, start)


class _Node:
    """A JSON object and its place in the file."""

    def __init__(self, value: Any, place: str, file: str | Path) -> None:
        self.value, self.place, self.file = value, place, file
        if not isinstance(value, dict):
            raise self.error(f"expected an object, got {type(value).__name__}")

    def has(self, key: str) -> bool:
        return key in self.value

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if not isinstance(value, str):
            raise self.error(f"expected text in {key!r}, got {'nothing' if value is None else type(value).__name__}")
        try:
            check_text(value, repr(key))
        except ValueError as error:
            raise self.error(str(error)) from error
        return value

    def each(self, key: str) -> list[_Node]:
        value = self.value.get(key)
        if not isinstance(value, list):
            raise self.error(f"expected a list in {key!r}, got {'nothing' if value is None else type(value).__name__}")
        stem = f"{self.place}.{key}" if self.place else key
        return [_Node(item, f"{stem}[{n}]", self.file) for n, item in enumerate(value)]

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.place or 'the top'}: {problem}", file=self.file, hint="expected the format of SQuAD")
