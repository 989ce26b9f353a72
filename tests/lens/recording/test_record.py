"""The attention of one layer grows row by row while the model generates."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Alibi, Causal, Window
from regard.decode import beam, greedy, score
from regard.lens import capture
from regard.lens.recording.record import checksums
from regard.models import Transformer, TransformerConfig
from regard.nn import Attention, BahdanauAttention, KVCache, ShawBias, T5Bias
from tests.lens.sdpa_layers import B, Bare, D, H, Layer, N, assert_close, lower, plain, tokens


def test_steps_of_a_recurrent_decoder_join():
    layer = BahdanauAttention(query_dim=5, state_dim=6, dim=7)
    states, queries = torch.randn(B, N, 6), torch.randn(B, 4, 5)
    with torch.no_grad(), capture(layer) as tape:
        memory = layer.remember(states, torch.tensor([9, 4]))
        for query in queries.unbind(1):
            layer(query, memory)
        truth = layer.weights(queries, memory)
    assert list(tape) == [("", 0)]
    assert (tape[0].dense() - truth.dense()).abs().max() < 1e-6


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(3)])
@pytest.mark.parametrize("chunks", [(9,), (5, 1, 1, 1, 1), (1,) * 9, (2, 3, 4)])
def test_rows_join_through_our_caches(mask, chunks):
    layer, x = Attention(D, H, kv_heads=2, mask=mask).eval(), tokens()
    truth = layer.weights(x)
    with torch.no_grad(), capture(layer) as tape:
        cache = layer.new_cache()
        for part in x.split(chunks, 1):
            layer(part, cache=cache)
    assert len(tape) == 1
    assert tape[0]._call.mask == mask
    assert (tape[0].dense() - truth.dense()).abs().max() < 1e-6


def test_rows_follow_beams_that_are_reordered():
    layer, cross = Attention(D, H, mask=Causal()).eval(), Attention(D, H).eval()
    model, source = nn.ModuleList([layer, cross]), tokens(5, 1).expand(3, -1, -1)
    history, real = tokens(4, 3), torch.ones(3, 4, dtype=torch.bool)
    real[1, :2] = real[2, :1] = False
    with torch.no_grad(), capture(model) as tape:
        cache, remembered = KVCache(), cross.remember(source)
        cross(layer(history, cache=cache, keep=real), remembered)
        for order in ([2, 0, 0], [1, 1, 2], [0, 2]):
            cache, remembered = cache.select(torch.tensor(order)), remembered.select(torch.tensor(order))
            history = torch.cat((history[order], tokens(1, len(order))), 1)
            real = F.pad(real[order], (0, 1), value=True)
            cross(layer(history[:, -1:], cache=cache, keep=real), remembered)
    assert len(tape) == 2
    hidden = layer(history, keep=real)
    assert (tape["0"].dense() - layer.weights(history, keep=real).dense()).abs().max() < 1e-6
    assert (tape["1"].dense() - cross.weights(hidden, source[:2]).dense()).abs().max() < 1e-6


@pytest.mark.parametrize("lengths", [None, [7, 4]])
def test_a_beam_has_a_row_for_each_hypothesis_in_every_layer(lengths):
    sizes = {"dim": 16, "heads": 2, "hidden": 16, "encoder_layers": 1, "decoder_layers": 2}
    model = Transformer(TransformerConfig(source_vocabulary=20, target_vocabulary=20, start=2, **sizes)).eval()
    source = {"source": torch.randint(4, 20, (2, 7))}
    if lengths is not None:
        source["source_lengths"] = torch.tensor(lengths)
    with capture(model) as tape:
        found = beam(model, source, [[2]] * 2, width=3, n_best=3, end=None, max_length=5)
    layers = [f"decoder.blocks.{n}.{kind}" for n in range(2) for kind in ("attention", "cross")]
    for sentence, some in enumerate(found):
        one = {name: x[sentence : sentence + 1] for name, x in source.items()}
        for hypothesis in some:
            ids = torch.tensor([[2, *hypothesis.tokens[:-1]]])
            with capture(model) as alone, torch.no_grad():
                model(inputs=ids, **one)
            for layer in layers:
                rows = tape[layer].dense()[3 * sentence : 3 * sentence + 3]
                assert (rows - alone[layer].dense()).abs().amax((1, 2, 3)).min() < 1e-6, layer


def test_an_encoder_that_reads_its_source_again_is_a_second_call():
    sizes = {"dim": 16, "heads": 2, "hidden": 16, "encoder_layers": 2, "decoder_layers": 1}
    model = Transformer(TransformerConfig(source_vocabulary=20, target_vocabulary=20, start=2, **sizes)).eval()
    source = {"source": torch.randint(4, 20, (2, 7))}
    with capture(model) as tape:
        for length in (3, 5):
            greedy(model, source, [[2]] * 2, end=None, max_length=length)
    for layer in ("encoder.blocks.0.attention", "encoder.blocks.1.attention"):
        first, again = tape.calls(layer)
        assert torch.equal(first.dense(), again.dense())
    assert [A.shape[2] for A in tape.calls("decoder.blocks.0.cross")] == [3, 5]


def test_pieces_of_a_cross_attention_join_whatever_their_length(monkeypatch):
    monkeypatch.setattr("regard.decode.prefix.POSITIONS_PER_PIECE", 4)  # tokens are read four at a time
    sizes = {"dim": 16, "heads": 2, "hidden": 16, "encoder_layers": 1, "decoder_layers": 2}
    model = Transformer(TransformerConfig(source_vocabulary=20, target_vocabulary=20, start=2, **sizes)).eval()
    with capture(model) as tape:
        score(model, {"source": torch.randint(4, 20, (1, 4))}, [[2]], [[torch.randint(4, 20, (12,)).tolist()]])
    for layer in ("decoder.blocks.0.cross", "decoder.blocks.1.cross"):
        assert [A.shape[2:] for A in tape.calls(layer)] == [(12, 4)]


@pytest.mark.parametrize("bias", [Alibi(H), T5Bias(H), ShawBias(D // H, reach=3)])
def test_biases_stay_terms_when_rows_join(bias):
    layer, x = Attention(D, H, mask=Causal(), bias=bias).eval(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        cache = KVCache()
        for part in x.split((4, 1, 1, 3), 1):
            layer(part, cache=cache)
        truth = layer.weights(x)
    assert repr(tape[0]) == repr(truth)
    assert (tape[0].dense() - truth.dense()).abs().max() < 1e-6


def test_cross_attention_alone_joins_through_its_memory():
    layer, x, source = Attention(D, H).eval(), tokens(6), tokens(5)
    with torch.no_grad(), capture(layer) as tape:
        remembered = layer.remember(source)
        for part in x.split((3, 1, 2), 1):
            layer(part, remembered)
    assert len(tape) == 1
    assert (tape[0].dense() - layer.weights(x, source).dense()).abs().max() < 1e-6


def test_rows_join_through_a_static_cache_written_by_hand():
    class Static(nn.Module):
        def __init__(self, room):
            super().__init__()
            self.keys = torch.zeros(B, H, room, D)

        def forward(self, x, start):
            stop = start + x.shape[2]
            self.keys[:, :, start:stop] = x
            seen = lower(stop, self.keys.shape[2])[start:]
            return F.scaled_dot_product_attention(x, self.keys, self.keys, attn_mask=seen)

    model, x = Static(12), torch.randn(B, H, 9, D)
    with torch.no_grad(), capture(model) as tape:
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
            model(x[:, :, start:stop], start)
        model(-x[:, :, :5], 0)  # another text in the same memory
    truth = (x @ x.mT / math.sqrt(D)).masked_fill(~lower(9, 9), -torch.inf).softmax(-1)
    assert [A.shape[2:] for A in tape.values()] == [(9, 9), (5, 5)]
    assert_close(tape[0], truth.double())
    assert_close(tape[1], truth[:, :, :5, :5].double())  # scores do not change with both signs


def test_two_passes_over_one_source_are_two_calls():
    layer, x, source = Attention(D, H), tokens(3), tokens(5)
    with torch.no_grad(), capture(layer) as tape:
        layer(x, source)
        layer(x, source)
    assert list(tape) == [("", 0), ("", 1)]


def test_padding_of_a_batch_is_kept_through_generation():
    layer, x, keep = Attention(D, H, mask=Causal()).eval(), tokens(), torch.ones(B, N, dtype=torch.bool)
    keep[0, :2] = False
    with torch.no_grad(), capture(layer) as tape:
        cache = KVCache()
        for start, stop in ((0, 6), (6, 7), (7, 9)):
            layer(x[:, start:stop], cache=cache, keep=keep[:, :stop])
    assert repr(tape[0]._call.mask) == "Causal() & Padding(bool[2, 9])"
    assert (tape[0].dense() - layer.weights(x, keep=keep).dense()).abs().max() < 1e-6


def test_values_and_projections_are_kept_on_request():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.ours, self.theirs = Attention(D, H, kv_heads=2), nn.MultiheadAttention(D, H, batch_first=True)
            self.hand = Layer()

        def forward(self, x):
            x = self.hand(self.ours(x))
            return self.theirs(x, x, x, need_weights=False)[0]

    model, x = Both(), tokens()
    with torch.no_grad(), capture(model, values=True) as tape:
        out = model(x)
    for name, weight in (("ours", model.ours.out), ("hand", model.hand.out), ("theirs", model.theirs.out_proj)):
        assert torch.equal(tape.extras(name).projection, weight.weight)
    extras = tape.extras("theirs")
    heads = (tape["theirs"] @ extras.v).transpose(1, 2).flatten(2)
    assert (heads @ extras.projection.T + model.theirs.out_proj.bias - out).abs().max() < 1e-5
    assert tape.extras("ours").v.shape == (B, 2, N, D // H)


def test_extras_hold_the_chosen_heads_only():
    layer, x, target, asked = Layer(kv_heads=2), tokens(), tokens(), {"values": True, "gradients": True}
    with capture(layer, **asked) as whole, capture(layer, heads=[2, 1], **asked) as some:
        (layer(x) * target).sum().backward()
    every, chosen = whole.extras(0), some.extras(0)
    assert torch.equal(chosen.gradient, every.gradient[:, [2, 1]])
    assert torch.equal(chosen.v, every.v[:, [1, 0]])
    assert torch.equal(chosen.projection, every.projection.unflatten(1, (H, -1))[:, [2, 1]].flatten(1))


def test_a_projection_that_was_changed_in_place_raises():
    layer = Layer()
    with torch.no_grad(), capture(layer, values=True) as tape:
        layer(tokens())
        layer.out.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        tape.extras(0)


def test_another_pass_of_several_queries_over_the_same_keys_is_another_call():
    memory, model = torch.randn(1, 1, 5, 8), Bare()
    with torch.no_grad(), capture(model) as tape:
        model(torch.randn(1, 1, 3, 8), memory)
        model(torch.randn(1, 1, 4, 8), memory)
    assert [tuple(tape[n].shape) for n in range(len(tape))] == [(1, 1, 3, 5), (1, 1, 4, 5)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_keys_written_over_in_place_start_another_call(mode):
    model = Bare()
    with mode(), capture(model) as tape:
        room, seen = torch.zeros(1, 1, 5, 8), []
        for _ in range(2):
            room.copy_(torch.randn(1, 1, 5, 8))
            q = torch.randn(1, 1, 1, 8)
            model(q, room)
            seen.append(plain(q, room))
    assert len(tape) == 2
    assert all(torch.allclose(tape[n].dense(), right, atol=1e-6) for n, right in enumerate(seen))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_checksums_are_those_of_the_bits_wherever_they_lie(dtype):
    k = torch.randn(2, 3, 5, 4).to(dtype)
    sums = checksums(k)
    assert sums.shape == (2, 5)
    other = k.transpose(1, 2).clone().transpose(1, 2)
    assert torch.equal(checksums(other), sums)
    changed = k.clone()
    changed.view(torch.uint8)[1, 0, 3, 0] ^= 1
    assert (checksums(changed) != sums).nonzero().tolist() == [[1, 3]]
