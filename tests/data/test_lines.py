"""Lines: by number and in order, whatever the file holds, and an error that names the place."""

import gzip
import multiprocessing
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import DataError, Lines
from regard.data import lines as module

LINE = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=9)
TEXTS = st.lists(LINE, min_size=1, max_size=9).filter(lambda texts: not texts[0].startswith("\ufeff"))


@given(texts=TEXTS, end=st.booleans(), packed=st.booleans(), block=st.integers(1, 9))
def test_lines_are_what_was_written(tmp_path_factory, texts, end, packed, block):
    if not end and texts[-1] == "":
        texts = [*texts, "last"]
    path = tmp_path_factory.getbasetemp() / "text"
    data = ("\n".join(texts) + "\n" * end).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        lines = Lines(path)
        assert len(lines) == len(texts)
    assert list(lines) == texts
    assert [lines[n] for n in range(len(texts))] == texts
    assert lines[-1] == texts[-1]


def test_separators_other_than_newline_end_no_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("a\u2028b\x0bc\x85d\re\r\nnext\r\n".encode())
    assert list(Lines(path)) == ["a\u2028b\x0bc\x85d\re", "next"]
    assert len(Lines(path)) == 2


def test_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert list(Lines(path)) == [Lines(path)[0], Lines(path)[1]] == ["a", "\ufeffb"]


def test_lines_outside_raise_index_error(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(IndexError, match=r"a.txt has no line 1: it has 1, counted from 0"):
        Lines(tmp_path / "a.txt")[1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_bad_utf8_names_file_and_line(tmp_path, bad, packed):
    path = tmp_path / "a.txt"
    data = "é\nok\nx".encode() + bad + b"\nmore\n"
    path.write_bytes(gzip.compress(data) if packed else data)
    for read in (len, list):
        with pytest.raises(
            DataError, match=r"a.txt line 3: byte 2 is not valid UTF-8; convert it with iconv"
        ) as caught:
            read(Lines(path))
        assert (caught.value.file, caught.value.line) == (str(path), 3)


def test_text_cut_inside_a_character_at_the_end_is_bad(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\nb\xc3")
    with pytest.raises(DataError, match=r"line 2: byte 2"):
        len(Lines(tmp_path / "a.txt"))


def test_empty_file_says_so(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"a.txt: the file is empty; expected at least one line of text"):
        len(Lines(tmp_path / "a.txt"))


def test_missing_file_folder_and_pipe_say_so(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: is a pipe or a device, expected a file; write its lines to a file"):
        Lines(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"nothing: no such file; check the path"):
        Lines(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"is a folder, expected a file"):
        Lines(tmp_path)


@pytest.mark.parametrize("read", [len, list])
def test_endless_line_is_refused(tmp_path, monkeypatch, read):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_text("short\n" + "x" * 101)
    with pytest.raises(DataError, match=r"line 2: the line is longer than 100 bytes; is this a text file?"):
        read(Lines(tmp_path / "a.txt"))


def test_index_costs_eight_bytes_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("word\n" * 1000)
    lines = Lines(tmp_path / "a.txt")
    assert len(lines) == 1000
    assert lines._index().nbytes == 8 * 1001


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_without_moving_its_parent(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(50)))
    lines = Lines(tmp_path / "a.txt")
    assert lines[7] == "line 7"
    place = lines._handle.tell()
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    process = context.Process(target=lambda: out.put(lines[33]))
    process.start()
    assert out.get(timeout=60) == "line 33"
    process.join()
    assert lines._handle.tell() == place


def test_lines_travel_to_spawned_processes(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    lines = Lines(tmp_path / "a.txt")
    assert lines[1] == "b"
    assert pickle.loads(pickle.dumps(lines))[1] == "b"
