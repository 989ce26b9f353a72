"""Texts: tokens, their letters, and what they stand for, in step with each other."""

from __future__ import annotations

import pytest
import torch

from regard.data import Tokenizer
from regard.tasks.character_inputs import LETTERS_PER_WORD
from regard.tasks.text_inputs import TextInputs

TEXTS = ["the great film", "", "so dull, so long", "an extraordinarily-long-word here", " two  spaces "]
CPU = torch.device("cpu")


def how(kind="words", *, spelled=True, start=False, limit=100, end=False):
    words = Tokenizer.bpe(TEXTS, size=300) if kind == "bpe" else Tokenizer.words(TEXTS)
    return TextInputs(words, Tokenizer.characters(TEXTS) if spelled else None, start, limit, end)


@pytest.mark.parametrize("kind", ["words", "bpe"])
@pytest.mark.parametrize("start", [False, True])
def test_every_token_has_a_piece(kind, start):
    texts = how(kind, spelled=False, start=start)
    for text, ids in zip(TEXTS, texts.read(TEXTS)["ids"], strict=True):
        pieces = texts.pieces(text)
        assert len(pieces) == len(ids) >= 1
        assert "".join(pieces[start:]) == "".join(text.split()) or not text


@pytest.mark.parametrize("limit", [100, 3])
def test_letters_are_those_of_the_tokens_beside_them(limit):
    texts = how(limit=limit)
    seen = []
    for rows, batch in texts.batches(TEXTS, CPU):
        seen += rows
        letters = batch["characters"].unflatten(1, (-1, LETTERS_PER_WORD))
        assert letters.shape[:2] == batch["ids"].shape
        assert batch["ids"].shape[1] <= limit
        for row, n, spelled in zip(rows, batch["ids_lengths"].tolist(), letters, strict=True):
            pieces = texts.pieces(TEXTS[row]) if TEXTS[row] else [""]
            assert [texts.letters.decode(one) for one in spelled[:n]] == [piece[:LETTERS_PER_WORD] for piece in pieces]
            assert not spelled[n:].any()
    assert sorted(seen) == list(range(len(TEXTS)))


@pytest.mark.parametrize("start", [False, True])
def test_a_text_is_too_long_beyond_the_limit_which_its_start_counts_to(start):
    texts = how(limit=3, start=start)
    assert texts.too_long(["the great film", "", "so dull, so"]) == [start, False, True]
    assert texts.too_long([]) == []


@pytest.mark.parametrize("limit", [2, 3, 5, 6, 100])
def test_an_end_is_kept_where_texts_are_cut(limit):
    texts = how(spelled=False, start=True, limit=limit, end=True)
    words = texts.words
    for rows, batch in texts.batches(TEXTS, CPU):
        for row, n, ids in zip(rows, batch["ids_lengths"].tolist(), batch["ids"].tolist(), strict=True):
            whole = [words.bos, *words.encode(TEXTS[row])][: limit - 1]
            assert ids[:n] == [*whole, words.eos]
            assert len(texts.pieces(TEXTS[row])) == n
            assert texts.pieces(TEXTS[row])[-1] == "<eos>"


def test_an_end_that_a_batch_was_cut_of_comes_back():
    texts = how(spelled=False, start=True, limit=3, end=True)
    eos = texts.words.eos
    batch = {"ids": torch.tensor([[9, 8, 7, 0], [9, eos, 0, 0]]), "ids_lengths": torch.tensor([3, 2])}
    assert texts.with_ends(batch)["ids"].tolist() == [[9, 8, eos, 0], [9, eos, 0, 0]]
    assert how(limit=3).with_ends(batch) is batch


def test_without_letters_there_are_none():
    for _, batch in how(spelled=False).batches(TEXTS, CPU):
        assert batch.keys() == {"ids", "ids_lengths"}


def test_one_batch_of_all_has_a_name_for_every_token():
    batch, pieces = how(limit=3).whole(TEXTS, CPU)
    assert batch["ids"].shape == (5, 3)
    assert pieces[:3] == [["the", "great", "film"], ["<eos>", "<pad>", "<pad>"], ["so", "dull", ","]]


def test_what_a_checkpoint_keeps_is_what_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.tasks.run_folder.read_text", lambda folder, name: (folder / name).read_text())
    for spelled in (True, False):
        folder = tmp_path / str(spelled)
        folder.mkdir()
        for name, text in how(spelled=spelled).files().items():
            (folder / name).write_text(text)
        assert TextInputs.load(folder, start=False, limit=100) == how(spelled=spelled)
