"""Encoders of others: found whatever their head, refused where they are none."""

from __future__ import annotations

import pytest

from regard.data import Tokenizer
from regard.models import Bert, BertConfig, BertReader, Gpt, GptConfig, pretrained
from regard.tasks.pretrained import encoder_of, places

SIZES = {"dim": 16, "depth": 1, "heads": 2}
PIECES = Tokenizer.words(["ein Haus"])


def test_an_encoder_comes_with_its_head_and_its_tokenizer(tmp_path):
    bert = Bert(BertConfig(vocabulary=30, length=40, hidden=32, pooler=False, **SIZES))
    pretrained.save(BertReader(bert), tmp_path)
    PIECES.save(tmp_path / "tokenizer.json")
    found, model, tokenizer = encoder_of(tmp_path)
    assert isinstance(model, BertReader)
    assert model.bert is found
    assert tokenizer == PIECES
    assert places(found) == 40


def test_what_is_no_encoder_is_named(tmp_path):
    pretrained.save(Gpt(GptConfig(vocabulary=9, **SIZES)), tmp_path)
    with pytest.raises(ValueError, match="must hold a BERT, RoBERTa or DistilBERT, got a Gpt"):
        encoder_of(tmp_path)


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    pretrained.save(Bert(BertConfig(vocabulary=3, hidden=32, **SIZES)), tmp_path)
    PIECES.save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=rf"has {len(PIECES)} tokens, more than the 3 of the model"):
        encoder_of(tmp_path)
