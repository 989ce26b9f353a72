"""Rows of ids for language models: the same on disk as in memory, and every id foretold once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import DataError, Tokenizer, Windows, ids_of, read_ids, write_ids
from regard.data import language as module

TEXTS = ["one two three", "", "four five", "six"]
TOKENIZER = Tokenizer.words(TEXTS, split="space")


@given(count=st.integers(2, 40), size=st.integers(1, 12))
def test_each_id_but_the_first_is_foretold_once_from_the_one_before(count, size):
    windows = Windows(np.arange(count, dtype=np.uint16), size=size)
    pairs = [pair for window in windows for pair in zip(window[:-1].tolist(), window[1:].tolist(), strict=True)]
    assert pairs == [(n, n + 1) for n in range(count - 1)]
    assert len(windows) == len(list(windows))
    assert all(2 <= len(window) <= size + 1 and window.dtype == np.int64 for window in windows)
    assert windows[-1].tolist() == windows[len(windows) - 1].tolist()


def test_texts_are_joined_and_each_ended():
    ids = ids_of(TEXTS, TOKENIZER)
    assert ids.tolist() == [id for text in TEXTS for id in TOKENIZER.encode(text, eos=True)]
    assert ids.dtype == np.uint16
    assert ids_of(TEXTS, TOKENIZER, eos=False).tolist() == [id for id in ids if id != TOKENIZER.eos]


def test_on_disk_equals_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TEXTS_PER_CHUNK", 3)
    ids = write_ids(iter(TEXTS), TOKENIZER, tmp_path / "ids.npy")
    assert isinstance(ids, np.memmap)
    assert ids.tolist() == ids_of(TEXTS, TOKENIZER).tolist() == read_ids(tmp_path / "ids.npy").tolist()
    assert np.load(tmp_path / "ids.npy").tolist() == ids.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"]


def test_large_vocabularies_take_four_bytes(monkeypatch):
    monkeypatch.setattr(Tokenizer, "__len__", lambda self: 2**16 + 1)
    assert ids_of(TEXTS, TOKENIZER).dtype == np.uint32


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield "one"
        raise DataError("bad line")

    with pytest.raises(DataError, match=r"bad line"):
        write_ids(broken(), TOKENIZER, tmp_path / "ids.npy")
    with pytest.raises(DataError, match=r"ids.npy: there is no text; expected at least one line"):
        write_ids([], TOKENIZER, tmp_path / "ids.npy")
    with pytest.raises(DataError, match=r"there is no text; expected at least one line"):
        ids_of([], TOKENIZER)
    with pytest.raises(TypeError, match=r"texts must be a list of texts, got a single text; pass \[text\]"):
        ids_of("one", TOKENIZER)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder; create it before you save ids\.npy there"):
        write_ids(TEXTS, TOKENIZER, tmp_path / "nowhere" / "ids.npy")


def test_files_that_are_no_rows_of_ids_are_refused(tmp_path):
    path = tmp_path / "ids.npy"
    for content in (np.zeros((2, 2), np.int64), np.zeros(3), np.array([{}, []], dtype=object)):
        np.save(path, content)
        with pytest.raises(DataError, match=r"ids.npy: not a file of ids.*; write it with write_ids"):
            read_ids(path)
    for data in (b"", b"\x93NUMPY", b"something else"):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"not a file of ids"):
            read_ids(path)
    with pytest.raises(DataError, match=r"not a file of ids"):
        read_ids(tmp_path / "nothing.npy")


def test_a_row_cut_short_is_refused(tmp_path):
    write_ids(TEXTS, TOKENIZER, tmp_path / "ids.npy")
    data = (tmp_path / "ids.npy").read_bytes()
    (tmp_path / "ids.npy").write_bytes(data[:-3])
    with pytest.raises(DataError, match=r"not a file of ids"):
        read_ids(tmp_path / "ids.npy")


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        (np.arange(5), 0, "size must be at least 1, got 0"),
        (np.arange(1), 3, r"a 1-D array of at least 2 whole numbers, got int64 \(1,\)"),
        (np.zeros((2, 2), int), 3, r"got int64 \(2, 2\)"),
        (np.zeros(4), 3, "got float64"),
    ],
)
def test_windows_that_cannot_be_say_why(ids, size, message):
    with pytest.raises(ValueError, match=message):
        Windows(ids, size=size)
    with pytest.raises(IndexError, match=r"there is no window 2: there are 2, counted from 0"):
        Windows(np.arange(5), size=2)[2]
