"""Bert: padding changes nothing, and the loss of pretraining is the one written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.models import Bert, BertClassifier, BertConfig, BertPretraining, BertTagger, mask_words
from tests.models.small_bert import CONFIG, LENGTHS, close, loud, text


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("first", [0, 3])
def test_padding_changes_nothing(side, first):
    config = BertConfig(vocabulary=29, length=14, first=first, dim=12, depth=2, heads=3, hidden=20)
    bert, (ids, types, keep) = loud(Bert(config)), text(side)
    out = bert(ids, types, keep=keep)
    pooled = bert.pool(out, keep)
    for row in range(3):
        real = keep[row]
        alone = bert(ids[row, real][None], types[row, real][None])
        close(out[row, real], alone[0])
        close(pooled[row], bert.pool(alone)[0])
    if side == "right":
        assert torch.equal(bert(ids, types, keep=LENGTHS)[keep], out[keep])
        assert torch.equal(bert.pool(out, LENGTHS), pooled)


def test_types_and_order_matter():
    bert, (ids, types, _) = loud(Bert(CONFIG)), text()
    assert not torch.allclose(bert(ids, types), bert(ids))
    assert not torch.allclose(bert(ids.flip(1)).flip(1), bert(ids))


def test_a_graph_foretells_every_word_and_counts_those_asked(monkeypatch):
    ids = torch.randint(5, 30, (3, 11))
    masked, targets = mask_words(ids, mask=4, vocabulary=30, special=range(5), share=0.4)
    model = BertPretraining(Bert(BertConfig.tiny(vocabulary=30))).eval()
    batch = {"ids": masked, "targets": targets, "next": torch.tensor([0, 1, 1])}
    plain = model.loss(batch)
    monkeypatch.setattr("regard.models.bert._is_captured", lambda x: True)
    captured = model.loss(batch)
    close(captured.sum, plain.sum, 1e-6)
    assert captured.count == plain.count == (targets >= 0).sum()


def test_words_are_read_where_they_are_asked_for():
    model, (ids, types, _) = loud(BertPretraining(Bert(CONFIG))), text()
    targets = torch.where(torch.rand(3, 11) < 0.4, torch.randint(0, 29, (3, 11)), -100)
    asked = targets >= 0
    batch = {"ids": ids, "types": types, "ids_lengths": LENGTHS, "targets": targets}
    loss = model.loss(batch)
    assert loss.count == asked.sum()
    words = F.cross_entropy(model(ids, types, keep=LENGTHS)[asked], targets[asked])
    close(loss.mean, words)
    follows = torch.tensor([0, 1, 1])
    pairs = F.cross_entropy(model.follows(ids, types, keep=LENGTHS), follows)
    close(model.loss(batch | {"next": follows}).mean, words + pairs)


@pytest.mark.parametrize(
    ("preset", "layers", "millions"),
    [
        (BertConfig.tiny(), 2, 4.4),
        (BertConfig.mini(), 4, 11.2),
        (BertConfig.small(), 4, 28.8),
        (BertConfig.medium(), 8, 41.4),
        (BertConfig.base(), 12, 109.5),
        (BertConfig.large(), 24, 335.1),
    ],
)
def test_presets_have_the_published_size(preset, layers, millions):
    with torch.device("meta"):
        bert = Bert(preset)
    assert len(bert.blocks) == layers
    assert sum(x.numel() for x in bert.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be 1 or more, got 0"),
        ({"types": -1}, "types must be 0 or more, got -1"),
        ({"padding": 9}, "padding must be a token of the vocabulary of 9, got 9"),
        ({"activation": "sine"}, "activation must be one of"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"pooler": "no"}, "pooler must be True or False, got 'no'"),
        ({"eps": -1.0}, "eps must be 0 or more, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite, got nan"),
        ({"eps": "small"}, "eps must be a number, got 'small'"),
    ],
)
def test_configs_that_cannot_be_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BertConfig(**{"vocabulary": 9, **values})


def test_what_a_model_has_not_is_refused():
    bare = Bert(BertConfig(vocabulary=29, types=0, dim=12, depth=1, heads=3, hidden=20, pooler=False))
    ids = torch.tensor([[3, 5]])
    with pytest.raises(ValueError, match="types must be None because this Bert has no table of types"):
        bare(ids, ids % 2)
    with pytest.raises(ValueError, match=r"next_sentence=True needs bert.pool, which this Bert lacks"):
        BertPretraining(bare)
    with pytest.raises(ValueError, match="this model predicts no next sentence"):
        BertPretraining(bare, next_sentence=False).follows(ids)
    with pytest.raises(ValueError, match="classes must be 1 or more, got 0"):
        BertClassifier(bare, classes=0)
    with pytest.raises(ValueError, match="positions must be from 0 to 23, got 24"):
        Bert(CONFIG)(torch.ones(1, 25, dtype=torch.long))


def test_what_is_no_model_and_what_are_no_ids_are_refused():
    for kind, options in ((BertPretraining, {}), (BertClassifier, {"classes": 2}), (BertTagger, {"tags": 2})):
        wrong = rf"bert must be a Bert, got BertConfig; write {kind.__name__}\(Bert\(config\), ...\)"
        with pytest.raises(TypeError, match=wrong):
            kind(CONFIG, **options)
        with pytest.raises(ValueError, match=r"the batch must hold 'ids', '.*', got nothing; add 'ids', '"):
            kind(Bert(CONFIG), **options).loss({})
    with pytest.raises(ValueError, match=r"ids must have dims b n, got shape \(2,\); write ids\[None\]"):
        Bert(CONFIG)(torch.tensor([3, 5]))
