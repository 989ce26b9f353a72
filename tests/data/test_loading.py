"""Loading: chunks by this process or by workers, in one order, and fields as arrays."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from regard.data import Batches, DataError, pairs_tsv
from tests.data.numbered_examples import Stream, examples, indices

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("plan", [{"tokens": 40, "pool": 33}, {"rows": 4}, {"rows": 4, "pool": 7, "shard": (1, 2)}])
@FORKS
def test_workers_change_nothing(kind, plan):
    items = examples(101)
    alone, together = Batches(kind(items), **plan), Batches(kind(items), workers=2, **plan)
    state = torch.get_rng_state()
    expected = indices(alone)
    assert indices(together) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert alone.report() == together.report()
    again = Batches(kind(items), workers=2, **plan)
    rest = iter(again)
    got = [next(rest)["index"].tolist() for _ in range(3)]
    last = Batches(kind(items), workers=1, **plan)
    last.restore(again.state())
    assert got + indices(last) == expected


@FORKS
def test_an_error_in_a_worker_arrives_as_it_is(tmp_path):
    (tmp_path / "a.tsv").write_text("x\ty\n" * 20 + "bad\n")
    rows = pairs_tsv(tmp_path / "a.tsv")
    for workers in (0, 1):
        with pytest.raises(
            DataError, match=r"^[^\n]*a.tsv line 21: expected at least 2 columns, got 1[^\n]*$"
        ) as caught:
            list(Batches(rows.stream(), lambda pair: {"a": [len(pair.source)]}, rows=4, workers=workers))
        assert caught.value.line == 21


FORKED = """
from regard.data import Batches, Generated, Copy, Tokenizer
toys = Generated(Copy(), size=200)
tokenizer = Tokenizer.bpe(toy.source for toy in toys)
tokenizer.encode_all([toy.source for toy in toys])
for _ in Batches(toys, lambda toy: {"a": tokenizer.encode(toy.source)}, tokens=100, workers=1): pass
"""


def test_a_trained_tokenizer_is_forked_without_a_word():
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    assert done.stdout == ""


def test_fields_keep_their_kind():
    example = {
        "ids": torch.tensor([1, 2], dtype=torch.int32),
        "none": [],
        "rate": 0.5,
        "image": torch.ones(1, 2, 2),
        "flag": True,
        "vector": np.ones(3, np.float64),
    }
    (batch,) = Batches([example], rows=1)
    kinds = {name: value.dtype for name, value in batch.items() if not name.endswith("lengths")}
    assert kinds == {
        "ids": torch.int64,
        "none": torch.int64,
        "rate": torch.float32,
        "image": torch.float32,
        "flag": torch.bool,
        "vector": torch.float64,
        "index": torch.int64,
    }


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([{"index": [1]}], ValueError, "encode must not return a field 'index'"),
        (
            [{"a": [1, 2], "a_lengths": 1}],
            ValueError,
            "encode must not return a field 'a_lengths': batches hold the len",
        ),
        ([[1, 2]], TypeError, r"encode must return fields by name, got list; write {'ids': \.\.\.}"),
        ([{"a": "text"}], TypeError, "encode must return numbers, got str in the field 'a'"),
    ],
)
def test_fields_that_cannot_be_say_why(items, error, message):
    with pytest.raises(error, match=message):
        list(Batches(items, rows=2, seed=None))


def test_lengths_beside_what_has_none_are_a_field_like_any_other():
    [batch] = Batches([{"a": 5, "a_lengths": 7}], rows=1)
    assert batch["a_lengths"].tolist() == [7]
