"""Reading: windows that cover a document, rows as models take them, and places that lead back to characters."""

from __future__ import annotations

import pytest
import torch

from regard.data import Tokenizer
from regard.tasks.answering import Asking
from regard.tasks.character_inputs import CharacterIds
from regard.tasks.document_windows import (
    OneRowLayout,
    TokenizedText,
    TwoRowLayout,
    WindowExamples,
    WindowSettings,
    longest_row,
)

DOCUMENT = "Das Haus (1973)  steht\n in\tÄgypten, am Nil."
CPU = torch.device("cpu")
TOKENIZERS = {
    "word": Tokenizer.words([DOCUMENT]),
    "space": Tokenizer.words([DOCUMENT], split="space"),
    "char": Tokenizer.characters([DOCUMENT]),
    "bpe": Tokenizer.bpe([DOCUMENT], size=270),
    "wordpiece": Tokenizer.wordpiece([DOCUMENT], size=80, lower=True),
}
WORDS = Tokenizer.words(["one two three four five six seven"], split="space")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_characters_of_a_token_are_those_of_the_text_without_spaces(kind):
    text = TokenizedText.of(f" {DOCUMENT}", TOKENIZERS[kind])
    found = [f" {DOCUMENT}"[start:end] for start, end in zip(text.starts, text.ends, strict=True)]
    assert all(word == word.strip() for word in found)
    if kind != "bpe":  # where letters of several bytes are split
        assert "".join(found) == "".join(DOCUMENT.split())


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("answer", ["1973", "Ägypten", "Haus (1973)  steht\n in", "Nil."])
def test_an_answer_comes_back_from_its_tokens(kind, answer):
    text = TokenizedText.of(DOCUMENT, TOKENIZERS[kind])
    start = DOCUMENT.index(answer)
    first, last = text.tokens(start, start + len(answer))
    found = DOCUMENT[text.starts[first] : text.ends[last]]
    assert answer in found
    if kind in ("word", "char", "wordpiece"):
        assert found == answer


def test_characters_between_tokens_belong_to_none():
    text = TokenizedText.of("a  b", Tokenizer.words(["a b"]))
    assert text.tokens(1, 3) is None
    assert text.tokens(0, 1) == (0, 0)
    assert text.tokens(0, 4) == (0, 1)


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 14, 63, 129])
@pytest.mark.parametrize(("size", "overlap"), [(6, 2), (6, 0), (6, 5), (1, 0)])
def test_windows_cover_every_stretch_that_the_overlap_allows(tokens, size, overlap):
    firsts = WindowSettings(size=size, overlap=overlap).starts(tokens)
    windows = [set(range(first, min(first + size, tokens))) for first in firsts]
    assert set().union(*windows) == set(range(tokens))
    assert all(windows) or tokens == 0
    for start in range(max(0, tokens - overlap)):
        assert any(set(range(start, start + overlap + 1)) <= window for window in windows)
    assert len(windows) == 1 or not windows[-1] <= windows[-2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be at least 1 token, got 0"),
        ({"size": 8, "overlap": 8}, "overlap must be at least 0 and below the window of 8, got 8"),
        ({"overlap": -1}, "overlap must be at least 0 and below the window of 384, got -1"),
        ({"question": 0}, "question must be at least 1 token, got 0"),
        ({"answer": 0}, "answer must be at least 1 token, got 0"),
        ({"long": "cut"}, "long must be 'drop' or 'truncate' or 'error', got 'cut'"),
    ],
)
def test_windows_that_cannot_be_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WindowSettings(**settings)


def read(layout, answers=None, spelling=None, question="seven one"):
    asked = [Asking(question, "one two three four five"), Asking("six", "six"), Asking("two", "")]
    windows = WindowSettings(size=3, overlap=1, question=2)
    return WindowExamples(asked, WORDS, layout=layout, windows=windows, spelling=spelling, answers=answers)


def named(row):
    return WORDS.tokens(row.tolist())


def test_a_reader_reads_question_and_window_side_by_side():
    window_examples = read(TwoRowLayout(WORDS, None), answers=[(4, 13), None, None])
    assert window_examples.owners == [0, 0, 1, 2]
    rows = [window_examples[number] for number in range(len(window_examples))]
    assert [named(row["document"]) for row in rows] == [
        ["<bos>", "one", "two", "three"],
        ["<bos>", "three", "four", "five"],
        ["<bos>", "six"],
        ["<bos>"],
    ]
    assert [named(row["question"])[:-1] for row in rows] == [["seven", "one"], ["seven", "one"], ["six"], ["two"]]
    assert {named(row["question"])[-1] for row in rows} == {"<eos>"}
    places = [(int(row["start"]), int(row["end"])) for row in rows]
    assert places == [(2, 3), (0, 0), (0, 0), (0, 0)]  # the second window holds but half of the answer
    assert window_examples.lengths == [4, 4, 2, 2]
    assert max(window_examples.lengths) <= longest_row(window_examples.layout, window_examples.windows) == 4


def test_a_bert_reads_both_in_one_row():
    window_examples = read(OneRowLayout(WORDS, types=2, first=0), answers=[(8, 18), (0, 3), None])
    rows = [window_examples[number] for number in range(len(window_examples))]
    assert named(rows[1]["ids"]) == ["<bos>", "seven", "one", "<eos>", "three", "four", "five", "<eos>"]
    assert rows[1]["types"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(int(row["start"]), int(row["end"])) for row in rows] == [(0, 0), (4, 5), (3, 3), (0, 0)]
    assert window_examples.lengths == [len(row["ids"]) for row in rows]
    assert longest_row(window_examples.layout, window_examples.windows) == 8
    batch = window_examples.batch([1, 3], CPU)
    assert batch["first"].tolist() == [4, 3]
    assert batch["behind"].tolist() == [7, 3]


def test_a_roberta_has_two_ends_between_and_no_types():
    window_examples = read(OneRowLayout(WORDS, types=1, first=2))
    assert named(window_examples[2]["ids"]) == ["<bos>", "six", "<eos>", "<eos>", "six", "<eos>"]
    assert window_examples[2].keys() == {"ids"}
    assert window_examples.batch([2], CPU)["first"].tolist() == [4]


def test_a_long_question_is_cut_at_its_end():
    window_examples = read(TwoRowLayout(WORDS, None), question="one two three four")
    assert named(window_examples[0]["question"]) == ["one", "two", "<eos>"]


def test_the_letters_of_a_window_are_those_of_its_words():
    spelling = CharacterIds(Tokenizer.characters(["abcdefghijklmnopqrstuvwxyz"]), letters=4)
    window_examples = read(TwoRowLayout(WORDS, spelling), spelling=spelling)
    batch = window_examples.batch([1, 2], CPU)
    letters = batch["document_characters"].view(2, 4, 4)
    assert letters[0, 0].tolist() == [0] * 4  # of the word that means no answer
    assert letters[0, 1:].tolist() == spelling(["three", "four", "five"]).tolist()
    assert letters[1, 1].tolist() == spelling(["six"])[0].tolist()
    assert not letters[1, 2:].any()
    assert batch["question_characters"].view(2, 3, 4)[0, :2].tolist() == spelling(["seven", "one"]).tolist()


def test_an_alphabet_pads_with_0():
    tokenizer = Tokenizer.characters(["ab"])
    tokenizer.pad = 3
    with pytest.raises(ValueError, match="the padding id of the alphabet must be 0, got 3"):
        CharacterIds(tokenizer)
    assert CharacterIds(Tokenizer.characters(["ab"]))([]).shape == (0, 16)
