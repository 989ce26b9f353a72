"""capture over plain PyTorch and our own layers: what it sees, what it keeps, what it says when it cannot."""

import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard import Additive, Alibi, Causal, Dense, Padding, Rule, Window, attend, weights
from regard.decode import beam, greedy, score
from regard.lens import Tape, ablate, capture
from regard.models import Gpt, GptConfig, Transformer, TransformerConfig
from regard.nn import Attention, BahdanauAttention, Core, EncoderBlock, FeedForward, KVCache, ShawBias, T5Bias

B, N, D, H = 2, 9, 24, 4


class Layer(nn.Module):
    """Attention as people write it by hand, over `F.scaled_dot_product_attention`."""

    def __init__(self, kv_heads=H, repeat=False):
        super().__init__()
        self.kv_heads, self.repeat = kv_heads, repeat
        self.query, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.key, self.value = (nn.Linear(D, D // H * kv_heads) for _ in range(2))

    def forward(self, x, context=None, **asked):
        context = x if context is None else context
        q, k, v = (
            layer(y).unflatten(-1, (-1, D // H)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, context), (self.value, context))
        )
        if self.repeat:
            k, v = (y.repeat_interleave(H // self.kv_heads, 1) for y in (k, v))
        elif self.kv_heads < H:
            asked["enable_gqa"] = True
        return self.out(F.scaled_dot_product_attention(q, k, v, **asked).transpose(1, 2).flatten(2))


def by_hand(layer, x, context=None, *, mask=None, added=0.0):
    """The definition, in float64."""
    context = x if context is None else context
    q = layer.query(x).double().unflatten(-1, (-1, D // H)).transpose(1, 2)
    k = layer.key(context).double().unflatten(-1, (-1, D // H)).transpose(1, 2)
    k = k.repeat_interleave(H // k.shape[1], 1)
    s = q @ k.mT / math.sqrt(D // H) + added
    return s.masked_fill(~mask, -torch.inf).softmax(-1) if mask is not None else s.softmax(-1)


def tokens(n=N, b=B):
    return torch.randn(b, n, D)


def lower(i, j, top=0):
    return torch.ones(i, j, dtype=torch.bool).tril(top)


def assert_close(A, truth, bound=1e-6):
    assert A.shape == truth.shape
    assert (A.dense().double() - truth).abs().max() < bound


def test_every_call_is_seen_in_order_under_its_layers_name():
    model = nn.Sequential(Layer(), nn.Sequential(Layer()), nn.MultiheadAttention(D, H))
    x = tokens()
    with torch.no_grad(), capture(model) as tape:
        y = model[1](model[0](x))
        model[2](y, y, y)
    assert list(tape) == [("0", 0), ("1.0", 0), ("2", 0)]
    assert_close(tape["1.0"], by_hand(model[1][0], model[0](x)))


@pytest.mark.parametrize(
    ("asked", "mask", "term"),
    [
        ({"is_causal": True}, lower(N, N), Causal()),
        ({"attn_mask": lower(N, N)}, lower(N, N), Causal()),
        ({"attn_mask": lower(N, N).triu(-2)}, lower(N, N).triu(-2), Causal() & Window(3)),
        ({"attn_mask": torch.where(lower(N, N), 0.0, -torch.inf)}, lower(N, N), Causal()),
        ({"attn_mask": torch.where(lower(N, N), 0.0, torch.finfo(torch.float32).min)}, lower(N, N), Causal()),
    ],
)
def test_masks_of_the_fused_kernel_are_terms_again(asked, mask, term):
    layer, x = Layer(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x, **asked)
    assert tape[0]._call.mask == term
    assert_close(tape[0], by_hand(layer, x, mask=mask))


def test_causal_flag_counts_from_the_top_left():
    layer, x, context = Layer(), tokens(4), tokens(7)
    with torch.no_grad(), capture(layer) as tape:
        layer(x, context, is_causal=True)
    assert_close(tape[0].select(batch=0), by_hand(layer, x, context, mask=lower(4, 7))[:1, :, :, :4])


def test_numbers_added_to_scores_are_a_bias():
    layer, x, added = Layer(), tokens(), torch.randn(1, H, N, N)
    mask = lower(N, N)
    with torch.no_grad(), capture(layer) as tape:
        layer(x, attn_mask=torch.where(mask, added, -torch.inf))
    assert tape[0]._call.mask == Causal()
    assert_close(tape[0], by_hand(layer, x, mask=mask, added=added))


@pytest.mark.parametrize("repeat", [False, True])
def test_shared_keys_are_kept_once_even_if_they_were_repeated(repeat):
    layer, x = Layer(kv_heads=2, repeat=repeat), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    assert tape[0]._call.k.shape[1] == 2
    assert_close(tape[0], by_hand(layer, x))


def test_a_mask_without_structure_is_packed_and_large_ones_are_announced(monkeypatch):
    layer, x, mask = Layer(), tokens(), torch.rand(B, 1, N, N) > 0.4
    mask |= torch.eye(N, dtype=torch.bool)
    with torch.no_grad(), capture(layer) as tape:
        layer(x, attn_mask=mask)
    assert repr(tape[0]._call.mask) == "Packed(uint8[2, 1, 9, 2], 9)"
    assert_close(tape[0], by_hand(layer, x, mask=mask))
    monkeypatch.setattr("regard.lens.terms.interpret.MIN_REPORTED_BYTES", 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="storing it densely, queries x keys, takes"), capture(layer):
        layer(x, attn_mask=mask)


def test_tensors_of_three_and_five_dims_are_seen():
    class Odd(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=lower(x.shape[-2], x.shape[-2]))

    for lead in ((3,), (2, 3, 5)):
        x, model = torch.randn(*lead, 7, 4), Odd()
        with capture(model) as tape:
            model(x)
        truth = (x @ x.mT / 2).masked_fill(~lower(7, 7), -torch.inf).softmax(-1).reshape(-1, *tape[0].shape[1:])
        assert_close(tape[0], truth.double())


class Folded(nn.Module):
    """Calls the kernel with heads within the batch, or before windows, as a subclass lays them out."""

    num_heads = H

    def forward(self, x, mask=None):
        q, k, v = self.laid(x.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4))  # 3 of b h n d
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class InBatch(Folded):
    def laid(self, x):
        return x.flatten(1, 2)


class BeforeWindows(Folded):
    def laid(self, x):
        return x.unflatten(3, (3, -1))  # windows of 3 tokens


@pytest.mark.parametrize("kind", [InBatch, BeforeWindows])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_where_a_layer_lays_them(kind, masked):
    x, model = torch.randn(B, 9, 3 * H * 4), kind()
    q, k, _ = model.laid(x.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4))
    sees = torch.rand(*q.shape[:-2], q.shape[-2], q.shape[-2]) < 0.7
    mask = sees | torch.eye(q.shape[-2], dtype=torch.bool) if masked else None
    with torch.no_grad(), capture(model, values=True) as tape:
        out = model(x, mask)
    scores = q @ k.mT / 2
    truth = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    truth = truth.unflatten(0, (B, H)) if kind is InBatch else truth.transpose(1, 2).flatten(0, 1)
    assert tape[0].shape[1] == H
    assert_close(tape[0], truth.double())
    with torch.no_grad(), ablate(model, {"": [1]}):
        heads = model(x, mask)
    heads, before = (y.unflatten(0, (B, H)) if kind is InBatch else y for y in (heads, out))
    assert not heads[:, 1].any()
    assert torch.equal(heads[:, [0, 2, 3]], before[:, [0, 2, 3]])


MULTI = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"bias": False}, {"need_weights": False}, id="no bias"),
    pytest.param({"kdim": 5, "vdim": 7}, {}, id="other widths"),
    pytest.param({"add_bias_kv": True, "add_zero_attn": True}, {}, id="added keys"),
    pytest.param({"batch_first": False}, {}, id="batch second"),
    pytest.param({}, {"attn_mask": ~lower(N, N)}, id="causal"),
    pytest.param({}, {"key_padding_mask": torch.arange(N) >= torch.tensor([[N], [4]])}, id="padding"),
    pytest.param(
        {}, {"attn_mask": ~lower(N, N), "key_padding_mask": torch.arange(N) >= torch.tensor([[N], [4]])}, id="both"
    ),
    pytest.param({"add_zero_attn": True}, {"attn_mask": torch.randn(B * H, N, N)}, id="numbers"),
]


@pytest.mark.parametrize(("made", "asked"), MULTI)
@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention_of_pytorch_shows_its_own_weights(made, asked, training):
    layer = nn.MultiheadAttention(D, H, **{"batch_first": True, **made}).train(training)
    widths = [D, made.get("kdim", D), made.get("vdim", D)]
    q, k, v = (torch.randn(B, N, width) for width in widths)
    if made.get("batch_first") is False:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        out, truth = layer(q, k, v, average_attn_weights=False, **{**asked, "need_weights": True})
        with capture(layer) as tape:
            seen, _ = layer(q, k, v, **asked)
    assert_close(tape[0], truth.double())
    assert (seen - out).abs().max() < 1e-6


def test_vision_transformer_of_timm():
    timm = pytest.importorskip("timm")
    model, image = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(image)
        with capture(model) as tape:
            assert torch.equal(model(image), plain)
        layer, x = model.blocks[0].attn, model.norm_pre(model._pos_embed(model.patch_embed(image)))
        q, k, _ = layer.qkv(model.blocks[0].norm1(x)).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        truth = (layer.q_norm(q) @ layer.k_norm(k).mT * layer.scale).softmax(-1)
    assert tape.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert_close(tape[0], truth.double())


def test_boolean_masks_given_to_the_function_hide_where_true():
    class Direct(nn.MultiheadAttention):
        def forward(self, x, **masks):
            projections = self.in_proj_weight, self.in_proj_bias
            out = self.out_proj.weight, self.out_proj.bias
            given = *projections, None, None, False, 0.0, *out
            return F.multi_head_attention_forward(x, x, x, D, H, *given, average_attn_weights=False, **masks)

    layer, x = Direct(D, H), torch.randn(N, B, D)
    with torch.no_grad(), capture(layer) as tape:
        _, truth = layer(x, attn_mask=~lower(N, N), key_padding_mask=torch.arange(N) >= torch.tensor([[N], [4]]))
    assert repr(tape[0]._call.mask) == "Causal() & Padding((9, 4))"
    assert_close(tape[0], truth.double())


def test_multi_head_attention_takes_one_text_without_a_batch():
    layer, x = nn.MultiheadAttention(D, H), torch.randn(N, D)
    with torch.no_grad(), capture(layer) as tape:
        _, truth = layer(x, x, x, average_attn_weights=False)
    assert_close(tape[0], truth[None].double())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_path_of_transformer_encoder_stays_observable():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 2).eval()
    x, hidden = tokens(), torch.arange(N) >= torch.tensor([[N], [4]])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=hidden)  # takes the fast path
        with capture(model) as tape:
            watched = model(x, src_key_padding_mask=hidden)
        _, truth = model.layers[0].self_attn(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
    assert tape.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert tape[0]._call.mask is tape[1]._call.mask
    assert_close(tape[0], truth.double())
    assert (plain - watched)[~hidden].abs().max() < 1e-5


def test_transformer_of_pytorch_with_both_masks():
    model = nn.Transformer(D, H, 1, 2, 32, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    with torch.no_grad(), capture(model) as tape:
        model(tokens(), tokens(7), tgt_mask=causal, tgt_is_causal=True)
    assert [tuple(A.shape[2:]) for A in tape.values()] == [(9, 9), (7, 7), (7, 9), (7, 7), (7, 9)]
    assert tape["decoder.layers.1.self_attn"]._call.mask == Causal()


class ByHand(nn.Module):
    """A layer of somebody's own over the operator."""

    def __init__(self, **terms):
        super().__init__()
        self.terms = terms

    def forward(self, x):
        return attend(x, x[:, :2], x[:, :2], **self.terms)


@pytest.mark.parametrize("terms", [{}, {"mask": Causal() & Window(3), "bias": Alibi(H)}, {"dropout": 0.5, "offset": 2}])
def test_the_operator_is_seen_wherever_it_is_called(terms):
    model, x = nn.Sequential(ByHand(**terms), nn.Identity()), torch.randn(B, H, N, 6)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with capture(model) as tape:
        assert torch.equal(model(x), plain)
    assert list(tape) == [("0", 0)]
    terms = {name: term for name, term in terms.items() if name != "dropout"}
    assert torch.equal(tape[0].dense(), weights(x, x[:, :2], **terms).dense())


def test_captures_within_captures_see_the_same():
    model, x = nn.Sequential(Layer(), ByHeads()), tokens()
    with torch.no_grad(), capture(model) as outer, capture(model[0]) as inner:
        model(x)
    assert list(outer) == [("0", 0), ("1", 0)]
    assert_close(inner[0], by_hand(model[0], x))
    assert_close(outer["0"], by_hand(model[0], x))


class ByHeads(nn.Module):
    def forward(self, x):
        return attend(*(x.unflatten(-1, (H, -1)).transpose(1, 2),) * 3)


OURS = [
    pytest.param(lambda: Attention(D, H), {}, id="plain"),
    pytest.param(lambda: Attention(D, H, kv_heads=2, mask=Causal() & Window(3)), {}, id="grouped window"),
    pytest.param(lambda: Attention(D, H, bias=Alibi(H), mask=Causal()), {}, id="alibi"),
    pytest.param(lambda: Attention(D, H, bias=T5Bias(H), slots=2), {"key_padding": torch.tensor([9, 5])}, id="slots"),
    pytest.param(lambda: Attention(D, H), {"mask": Dense(torch.eye(N, dtype=torch.bool))}, id="dense"),
]


@pytest.mark.parametrize(("make", "asked"), OURS)
def test_our_layers_are_seen_once_with_their_terms(make, asked):
    model, x = nn.ModuleDict({"layer": make()}), tokens()
    plain = model["layer"](x, **asked)
    with capture(model) as tape:
        watched = model["layer"](x, **asked)
    assert list(tape) == [("layer", 0)]
    truth = model["layer"].weights(x, **asked)
    assert repr(tape["layer"]) == repr(truth)
    assert torch.equal(tape["layer"].dense(), truth.dense())
    assert torch.equal(plain, watched)
    assert not tape["layer"].entropy().requires_grad


def test_blocks_of_ours_are_named_by_their_attention():
    model = nn.Sequential(*(EncoderBlock(Attention(D, H), FeedForward(D, 32)) for _ in range(2)))
    with torch.no_grad(), capture(model) as tape:
        model(tokens())
    assert tape.layers == ["0.attention", "1.attention"]


def test_parameters_in_terms_are_copied():
    layer = BahdanauAttention(query_dim=5, state_dim=6, dim=7)
    memory = layer.remember(torch.randn(B, N, 6), torch.tensor([9, 4]))
    with capture(layer) as tape:
        layer(torch.randn(B, 3, 5), memory)
    before = tape[0].dense()
    assert isinstance(tape[0]._call.score, Additive)
    with torch.no_grad():
        layer.score.vector.add_(1.0)
    assert torch.equal(tape[0].dense(), before)


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
        cross(layer(history, cache=cache, key_padding=real), remembered)
        for order in ([2, 0, 0], [1, 1, 2], [0, 2]):
            cache, remembered = cache.select(torch.tensor(order)), remembered.select(torch.tensor(order))
            history = torch.cat((history[order], tokens(1, len(order))), 1)
            real = F.pad(real[order], (0, 1), value=True)
            cross(layer(history[:, -1:], cache=cache, key_padding=real), remembered)
    assert len(tape) == 2
    hidden = layer(history, key_padding=real)
    assert (tape["0"].dense() - layer.weights(history, key_padding=real).dense()).abs().max() < 1e-6
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


def test_a_memory_asked_by_as_many_queries_as_it_has_keys_is_asked_in_one_call(monkeypatch):
    monkeypatch.setattr("regard.decode.prefix.POSITIONS_PER_PIECE", 4)  # tokens are read four at a time
    sizes = {"dim": 16, "heads": 2, "hidden": 16, "encoder_layers": 1, "decoder_layers": 2}
    model = Transformer(TransformerConfig(source_vocabulary=20, target_vocabulary=20, start=2, **sizes)).eval()
    with capture(model) as tape:
        score(model, {"source": torch.randint(4, 20, (1, 4))}, [[2]], [[torch.randint(4, 20, (12,)).tolist()]])
    for layer in ("decoder.blocks.0.cross", "decoder.blocks.1.cross"):
        assert [A.shape[2:] for A in tape.calls(layer)] == [(12, 4)]


def test_texts_that_end_before_others_are_told():
    model = Gpt(GptConfig.llama(vocabulary=6, dim=16, depth=1, heads=4)).eval()
    with (
        pytest.warns(UserWarning, match=r"the tape holds batch rows \[2\] of 3: the other sequences finished earlier"),
        capture(model) as tape,
    ):
        greedy(model, None, [[1, 2], [3], [5, 1, 2, 2]], end=None, max_length=3)
    assert tape[0].shape == (1, 4, 6, 6)
    with warnings.catch_warnings(), capture(model) as tape:
        warnings.simplefilter("error")
        beam(model, None, [[1, 2], [3, 3]], width=3, end=None, max_length=3)
    assert tape[0].shape == (6, 4, 4, 4)


@pytest.mark.parametrize("bias", [Alibi(H), T5Bias(H), ShawBias(D // H, reach=3)])
def test_biases_join_as_the_terms_they_are(bias):
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
            layer(x[:, start:stop], cache=cache, key_padding=keep[:, :stop])
    assert repr(tape[0]._call.mask) == "Causal() & Padding(bool[2, 9])"
    assert (tape[0].dense() - layer.weights(x, key_padding=keep).dense()).abs().max() < 1e-6


def test_inference_mode_is_watched_like_any_other():
    layer, x = Attention(D, H), tokens()
    with torch.inference_mode(), capture(layer) as tape:
        layer(x)
    assert not tape[0]._call.q.is_inference()
    assert torch.equal(tape[0].dense(), layer.weights(x).dense())


def test_a_change_in_place_after_the_attention_is_noticed():
    class Rude(nn.Module):
        def forward(self, x):
            out = F.scaled_dot_product_attention(x, x, x)
            x.zero_()
            return out

    model = Rude()
    with capture(model) as tape:
        model(torch.randn(1, 2, 5, 4))
    with pytest.raises(RuntimeError, match=r"changed in place by the model.*to='cpu'"):
        tape[0]
    with capture(model, to="cpu") as tape:
        x = torch.randn(1, 2, 5, 4)
        truth = (x @ x.mT / 2).softmax(-1)
        model(x)
    assert_close(tape[0], truth.double())


def test_autocast_is_what_the_kernel_saw():
    layer, x = Layer(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), capture(layer) as tape:
        layer(x)
    assert tape[0]._call.q.dtype == torch.bfloat16


def test_layers_and_heads_can_be_chosen():
    model, x = nn.Sequential(*(Attention(D, H, kv_heads=2, bias=Alibi(H), mask=Causal()) for _ in range(3))), tokens()
    with torch.no_grad(), capture(model, layers=["0", "[2-9]"], heads=[2, 1]) as tape:
        model(x)
        truth = model[0].weights(x).dense()
    assert tape.layers == ["0", "2"]
    assert tape["0"]._call.q.shape[1] == 2
    assert torch.equal(tape["0"].dense(), truth[:, [2, 1]])


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


def test_extras_of_chosen_heads_are_of_these_heads():
    layer, x, target, asked = Layer(kv_heads=2), tokens(), tokens(), {"values": True, "gradients": True}
    with capture(layer, **asked) as whole, capture(layer, heads=[2, 1], **asked) as some:
        (layer(x) * target).sum().backward()
    every, chosen = whole.extras(0), some.extras(0)
    assert torch.equal(chosen.gradient, every.gradient[:, [2, 1]])
    assert torch.equal(chosen.v, every.v[:, [1, 0]])
    assert torch.equal(chosen.projection, every.projection.unflatten(1, (H, -1))[:, [2, 1]].flatten(1))


def test_a_projection_that_was_trained_since_is_noticed():
    layer = Layer()
    with torch.no_grad(), capture(layer, values=True) as tape:
        layer(tokens())
        layer.out.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        tape.extras(0)


@pytest.mark.parametrize(
    "make", [Layer, lambda: Attention(D, H), lambda: nn.MultiheadAttention(D, H, batch_first=True)]
)
def test_gradients_of_outputs_are_kept_on_request(make):
    layer, x, target = make(), tokens(), tokens()
    with capture(layer, values=True, gradients=True) as tape:
        out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
        (out * target).sum().backward()
    extras = tape.extras(0)
    joined = target @ extras.projection  # the gradient of the heads side by side
    assert (extras.gradient - joined.unflatten(-1, (H, -1)).transpose(1, 2)).abs().max() < 1e-5


def test_gradients_need_a_pass_that_records_them():
    layer = Layer()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"gradients=True needs.*torch.no_grad"),
        capture(layer, gradients=True),
    ):
        layer(tokens())


def test_measures_can_be_all_that_is_kept():
    model, x = nn.Sequential(Layer(), Layer()), tokens(70)
    keep = ["entropy", "received", "pool:512", "pool:8"]
    with torch.no_grad(), capture(model, keep=keep) as tape:
        model(x)
    truth = by_hand(model[0], x)
    reduced = tape["0"]
    assert (reduced.entropy() + (truth * truth.log()).sum(-1)).abs().max() < 1e-5
    assert (reduced.received() - truth.sum(-2)).abs().max() < 1e-5
    assert reduced.pool(70, 70).shape == (B, H, 70, 70)
    assert reduced.pool(8, 8).shape == (B, H, 8, 8)
    assert repr(reduced) == f"Reduced(2 x 4 x 70 x 70, {', '.join(keep)})"
    with pytest.raises(KeyError, match="'distance' was not kept, only entropy"):
        reduced.distance()
    with pytest.raises(
        AttributeError, match=r"topk needs the full weights, but .* kept only entropy, .*; capture without"
    ):
        reduced.topk(2)
    with pytest.raises(TypeError, match=r"A\[\(0, 0\)\] needs the full weights"):
        reduced[0, 0]
    assert not hasattr(reduced, "anything")


@pytest.mark.parametrize("keep", [["max"], ["distance", "max"], ["pool:4"]])
def test_kept_measures_are_those_of_the_weights(keep):
    layer, x = Layer(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    with torch.no_grad(), capture(layer, keep=keep) as reduced:
        layer(x)
    A = tape[0]
    for name in keep:
        truth = A.pool(4, 4) if name == "pool:4" else getattr(A, name)()
        assert (reduced[0][name] - truth).abs().max() < 1e-6


def test_what_is_kept_on_disk_takes_no_memory(tmp_path):
    model, x = nn.Sequential(Layer(), Attention(D, H, mask=Causal()).eval()), tokens()
    with torch.no_grad(), capture(model) as held:
        model(x)
    with torch.no_grad(), capture(model, to=tmp_path / "scratch", budget="0KB") as tape:
        model(x)
    # Queries and keys of both, and what the kernel said of each row where it was PyTorch's own.
    assert len(list((tmp_path / "scratch").glob("*/*.safetensors"))) == 5
    for A, B_ in zip(tape.values(), held.values(), strict=True):
        assert torch.equal(A.dense(), B_.dense())


def test_generation_on_disk_ends_in_one_file_a_tensor(tmp_path):
    layer, x = Attention(D, H, mask=Causal()).eval(), tokens()
    with torch.no_grad(), capture(layer, to=tmp_path) as tape:
        cache = KVCache()
        for part in x.split(1, 1):
            layer(part, cache=cache)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    assert (tape[0].dense() - layer.weights(x).dense()).abs().max() < 1e-6


def test_budget_is_honoured_before_it_is_passed():
    model, x = nn.Sequential(*(Layer() for _ in range(4))), tokens(64)
    one = 2 * B * 64 * D * 4 + B * H * 64 * 4  # queries, keys and a number for each row
    with torch.no_grad(), capture(model, budget=f"{4 * one}B"):
        model(x)
    message = r"^3: statistic of shape \(2, 4, 64\) .* more than budget='.*keep=\['entropy'"
    with torch.no_grad(), pytest.raises(MemoryError, match=message), capture(model, budget=f"{4 * one - 1}B"):
        model(x)


def test_a_tape_can_be_read_while_the_model_runs():
    layer, x = Attention(D, H, mask=Causal()).eval(), tokens()
    with torch.no_grad(), capture(layer) as tape:
        cache = KVCache()
        for n, part in enumerate(x.split(1, 1)):
            layer(part, cache=cache)
            assert tape[0].shape == (B, H, n + 1, n + 1)


def test_what_is_not_the_models_is_not_recorded():
    layer, x = Layer(), torch.randn(1, 2, 3, 4)
    with torch.no_grad(), capture(layer) as tape:
        F.scaled_dot_product_attention(x, x, x)
        layer(tokens())
        Core()(x, x, x)
    assert len(tape) == 1


def test_an_error_in_the_model_leaves_nothing_behind():
    model = nn.Sequential(Layer(), nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), capture(model):
        model(tokens())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad(), capture(model) as tape:
        model[0](tokens())
    assert len(tape) == 1


class Blind(nn.Module):
    """A model that attends in no way that is seen: its softmax is written out."""

    def forward(self, x):
        weights = (x @ x.mT).exp()
        return weights / weights.sum(-1, keepdim=True) @ x


@pytest.mark.parametrize(
    ("model", "run", "asked", "message"),
    [
        (
            Blind(),
            lambda m: m(tokens()),
            {},
            r"Blind was recorded; recognized are regard.attend.*regard.weights",
        ),
        (Layer(), lambda m: None, {}, r"Layer was not called within the block; call model\(...\)"),
        (Layer(), lambda m: m.forward(tokens()), {}, "not model.forward"),
        (nn.Sequential(Layer()), lambda m: m(tokens()), {"layers": "x.*"}, r"matches layers=\['x.\*'\]; there were 0"),
        (Layer(), lambda m: m(tokens()), {"keep": ["mean"]}, r"keep takes entropy, .*pool:N.*'mean'"),
        (Layer(), lambda m: m(tokens()), {"keep": ["pool:0"]}, "keep takes entropy"),
        (Layer(), lambda m: m(tokens()), {"keep": []}, "at least one measure"),
        (Layer(), lambda m: m(tokens()), {"heads": []}, r"heads must name at least one head, got heads=\[\]; write"),
        (Layer(), lambda m: m(tokens()), {"to": "some/folder"}, r"or to=Path\('some/folder'\)"),
        (Layer(), lambda m: m(tokens()), {"to": "gpu"}, r"got 'gpu'; write to='cpu' or to='cuda', or to=Path\('gpu'\)"),
        (
            Layer(),
            lambda m: m(tokens()),
            {"to": "cuda:99"},
            r"to='cuda:99' is a device this machine does not have; write",
        ),
        (Layer(), lambda m: m(tokens()), {"layers": "x"}, r"matches layers=\['x'\]; there were \(model\)"),
        (Layer(), lambda m: m(tokens()), {"keep": ["max"], "values": True}, "reduces to measures at once"),
    ],
)
def test_what_cannot_be_seen_or_done_is_said(model, run, asked, message):
    with pytest.raises(ValueError, match=message), capture(model, **asked):
        run(model)


def test_a_head_that_is_not_there_is_named():
    model = Layer()
    with (
        pytest.raises(IndexError, match=r"heads must be from 0 to 3 in '\(model\)', got heads=\[4\]"),
        capture(model, heads=[4]),
    ):
        model(tokens())


@pytest.mark.parametrize("heads", [3, "01", [1.5], [True], ["0"], torch.tensor([0.5]), torch.tensor(1)])
def test_heads_are_whole_numbers_and_many(heads):
    with pytest.raises(TypeError, match=r"numbers of heads, as in heads=\[0, 3\], got"), capture(Layer(), heads=heads):
        pass


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got str"), capture("gpt2"):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_scripted_models_are_refused():
    compiled, traced = torch.compile(Layer(), backend="eager"), torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"capture model._orig_mod instead"), capture(compiled):
        pass
    with pytest.raises(TypeError, match="runs outside Python"), capture(traced):
        pass


def test_keep_is_a_list():
    with pytest.raises(TypeError, match=r"write keep=\['entropy'\]"), capture(Layer(), keep="entropy"):
        pass


def test_a_tape_of_rules_and_padding_shows_them():
    layer, x = Attention(D, H), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x, mask=Rule(lambda b, h, i, j: (i + j) % 2 == 0) & Padding((9, 4)))
    assert "Padding((9, 4))" in repr(tape)
    assert isinstance(tape, Tape)


class TestTokens:
    def seen(self, tokens, batch=1):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
        with capture(model, tokens) as tape, torch.no_grad():
            model(torch.randn(batch, 5, 8))
        return tape

    def test_those_that_fit_no_layer_are_warned_of_when_the_block_ends(self):
        with pytest.warns(UserWarning, match=r"2 tokens were given, but 'layers.0.self_attn' has 5 queries and 5 keys"):
            tape = self.seen(["a", "b"])
        assert tape.tokens_of(0) == (None, None)  # and not again

    def test_a_pattern_that_matches_no_layer_is_warned_of(self):
        with pytest.warns(UserWarning, match=r"given for 'layer.0\*', which matches no layer; there are layers.0"):
            self.seen({"layer.0*": list("abcde")})

    def test_those_that_are_set_later_are_warned_of_at_once(self):
        tape = self.seen(list("abcde"), batch=2)
        assert tape.tokens_of(0) == (list("abcde"), list("abcde"))
        with pytest.warns(UserWarning, match="3 to 4 tokens were given, but"):
            tape.tokens = [list("abc"), list("abcd")]

    def test_texts_of_another_number_than_the_batch_are_warned_of(self):
        told = "tokens of 3 texts were given, but 'layers.0.self_attn' has 2 batch rows; set tape.tokens to one"
        with pytest.warns(UserWarning, match=told):
            self.seen([list("abcde")] * 3, batch=2)

    def test_a_batch_row_whose_tokens_do_not_fit_is_named(self):
        told = r"3 tokens were given for batch row 1, but 'layers.0.self_attn' has 5 queries .*including padding"
        with pytest.warns(UserWarning, match=told):
            tape = self.seen([list("abcde"), list("abc")], batch=2)
        assert tape.tokens_of(0)[0] == list("abcde")
        assert tape.tokens_of(0, batch=1) == (None, None)

    @pytest.mark.parametrize(
        ("tokens", "message"), [("abcde", "got the string 'abcde'"), (range(5), "must be strings")]
    )
    def test_what_is_no_list_of_strings_is_refused(self, tokens, message):
        with pytest.raises(TypeError, match=message):
            self.seen(tokens)

    def test_layers_are_given_by_patterns(self):
        with pytest.raises(TypeError, match=r"layers must be name patterns such as 'encoder.\*', got \[1\]"):
            capture(nn.Linear(2, 2), layers=[1]).__enter__()


class Stack(nn.Module):
    """Three layers by hand, checkpointed if asked."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList([Layer() for _ in range(3)]), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def test_what_backward_computes_once_more_is_not_seen():
    model, x = Stack(checkpointed=True), tokens()
    with capture(model, gradients=True) as tape:
        model(x).sum().backward()
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    with capture(plain, gradients=True) as truth:
        plain(x).sum().backward()
    assert list(tape) == list(truth)
    for name in truth:
        torch.testing.assert_close(tape[name].dense(), truth[name].dense())
        torch.testing.assert_close(tape.extras(name).gradient, truth.extras(name).gradient)


def test_a_model_that_runs_in_several_threads_is_seen_in_all():
    model, inputs = Stack(), [tokens(N, 1) for _ in range(12)]
    with capture(model) as tape, torch.no_grad(), ThreadPoolExecutor(4) as pool:
        list(pool.map(model, inputs))
    assert len(tape) == 3 * len(inputs)


@pytest.mark.parametrize("kind", ["layers of our own", "PyTorch's"])
def test_threads_that_watch_the_same_model_see_what_they_run_themselves(kind):
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True)
    model = Stack() if kind == "layers of our own" else nn.TransformerEncoder(layer, 2).eval()
    together = threading.Barrier(4, timeout=60)

    def look(n):
        together.wait()
        with capture(model) as tape, torch.no_grad():
            for _ in range(3):
                model(tokens(n, 1))
        return len(tape), {A.shape[-1] for A in tape.values()}

    with capture(model) as alone:
        model(tokens(2, 1))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, [2, 3, 4, 5])) == [(3 * len(alone), {n}) for n in (2, 3, 4, 5)]


def test_one_that_watches_does_not_see_what_another_thread_watches():
    model, other = Stack(), Stack()

    def look():
        with capture(model) as tape:
            model(tokens(5, 1))
            other(tokens(5, 1))
        return tape

    with capture(nn.ModuleList((model, other))) as outer, ThreadPoolExecutor(1) as pool:
        inner = pool.submit(look).result()
    assert [name for name, _ in inner] == [f"layers.{n}" for n in range(3)]
    assert [name for name, _ in outer] == [f"1.layers.{n}" for n in range(3)]  # what nobody else looks at


def test_a_copy_of_a_watched_model_runs_and_is_not_watched():
    model, x = Stack(), tokens()
    with capture(model) as tape:
        copied = deepcopy(model)
        assert torch.equal(model(x), copied(x))
    assert len(tape) == 3
    assert torch.equal(model(x), copied(x))
    assert len(tape) == 3


def test_compiled_parts_are_refused_and_scripted_ones_told():
    model = Stack()
    model.layers[1].compile(backend="eager")
    with (
        pytest.raises(TypeError, match=r"'layers.1' is compiled, and attention inside torch.compile cannot"),
        capture(model),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would have us compile
        scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.ReLU()))
    model = nn.Sequential(Layer(), scripted)
    with (
        pytest.warns(UserWarning, match="submodule '1' is scripted and runs outside Python"),
        capture(model) as tape,
    ):
        model(tokens())
    assert len(tape) == 1


def test_nan_in_a_key_is_nan_in_every_measure_of_rows_that_see_it():
    layer, x = Layer(), tokens(64, 1)
    x[0, 20] = math.nan
    with capture(layer) as tape, torch.no_grad():
        layer(x, is_causal=True)
    row = tape[0].dense()[0, 0].isnan().any(-1)
    assert row.tolist() == [n >= 20 for n in range(64)]
    summary = tape.summary(0)
    assert summary.map[0, 0].isnan().any(-1).tolist() == row.tolist()
    assert summary.entropy[0, 0].isnan().tolist() == row.tolist()


def test_a_model_that_is_one_layer_is_asked_for_as_it_is_shown():
    model = Layer()
    with capture(model, layers="(model)") as tape:
        model(tokens())
    assert tape.layers == [""]
