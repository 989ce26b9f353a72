"""Reader: a question and a document look at each other, and padding at neither; the answer is the best legal span."""

import math

import pytest
import torch
from torch import nn

from regard import Padding
from regard.lens import capture
from regard.models import Reader, ReaderConfig
from regard.models.reader import Trilinear, WholeDropout
from tests.models.generator_checks import D, trained
from tests.models.save_and_reload import keeps_its_config_and_its_weights

VOCABULARY, LETTERS, B, N, M, C = 23, 13, 5, 11, 6, 4
DOCUMENTS, QUESTIONS = torch.tensor([11, 4, 1, 6, 9]), torch.tensor([3, 6, 2, 1, 6])
KINDS = {"words": {}, "characters": {"characters": LETTERS}, "lstm": {"cell": "lstm", "heads": 1}}
SIDES = {"document": DOCUMENTS, "question": QUESTIONS}


def config(**options):
    sizes = {"vocabulary": VOCABULARY, "dim": 8, "character_dim": 6, "hidden": 12, "heads": 3, "dropout": 0.0}
    return ReaderConfig(**{**sizes, **options})


def model_of(kind):
    model = Reader(config(**KINDS[kind])).to(D).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that attention is not flat
    return model


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


def batch_of(model):
    random = torch.Generator().manual_seed(0)
    batch = {"start": torch.tensor([2, 0, 0, -1, 8]), "end": torch.tensor([5, 3, 0, -1, 8])}
    for side, n in (("document", N), ("question", M)):
        batch |= {side: torch.randint(1, VOCABULARY, (B, n), generator=random), f"{side}_lengths": SIDES[side]}
        if model.config.characters is not None:
            batch[f"{side}_characters"] = torch.randint(0, LETTERS, (B, n, C), generator=random)
    return batch


def logits_of(model, batch):
    return torch.stack(model(**{name: x for name, x in batch.items() if name not in ("start", "end")}))


def row_of(batch, n):
    row = {}
    for side, lengths in SIDES.items():
        for name in (side, f"{side}_characters"):
            if name in batch:
                row[name] = batch[name][n : n + 1, : lengths[n]]
    return row


@torch.no_grad()
def test_a_row_alone_and_in_another_order_gives_what_it_gives_in_a_padded_batch(model):
    batch, order = batch_of(model), torch.tensor([3, 0, 4, 2, 1])
    together = logits_of(model, batch)
    moved = {name: x[order] for name, x in batch.items()}
    torch.testing.assert_close(logits_of(model, moved), together[:, order], rtol=0, atol=1e-10)
    for n in range(B):
        alone = logits_of(model, row_of(batch, n))[:, 0]
        assert alone.isfinite().all()
        torch.testing.assert_close(together[:, n, : DOCUMENTS[n]], alone, rtol=0, atol=1e-10)
        assert (together[:, n, DOCUMENTS[n] :] == -torch.inf).all()


def test_what_stands_in_the_padding_changes_neither_loss_nor_gradient(model):
    batch = batch_of(model)
    other = dict(batch)
    for side, lengths in SIDES.items():
        for name in (side, f"{side}_characters"):
            if name in batch:
                x = torch.cat((batch[name], batch[name][:, :3]), 1)
                beyond = torch.arange(x.shape[1]) >= lengths[:, None]
                other[name] = torch.where(beyond.view(*beyond.shape, *[1] * (x.ndim - 2)), 7, x)
    weights = [model.span.weight, model.encode.cell.weight_hh_l0, model.both.to_question.product]
    sums = [model.loss(one).sum for one in (batch, other)]
    torch.testing.assert_close(*sums, rtol=0, atol=1e-10)
    for pair in zip(*(torch.autograd.grad(x, weights) for x in sums), strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-10)


def test_the_score_is_trilinear_in_words_and_their_product():
    layer, lengths = Trilinear(6, heads=2).to(D), torch.tensor([5, 2])
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, y, v = torch.randn(2, 4, 6, dtype=D), torch.randn(2, 5, 6, dtype=D), torch.randn(2, 5, 6, dtype=D)
    out, of_x = layer(x, y, v, mask=Padding(lengths)).detach(), torch.randn(6, dtype=D)  # w . x_i may be anything
    for b in range(2):
        for i in range(4):
            for part in (slice(0, 3), slice(3, 6)):
                w = torch.cat((of_x[part], layer.key[part], layer.product[part])).detach()
                pairs = [torch.cat((x[b, i, part], y[b, j, part], x[b, i, part] * y[b, j, part])) for j in range(5)]
                powers = [math.exp(float(w @ pairs[j])) for j in range(int(lengths[b]))]
                expected = sum(power / sum(powers) * v[b, j, part] for j, power in enumerate(powers))
                torch.testing.assert_close(out[b, i, part], expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_capture_sees_both_ways_and_the_document_within(model):
    batch = batch_of(model)
    with capture(model) as tape:
        logits_of(model, batch)
    assert tape.layers == ["both.to_document", "both.to_question", "itself"]
    real, asked = (torch.arange(n) < SIDES[side][:, None] for side, n in (("document", N), ("question", M)))
    keys = {"both.to_document": real, "both.to_question": asked, "itself": real}
    for name, keep in keys.items():
        A = tape[name][...]
        assert A.shape[1] == model.config.heads
        assert not A.masked_select(~keep[:, None, None]).any()
        torch.testing.assert_close(A.sum(-1), torch.ones(A.shape[:3], dtype=D))
        assert A[0].amax() > 1.5 / keep[0].sum()


@torch.no_grad()
def test_a_word_is_marked_where_the_other_side_has_it():
    model = model_of("characters")
    batch = batch_of(model)
    batch["document"][0, 1], batch["question"][0, 2] = 21, 21
    batch["document_characters"][0, 3] = batch["question_characters"][0, 0] = torch.tensor([1, 2, 3, 0])
    seen = []
    model.encode.register_forward_pre_hook(lambda layer, args: seen.append(args[0][..., -2:]))
    logits_of(model, batch)
    for (here, there), marks in zip((("document", "question"), ("question", "document")), seen, strict=True):
        for b in range(B):
            for i in range(SIDES[here][b]):
                others = range(SIDES[there][b])
                same = any(batch[here][b, i] == batch[there][b, j] for j in others)
                spelled = any(
                    batch[f"{here}_characters"][b, i].tolist() == batch[f"{there}_characters"][b, j].tolist()
                    for j in others
                )
                assert marks[b, i].tolist() == [same, spelled]
    assert seen[0][0, 1, 0] == seen[0][0, 3, 1] == 1


def test_the_loss_is_the_mean_over_both_ends_of_what_is_counted(model):
    batch = batch_of(model)
    logits = logits_of(model, batch).detach()
    expected = 0.0
    for row in (0, 1, 2, 4):
        for x, name in zip(logits, ("start", "end"), strict=True):
            expected -= float(x[row, : DOCUMENTS[row]].log_softmax(-1)[batch[name][row]]) / 2
    loss = model.loss(batch)
    assert loss.sum.item() == pytest.approx(expected, abs=1e-9)
    assert loss.count == 4
    loss.sum.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())


@pytest.mark.parametrize("longest", [None, 1, 3])
@torch.no_grad()
def test_the_answer_is_the_best_span_of_the_document(model, longest):
    batch = batch_of(model)
    start, end = logits_of(model, batch)
    found = model.answer(batch, longest=longest)
    for row, n in enumerate(DOCUMENTS.tolist()):
        spans = [
            (float(start[row, i] + end[row, j]), i, j)
            for i in range(n)
            for j in range(i, n)
            if longest is None or j - i < longest
        ]
        assert tuple(found[row].tolist()) == max(spans)[1:]


@torch.no_grad()
@torch.no_grad()
@pytest.mark.parametrize(("of_document", "of_question"), [(1, C), (C, 1), (2, 3), (C, 2 * C)])
def test_spellings_of_different_widths_are_those_filled_up_with_zeros(of_document, of_question):
    model = model_of("characters")
    batch = batch_of(model)
    letters = {"document": of_document, "question": of_question}
    for side, c in letters.items():
        n = batch[side].shape[1]
        # Two letters, so that 'a' and 'aa' are about and are not one word.
        batch[f"{side}_characters"] = torch.randint(1, 3, (B, n, c), generator=torch.Generator().manual_seed(c))
    filled = dict(batch)
    for side, c in letters.items():
        filled[f"{side}_characters"] = nn.functional.pad(batch[f"{side}_characters"], (0, 2 * C - c))
    torch.testing.assert_close(logits_of(model, batch), logits_of(model, filled))


def test_characters_in_one_row_as_batches_pad_them_give_the_same():
    model = model_of("characters")
    batch = batch_of(model)
    flat = {name: x.flatten(1) if "characters" in name else x for name, x in batch.items()}
    assert torch.equal(logits_of(model, flat), logits_of(model, batch))


def test_a_document_without_a_word_has_no_answer(model):
    batch = batch_of(model)
    batch["document_lengths"] = torch.tensor([11, 4, 0, 6, 9])
    with pytest.raises(ValueError, match="every row must have a possible span, got none in row 2"):
        model.answer(batch)


def test_a_question_without_a_word_gives_finite_numbers_and_gradients(model):
    batch = batch_of(model)
    batch["question_lengths"] = torch.tensor([3, 0, 2, 1, 6])
    model.loss(batch).sum.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())


def test_what_dropout_takes_it_takes_from_all_words_of_a_row():
    x = WholeDropout(0.5)(torch.ones(3, 7, 40))
    assert set(x.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(x, x[:, :1].expand_as(x))
    assert not torch.equal(x[0], x[1])
    assert torch.equal(WholeDropout(0.5).eval()(x), x)


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_a_handful_of_answers_by_heart(kind):
    model = Reader(config(**KINDS[kind], hidden=24, dim=16))
    batch = batch_of(model)
    trained(model, lambda step: batch, steps=60, rate=0.02)
    assert model.loss(batch).mean < 0.05
    expected = torch.stack((batch["start"], batch["end"]), 1)
    counted = expected[:, 0] >= 0
    assert torch.equal(model.answer(batch)[counted], expected[counted])


@pytest.mark.learning
def test_it_learns_to_find_what_follows_the_word_asked_for():
    model = Reader(config(hidden=36, dim=16))
    trained(model, lambda step: sentences(48, step), steps=80, rate=0.02)
    batch = sentences(300, seed=10_000)
    with torch.no_grad():
        right = model.answer(batch, longest=5) == torch.stack((batch["start"], batch["end"]), 1)
    assert right.all(1).double().mean() >= 0.99


def sentences(b, seed):
    """Three keys, each with a word or two behind it and a full stop, 1; the question is one of the keys."""
    random = torch.Generator().manual_seed(seed)
    document, lengths = torch.zeros(b, 12, dtype=torch.long), torch.zeros(b, dtype=torch.long)
    question, start, end = torch.zeros(b, 1, dtype=torch.long), lengths.clone(), lengths.clone()
    for row in range(b):
        keys, words = torch.randperm(6, generator=random)[:3] + 2, []
        asked = int(torch.randint(3, (), generator=random))
        for n, key in enumerate(keys.tolist()):
            behind = torch.randint(8, VOCABULARY, (int(torch.randint(1, 3, (), generator=random)),), generator=random)
            if n == asked:
                question[row], start[row], end[row] = key, len(words) + 1, len(words) + len(behind)
            words += [key, *behind.tolist(), 1]
        document[row, : len(words)], lengths[row] = torch.tensor(words), len(words)
    return {"document": document, "document_lengths": lengths, "question": question, "start": start, "end": end}


@torch.no_grad()
def test_config_and_weights_make_the_round_trip(model, tmp_path):
    other, batch = keeps_its_config_and_its_weights(model, tmp_path), batch_of(model)
    assert torch.equal(logits_of(other, batch), logits_of(model, batch))


def test_autocast_stays_near_and_its_loss_is_float32(model):
    model = Reader(model.config).eval()
    batch = batch_of(model)
    expected = model.loss(batch).mean
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(batch).mean
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), abs=0.05)
    assert all(x.grad.isfinite().all() for x in model.parameters())


def test_presets():
    assert ReaderConfig.small(vocabulary=9).hidden == 128
    assert ReaderConfig.base(vocabulary=9, characters=5).hidden == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be 1 or more, got 0"),
        ({"characters": 0}, "characters must be 1 or more, got 0"),
        ({"cell": "rnn"}, "cell must be one of 'gru', 'lstm', got 'rnn'"),
        ({"padding": 23}, "padding must be a token of the vocabulary of 23, got 23"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"heads": 5}, "hidden must be even, .* and a multiple of heads, got hidden=12 and heads=5"),
        ({"hidden": 9}, "hidden must be even, .* and a multiple of heads, got hidden=9 and heads=3"),
    ],
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_characters_are_for_both_sides_or_for_none():
    batch = batch_of(model_of("characters"))
    with pytest.raises(ValueError, match="characters must be None because this model was built without characters="):
        logits_of(model_of("words"), batch)
    del batch["question_characters"]
    with pytest.raises(ValueError, match="characters must be given because this model reads the spelling"):
        logits_of(model_of("characters"), batch)


def test_wrong_batches_are_refused(model):
    batch = batch_of(model)
    for side in ("document", "question"):
        with pytest.raises(ValueError, match=f"{side}_lengths must be one number per row, from 0 to .*, got 99"):
            model.loss({**batch, f"{side}_lengths": torch.full((len(batch[side]),), 99)})
        with pytest.raises(ValueError, match=rf"{side} must have dims b n, got shape .*write {side}\[None\]"):
            model.loss({**batch, side: batch[side][0]})
        with pytest.raises(ValueError, match=f"the batch must hold .*; add '{side}'"):
            model.loss({name: x for name, x in batch.items() if name != side})
