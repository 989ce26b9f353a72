"""Attention: against an oracle written out here, and what must hold whatever the numbers."""

import math
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from regard import (
    Alibi,
    Causal,
    Dilated,
    Gaussian,
    Location,
    Padding,
    Prefix,
    Softmax,
    Tapered,
    Window,
)
from regard.nn import (
    Attention,
    KeyValues,
    KVCache,
    LearnedSink,
    RMSNorm,
    Rotary,
    T5Bias,
)

D = torch.float64
TOLERANCE = {torch.float32: 1e-5, D: 1e-10}
LENGTHS = torch.tensor([7, 3])
KEEP = torch.arange(7) < LENGTHS[:, None]


def close(x, y, dtype=D):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def oracle(layer, x, context, keep=None):
    """Attention in plain loops: head n takes features n * d to (n + 1) * d, and key head n // (h / g)."""
    b, n, _ = x.shape
    d, e = layer.head_dim, layer.value_dim
    q, k, v = layer.query(x), layer.key(context), layer.value(context)
    joined = x.new_zeros(b, n, layer.heads * e)
    for row in range(b):
        for head in range(layer.heads):
            g = head // (layer.heads // layer.kv_heads)
            s = q[row, :, head * d : (head + 1) * d] @ k[row, :, g * d : (g + 1) * d].T / math.sqrt(d)
            s = s if keep is None else s.masked_fill(~keep[row], -math.inf)
            joined[row, :, head * e : (head + 1) * e] = s.softmax(-1) @ v[row, :, g * e : (g + 1) * e]
    return layer.out(joined)


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(None, None), (5, 3)])
def test_grouped_heads_equal_a_loop_over_single_heads(kv_heads, head_dim, value_dim):
    layer = Attention(12, 6, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, key_width=5).to(D)
    x, context = torch.randn(2, 3, 12, dtype=D), torch.randn(2, 7, 5, dtype=D)
    close(layer(x, context, keep=LENGTHS), oracle(layer, x, context, KEEP))


def test_heads_are_split_over_features_not_over_tokens():
    layer = Attention(12, 3, biased="").to(D)
    x = torch.randn(1, 7, 12, dtype=D)
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(12))
        before = layer(x)
        layer.value.weight[4:8] = 0
    after = layer(x)
    assert torch.equal(after[..., 4:8], torch.zeros_like(after[..., 4:8]))
    close(after[..., :4], before[..., :4])
    close(after[..., 8:], before[..., 8:])


def test_the_mask_reaches_every_head():
    layer = Attention(12, 3, mask=Causal()).to(D)
    A = layer.weights(torch.randn(2, 7, 12, dtype=D), keep=LENGTHS).dense()
    seen = torch.ones(7, 7, dtype=torch.bool).tril() & KEEP[:, None]
    assert torch.equal(A > 0, seen[:, None].expand(2, 3, 7, 7))


def test_masks_of_layer_call_and_padding_are_all_applied():
    layer = Attention(12, 3, mask=Window(3)).to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    expected = Attention(12, 3).to(D)
    expected.load_state_dict(layer.state_dict())
    close(
        layer(x, mask=Causal(), keep=KEEP),
        expected(x, mask=Window(3) & Causal() & Padding(KEEP)),
    )
    close(layer(x, keep=LENGTHS), layer(x, keep=KEEP))


def test_a_query_that_sees_nothing_gets_the_bias_of_the_last_projection_only():
    layer = Attention(12, 3).to(D)
    nn.init.normal_(layer.out.bias)
    out = layer(torch.randn(2, 7, 12, dtype=D, requires_grad=True), keep=torch.tensor([7, 0]))
    close(out[1], layer.out.bias.expand(7, 12))
    out.sum().backward()
    assert not any(p.grad.isnan().any() for p in layer.parameters())


def test_permuting_tokens_permutes_the_output_unless_positions_say_otherwise():
    x, order = torch.randn(2, 7, 12, dtype=D), torch.randperm(7)
    plain = Attention(12, 3).to(D)
    close(plain(x[:, order]), plain(x)[:, order])
    for placed in ({"rotary": Rotary(4)}, {"bias": Alibi(3)}, {"bias": T5Bias(3)}, {"mask": Causal()}):
        layer = Attention(12, 3, **placed).to(D)
        assert not torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-4)


@pytest.mark.parametrize("junk", [1e6, math.nan, math.inf])
def test_what_padding_holds_changes_nothing(junk):
    layer = Attention(12, 3, kv_heads=1, rotary=Rotary(4), qk_norm=RMSNorm).to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    spoiled = torch.where(KEEP[..., None], x, junk)
    close(layer(x, spoiled, keep=LENGTHS), layer(x, keep=LENGTHS))


def test_padded_on_either_side_equals_unpadded():
    layer = Attention(12, 3, rotary=Rotary(4), mask=Causal(), bias=Alibi(3)).to(D)
    x = torch.randn(1, 5, 12, dtype=D)
    expected = layer(x)
    junk = torch.randn(1, 2, 12, dtype=D)
    close(layer(torch.cat((x, junk), 1), keep=torch.tensor([5]))[:, :5], expected)
    keep = torch.tensor([[False, False, True, True, True, True, True]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4]])
    close(layer(torch.cat((junk, x), 1), keep=keep, positions=positions)[:, 2:], expected)


def test_queries_and_keys_are_normalized_head_by_head():
    layer = Attention(12, 3, qk_norm=RMSNorm).to(D)
    assert layer.query_norm is not layer.key_norm
    x = torch.randn(2, 7, 12, dtype=D)
    q, k = (linear(x).unflatten(-1, (3, 4)) for linear in (layer.query, layer.key))
    q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    s = torch.einsum("b i h d, b j h d -> b h i j", q, k) / 2
    close(layer.weights(x).dense(), s.softmax(-1))


def test_weights_are_those_of_the_forward_pass():
    layer = Attention(12, 3, kv_heads=1, mask=Causal(), rotary=Rotary(4), bias=Alibi(3)).to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    v = layer.value(x).unflatten(-1, (1, 4)).transpose(1, 2)
    out = layer.weights(x, keep=LENGTHS) @ v
    close(layer.out(out.transpose(1, 2).flatten(2)), layer(x, keep=LENGTHS))


def test_rotary_attention_sees_distances_and_no_places():
    layer = Attention(12, 3, rotary=Rotary(4), mask=Causal()).to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    close(layer(x, positions=torch.arange(100, 107)), layer(x))
    close(layer(x, positions=torch.arange(7).expand(2, 7)), layer(x))
    assert not torch.allclose(layer(x, positions=torch.arange(0, 14, 2)), layer(x))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"dropout": 1.5}, "dropout must be at least 0"), ({"head_dim": 0}, "head_dim"), ({"value_dim": -1}, "value_dim")],
)
def test_settings_that_cannot_be_are_refused_at_once(wrong, told):
    with pytest.raises(ValueError, match=told):
        Attention(16, 4, **wrong)


def test_dropout_acts_in_training_only():
    layer = Attention(12, 3, dropout=0.5)
    x = torch.randn(2, 7, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    close(layer(x), Attention.from_torch(layer.to_torch()).eval()(x), torch.float32)


def test_biased_names_the_projections_that_have_a_bias():
    layer = Attention(12, 3, biased="qo")
    assert [linear.bias is not None for linear in (layer.query, layer.key, layer.value, layer.out)] == [1, 0, 0, 1]


@pytest.mark.parametrize("shape", [(0, 7, 12), (2, 0, 12)])
def test_empty_batches_and_sequences_pass(shape):
    layer = Attention(12, 3, mask=Causal(), rotary=Rotary(4))
    assert layer(torch.zeros(shape)).shape == shape


def test_state_dict_round_trip():
    made = {"kv_heads": 1, "bias": T5Bias(3), "normalize": LearnedSink(3), "qk_norm": RMSNorm, "slots": 2}
    layer = Attention(12, 3, **made)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    other = Attention(12, 3, **{**made, "bias": T5Bias(3), "normalize": LearnedSink(3)})
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 12)
    assert torch.equal(layer(x), other(x))


def test_autocast_stays_near_and_gives_the_parameters_their_own_dtype():
    layer = Attention(12, 3, mask=Causal(), rotary=Rotary(4), qk_norm=RMSNorm)
    x = torch.randn(2, 7, 12)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
    out.float().sum().backward()
    assert layer.query.weight.grad.dtype == torch.float32


def test_compiles_into_one_graph():
    layer = Attention(12, 3, kv_heads=1, mask=Causal(), rotary=Rotary(4))
    x = torch.randn(2, 7, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x), layer(x), torch.float32)


def test_exports():
    layer = Attention(12, 3, kv_heads=1, mask=Causal(), rotary=Rotary(4)).eval()
    x = torch.randn(2, 7, 12)
    close(torch.export.export(layer, (x,)).module()(x), layer(x), torch.float32)


def test_exports_lengths_of_any_batch():
    layer = Attention(12, 3).eval()
    open_dims = {"x": {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("n", min=2, max=64)}}
    open_dims["keep"] = {0: open_dims["x"][0]}
    given = {"x": torch.randn(2, 7, 12), "keep": torch.tensor([7, 3])}
    program = torch.export.export(layer, (), given, dynamic_shapes=open_dims).module()
    given = {"x": torch.randn(5, 9, 12), "keep": torch.tensor([9, 3, 0, 1, 4])}
    close(program(**given), layer(**given), torch.float32)


def test_exports_slots_with_an_open_length():
    layer = Attention(12, 3, slots=2).eval()
    lengths = ({1: torch.export.Dim("n", min=2, max=64)},)
    program = torch.export.export(layer, (torch.randn(2, 7, 12),), dynamic_shapes=lengths).module()
    for n in (5, 31):
        x = torch.randn(2, n, 12)
        close(program(x), layer(x), torch.float32)


def test_shapes_in_signatures_hold_when_checked():
    code = """
from jaxtyping import install_import_hook
rooms = ("attention", "blocks", "feedforward", "learned", "memory", "norms", "positions")
with install_import_hook([f"regard.nn.{room}" for room in rooms], "beartype.beartype"):
    import torch
    from regard import Causal, Window
    from regard.nn import *
x, source, keep = torch.randn(2, 7, 12), torch.randn(2, 5, 9), torch.ones(2, 7, dtype=torch.bool)
terms = {"mask": Causal() & Window(4), "rotary": Rotary(4), "qk_norm": RMSNorm}
attention = Attention(12, 3, kv_heads=1, value_dim=5, slots=2, **terms)
cross = Attention(12, 3, key_width=9, bias=T5Bias(3))
block = DecoderBlock(attention, cross, GatedFeedForward(12, 20), residual=PostNorm).requires_grad_(False)
expected = block(x, source, keep=keep, context_keep=torch.tensor([5, 2]))
cache, memory = attention.new_cache(), block.remember(source, context_keep=torch.tensor([5, 2]))
for n in range(7):
    position = positions_of(keep)[:, [n]]
    out = block(x[:, [n]], memory, keep=keep[:, : n + 1], positions=position, cache=cache)
rows = torch.tensor([1, 0, 0])
cache.select(rows), memory.select(rows)
torch.testing.assert_close(out, expected[:, -1:], rtol=1e-4, atol=1e-4)
attention.weights(x, cache=cache.select(torch.tensor([0, 1])))
EncoderBlock(Attention(12, 3), FeedForward(12, 20))(x, memory=SegmentMemory(3))
Sinusoidal(12)(torch.arange(7)), LearnedPositions(9, 12)(torch.zeros(2, 7, dtype=torch.long))
try:
    Attention(12, 3)(x, keep=keep[:, None])
except Exception as error:
    print(type(error).__name__)
"""
    # -B: the hook's cached bytecode of one test holds modules that another test wants instrumented.
    run = subprocess.run([sys.executable, "-B", "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "TypeCheckError" in run.stdout


def test_repr_shows_the_terms():
    text = repr(Attention(12, 3, kv_heads=1, mask=Causal() & Window(4), normalize=Softmax()))
    assert "12, heads=3, kv_heads=1, mask=Causal() & Window(4), normalize=Softmax()" in text


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            {"heads": 5},
            "dim must be a multiple of heads, got dim=12 and heads=5; pass heads=1, 2, 3, 4, 6 or 12",
        ),
        ({"kv_heads": 2}, "heads must be a multiple of kv_heads, got heads=3 and kv_heads=2; pass kv_heads=1 or 3"),
        ({"heads": 0}, "heads must be 1 or more, got 0"),
        ({"kv_heads": 0}, "kv_heads must be 1 or more, got 0"),
        ({"biased": "qx"}, "biased must contain only letters of 'qkvo', got 'qx'"),
        ({"biased": True}, "biased must contain only letters of 'qkvo', got True"),
        ({"biased": "vq"}, "biased must have letters in the order of 'qkvo', got 'vq'; write 'qv'"),
        ({"mask": Padding(LENGTHS)}, "holds tensors, which a layer would neither move nor save"),
        ({"mask": Prefix(LENGTHS) | Causal()}, "holds tensors, which a layer would neither move nor save"),
    ],
)
def test_bad_layers_are_refused(made, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Attention(12, **{"heads": 3, **made})


X = torch.zeros(2, 7, 12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": X[0]}, "x must have dims b n 12, batch first, got (7, 12)"),
        ({"x": X[..., :5]}, "x must have dims b n 12, batch first, got (2, 7, 5)"),
        ({"context": X[..., :5]}, "context must have dims b n 12"),
        ({"context": X, "values": X[..., :5]}, "values must have dims b n 12"),
        ({"context": X, "cache": KVCache()}, "a cache is for self-attention"),
        ({"keep": KEEP[:, :5]}, "keep must be lengths (b,) or keep (b, 7)"),
        ({"keep": torch.tensor([8, 1])}, "Padding lengths must be from 0 to the number of keys j=7, got 8"),
        ({"positions": torch.arange(5)}, "positions must hold one position for each of the 7 new keys, got shape (5,)"),
        ({"context": X[:, :3]}, "queries take the last key positions, got 7 queries and 3 keys"),
        (
            {"cache": KVCache(window=4)},
            "forgets keys that mask=Window(9) may still see; pass cache=KVCache(), which forgets none",
        ),
    ],
)
def test_bad_calls_are_answered(given, message):
    layer = Attention(12, 3, rotary=Rotary(4), mask=Window(9))
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(message)):
        layer(**{"x": X, **given})


def test_a_tensor_for_a_mask_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"mask must be a Mask term, got Tensor; write mask=Dense\(x\)"):
        Attention(12, 3)(X, mask=torch.ones(7, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="keep must be a tensor, got list"):
        Attention(12, 3)(X, keep=[7, 3])


def test_rotary_keys_are_not_remembered():
    with pytest.raises(ValueError, match=r"remember\(\) does not support rotary=: .*; call layer\(x, context\)"):
        Attention(12, 3, rotary=Rotary(4)).remember(X)


def test_remembered_context_equals_context():
    layer = Attention(12, 3, kv_heads=1, key_width=5).to(D)
    x, context = torch.randn(2, 3, 12, dtype=D), torch.randn(2, 7, 5, dtype=D)
    expected = layer(x, context, keep=LENGTHS)
    memory = layer.remember(context, keep=LENGTHS)
    assert isinstance(memory, KeyValues)
    close(layer(x, memory), expected)
    with pytest.raises(ValueError, match="values come with the remembered context"):
        layer(x, memory, context)
    close(torch.cat([layer(x[:, [n]], memory) for n in range(3)], 1), expected)
    close(layer.weights(x, memory).dense(), layer.weights(x, context, keep=LENGTHS).dense())
    rows = torch.tensor([1, 1, 0])
    close(layer(x[rows], memory.select(rows)), expected[rows])


class Places(nn.Module):
    """A score that counts keys from the start."""

    def forward(self):
        return Location(torch.zeros(64, 4))


class Placed(nn.Module):
    def __init__(self, term):
        super().__init__()
        self.term = term

    def forward(self):
        return self.term


@pytest.mark.parametrize(
    ("made", "window"),
    [
        ({"mask": Causal() & Window(5)}, 5),
        ({"mask": Causal() & Dilated(3, 2)}, 5),
        ({"mask": Causal() & (Window(2) | Dilated(2, 4))}, 5),
        ({"mask": Window(before=3, after=0), "bias": Alibi(3)}, 4),
        ({"mask": Causal()}, None),
        ({"mask": None}, None),
        ({"mask": Causal() & ~Window(3)}, None),
        ({"mask": Causal() & Window(5) & Prefix(9)}, None),
        ({"mask": Causal() & Window(5) & ~Prefix(2)}, None),
        ({"mask": Window(5), "score": Places()}, None),
        ({"mask": Window(5), "bias": Placed(Gaussian(torch.zeros(()), 2.0))}, None),
        ({"mask": Window(5), "bias": Placed(Alibi(3) + Gaussian(torch.zeros(()), 2.0))}, None),
        ({"mask": Window(5), "normalize": Placed(Tapered(Softmax(), Gaussian(torch.zeros(()), 2.0)))}, None),
        ({"mask": Window(5), "normalize": Tapered(Softmax(), Alibi(3))}, 5),
    ],
)
def test_a_layer_makes_the_cache_its_mask_allows(made, window):
    assert Attention(12, 3, **made).new_cache().window == window
