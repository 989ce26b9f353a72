"""Finding: what windows share is found once, with the better of its scores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.data import Tokenizer
from regard.tasks.answering import Asking
from regard.tasks.document_windows import TwoRowLayout, WindowExamples, WindowSettings
from regard.tasks.span_search import SpanFinder

TEXT = "a b c d e"
WORDS = Tokenizer.words([TEXT])
WINDOWS = WindowSettings(size=3, overlap=1, question=2, answer=2)


class Likes(TwoRowLayout):
    """The logits of each place are those of its word; of the place that means no answer, less in a later window."""

    def __init__(self, **liked: float) -> None:
        super().__init__(WORDS, None)
        self.table = torch.full((len(WORDS),), -9.0)
        for word, logit in liked.items():
            self.table[WORDS.encode(word)[0]] = logit

    def logits(self, model, batch):
        start = self.table[batch["document"]]
        start[:, 0] = -batch["document"][:, 1] / 10  # ids grow along the text
        return start, start


def finder(**liked: float) -> tuple[SpanFinder, WindowExamples]:
    layout = Likes(**liked)
    window_examples = WindowExamples([Asking("a b", TEXT), Asking("c", "e d")], WORDS, layout=layout, windows=WINDOWS)
    return SpanFinder(nn.Linear(1, 1), layout, WINDOWS.answer), window_examples


def test_a_word_in_two_windows_is_found_once_with_the_better_score():
    found, other = finder(c=2.0)[0].spans(finder(c=2.0)[1], 1)
    a, c = (WORDS.encode(word)[0] for word in "ac")
    assert list(found) == [(4, 5)]  # the characters of c, the end of one window and the start of the next
    assert found[4, 5] == pytest.approx(4.0 + 2 * max(a, c) / 10, abs=1e-5)
    assert all(score < 0 for score in other.values())


def test_the_best_window_of_each_question_is_told_by_its_number():
    one, window_examples = finder(d=1.0)
    assert [window_examples.owners[number] for number in one.windows(window_examples)] == [0, 1]
    number = one.windows(window_examples)[0]
    assert window_examples.firsts[number] == 2


def test_no_span_is_longer_than_it_may_be():
    one, window_examples = finder(a=3.0, c=3.0)
    spans = [span for found in one.spans(window_examples, 9) for span in found]
    assert max(end - start for start, end in spans) == 3  # two words and the space between them
