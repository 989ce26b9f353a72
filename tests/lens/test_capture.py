"""capture over plain PyTorch and our own layers: what it sees, what it keeps, what it says when it cannot."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Alibi, Causal, Dense, Padding, Rule, Window, attend, weights
from regard.lens import Tape, capture
from regard.nn import Attention, Core, EncoderBlock, FeedForward, T5Bias
from tests.lens.sdpa_layers import B, D, H, Layer, N, Stack, assert_close, by_hand, lower, tokens


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
    pytest.param(lambda: Attention(D, H, bias=T5Bias(H), slots=2), {"keep": torch.tensor([9, 5])}, id="slots"),
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


@pytest.mark.parametrize("heads", [3, "01", [1.5], [True], ["0"], torch.tensor([0.5]), torch.tensor(1)])
def test_heads_are_whole_numbers_and_many(heads):
    with pytest.raises(TypeError, match=r"numbers of heads, as in heads=\[0, 3\], got"), capture(Layer(), heads=heads):
        pass


def test_a_tape_of_rules_and_padding_shows_them():
    layer, x = Attention(D, H), tokens()
    with torch.no_grad(), capture(layer) as tape:
        layer(x, mask=Rule(lambda b, h, i, j: (i + j) % 2 == 0) & Padding((9, 4)))
    assert "Padding((9, 4))" in repr(tape)
    assert isinstance(tape, Tape)


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


def test_an_empty_list_of_heads_is_refused():
    with pytest.raises(ValueError, match=r"heads must name at least one head, got heads=\[\]; write"):
        capture(Layer(), heads=[]).__enter__()


def test_attention_whose_batch_dims_broadcast_is_recorded_in_full():
    class Attends(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, mask=Causal())

    model, q, k = Attends(), torch.randn(3, 2, 6, 8), torch.randn(1, 2, 6, 8)
    with capture(model) as tape:
        model(q, k, k)
    torch.testing.assert_close(tape[0][...], weights(q, k, mask=Causal())[...])
