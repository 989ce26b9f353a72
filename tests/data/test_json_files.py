"""JSON files: plain or packed, of bounded size, and every fault named by its place."""

import gzip

import pytest

from regard.data import DataError, json_files
from regard.data.json_files import read_json


@pytest.mark.parametrize(
    "content",
    [b'{"a": [1]}', b'\xef\xbb\xbf{"a": [1]}', gzip.compress(b'{"a": [1]}')],
    ids=["plain", "mark", "packed"],  # the packed one holds the time
)
def test_a_file_is_read_packed_or_with_a_byte_order_mark(write, content):
    assert read_json(write("a.json", content)) == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"data": [}', r"a.json line 2: not valid JSON"),
        (b'{"data": "\xff"}', r"a.json: byte 11 is not valid UTF-8"),
        (b"[" * 200_000, r"a.json: not valid JSON: nested too deeply"),
        (b"", r"a.json line 1: not valid JSON"),
    ],
)
def test_faults_are_named_by_their_place(write, content, message):
    with pytest.raises(DataError, match=message):
        read_json(write("a.json", content))


def test_a_file_that_unpacks_without_bound_is_stopped(write, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"holds more than 100 bytes"):
        read_json(write("a.json", gzip.compress(b"[" + b"1, " * 99 + b"1]")))
