"""Positions: against the papers' formulas in plain Python, against transformers, and what they must leave alone."""

import math
import re

import pytest
import torch
from torch import nn

from regard import Causal, weights
from regard.nn import Attention, LearnedPositions, Rotary, ShawBias, Sinusoidal, T5Bias, positions_of

D = torch.float64


@pytest.mark.parametrize("dim", [1, 2, 7, 12])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_are_those_of_the_paper_at_any_width(dim, layout):
    ids = [0, 1, 5, 63, 5000]
    out = Sinusoidal(dim, base=100.0, layout=layout)(torch.tensor(ids))
    pairs = (dim + 1) // 2
    for row, p in zip(out.tolist(), ids, strict=True):
        sines = [math.sin(p / 100 ** (2 * m / dim)) for m in range(pairs)]
        cosines = [math.cos(p / 100 ** (2 * m / dim)) for m in range(pairs)]
        paired = [x for pair in zip(sines, cosines, strict=True) for x in pair]
        expected = (paired if layout == "interleaved" else sines + cosines)[:dim]
        assert row == pytest.approx(expected, abs=1e-3 if p == 5000 else 1e-5)


def test_sinusoids_stay_float32_in_a_half_precision_model():
    model = nn.Sequential(Sinusoidal(8)).to(torch.bfloat16)
    assert model(torch.arange(3)).dtype == torch.float32
    assert not model.state_dict()


def test_position_ids_may_differ_by_batch_row():
    ids = torch.tensor([[0, 0, 1], [4, 5, 6]])
    for module in (Sinusoidal(8), LearnedPositions(7, 8)):
        out = module(ids)
        assert out.shape == (2, 3, 8)
        assert torch.equal(out[1], module(ids[1]))


def test_learned_positions_are_rows_of_the_table():
    module = LearnedPositions(7, 8)
    assert torch.equal(module(torch.tensor([6, 0])), module.weight[[6, 0]])
    module(torch.tensor([6, 6])).sum().backward()
    assert torch.equal(module.weight.grad[:, 0], torch.tensor([0.0] * 6 + [2.0]))


@pytest.mark.parametrize(("wrong", "shown"), [(7, 7), (-1, -1)])
def test_a_position_beyond_the_table_is_named(wrong, shown):
    with pytest.raises(ValueError, match=f"positions must be from 0 to 6, got {shown}; shorten the input"):
        LearnedPositions(7, 8)(torch.tensor([0, wrong]))


def test_rotary_is_a_turn_of_each_pair():
    x = torch.randn(2, 3, 5, 10, dtype=D)
    ids = [0, 1, 7, 7, 100]
    out = Rotary(6, base=50.0)(x, torch.tensor(ids))
    for n, p in enumerate(ids):
        for m in range(3):
            angle = p / 50 ** (2 * m / 6)
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=D)
            pair = x[:, :, n, [m, m + 3]]
            torch.testing.assert_close(out[:, :, n, [m, m + 3]], pair @ turn.T, rtol=1e-10, atol=1e-10)
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_rotary_scores_depend_on_the_distance_only():
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=D)
    near = rotary(q, torch.arange(5)) @ rotary(k, torch.arange(5)).mT
    far = rotary(q, torch.arange(1000, 1005)) @ rotary(k, torch.arange(1000, 1005)).mT
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)


def test_rotary_angles_are_not_rounded_to_half_precision():
    x = torch.randn(1, 1, 1, 8)
    at = torch.tensor([4097])
    expected = Rotary(8)(x, at)
    low = Rotary(8).to(torch.bfloat16)(x.to(torch.bfloat16), at)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.02, atol=0.02)


def test_rotary_scaling_maps_the_frequencies():
    x = torch.randn(1, 2, 3, 8, dtype=D)
    stretched = Rotary(8, scaling=lambda f: f / 4)(x, torch.tensor([0, 4, 8]))
    torch.testing.assert_close(stretched, Rotary(8)(x, torch.tensor([0, 1, 2])))


def test_rotary_takes_positions_of_each_batch_row():
    x = torch.randn(2, 3, 4, 8)
    ids = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    out = Rotary(8)(x, ids)
    for row in range(2):
        assert torch.equal(out[row], Rotary(8)(x[[row]], ids[row])[0])


@pytest.mark.parametrize(("width", "d"), [(8, 8), (4, 8)])
def test_rotary_equals_transformers(width, d):
    pytest.importorskip("transformers")
    from transformers import GPTNeoXConfig, LlamaConfig
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama

    x, ids = torch.randn(2, 3, 5, d), torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 1000]])
    if width == d:
        config = LlamaConfig(hidden_size=3 * d, num_attention_heads=3, max_position_embeddings=2048)
        cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(x, ids)
        expected, _ = modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)
    else:
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": width / d}
        config = GPTNeoXConfig(hidden_size=3 * d, num_attention_heads=3, rope_parameters=rope)
        cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(x, ids)
        expected, _ = modeling_gpt_neox.apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(Rotary(width)(x, ids), expected, rtol=1e-5, atol=1e-5)


def t5_bucket(distance, buckets, max_distance, bidirectional):
    """Raffel et al. 2020, sec. 2.1: exact up to half the buckets of a side, then logarithmic."""
    base = 0
    if bidirectional:
        buckets //= 2
        base, distance = (buckets, distance) if distance > 0 else (0, -distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return base + min(exact + int(growth * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias_is_its_table_by_bucket(bidirectional):
    module = T5Bias(3, buckets=8, max_distance=20, bidirectional=bidirectional)
    with torch.no_grad():
        module.table.copy_(torch.arange(24.0).view(3, 8))
    n = 33
    zero = torch.zeros(1, 3, n, 4)
    scores = weights(zero, zero, bias=module()).dense().log()
    scores = scores - scores[..., :1]
    buckets = torch.tensor([[t5_bucket(j - i, 8, 20, bidirectional) for j in range(n)] for i in range(n)])
    expected = module.table[:, buckets]
    torch.testing.assert_close(scores[0], (expected - expected[..., :1]).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_equal_transformers(bidirectional):
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, 32, 128)
    assert torch.equal(T5Bias(1, bidirectional=bidirectional)().buckets.of(distance), expected)


def test_shaw_bias_is_a_key_for_each_distance():
    layer = Attention(12, 3, bias=ShawBias(4, reach=2), biased="").to(D)
    x = torch.randn(2, 7, 12, dtype=D)
    q, k = (linear(x).unflatten(-1, (3, 4)) for linear in (layer.query, layer.key))
    s = torch.zeros(2, 3, 7, 7, dtype=D)
    for i in range(7):
        for j in range(7):
            moved = k[:, j] + layer.bias.keys[max(-2, min(2, j - i)) + 2]
            s[:, :, i, j] = (q[:, i] * moved).sum(-1) / 2
    torch.testing.assert_close(layer.weights(x).dense(), s.softmax(-1), rtol=1e-10, atol=1e-10)


def test_one_t5_bias_serves_every_layer():
    bias = T5Bias(3)
    layers = nn.ModuleList(Attention(12, 3, bias=bias, mask=Causal()) for _ in range(2))
    x = torch.randn(1, 5, 12)
    sum(layer(x).square().sum() for layer in layers).backward()
    assert bias.table.grad is not None
    assert sum(p is bias.table for p in layers.parameters()) == 1


def test_positions_of_padded_rows_count_real_tokens():
    keep = torch.tensor([[False, True, True], [True, True, False], [False, False, False]])
    assert positions_of(keep).tolist() == [[0, 0, 1], [0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(7), "width must be even, features are rotated in pairs, got 7; pass 6"),
        (lambda: Rotary(0), "width must be 2 or more, got 0"),
        (lambda: Rotary(8)(torch.zeros(1, 1, 2, 4), torch.arange(2)), "Rotary rotates 8 features, got x of width 4"),
        (lambda: Sinusoidal(0), "dim must be 1 or more, got 0"),
        (lambda: Sinusoidal(8, layout="pairs"), "layout must be 'interleaved' or 'halves', got 'pairs'"),
        (lambda: T5Bias(3, buckets=2), "the number of buckets must be 4 or more, got 2"),
    ],
)
def test_bad_positions_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("positions", [torch.rand(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.rand(0)])
def test_learned_positions_must_be_whole_numbers(positions):
    with pytest.raises(TypeError, match=f"positions must be whole numbers, got {positions.dtype}; write torch.arange"):
        LearnedPositions(50, 4)(positions)


def test_positions_must_be_whole_numbers():
    with pytest.raises(TypeError, match=re.escape("positions must be whole numbers, got torch.float32")):
        Sinusoidal(8)(torch.rand(3))


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_a_position_alone_has_the_sines_it_has_among_others(layout):
    positions = torch.tensor([0, 1, 7, 255, 256, 100_000])
    with torch.inference_mode():
        module = Sinusoidal(7, layout=layout)
        module(positions[:1])
    together = module(positions)
    for n, position in enumerate(positions):
        torch.testing.assert_close(module(position[None]), together[n][None], rtol=0, atol=1e-6)
        assert module(position[None]).is_inference() is False


@pytest.mark.parametrize("layer", [LearnedPositions(10, 4), Sinusoidal(4)])
@pytest.mark.parametrize("shape", [(2, 3), (6, 1)])
def test_positions_may_be_mapped_over(layer, shape):
    positions = torch.arange(6).view(shape)
    torch.testing.assert_close(torch.vmap(layer)(positions), layer(positions))


def test_interleaved_features_rotate_as_those_of_halves_in_another_order():
    x, at = torch.randn(2, 3, 5, 10), torch.arange(5)
    order = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7, 8, 9])  # of 6 rotated features, the even ones first
    found = Rotary(6, layout="interleaved")(x, at)
    torch.testing.assert_close(found[..., order], Rotary(6)(x[..., order], at))
    assert repr(Rotary(6, layout="interleaved")) == "Rotary(6, base=10000, layout='interleaved')"
    with pytest.raises(ValueError, match="layout must be 'halves' or 'interleaved', got 'pairs'"):
        Rotary(6, layout="pairs")


def test_interleaved_features_rotate_as_in_transformers():
    helium = pytest.importorskip("transformers.models.helium.modeling_helium")
    x, at = torch.randn(2, 3, 5, 8), torch.arange(5)
    rotary = Rotary(8, layout="interleaved")
    cos, sin = (torch.cat((y, y), -1)[None] for y in rotary.angles(x, at))
    torch.testing.assert_close(rotary(x, at), helium.apply_rotary_pos_emb(x, x, cos, sin)[0])
