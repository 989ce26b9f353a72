"""Strings as tensors: every string comes back, and a million of them fit into a file."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, weights
from regard.lens import Groups, Tape
from regard.lens.tape.string_tensors import StringBox, StringReader
from regard.lens.tape.term_json import TensorBox

ANY = st.text(st.characters(categories=None), max_size=6)  # lone surrogates too


@given(st.lists(st.lists(ANY, max_size=5), max_size=4))
def test_every_string_comes_back(rows):
    box = TensorBox()
    names = StringBox(box).add(rows)
    assert StringReader(box.tensors).read(names) == rows


def test_equal_rows_are_stored_and_read_once():
    box = TensorBox()
    strings = StringBox(box)
    one, other, more = strings.add([["a", "b"]]), strings.add([["a", "b"]]), strings.add([["a"], ["b"]])
    assert one == other != more
    reader = StringReader(box.tensors)
    assert reader.read(one) is reader.read(other)
    assert reader.read(more) == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("texts", "n"),
    [(1, 2**16), *(pytest.param(*size, marks=pytest.mark.thorough) for size in ((1, 2**20), (2000, 512)))],
)
def test_a_tape_of_many_tokens_keeps_them_out_of_the_header_of_its_file(tmp_path, texts, n):
    rng = random.Random(0)
    q = torch.zeros(texts, 1, n, 1, dtype=torch.bfloat16)
    tape = Tape({("layer", 0): weights(q, q, mask=Causal())})
    tokens = [[rng.choice(("▁the", "▁map", "ping", "日本", ".")) for _ in range(n)] for _ in range(texts)]
    tape.tokens = tokens if texts > 1 else tokens[0]
    if texts == 1:
        tape.group("each", Groups(torch.arange(n), tuple(f"label {m}" for m in range(n))))
    path = tmp_path / "long.safetensors"
    tape.save(path)
    with path.open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 10_000  # bytes of the header
    found = Tape.load(path)
    assert found.tokens_of("layer", batch=texts - 1)[0] == tokens[-1]
    assert found.tokens_of("layer")[1] == tokens[0]
    if texts == 1:
        assert found.groups_of("layer", "each")[1].labels[-1] == f"label {n - 1}"
