"""Pointer: what it may write is a mixture of the vocabulary and of the source, word for word."""

import pytest
import torch

from regard.decode import Ensemble, beam, greedy, score
from regard.lens import capture
from regard.models.pointer import Pointer, PointerConfig
from regard.models.seq2seq import coverage_overlap
from tests.models.generator_checks import (
    END,
    START,
    B,
    D,
    M,
    any_chunking_gives_what_the_whole_pass_gives,
    begun,
    stepped,
    trained,
    wrong_batches_are_refused,
)
from tests.models.save_and_reload import keeps_its_config_and_its_weights

VOCABULARY, UNKNOWN, N, EXTRA = 19, 1, 9, 4
LENGTHS = torch.tensor([9, 4, 1, 6, 9])
KINDS = {
    "plain": {},
    "tied": {"tied": "all", "hidden": 10},
    "coverage": {"coverage": 1.0},
    "feed": {"feed": True, "cell": "lstm", "layers": 2},
    "general": {"attention": "general", "modulate": "gate"},
}


def config(**options):
    sizes = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY, "dim": 10, "hidden": 12, "dropout": 0.0}
    return PointerConfig(**{**sizes, "start": START, "unknown": UNKNOWN, **options})


def model_of(kind):
    model = Pointer(config(**KINDS[kind])).to(D).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that attention is not flat and the gate neither open nor shut
    return model


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


def batch_of(seed=0):
    """Sources in which words come twice and some are unknown, and targets that may be copies of either."""
    random = torch.Generator().manual_seed(seed)
    copies = torch.randint(4, VOCABULARY + EXTRA, (B, N), generator=random)
    source = copies.masked_fill(copies >= VOCABULARY, UNKNOWN)
    target = torch.randint(4, VOCABULARY, (B, M), generator=random)
    target[:, ::2] = copies[:, : target[:, ::2].shape[1]]
    lengths = torch.tensor([7, 3, 1, 5, 6])
    target[torch.arange(B), lengths - 1] = END
    for n, length in enumerate(LENGTHS):  # rows of one word know no others
        held = {*copies[n, :length].tolist(), *range(VOCABULARY)}
        target[n] = torch.tensor([word if word in held else UNKNOWN for word in target[n].tolist()])
    return {
        "source": source,
        "source_lengths": LENGTHS,
        "copies": copies,
        "target": target,
        "target_lengths": lengths,
    }


def log_p(model, batch, inputs=None):
    inputs = begun(batch["target"]) if inputs is None else inputs
    return model(batch["source"], inputs, batch["copies"], source_lengths=batch["source_lengths"])


def row_of(batch, n):
    ends = {name: int(batch[f"{name}_lengths"][n]) for name in ("source", "target")}
    ends["copies"] = ends["source"]
    return {name: batch[name][n : n + 1, :end] for name, end in ends.items()}


@torch.no_grad()
def test_the_mixture_is_that_of_equation_9_word_for_word(model):
    batch = batch_of()
    found, inputs = log_p(model, batch).exp(), begun(batch["target"])
    assert found.shape == (B, M, VOCABULARY + EXTRA)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, M, dtype=D))
    for b in range(B):
        length = LENGTHS[b]
        states, hidden = model.encoder(batch["source"][b : b + 1, :length])
        state = model.decoder.start(hidden, states)
        for t in range(M):
            word = torch.where(inputs[b, t] < VOCABULARY, inputs[b, t], UNKNOWN)[None, None]
            h, state = model.decoder.read(word, state)
            context, A = model.decoder.look(h, state)
            weights = A[0, 0, 0]
            if state.memory.coverage is not None:
                state = type(state)(**{**vars(state), "memory": state.memory.cover(A)})
            logits, state = model.decoder.write(h, context, state)
            beside = torch.cat((context, h, model.decoder.embedding(word)), -1)
            gate = torch.sigmoid(model.gate(beside))[0, 0, 0]
            expected = torch.zeros(VOCABULARY + EXTRA, dtype=D)
            expected[:VOCABULARY] = gate * logits[0, 0].softmax(-1)
            for place in range(length):
                expected[batch["copies"][b, place]] += (1 - gate) * weights[place]
            torch.testing.assert_close(found[b, t], expected)


def test_any_chunking_gives_what_the_whole_pass_gives(model):
    batch = batch_of()
    any_chunking_gives_what_the_whole_pass_gives(model, batch, log_p(model, batch).detach())


@torch.no_grad()
def test_a_row_alone_gives_what_it_gives_in_a_padded_batch(model):
    batch = batch_of()
    together = log_p(model, batch).exp()
    for n in range(B):
        row = row_of(batch, n)
        alone = model(row["source"], begun(row["target"]), row["copies"]).exp()
        words, steps = alone.shape[2], alone.shape[1]
        torch.testing.assert_close(together[n : n + 1, :steps, :words], alone)
        assert not together[n, :steps, words:].any()


def test_the_loss_is_that_of_all_log_probabilities(model):
    batch = batch_of()
    loss = model.loss(batch)
    each = log_p(model, batch).gather(2, batch["target"][..., None])[..., 0]
    expected = -sum(each[n, :length].sum() for n, length in enumerate(batch["target_lengths"]))
    if model.config.coverage is not None:
        for n in range(B):
            row = row_of(batch, n)
            state = model.start(row)
            _, state = model.step(begun(row["target"]), state)
            expected = expected + coverage_overlap(state.attention["source"][:, 0]).sum()
    torch.testing.assert_close(loss.sum, expected)
    assert loss.count == batch["target_lengths"].sum()


def test_gradients_are_those_of_the_whole_mixture(model):
    batch = batch_of()
    model.loss(batch).sum.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(x.isfinite().all() for x in found)
    if model.config.coverage is None:
        model.zero_grad()
        p = log_p(model, batch).exp().gather(2, batch["target"][..., None])[..., 0]
        counted = torch.arange(M) < batch["target_lengths"][:, None]
        (-p[counted].log().sum()).backward()
        for x, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(x, parameter.grad)


def test_what_stands_in_the_padding_changes_nothing(model):
    batch = batch_of()
    other = {name: x.clone() for name, x in batch.items()}
    hidden = torch.arange(N) >= LENGTHS[:, None]
    other["source"][hidden], other["copies"][hidden] = 7, VOCABULARY + 2
    other["target"][torch.arange(M) >= batch["target_lengths"][:, None]] = VOCABULARY + 3
    torch.testing.assert_close(model.loss(other).sum, model.loss(batch).sum)


def test_a_word_that_the_source_no_longer_holds_is_unknown():
    model, batch = model_of("plain"), batch_of()
    far, unknown = batch["target"].clone(), batch["target"].clone()
    far[:, 1], unknown[:, 1] = VOCABULARY + EXTRA - 1, UNKNOWN
    batch["copies"] = batch["copies"].clamp(max=VOCABULARY + EXTRA - 2)
    found = model.loss({**batch, "target": far}).sum
    assert found.isfinite()
    torch.testing.assert_close(found, model.loss({**batch, "target": unknown}).sum)


def test_half_a_truth_is_read_by_the_share_of_forcing(model):
    batch = batch_of()
    torch.testing.assert_close(model.loss(batch, forcing=1.0).sum, model.loss(batch).sum)
    assert model.loss(batch, forcing=0.0).sum.isfinite()
    with pytest.raises(ValueError, match="forcing must be a probability, got 2"):
        model.loss(batch, forcing=2)


@torch.no_grad()
def test_without_forcing_it_reads_what_it_would_choose(model):
    batch = batch_of()
    free = model(batch["source"], begun(batch["target"]), batch["copies"], source_lengths=LENGTHS, forcing=0.0)
    chosen = free.argmax(-1)
    inputs = torch.cat((torch.full((B, 1), START), chosen[:, :-1]), 1)
    torch.testing.assert_close(free, log_p(model, batch, inputs))


@pytest.mark.thorough
@torch.no_grad()
def test_searches_find_words_outside_of_the_vocabulary_and_score_them_alike(model):
    batch = batch_of()
    prefix, limits = torch.full((B, 1), START), {"end": END, "max_length": 6}
    found = beam(model, batch, prefix, width=4, n_best=4, **limits)
    assert any(token >= VOCABULARY for best in found for one in best for token in one.tokens)
    again = score(model, batch, prefix, [[one.tokens for one in best] for best in found])
    for n, (best, scored) in enumerate(zip(found, again, strict=True)):
        held = {*batch["copies"][n, : LENGTHS[n]].tolist(), *range(VOCABULARY)}
        for one, other in zip(best, scored, strict=True):
            assert set(one.tokens) <= held
            assert one.log_probability == pytest.approx(other.log_probability, abs=1e-9)
            assert one.attention["source"].shape == (1, len(one.tokens), N)
            torch.testing.assert_close(one.attention["source"], other.attention["source"])
        row = row_of(batch, n)
        [alone] = beam(model, row, prefix[:1], width=4, n_best=4, **limits)
        assert [one.tokens for one in alone] == [one.tokens for one in best]
    twice = greedy(Ensemble([model, model]), batch, prefix, **limits)
    assert [one.tokens for one in twice] == [one.tokens for one in greedy(model, batch, prefix, **limits)]


@torch.no_grad()
def test_beams_that_swap_within_a_source_take_their_past_along(model):
    batch, tokens = batch_of(), torch.tensor([5, VOCABULARY] * B)
    _, state = model.step(tokens, model.start(batch).select(torch.arange(B).repeat_interleave(2)))
    swap = torch.arange(2 * B).view(B, 2).flip(1).flatten()
    one, _ = model.step(tokens, state)
    other, _ = model.step(tokens[swap], state.select(swap))
    torch.testing.assert_close(other, one[swap])


def test_a_source_without_unknown_words_or_without_words_adds_none():
    model = model_of("plain")
    batch = {"source": torch.tensor([[4, 5]]), "copies": torch.tensor([[4, 5]])}
    assert stepped(model, batch, torch.tensor([[START, 4]]), [1, 1]).shape == (1, 2, VOCABULARY)
    empty = {"source": torch.zeros(1, 1, dtype=torch.long), "source_lengths": torch.tensor([0])}
    found = stepped(model, {**empty, "copies": torch.tensor([[VOCABULARY + 3]])}, torch.tensor([[START]]), [1])
    assert found.shape == (1, 1, VOCABULARY)
    assert not found.isnan().any()


def test_a_source_without_words_leaves_the_vocabulary(model):
    batch = batch_of()
    batch["source_lengths"] = torch.tensor([9, 0, 1, 0, 9])
    found = log_p(model, batch)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(B, M, dtype=D))
    assert found[[1, 3], :, :VOCABULARY].isfinite().all()
    found[:, :, :VOCABULARY].sum().backward()
    model.loss(batch).sum.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def test_its_attention_can_be_watched():
    model, batch = model_of("plain"), batch_of()
    with torch.no_grad(), capture(model) as tape:
        log_p(model, batch)
    assert tape["decoder.attention"].shape == (B, 1, M, N)


@torch.no_grad()
def test_it_is_kept_as_it_is(tmp_path):
    model = model_of("coverage")
    again = keeps_its_config_and_its_weights(model, tmp_path)
    torch.testing.assert_close(log_p(again, batch_of()), log_p(model, batch_of()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unknown": VOCABULARY}, "unknown must be"),
        ({"source_vocabulary": 7}, "words are copied within one vocabulary, got source_vocabulary=7"),
        ({"attention": None}, "attention must be one of bahdanau, dot, .* to point with, got None"),
        ({"attention": "local_predictive"}, "to point with, got 'local_predictive'"),
        ({"smoothing": 0.1}, r"smoothing must be 0 where words are copied, got 0.1"),
    ],
)
def test_a_config_that_cannot_point_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_copies_are_one_a_word():
    model = model_of("plain")
    with pytest.raises(ValueError, match=r"copies must have the shape of source, \(1, 3\), got \(1, 2\)"):
        model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 1, dtype=torch.long), torch.ones(1, 2).long())


@pytest.mark.learning
def test_it_learns_a_handful_of_examples_by_heart():
    model, batch = Pointer(config(dim=24, hidden=48)), batch_of()
    trained(model, lambda step: batch, steps=100, rate=0.02)
    assert model.loss(batch).mean.item() < 0.02


@pytest.mark.learning
def test_it_learns_to_copy_words_it_has_never_seen():
    """The word behind a marker is to be written; all of these words are unknown, and only their places differ."""
    torch.manual_seed(0)
    model, marker = Pointer(config(dim=16, hidden=32)), 5
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def some(b):
        copies = VOCABULARY + torch.arange(6).repeat(b, 1)
        places = torch.randint(0, 5, (b,))
        copies[torch.arange(b), places] = marker
        target = torch.stack((VOCABULARY + places + 1, torch.full((b,), END)), 1)
        return {"source": copies.masked_fill(copies >= VOCABULARY, UNKNOWN), "copies": copies, "target": target}

    for _ in range(60):
        optimizer.zero_grad()
        model.loss(some(32)).mean.backward()
        optimizer.step()
    batch = some(20)
    found = greedy(model.eval(), batch, torch.full((20, 1), START), end=END, max_length=4)
    assert [one.tokens for one in found] == [tuple(row) for row in batch["target"].tolist()]


def test_wrong_batches_are_refused(model):
    wrong_batches_are_refused(model, batch_of(), tokens=(-1,))  # a word above the vocabulary is one to copy
    with pytest.raises(ValueError, match=r"source_lengths must be one number per row, from 0 to .*, got 99"):
        model.loss({**batch_of(), "source_lengths": torch.full((B,), 99)})
