"""TextClassifier: words, characters or another model's states, in order or not, and what attention picks of them."""

import pytest
import torch

from regard.lens import capture
from regard.models import Bert, BertConfig, TextClassifier, TextClassifierConfig
from tests.models.generator_checks import D, trained
from tests.models.save_and_reload import keeps_its_config_and_its_weights

VOCABULARY, LETTERS, B, N, C = 23, 13, 5, 9, 6
LENGTHS = torch.tensor([9, 4, 1, 6, 9])
KINDS = {
    "words": {"vocabulary": VOCABULARY},
    "characters": {"characters": LETTERS, "cell": "gru"},
    "both": {"vocabulary": VOCABULARY, "characters": LETTERS, "layers": 2},
    "no_rnn": {"vocabulary": VOCABULARY, "layers": 0},
    "several_looks": {"vocabulary": VOCABULARY, "queries": 3, "heads": 2, "apart": 0.3},
    "encoder": {"encoder_dim": 8, "layers": 0},
    "frozen_encoder": {"vocabulary": VOCABULARY, "encoder_dim": 8, "tuned": False},
}


def config(**options):
    sizes = {"classes": 4, "dim": 10, "character_dim": 6, "hidden": 12, "score": 8, "dropout": 0.0}
    return TextClassifierConfig(**{**sizes, **options})


def encoder_of(kind):
    if "encoder" not in kind:
        return None
    return Bert(BertConfig(vocabulary=VOCABULARY, length=N + 3, dim=8, depth=1, heads=2, hidden=12, dropout=0.1))


def model_of(kind):
    model = TextClassifier(config(**KINDS[kind]), encoder=encoder_of(kind)).to(D).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 3.0)  # so that attention is not flat
    return model


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


def batch_of(model):
    random = torch.Generator().manual_seed(0)
    batch = {"ids": torch.randint(1, VOCABULARY, (B, N), generator=random), "ids_lengths": LENGTHS}
    if model.config.characters is not None:
        batch["characters"] = torch.randint(0, LETTERS, (B, N, C), generator=random)
    return batch | {"label": torch.tensor([3, 0, 1, 1, 2])}


def logits_of(model, batch):
    return model(batch["ids"], batch.get("characters"), lengths=batch.get("ids_lengths"))


def row_of(batch, n):
    length = int(batch["ids_lengths"][n])
    return {name: batch[name][n : n + 1, :length] for name in ("ids", "characters") if name in batch}


@torch.no_grad()
def test_a_row_alone_and_in_another_order_gives_what_it_gives_in_a_padded_batch(model):
    batch, order = batch_of(model), torch.tensor([3, 0, 4, 2, 1])
    together = logits_of(model, batch)
    assert together.isfinite().all()
    moved = {name: x[order] for name, x in batch.items()}
    torch.testing.assert_close(logits_of(model, moved), together[order], rtol=0, atol=1e-10)
    for n in range(B):
        torch.testing.assert_close(logits_of(model, row_of(batch, n))[0], together[n], rtol=0, atol=1e-10)


def test_what_stands_in_the_padding_changes_neither_loss_nor_gradient(model):
    batch = batch_of(model)
    other = dict(batch)
    for name in ("ids", "characters"):
        if name in batch:
            x = torch.cat((batch[name], batch[name][:, :3]), 1)
            beyond = (torch.arange(N + 3) >= LENGTHS[:, None]).view(B, N + 3, *[1] * (x.ndim - 2))
            other[name] = torch.where(beyond, 7, x)
    weight = model.classes.weight
    sums = [model.loss(one).sum for one in (batch, other)]
    torch.testing.assert_close(*sums, rtol=0, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(x, weight)[0] for x in sums), rtol=0, atol=1e-10)


@torch.no_grad()
def test_capture_sees_what_the_logits_are_made_of(model):
    batch = batch_of(model)
    with capture(model, layers="pool") as tape:
        logits = logits_of(model, batch)
    A, x = tape["pool"][...], model.states(batch["ids"], batch.get("characters"), lengths=LENGTHS)
    assert A.shape == (B, model.config.heads, model.config.queries, N)
    assert not A.masked_select(torch.arange(N) >= LENGTHS[:, None, None, None]).any()
    torch.testing.assert_close(A.sum(-1), torch.ones(A.shape[:3], dtype=D))
    parts = x.unflatten(-1, (model.config.heads, -1))
    pooled = torch.einsum("bhrn,bnhd->brhd", A, parts).flatten(1)
    torch.testing.assert_close(model.classes(pooled), logits)
    assert A[0].amax() > 1.5 / N


@pytest.mark.parametrize(("kind", "matters"), [("no_rnn", False), ("words", True), ("encoder", True)])
@torch.no_grad()
def test_order_matters_to_what_reads_in_order(kind, matters):
    model = model_of(kind)
    ids = batch_of(model)["ids"]
    assert torch.allclose(model(ids.flip(1)), model(ids)) != matters


def test_the_loss_is_the_cross_entropy_and_the_price_of_looking_twice(model):
    batch = batch_of(model)
    logp = logits_of(model, batch).detach().log_softmax(-1)
    expected = sum(-float(logp[row, label]) for row, label in enumerate(batch["label"].tolist()))
    if model.config.apart:
        x = model.states(batch["ids"], lengths=LENGTHS)
        A = model.pool.weights(x, LENGTHS)[...].detach()
        for row in range(B):
            for r in range(3):
                for s in range(3):
                    overlap = [float(A[row, h, r] @ A[row, h, s]) - (r == s) for h in range(2)]
                    expected += 0.3 * sum(z * z for z in overlap) / 2
    loss = model.loss(batch)
    assert loss.sum.item() == pytest.approx(expected, abs=1e-9)
    assert loss.count == B


def test_the_loss_is_smoothed_in_training_alone():
    model = TextClassifier(config(vocabulary=VOCABULARY, smoothing=0.2)).to(D)
    batch = batch_of(model)
    logp = logits_of(model, batch).detach().log_softmax(-1)
    for mode, smoothing in ((True, 0.2), (False, 0.0)):
        expected = sum(
            -(1 - smoothing) * float(logp[row, label]) - smoothing * float(logp[row].mean())
            for row, label in enumerate(batch["label"].tolist())
        )
        assert model.train(mode).loss(batch).sum.item() == pytest.approx(expected, abs=1e-10)


def test_characters_in_one_row_as_batches_pad_them_give_the_same():
    model = model_of("both")
    batch = batch_of(model)
    flat = {**batch, "characters": batch["characters"].flatten(1)}
    assert torch.equal(model.loss(flat).sum, model.loss(batch).sum)


def test_a_text_without_a_word_gives_finite_numbers_and_gradients(model):
    batch = batch_of(model)
    batch["ids_lengths"] = torch.tensor([9, 0, 1, 6, 9])
    model.loss(batch).sum.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


@pytest.mark.parametrize("kind", ["encoder", "frozen_encoder"])
def test_an_encoder_learns_along_if_it_is_tuned(kind):
    model = model_of(kind).train()
    model.loss(batch_of(model)).sum.backward()
    learns = [x.grad is not None for x in model.words.encoder.blocks.parameters()]
    assert all(learns) if kind == "encoder" else not any(learns)
    assert model.words.encoder.training == (kind == "encoder")


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_a_handful_of_texts_by_heart(kind):
    model = TextClassifier(config(**{**KINDS[kind], "hidden": 32, "apart": 0.0}), encoder=encoder_of(kind))
    batch = batch_of(model)
    trained(model, lambda step: batch, steps=80, rate=0.02)
    assert model.loss(batch).mean < 0.05
    assert torch.equal(logits_of(model, batch).argmax(-1), batch["label"])


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["words", "no_rnn", "characters"])
def test_it_learns_whether_a_word_is_there(kind):
    model = TextClassifier(config(**{**KINDS[kind], "classes": 2, "hidden": 32, "dim": 16, "character_dim": 16}))
    trained(model, lambda step: presences(48, step, spelled=kind == "characters"), steps=70, rate=0.02)
    batch = presences(300, seed=10_000, spelled=kind == "characters")
    with torch.no_grad():
        right = logits_of(model, batch).argmax(-1) == batch["label"]
    assert right.double().mean() >= 0.99


def presences(b, seed, *, spelled):
    """Half of the texts hold the word 5; a word is spelled by its two digits in base 5."""
    random = torch.Generator().manual_seed(seed)
    ids, lengths = (
        torch.randint(6, VOCABULARY, (b, N), generator=random),
        torch.randint(1, N + 1, (b,), generator=random),
    )
    label = torch.randint(2, (b,), generator=random)
    place = (torch.rand(b, generator=random) * lengths).long()
    ids[label == 1, place[label == 1]] = 5
    batch = {"ids": ids, "ids_lengths": lengths, "label": label}
    return batch | ({"characters": torch.stack((ids // 5 + 1, ids % 5 + 6), -1)} if spelled else {})


def test_config_and_weights_make_the_round_trip(model, tmp_path):
    encoder = None if model.config.encoder_dim is None else encoder_of("encoder")
    other, batch = keeps_its_config_and_its_weights(model, tmp_path, encoder=encoder), batch_of(model)
    assert torch.equal(logits_of(other, batch), logits_of(model, batch))


def test_autocast_stays_near_and_finite(model):
    model = model.float()
    batch = batch_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        half = logits_of(model, batch)
    torch.testing.assert_close(half.float(), logits_of(model, batch), rtol=0.2, atol=0.2)


def test_presets():
    assert TextClassifierConfig.pooled(classes=2, vocabulary=9).layers == 0
    assert TextClassifierConfig.structured(classes=2, vocabulary=9, characters=5).queries == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "words need at least one kind of vector; pass vocabulary, characters, encoder_dim or several of them"),
        ({"vocabulary": 0}, "vocabulary must be 1 or more, got 0"),
        ({"vocabulary": 9, "padding": 9}, "padding must be a token of the vocabulary of 9, got 9"),
        ({"vocabulary": 9, "layers": -1}, "layers must be 0 or more, got -1"),
        ({"vocabulary": 9, "cell": "rnn"}, "cell must be one of 'gru', 'lstm', got 'rnn'"),
        ({"vocabulary": 9, "dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"vocabulary": 9, "apart": float("nan")}, "apart must be finite, got nan"),
        ({"vocabulary": 9, "tuned": "no"}, "tuned must be True or False, got 'no'"),
    ],
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config(**options)


def test_an_encoder_that_the_config_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"an encoder and encoder_dim, .* got encoder_dim=None and Bert"):
        TextClassifier(config(vocabulary=VOCABULARY), encoder=encoder_of("encoder"))
