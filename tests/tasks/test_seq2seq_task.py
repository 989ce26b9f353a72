"""Writers: what a config says of them, and how much of a source they read."""

from __future__ import annotations

import json

import pytest
from torch import nn

from regard.data import Tokenizer
from regard.models import Pointer, PointerConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from regard.tasks.captioning import Describer
from regard.tasks.copy_vocabulary import CopyTokenizers
from regard.tasks.pairs import Tokenizers
from regard.tasks.seq2seq_task import Seq2SeqTaskConfig, Writer, build_model, tokenizers_class
from regard.train.dataclass_json import from_json, to_json

SIZES = {"source_vocabulary": 9, "target_vocabulary": 9, "start": 2, "dim": 8, "hidden": 8}
WORDS = Tokenizer.words(["ein kleines Haus am See"])


def test_a_config_that_names_no_limit_reads_sources_whole():
    config = Seq2SeqTaskConfig(model=Seq2SeqConfig(**SIZES), longest=7)
    named = to_json(config)
    assert named.pop("limit") is None
    assert from_json(Seq2SeqTaskConfig, json.dumps(named), source="config.json") == config


@pytest.mark.parametrize(
    ("config", "model", "tokenizers"),
    [
        (Seq2SeqConfig(**SIZES), Seq2Seq, Tokenizers),
        (PointerConfig(**SIZES, tied="all", unknown=1), Pointer, CopyTokenizers),
        (TransformerConfig(**SIZES, heads=2, encoder_layers=1, decoder_layers=1), Transformer, Tokenizers),
    ],
)
def test_a_config_is_built_and_read_by_its_kind(config, model, tokenizers):
    assert type(build_model(config)) is model
    assert tokenizers_class(config) is tokenizers


@pytest.mark.parametrize(
    ("limit", "read"), [(None, "ein kleines Haus am See"), (6, "ein kleines Haus am See"), (3, "ein kleines"), (1, "")]
)
def test_a_source_is_read_up_to_the_limit_which_its_end_counts_to(limit, read):
    model = nn.Module()
    model.weight = nn.Parameter(nn.Linear(1, 1).weight)
    writer = Writer([model], Tokenizers(WORDS, WORDS), longest=9, limit=limit)
    assert writer.read("ein kleines Haus am See") == read
    assert writer.too_long(["ein kleines Haus am See", ""]) == [read != "ein kleines Haus am See", False]


@pytest.mark.parametrize(
    ("wish", "error", "message"),
    [
        ({"beam": 0, "n": 1}, ValueError, "beam must be 1 or more, got 0"),
        ({"beam": True, "n": 1}, TypeError, "beam must be a whole number, got True"),
        ({"beam": 5, "n": 0}, ValueError, "n must be 1 or more, got 0"),
        ({"beam": 5, "n": 7}, ValueError, "n must be at most beam, got n=7 and beam=5; pass beam=7 or more"),
    ],
)
def test_a_beam_that_cannot_find_so_many_is_named_as_it_was_given(wish, error, message):
    for kind in (Writer, Describer):
        with pytest.raises(error, match=f"^{message}"):
            kind.n_best(None, [], **wish)
