"""Heads over a Bert: padding changes none, losses count what they say, and each learns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.models import Bert, BertClassifier, BertConfig, BertPretraining, BertReader, BertTagger, mask_words
from tests.models.small_bert import CONFIG, LENGTHS, close, loud, text


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
        close(classifier(ids, types, keep=keep)[row], classifier(one, kinds)[0])
        close(tagger(ids, types, keep=keep)[row, real], tagger(one, kinds)[0])
        for whole, alone in zip(reader(ids, types, keep=keep), reader(one, kinds), strict=True):
            close(whole[row, real], alone[0])
            assert (whole[row, ~real] == -torch.inf).all()


def test_losses_count_what_they_say_and_no_padding():
    ids, _, keep = text()
    tags = torch.randint(0, 5, (3, 11))
    tags[0, 4] = -100
    batch = {"ids": ids, "ids_lengths": LENGTHS, "tags": tags, "label": torch.tensor([3, 0, 1])}
    batch |= {"start": torch.tensor([2, 0, -1]), "end": torch.tensor([5, 1, -1])}

    tagger = loud(BertTagger(Bert(CONFIG), tags=5))
    loss, asked = tagger.loss(batch), keep & (tags >= 0)
    assert loss.count == 11 + 3 + 7 - 1
    close(loss.sum, F.cross_entropy(tagger(ids, keep=LENGTHS)[asked], tags[asked], reduction="sum"))

    classifier = loud(BertClassifier(Bert(CONFIG), classes=4))
    expected = F.cross_entropy(classifier(ids, keep=LENGTHS), batch["label"])
    close(classifier.loss(batch).mean, expected)

    reader = loud(BertReader(Bert(CONFIG)))
    start, end = reader(ids, keep=LENGTHS)
    loss = reader.loss(batch)
    assert loss.count == 2
    expected = sum(
        F.cross_entropy(x[row, : LENGTHS[row]], y[row])
        for row in range(2)
        for x, y in ((start, batch["start"]), (end, batch["end"]))
    )
    close(loss.sum, expected / 2)


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
