"""Seq2Seq: every attention, padded and alone, and every price of its loss."""

import pytest
import torch

from regard import Sparsemax
from regard.decode import greedy
from regard.models.seq2seq import Seq2Seq
from regard.nn import BahdanauAttention
from tests.models.generator_checks import (
    END,
    START,
    VOCABULARY,
    B,
    D,
    N,
    a_row_alone_gives_what_it_gives_in_a_padded_batch,
    a_state_may_be_stepped_from_twice,
    accuracy,
    an_ensemble_of_one_writes_what_the_model_writes,
    any_chunking_gives_what_the_whole_pass_gives,
    batch_order_changes_nothing,
    beam_never_scores_below_greedy,
    begun,
    by_hand,
    decoded_attention_is_that_of_the_hypotheses,
    logits_of,
    no_logit_sees_the_token_it_predicts,
    pairs,
    stepped,
    trained,
    what_stands_in_the_padding_changes_nothing,
    wrong_batches_are_refused,
    wrong_sources_are_refused,
)
from tests.models.small_seq2seq import KINDS, config, model_of

SHOWN = [kind for kind in KINDS if kind != "none"]


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


@pytest.mark.thorough
def test_any_chunking_gives_what_the_whole_pass_gives(model):
    any_chunking_gives_what_the_whole_pass_gives(model, pairs(), logits_of(model, pairs()).detach())


def test_a_row_alone_gives_what_it_gives_in_a_padded_batch(model):
    a_row_alone_gives_what_it_gives_in_a_padded_batch(model)


def test_what_stands_in_the_padding_changes_nothing(model):
    what_stands_in_the_padding_changes_nothing(model)


def test_batch_order_changes_nothing(model):
    batch_order_changes_nothing(model)


@torch.no_grad()
def test_the_state_of_selected_rows_is_that_of_their_sources(model):
    batch, rows = pairs(), torch.tensor([4, 4, 0, 2, 2, 2])
    inputs = begun(batch["target"])
    _, state = model.step(inputs[:, :3], model.start(batch))
    logits, _ = model.step(inputs[rows, 3], state.select(rows))
    moved = {name: x[rows] for name, x in batch.items()}
    _, state = model.step(inputs[rows, :3], model.start(moved))
    torch.testing.assert_close(logits, model.step(inputs[rows, 3], state)[0])


@torch.no_grad()
def test_beams_that_swap_within_a_source_take_their_past_along(model):
    batch = pairs()
    state = model.start(batch).select(torch.arange(B).repeat_interleave(2))
    tokens = torch.tensor([5, 6] * B)
    _, state = model.step(tokens, state)
    swap = torch.arange(2 * B).view(B, 2).flip(1).flatten()
    one, _ = model.step(tokens, state)
    other, _ = model.step(tokens[swap], state.select(swap))
    torch.testing.assert_close(other, one[swap])


def test_a_state_may_be_stepped_from_twice(model):
    a_state_may_be_stepped_from_twice(model)


@pytest.mark.parametrize("kind", SHOWN)
def test_attention_follows_the_hypotheses_of_a_beam(kind):
    decoded_attention_is_that_of_the_hypotheses(model_of(kind), pairs(), "source", B)


@torch.no_grad()
def test_attention_is_zero_on_padding_and_sums_to_one():
    batch = pairs()
    _, state = model_of("bahdanau").step(torch.full((B, 2), START), model_of("bahdanau").start(batch))
    A = state.attention["source"]
    assert A.shape == (B, 1, 2, N)
    assert torch.all(A.masked_select(torch.arange(N) >= batch["source_lengths"][:, None, None, None]) == 0)
    torch.testing.assert_close(A.sum(-1), torch.ones(B, 1, 2, dtype=D))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "coverage"])
def test_the_loss_is_the_cross_entropy_of_targets_shifted_once(kind):
    model, batch = model_of(kind), pairs()
    loss = model.loss(batch)
    expected = by_hand(logits_of(model, batch).detach(), batch["target"], batch["target_lengths"])
    assert loss.sum.item() == pytest.approx(expected, abs=1e-9)
    assert loss.mean.item() == pytest.approx(expected / int(batch["target_lengths"].sum()), abs=1e-9)


def test_smoothing_counts_in_training_alone():
    model, batch = Seq2Seq(config(smoothing=0.2)).to(D), pairs()
    logits = logits_of(model, batch).detach()
    expected = [by_hand(logits, batch["target"], batch["target_lengths"], smoothing) for smoothing in (0.2, 0.0)]
    assert [model.train().loss(batch).sum.item(), model.eval().loss(batch).sum.item()] == pytest.approx(expected)


def test_no_logit_sees_the_token_it_predicts(model):
    no_logit_sees_the_token_it_predicts(model)


def test_coverage_adds_up_and_its_price_is_that_of_the_paper():
    model, batch = model_of("coverage"), pairs()
    _, state = model.decoder(begun(batch["target"]), model.start(batch))
    A = state.weights()[:, 0].detach()
    torch.testing.assert_close(state.memory.coverage, A.sum(1))
    price = 0.0
    for row in range(B):
        for t in range(int(batch["target_lengths"][row])):
            covered = A[row, :t].sum(0)
            price += float(torch.minimum(A[row, t], covered).sum())
    plain = by_hand(logits_of(model, batch).detach(), batch["target"], batch["target_lengths"])
    assert price > 0.1
    assert model.loss(batch).sum.item() == pytest.approx(plain + 0.7 * price, abs=1e-9)


def test_tied_embeddings_are_one_table():
    shared = {"source_vocabulary": VOCABULARY, "tied": "all"}
    sizes = {tied: _count(Seq2Seq(config(**{**shared, "tied": tied}))) for tied in ("none", "output", "all")}
    table, narrow, out = VOCABULARY * 10, 12 * 10, 13 * VOCABULARY
    assert sizes["none"] - sizes["output"] == out - narrow
    assert sizes["output"] - sizes["all"] == table


def test_an_attention_layer_of_your_own():
    layer = BahdanauAttention(12, 12, 5, normalize=Sparsemax())
    model = Seq2Seq(config(attention=None), attention=layer).to(D).eval()
    batch = pairs()
    torch.testing.assert_close(stepped(model, batch, begun(batch["target"]), 1), logits_of(model, batch))
    assert model.decoder.attention is layer


def test_an_ensemble_of_one_writes_what_the_model_writes():
    an_ensemble_of_one_writes_what_the_model_writes(model_of("bahdanau"))


def test_a_source_without_a_token_is_read_and_gives_no_nan():
    model, batch = model_of("bahdanau"), pairs()
    batch["source_lengths"][1] = 0
    logits = logits_of(model, batch)
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in model.parameters() if x.grad is not None)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_it_trains_and_writes_in_bfloat16(cell, padded):
    model, batch = Seq2Seq(config(cell=cell, layers=2)), pairs()
    if not padded:
        del batch["source_lengths"]
    exact = model.loss(batch).mean
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(batch).mean
        found = greedy(model, batch, [[START]] * B, end=END, max_length=4)
    loss.backward()
    torch.testing.assert_close(loss.float(), exact, rtol=0.02, atol=0)
    assert all(torch.isfinite(x.grad).all() for x in model.parameters())
    assert len(found) == B


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["none", "bahdanau", "feed", "local_predictive"])
def test_it_learns_a_handful_of_examples_by_heart(kind):
    model, batch = Seq2Seq(config(**{**KINDS[kind], "hidden": 48, "dim": 24})), pairs()
    trained(model, lambda step: batch, steps=80, rate=0.02)
    assert model.loss(batch).mean.item() < 0.02
    assert accuracy(model, batch) == 1.0


@pytest.mark.learning
def test_it_learns_to_reverse():
    words = {"source_vocabulary": 12, "target_vocabulary": 12}
    model = Seq2Seq(config(attention="general", hidden=64, dim=32, **words))
    trained(model, lambda step: reversals(128, step), steps=150, rate=0.01)
    assert accuracy(model, reversals(200, seed=10_000)) >= 0.99


def test_beam_never_scores_below_greedy():
    words = {"source_vocabulary": 12, "target_vocabulary": 12}
    model = Seq2Seq(config(attention="general", hidden=64, dim=32, **words))
    trained(model, lambda step: reversals(128, step), steps=30, rate=0.01)
    beam_never_scores_below_greedy(model, reversals(200, seed=10_000))


def reversals(b, seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (b,), generator=random)
    source = torch.randint(4, 12, (b, 5), generator=random)
    back = (lengths[:, None] - 1 - torch.arange(6)).clamp(min=0)
    target = source.gather(1, back).masked_fill(torch.arange(6) == lengths[:, None], END)
    return {"source": source, "source_lengths": lengths, "target": target, "target_lengths": lengths + 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "loud"}, "attention must be one of 'bahdanau', .* got 'loud'"),
        ({"cell": "rnn"}, "cell must be one of 'gru', 'lstm', got 'rnn'"),
        ({"hidden": 13}, "hidden must be even, half for each direction, got 13"),
        ({"attention": "dot", "coverage": 1.0}, "coverage needs an additive score, got attention='dot'"),
        ({"tied": "all"}, "tied='all' needs one vocabulary for both sides, got source_vocabulary=23"),
        ({"start": 19}, "start must be a token of the vocabulary of 19, got 19"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"coverage": float("nan")}, "coverage must be finite, got nan"),
        ({"coverage": "x"}, "coverage must be a number, got 'x'"),
        ({"feed": "no"}, "feed must be True or False, got 'no'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config(**options)


def test_feeding_without_attention_raises():
    with pytest.raises(ValueError, match="feed=True feeds back the output of attention"):
        Seq2Seq(config(attention=None, feed=True))


@pytest.mark.parametrize("forcing", [-0.1, 1.1])
def test_forcing_is_a_probability(forcing):
    with pytest.raises(ValueError, match=f"forcing must be a probability, got {forcing}"):
        model_of("bahdanau").loss(pairs(), forcing=forcing)


def _count(model):
    return sum(x.numel() for x in model.parameters())


def test_wrong_batches_are_refused(model):
    wrong_batches_are_refused(model, pairs())
    wrong_sources_are_refused(model, pairs())
