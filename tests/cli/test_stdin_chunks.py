"""Which lines of standard input are decoded together."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from regard.cli import stdin_chunks
from regard.data import DataError

pytestmark = pytest.mark.commands


@pytest.mark.parametrize(("typed", "sizes"), [(False, [3]), (True, [1, 1, 1])])
def test_lines_that_someone_types_are_answered_one_by_one(typed, sizes, monkeypatch):
    class Given(io.TextIOWrapper):
        def isatty(self):
            return typed

    monkeypatch.setattr(sys, "stdin", Given(io.BytesIO(b"\xef\xbb\xbfone\r\ntwo\nthree")))
    chunks = list(stdin_chunks.chunks_of_input())
    assert list(map(len, chunks)) == sizes
    assert [line for chunk in chunks for line in chunk] == ["one", "two", "three"]


@pytest.fixture
def pipe(monkeypatch):
    """The writing end of a pipe that is standard input."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writer


def test_lines_of_a_pipe_are_answered_when_they_arrive(pipe):
    chunks = stdin_chunks.chunks_of_input()
    pipe.write(b"one\r\n")
    assert next(chunks) == ["one"]
    pipe.write(b"two\nthree\nfo")
    assert next(chunks) == ["two", "three"]
    pipe.write(b"ur\n\n")
    assert next(chunks) == ["four", ""]
    pipe.write(b"five")
    pipe.close()
    assert list(chunks) == [["five"]]


def test_a_pipe_that_does_not_wait_is_read_in_large_chunks(pipe, monkeypatch):
    monkeypatch.setattr(stdin_chunks, "LINES_PER_CHUNK", 100)
    pipe.write(b"a line\n" * 250)
    pipe.close()
    assert list(map(len, stdin_chunks.chunks_of_input())) == [100, 100, 50]


def test_a_stream_is_read_line_by_line(pipe, monkeypatch):
    pipe.write(b"one\ntwo\n")
    pipe.close()
    assert list(stdin_chunks.chunks_of_input(stream=True)) == [["one"], ["two"]]


def test_a_file_is_read_in_large_chunks_unless_streamed(tmp_path, monkeypatch):
    (tmp_path / "lines").write_bytes(b"one\ntwo\nthree\n")
    for stream, sizes in ((False, [3]), (True, [1, 1, 1])):
        with (tmp_path / "lines").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert list(map(len, stdin_chunks.chunks_of_input(stream=stream))) == sizes


def test_a_line_that_is_no_text_is_named_by_its_number(pipe):
    pipe.write(b"one\n\xff\n")
    with pytest.raises(DataError, match="line 2"):
        list(stdin_chunks.chunks_of_input())


def test_a_line_longer_than_one_read(pipe, monkeypatch):
    monkeypatch.setattr(stdin_chunks, "BYTES_PER_READ", 4)
    pipe.write(b"abcdefghij\nk\n")
    pipe.close()
    assert [line for chunk in stdin_chunks.chunks_of_input() for line in chunk] == ["abcdefghij", "k"]


def test_another_program_gets_an_answer_before_it_closes_its_end():
    code = "from regard.cli.stdin_chunks import chunks_of_input as c\nfor x in c(): print(len(x), *x, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        run.stdin.write(b"one\n")
        run.stdin.flush()
        assert run.stdout.readline() == b"1 one\n"
        run.stdin.close()
        assert run.wait(60) == 0
