"""RecurrentDecoder: forced and left to itself, step by step and at once."""

import pytest
import torch
from torch import nn

from regard.decode import greedy
from regard.models.recurrent_decoder import RecurrentDecoder, choose_fed_tokens, run_rnn
from tests.models.generator_checks import START, B, M, begun, logits_of, pairs
from tests.models.small_seq2seq import KINDS, model_of

AT_ONCE = [kind for kind in KINDS if kind not in ("feed", "local_feed", "coverage")]


@pytest.fixture(params=KINDS)
def model(request):
    return model_of(request.param)


@pytest.mark.parametrize("kind", AT_ONCE)
@torch.no_grad()
def test_teacher_forcing_step_by_step_equals_all_at_once(kind, monkeypatch):
    model, batch = model_of(kind), pairs()
    whole = logits_of(model, batch)
    monkeypatch.setattr(type(model.decoder), "stepwise", True)
    torch.testing.assert_close(logits_of(model, batch), whole)


@torch.no_grad()
def test_without_forcing_the_decoder_reads_its_own_words(model):
    batch = pairs()
    logits = logits_of(model, batch, forcing=0.0)
    own = torch.cat((torch.full((B, 1), START), logits.argmax(-1)[:, :-1]), 1)
    torch.testing.assert_close(logits, model(batch["source"], own, source_lengths=batch["source_lengths"]))
    written = greedy(model, batch, own[:, :1], end=None, max_length=M)
    assert [list(one.tokens) for one in written] == logits.argmax(-1).tolist()


@torch.no_grad()
def test_scheduled_sampling_mixes_truth_and_own_words_token_by_token():
    model, batch = model_of("general"), pairs()
    torch.manual_seed(3)
    logits = logits_of(model, batch, forcing=0.5)
    truth = begun(batch["target"])
    own = torch.cat((truth[:, :1], logits.argmax(-1)[:, :-1]), 1)
    torch.manual_seed(3)
    coins = torch.stack([torch.rand(B, 1)[:, 0] for _ in range(M - 1)], 1) < 0.5
    read = torch.cat((truth[:, :1], torch.where(coins, truth[:, 1:], own[:, 1:])), 1)
    assert coins.any()
    assert not coins.all()
    torch.testing.assert_close(logits, model(batch["source"], read, source_lengths=batch["source_lengths"]))


@pytest.mark.parametrize("half", [False, True])
def test_a_sampling_decoder_learns_from_what_it_read(half, monkeypatch):
    model, batch = model_of("general").float(), pairs()
    read: list[torch.Tensor] = []
    advance = model.decoder._advance
    monkeypatch.setattr(model.decoder, "_advance", lambda tokens, state: read.append(tokens) or advance(tokens, state))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        model(batch["source"], begun(batch["target"]), forcing=0.5).square().sum().backward()
    sampled = [p.grad for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        model(batch["source"], read[-1]).square().sum().backward()
    assert not torch.equal(read[-1], begun(batch["target"]))
    assert all(grad is not None for grad in sampled)
    torch.testing.assert_close(sampled, [p.grad for p in model.parameters()])


def test_without_attention_the_context_enters_every_step():
    model, batch = model_of("none"), pairs()
    state = model.start(batch)
    beside = state.beside.detach().requires_grad_()
    h, _ = model.decoder.read(begun(batch["target"]), type(state)(**{**vars(state), "beside": beside}))
    assert model.decoder.cell.input_size == model.config.dim + model.config.hidden
    torch.testing.assert_close(state.beside, state.hidden[0][-1])
    for t in range(M):
        others = [x.detach() for x in state.hidden]
        fresh = type(state)(hidden=tuple(others), beside=beside, memory=None, sources=state.sources)
        h, _ = model.decoder.read(begun(batch["target"])[:, t : t + 1], fresh)
        assert torch.autograd.grad(h.sum(), beside)[0].abs().sum() > 0


def test_input_feeding_hands_on_what_was_written_from():
    model, batch = model_of("feed"), pairs()
    h, state = model.decoder.read(begun(batch["target"])[:, :1], model.start(batch))
    context, _ = model.decoder.look(h, state)
    _, state = model.decoder.write(h, context, state)
    assert torch.equal(state.beside, model.decoder.modulate(h, context)[:, 0])
    assert torch.count_nonzero(model.start(batch).beside) == 0


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_an_rnn_goes_on_from_its_last_state_and_leaves_autocast_on_the_cpu(kind):
    cell, x = kind(3, 5, 2, batch_first=True), torch.randn(2, 7, 3)
    whole, last = run_rnn(cell, x)
    first, between = run_rnn(cell, x[:, :4])
    second, end = run_rnn(cell, x[:, 4:], between)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(end, last)
    assert len(last) == (2 if kind is nn.LSTM else 1)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = run_rnn(cell, x.bfloat16(), tuple(h.bfloat16() for h in between))
    assert half.dtype == torch.float32


def test_tokens_are_true_with_the_probability_of_forcing():
    tokens, predicted = torch.zeros(100, 100, dtype=torch.long), torch.ones(100, 100, dtype=torch.long)
    shares = [choose_fed_tokens(tokens, predicted, forcing).double().mean().item() for forcing in (1.0, 0.7, 0.0)]
    assert shares == [0.0, pytest.approx(0.3, abs=0.03), 1.0]


def test_feeding_back_needs_an_attention():
    with pytest.raises(ValueError, match="feed=True feeds back the output of attention, got no attention; pass"):
        RecurrentDecoder(9, dim=4, hidden=6, state_dim=5, feed=True)
