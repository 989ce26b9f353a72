"""Encoded examples: what goes in comes out, in batches of like length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regard.tasks.encoded_dataset import EXAMPLES_PER_CHUNK, EncodedExamples, in_batches

CPU = torch.device("cpu")


def letters(texts):
    return {"ids": [[ord(letter) for letter in text] for text in texts], "sizes": [[len(text)] for text in texts]}


def test_every_row_comes_back_whatever_its_length():
    texts = ["ab", "", "xyz", "", "q"]
    encoded = EncodedExamples(texts, letters)
    assert len(encoded) == 5
    for number, text in enumerate(texts):
        assert encoded[number]["ids"].tolist() == [ord(letter) for letter in text]
        assert encoded[number - 5]["sizes"].tolist() == [len(text)]
    assert encoded.lengths["ids"].tolist() == [2, 0, 3, 0, 1]
    assert encoded.longest.tolist() == [2, 1, 3, 1, 1]
    with pytest.raises(IndexError, match="there is no example 5: the dataset has 5"):
        encoded[5]


def test_examples_are_encoded_many_at_a_time_and_all_of_them():
    sizes = []

    def encode(some):
        sizes.append(len(some))
        return {"ids": [[number] for number in some]}

    encoded = EncodedExamples(range(2 * EXAMPLES_PER_CHUNK + 7), encode)
    assert sizes == [EXAMPLES_PER_CHUNK, EXAMPLES_PER_CHUNK, 7]
    assert [encoded[n]["ids"].item() for n in (0, EXAMPLES_PER_CHUNK, 2 * EXAMPLES_PER_CHUNK + 6)] == [
        0,
        EXAMPLES_PER_CHUNK,
        2 * EXAMPLES_PER_CHUNK + 6,
    ]


def test_ids_take_four_bytes_each():
    assert EncodedExamples(["abc"], letters)[0]["ids"].dtype == np.int32


def test_where_an_example_came_from_is_known():
    class Named(list):
        def where(self, number):
            return f"file line {number + 1}"

    assert EncodedExamples(Named(["a"]), letters).where(0) == "file line 1"
    assert EncodedExamples(["a"], letters).where(0) == "example 0"


def test_batches_hold_every_example_once_and_no_more_tokens_than_asked():
    lengths = torch.randint(0, 30, (63,)).tolist()
    encoded = EncodedExamples(lengths, lambda some: {"ids": [[7] * n for n in some]})
    seen = []
    for rows, batch in in_batches(encoded, tokens=64, pad={"ids": 9}, device=CPU):
        assert batch["ids"].shape == (len(rows), max(lengths[row] for row in rows))
        assert batch["ids"].numel() <= 64
        assert batch["ids_lengths"].tolist() == [lengths[row] for row in rows]
        assert int((batch["ids"] == 9).sum()) == batch["ids"].numel() - int(batch["ids_lengths"].sum())
        seen += rows
    assert sorted(seen) == list(range(63))


def test_an_example_longer_than_a_batch_has_one_of_its_own():
    encoded = EncodedExamples([3, 50, 4], lambda some: {"ids": [[1] * n for n in some]})
    assert [rows for rows, _ in in_batches(encoded, tokens=8, pad={}, device=CPU)] == [[0, 2], [1]]


def test_no_examples_make_no_batches():
    assert list(in_batches(EncodedExamples([], letters), tokens=8, pad={}, device=CPU)) == []
