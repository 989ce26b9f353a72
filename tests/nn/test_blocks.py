"""Blocks: against PyTorch's encoder and decoder layers for the same weights, and the shapes other models need."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Alibi, Causal, Dense, Window
from regard.nn import (
    Attention,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    PostNorm,
    PreNorm,
    RMSNorm,
    Rotary,
)

D = torch.float64
TOLERANCE = {torch.float32: 1e-5, D: 1e-10}
LENGTHS = torch.tensor([7, 4])
KEEP = torch.arange(7) < LENGTHS[:, None]
SOURCE_LENGTHS = torch.tensor([3, 5])
SOURCE_KEEP = torch.arange(5) < SOURCE_LENGTHS[:, None]
HIDDEN = torch.ones(7, 7, dtype=torch.bool).triu(1)
RESIDUALS = {False: PostNorm, True: PreNorm}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


def close(x, y, dtype=D):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def feedforward_of(layer, activation):
    feedforward = FeedForward(12, 20, activation=ACTIVATIONS[activation], bias=layer.linear1.bias is not None)
    feedforward.up.load_state_dict(layer.linear1.state_dict())
    feedforward.down.load_state_dict(layer.linear2.state_dict())
    return feedforward


def around(layer, first, bias):
    return {"residual": RESIDUALS[first], "norm": partial(nn.LayerNorm, eps=layer.norm1.eps, bias=bias)}


def encoder_pair(first, activation, bias, dtype):
    options = {"norm_first": first, "activation": activation, "bias": bias, "layer_norm_eps": 1e-3}
    layer = nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    attention = Attention.from_torch(layer.self_attn)
    block = EncoderBlock(attention, feedforward_of(layer, activation), **around(layer, first, bias))
    block.around_attention.norm.load_state_dict(layer.norm1.state_dict())
    block.around_feedforward.norm.load_state_dict(layer.norm2.state_dict())
    return layer.to(dtype), block.to(dtype)


def decoder_pair(first, activation, bias, dtype):
    options = {"norm_first": first, "activation": activation, "bias": bias, "layer_norm_eps": 1e-3}
    layer = nn.TransformerDecoderLayer(12, 3, 20, 0.0, batch_first=True, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    own, cross = Attention.from_torch(layer.self_attn), Attention.from_torch(layer.multihead_attn)
    block = DecoderBlock(own, cross, feedforward_of(layer, activation), **around(layer, first, bias))
    block.around_attention.norm.load_state_dict(layer.norm1.state_dict())
    block.around_cross.norm.load_state_dict(layer.norm2.state_dict())
    block.around_feedforward.norm.load_state_dict(layer.norm3.state_dict())
    return layer.to(dtype), block.to(dtype)


KINDS = [(first, activation, bias) for first in (False, True) for activation in ACTIVATIONS for bias in (True, False)]


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("first", "activation", "bias"), KINDS)
def test_encoder_block_equals_torch_forward_and_backward(first, activation, bias, causal, dtype):
    layer, block = encoder_pair(first, activation, bias, dtype)
    x = torch.randn(2, 7, 12, dtype=dtype, requires_grad=True)
    expected = layer(x, src_mask=HIDDEN if causal else None, src_key_padding_mask=~KEEP)
    out = block(x, mask=Causal() if causal else None, keep=LENGTHS)
    close(out, expected, dtype)
    direction = torch.randn_like(out) * KEEP[..., None]
    pairs = [
        (x, x),
        (block.attention.value.weight, layer.self_attn.in_proj_weight),
        (block.feedforward.up.weight, layer.linear1.weight),
        (block.around_attention.norm.weight, layer.norm1.weight),
    ]
    ours = torch.autograd.grad(out, [mine for mine, _ in pairs], direction)
    theirs = list(torch.autograd.grad(expected, [peer for _, peer in pairs], direction))
    theirs[1] = theirs[1][24:]
    for mine, peer in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, peer, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize(("first", "activation", "bias"), KINDS)
def test_decoder_block_equals_torch_forward_and_backward(first, activation, bias, dtype):
    layer, block = decoder_pair(first, activation, bias, dtype)
    x = torch.randn(2, 7, 12, dtype=dtype, requires_grad=True)
    source = torch.randn(2, 5, 12, dtype=dtype, requires_grad=True)
    seen = torch.rand(7, 5) < 0.6
    seen[:, 0] = True
    expected = layer(
        x,
        source,
        tgt_mask=HIDDEN,
        memory_mask=~seen,
        tgt_key_padding_mask=~KEEP,
        memory_key_padding_mask=~SOURCE_KEEP,
    )
    out = block(x, source, mask=Causal(), keep=KEEP, context_mask=Dense(seen), context_keep=SOURCE_LENGTHS)
    close(out, expected, dtype)
    direction = torch.randn_like(out)
    for mine, peer in zip(*(torch.autograd.grad(y, (x, source), direction) for y in (out, expected)), strict=True):
        torch.testing.assert_close(mine, peer, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def llama(**given):
    attention = Attention(12, 3, kv_heads=1, biased="", mask=Causal(), rotary=Rotary(4), **given)
    return EncoderBlock(attention, GatedFeedForward(12, 20), residual=PreNorm, norm=partial(RMSNorm, eps=1e-5))


def test_llama_block_equals_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaModel

    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
    )
    model = LlamaModel(config).eval()
    block = llama()
    theirs = model.layers[0]
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    for ours, name in names.items():
        getattr(block.attention, ours).load_state_dict(getattr(theirs.self_attn, name).state_dict())
    for ours, name in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
        getattr(block.feedforward, ours).load_state_dict(getattr(theirs.mlp, name).state_dict())
    block.around_attention.norm.load_state_dict(theirs.input_layernorm.state_dict())
    block.around_feedforward.norm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    ids = torch.randint(11, (2, 7))
    keep = torch.arange(7) >= torch.tensor([[0], [3]])
    positions = (keep.long().cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=keep.long(), position_ids=positions).last_hidden_state
    out = model.norm(block(model.embed_tokens(ids), keep=keep, positions=positions))
    close(out[keep], expected[keep], torch.float32)


def test_changing_the_future_leaves_the_past_as_it_was():
    block = llama().to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(block(x)[:, :4], block(changed)[:, :4])
    assert not torch.equal(block(x)[:, 4:], block(changed)[:, 4:])


def test_what_padding_holds_changes_no_real_token():
    encoder = EncoderBlock(Attention(12, 3), FeedForward(12, 20)).to(D)
    decoder = DecoderBlock(Attention(12, 3, mask=Causal()), Attention(12, 3), FeedForward(12, 20)).to(D)
    x, source = torch.randn(2, 7, 12, dtype=D), torch.randn(2, 5, 12, dtype=D)
    spoiled = torch.where(KEEP[..., None], x, 1e6)
    close(encoder(spoiled, keep=KEEP)[KEEP], encoder(x, keep=LENGTHS)[KEEP])
    spoiled = torch.where(SOURCE_KEEP[..., None], source, torch.nan)
    close(decoder(x, spoiled, context_keep=SOURCE_KEEP), decoder(x, source, context_keep=SOURCE_LENGTHS))


def test_dropout_acts_on_what_each_sublayer_adds():
    block = EncoderBlock(Attention(12, 3), FeedForward(12, 20), dropout=0.999999)
    x = torch.randn(2, 7, 12)
    assert torch.equal(block(x), x)
    assert not torch.equal(block.eval()(x), x)
    block = EncoderBlock(Attention(12, 3), FeedForward(12, 20), residual=PostNorm, dropout=0.999999)
    assert torch.equal(block(x), block.around_feedforward.norm(block.around_attention.norm(x)))


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
def test_state_dict_round_trip(residual):
    made = [
        DecoderBlock(Attention(12, 3), Attention(12, 3), FeedForward(12, 20), residual=residual, norm=RMSNorm)
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    x, source = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    assert torch.equal(made[0](x, source), made[1](x, source))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it where a graph breaks
@pytest.mark.parametrize(
    ("terms", "fullgraph"), [({"mask": Causal()}, True), ({"mask": Window(4), "bias": Alibi(3)}, False)]
)
def test_compiled_equals_eager_in_one_graph_where_no_tiles_are_planned(terms, fullgraph):
    block = EncoderBlock(Attention(12, 3, **terms), FeedForward(12, 20))
    x = torch.randn(2, 7, 12, requires_grad=True)
    compiled = torch.compile(block, fullgraph=fullgraph, backend="aot_eager")
    out, expected = compiled(x, keep=KEEP), block(x, keep=KEEP)
    close(out, expected, torch.float32)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
    close(ours, theirs, torch.float32)


def test_autocast_stays_near():
    block = llama()
    x = torch.randn(2, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    torch.testing.assert_close(out.float(), block(x), rtol=0.05, atol=0.05)
    assert out.dtype == torch.float32


def test_a_block_in_half_precision_stays_in_it():
    out = llama().to(torch.bfloat16)(torch.randn(2, 7, 12, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
