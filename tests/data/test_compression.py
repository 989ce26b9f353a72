"""Compressed files are read, or refused by the name of their format."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random

import pytest

from regard.data import DataError, Lines
from regard.data import compression as module
from regard.data.compression import compression, read_content

PACK = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}


@pytest.mark.parametrize("name", PACK)
def test_compressed_file_has_the_lines_of_the_plain_one(tmp_path, name):
    (tmp_path / "a").write_bytes(PACK[name]("ein Haus\nein Hünd\n".encode()))
    lines = Lines(tmp_path / "a")
    assert compression(tmp_path / "a") == name
    assert list(lines) == ["ein Haus", "ein Hünd"]
    assert (len(lines), lines[1]) == (2, "ein Hünd")


def test_plain_file_has_no_compression(tmp_path):
    (tmp_path / "a.gz").write_text("text")
    assert compression(tmp_path / "a.gz") is None


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"\x28\xb5\x2f\xfd", r"a: is compressed with Zstandard, which is not read; unpack it with zstd -d"),
        (b"PK\x03\x04", r"a: is compressed with zip, which is not read; unpack it with unzip"),
        (b"7z\xbc\xaf\x27\x1c", r"a: is compressed with 7z, which is not read; unpack it with 7z x"),
        (b"\x04\x22\x4d\x18", r"a: is compressed with LZ4, which is not read; unpack it with lz4 -d"),
    ],
)
@pytest.mark.parametrize("read", [len, list])
def test_other_formats_are_refused_by_name(tmp_path, first, message, read):
    (tmp_path / "a").write_bytes(first + b"\0" * 20)
    with pytest.raises(DataError, match=message):
        read(Lines(tmp_path / "a"))


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("read", [len, list])
def test_damaged_file_is_named_with_its_format(tmp_path, name, read):
    whole = PACK[name](random.Random(0).randbytes(1000).hex().encode())
    for data in (whole[:-9], whole[:60] + b"\0\0\0\0" + whole[64:]):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(DataError, match=rf"a: the {name} file is damaged \(.*\); download or compress it again"):
            read(Lines(tmp_path / "a"))


@pytest.mark.parametrize("name", PACK)
def test_content_that_grows_without_bound_is_stopped(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    (tmp_path / "a").write_bytes(PACK[name](b"a" * 1000))
    with pytest.raises(DataError, match=r"holds more than 500 bytes, the limit for reading into memory; split it, or"):
        read_content(tmp_path / "a", 500)
    assert read_content(tmp_path / "a", 1000) == b"a" * 1000
