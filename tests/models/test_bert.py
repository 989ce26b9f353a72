"""Bert: padding changes nothing, every head learns, and losses are those written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.models import (
    Bert,
    BertClassifier,
    BertConfig,
    BertPretraining,
    BertReader,
    BertTagger,
    best_spans,
    mask_words,
)

D = torch.float64
CONFIG = BertConfig(vocabulary=29, length=24, dim=12, depth=2, heads=3, hidden=20, dropout=0.0, attention_dropout=0.0)
LENGTHS = torch.tensor([11, 3, 7])


def loud(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.to(D).eval()


def close(x, y, tolerance=1e-10):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def text(side="right"):
    keep = torch.arange(11) < LENGTHS[:, None]
    return torch.randint(1, 29, (3, 11)), torch.randint(0, 2, (3, 11)), keep.flip(1) if side == "left" else keep


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("first", [0, 3])
def test_padding_changes_nothing(side, first):
    config = BertConfig(vocabulary=29, length=14, first=first, dim=12, depth=2, heads=3, hidden=20)
    bert, (ids, types, keep) = loud(Bert(config)), text(side)
    out = bert(ids, types, padding=keep)
    pooled = bert.pool(out, keep)
    for row in range(3):
        real = keep[row]
        alone = bert(ids[row, real][None], types[row, real][None])
        close(out[row, real], alone[0])
        close(pooled[row], bert.pool(alone)[0])
    if side == "right":
        assert torch.equal(bert(ids, types, padding=LENGTHS)[keep], out[keep])
        assert torch.equal(bert.pool(out, LENGTHS), pooled)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_head(side):
    ids, types, keep = text(side)
    classifier, tagger, reader = (
        loud(BertClassifier(Bert(CONFIG), classes=4)),
        loud(BertTagger(Bert(CONFIG), tags=5)),
        loud(BertReader(Bert(CONFIG))),
    )
    for row in range(3):
        real = keep[row]
        one, kinds = ids[row, real][None], types[row, real][None]
        close(classifier(ids, types, padding=keep)[row], classifier(one, kinds)[0])
        close(tagger(ids, types, padding=keep)[row, real], tagger(one, kinds)[0])
        for whole, alone in zip(reader(ids, types, padding=keep), reader(one, kinds), strict=True):
            close(whole[row, real], alone[0])
            assert (whole[row, ~real] == -torch.inf).all()


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


def test_losses_count_what_they_say_and_no_padding():
    ids, _, keep = text()
    tags = torch.randint(0, 5, (3, 11))
    tags[0, 4] = -100
    batch = {"ids": ids, "ids_lengths": LENGTHS, "tags": tags, "label": torch.tensor([3, 0, 1])}
    batch |= {"start": torch.tensor([2, 0, -1]), "end": torch.tensor([5, 1, -1])}

    tagger = loud(BertTagger(Bert(CONFIG), tags=5))
    loss, asked = tagger.loss(batch), keep & (tags >= 0)
    assert loss.count == 11 + 3 + 7 - 1
    close(loss.sum, F.cross_entropy(tagger(ids, padding=LENGTHS)[asked], tags[asked], reduction="sum"))

    classifier = loud(BertClassifier(Bert(CONFIG), classes=4))
    expected = F.cross_entropy(classifier(ids, padding=LENGTHS), batch["label"])
    close(classifier.loss(batch).mean, expected)

    reader = loud(BertReader(Bert(CONFIG)))
    start, end = reader(ids, padding=LENGTHS)
    loss = reader.loss(batch)
    assert loss.count == 2
    expected = sum(
        F.cross_entropy(x[row, : LENGTHS[row]], y[row])
        for row in range(2)
        for x, y in ((start, batch["start"]), (end, batch["end"]))
    )
    close(loss.sum, expected / 2)


def test_words_are_read_where_they_are_asked_for():
    model, (ids, types, _) = loud(BertPretraining(Bert(CONFIG))), text()
    targets = torch.where(torch.rand(3, 11) < 0.4, torch.randint(0, 29, (3, 11)), -100)
    asked = targets >= 0
    batch = {"ids": ids, "types": types, "ids_lengths": LENGTHS, "targets": targets}
    loss = model.loss(batch)
    assert loss.count == asked.sum()
    words = F.cross_entropy(model(ids, types, padding=LENGTHS)[asked], targets[asked])
    close(loss.mean, words)
    follows = torch.tensor([0, 1, 1])
    pairs = F.cross_entropy(model.follows(ids, types, padding=LENGTHS), follows)
    close(model.loss(batch | {"next": follows}).mean, words + pairs)


def test_masking_follows_the_shares_of_the_paper():
    ids = torch.randint(0, 1000, (200, 200))
    read, targets = mask_words(ids, mask=999, vocabulary=1000, special=(0, 1, 2, 999))
    asked = targets >= 0
    assert not torch.isin(targets[asked], torch.tensor([0, 1, 2, 999])).any()
    assert torch.equal(targets[asked], ids[asked])
    assert torch.equal(read[~asked], ids[~asked])
    share = asked.sum() / (~torch.isin(ids, torch.tensor([0, 1, 2, 999]))).sum()
    assert share == pytest.approx(0.15, abs=0.01)
    masked, kept = (read[asked] == 999).double().mean(), (read[asked] == ids[asked]).double().mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    again = [mask_words(ids, mask=999, vocabulary=1000, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(again[0][0], again[1][0])
    assert torch.equal(again[0][1], again[1][1])


@pytest.mark.parametrize("longest", [None, 1, 3])
def test_best_spans_are_those_of_a_search_by_hand(longest):
    for _ in range(20):
        start, end = torch.randn(2, 4, 9)
        among = torch.rand(4, 9) < 0.6
        among[:, 5] = True
        found = best_spans(start, end, among=among, longest=longest)
        for row in range(4):
            spans = [
                (float(start[row, i] + end[row, j]), i, j)
                for i in range(9)
                for j in range(i, 9)
                if among[row, i] and among[row, j] and (longest is None or j - i < longest)
            ]
            assert tuple(found[row].tolist()) == max(spans)[1:]


@pytest.mark.parametrize("n", [0, 3])
def test_a_row_without_a_token_for_a_span_is_refused(n):
    start, end, among = torch.zeros(2, n), torch.zeros(2, n), torch.zeros(2, n, dtype=torch.bool)
    among[:1] = True
    with pytest.raises(ValueError, match=f"every row must .* got none in row {int(n > 0)}: .*; drop such"):
        best_spans(start, end, among=among)


def learnt(model, batch, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(batch).mean
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.learning
def test_every_head_learns_a_handful_by_heart():
    config = BertConfig(
        vocabulary=29, length=24, dim=32, depth=2, heads=4, hidden=64, dropout=0.0, attention_dropout=0.0
    )
    ids = torch.randint(5, 29, (6, 11))
    lengths = torch.tensor([11, 4, 7, 9, 11, 5])
    shown, targets = mask_words(ids, mask=4, vocabulary=29, share=0.3)
    batch = {
        "ids": ids,
        "ids_lengths": lengths,
        "label": torch.randint(0, 3, (6,)),
        "tags": torch.randint(0, 4, (6, 11)),
    }
    batch |= {"start": torch.tensor([2, 0, 3, 1, 6, 0]), "end": torch.tensor([5, 3, 3, 8, 10, 2])}
    for make in (
        lambda bert: BertClassifier(bert, classes=3),
        lambda bert: BertTagger(bert, tags=4),
        BertReader,
    ):
        assert learnt(make(Bert(config)), batch) < 0.05
    words = {"ids": shown, "types": ids % 2, "targets": targets, "next": torch.tensor([0, 1, 0, 0, 1, 1])}
    assert learnt(BertPretraining(Bert(config)), words, steps=100) < 0.05


def test_it_learns_to_reverse():
    config = BertConfig(
        vocabulary=12, length=8, types=0, dim=32, depth=2, heads=4, hidden=64, dropout=0.0, attention_dropout=0.0
    )
    model = BertTagger(Bert(config), tags=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 200)
        optimizer.zero_grad()
        ids = torch.randint(1, 12, (64, 7), generator=torch.Generator().manual_seed(step))
        model.loss({"ids": ids, "tags": ids.flip(1)}).mean.backward()
        optimizer.step()
    ids = torch.randint(1, 12, (200, 7), generator=torch.Generator().manual_seed(10_000))
    right = (model.eval()(ids).argmax(-1) == ids.flip(1)).all(1)
    assert int(right.sum()) >= 198


def test_a_classifier_reads_the_pool_of_its_encoder_or_its_own():
    bert = Bert(CONFIG)
    assert BertClassifier(bert, classes=2).pool is None
    assert BertClassifier(bert, classes=2, pooler="relu").pool is not None
    bare = Bert(BertConfig(vocabulary=29, dim=12, depth=1, heads=3, hidden=20, pooler=False))
    assert BertClassifier(bare, classes=2)(torch.tensor([[3, 5]])).shape == (1, 2)


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
