"""Answers to the exercises of chapters 1 to 6."""

from __future__ import annotations

import torch
from torch import nn

from regard import Additive, Causal, Rule, Window, attend, weights
from regard.models import Seq2Seq, Seq2SeqConfig
from regard.nn import Attention, BahdanauAttention


def seen_by_the_decoder(attention: str | None, length: int) -> int:
    """How many different numbers of one source the state before the first token holds."""
    config = Seq2SeqConfig(source_vocabulary=12, target_vocabulary=12, start=0, hidden=64, attention=attention)
    state = Seq2Seq(config).start({"source": torch.randint(2, 12, (1, length))})
    vectors = sum(x.numel() for x in state.hidden)  # what enters beside each token is the same vector once more
    return vectors + (0 if state.memory is None else state.memory.values.numel())


def test_chapter_1_what_the_decoder_sees():
    """64 numbers, whatever the length; with attention the same and 64 more for each digit."""
    assert seen_by_the_decoder(None, 5) == seen_by_the_decoder(None, 500) == 64
    assert seen_by_the_decoder("bahdanau", 5) == 64 + 5 * 64
    assert seen_by_the_decoder("bahdanau", 500) == 64 + 500 * 64


def test_chapter_2_bahdanau_by_hand():
    """Padding becomes -inf before the softmax; zeroed after it, it would have taken its share of each row already."""
    torch.manual_seed(0)
    layer = BahdanauAttention(query_dim=5, state_dim=6, dim=8)
    W, U, v = layer.score.query.weight, layer.score.key.weight, layer.score.vector
    s, h, lengths = torch.randn(2, 3, 5), torch.randn(2, 7, 6), torch.tensor([7, 4])
    hidden = torch.arange(7) >= lengths[:, None, None]  # b 1 j

    e = torch.tanh((s @ W.T)[:, :, None] + (h @ U.T)[:, None]) @ v  # b i j
    a = torch.softmax(e.masked_fill(hidden, float("-inf")), -1)
    context = a @ h  # b i state_dim

    found = layer(s, layer.remember(h, lengths))
    assert torch.allclose(found, context, atol=1e-6)
    late = torch.softmax(e, -1).masked_fill(hidden, 0.0)
    assert torch.allclose(late[0].sum(-1), torch.ones(3))
    assert late[1].sum(-1).max() < 0.9
    assert not torch.allclose(late @ h, context, atol=1e-2)


def test_chapter_3_means_are_attention():
    """A query of zeros likes all keys alike, so its answer is the mean of what it sees."""
    k, v = torch.randn(1, 1, 11, 4), torch.randn(1, 1, 11, 3)
    nothing = torch.zeros_like(k)
    assert torch.allclose(attend(nothing, k, v), v.mean(2, keepdim=True).expand_as(v), atol=1e-6)
    last_four = attend(nothing, k, v, mask=Causal() & Window(4))
    expected = torch.stack([v[:, :, max(0, i - 3) : i + 1].mean(2) for i in range(11)], 2)
    assert torch.allclose(last_four, expected, atol=1e-6)


def test_chapter_4_small_additive_scores_forget_the_query():
    """u . (q + k) = u . q + u . k, and the first half is the same for all keys: the softmax takes it out again."""
    torch.manual_seed(0)
    q, k, u = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 9, 16), 50 * torch.randn(16)

    def spread(size: float) -> float:
        """The most that the weights of two queries differ by, scores of the same size throughout."""
        A = weights(size * q, size * k, score=Additive(u / size))[0, 0]
        return (A - A[:1]).abs().max().item()

    assert spread(1.0) > 0.5
    assert spread(0.001) < 0.01


def test_chapter_5_heads_that_look_both_ways():
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    both = Rule(lambda b, h, i, j: torch.where(h % 2 == 1, j <= i, j >= i))
    ahead = Rule(lambda b, h, i, j: j >= i)
    found = attend(q, k, v, mask=both)
    for head in range(4):
        mask = Causal() if head % 2 else ahead
        alone = attend(*(x[:, head : head + 1] for x in (q, k, v)), mask=mask)
        assert torch.allclose(found[:, head : head + 1], alone, atol=1e-6)


def test_chapter_6_heads_add_up():
    """Each head has its rows of W_q, W_k and W_v and its columns of W_o; the bias of W_o is added once."""
    layer = Attention(12, heads=4).double()
    nn.init.normal_(layer.out.bias)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    total = layer.out.bias
    for head in range(4):
        rows = slice(3 * head, 3 * head + 3)
        sides = (layer.query, layer.key, layer.value)
        q, k, v = ((x @ side.weight[rows].T + side.bias[rows])[:, None] for side in sides)  # b 1 n d
        total = total + attend(q, k, v)[:, 0] @ layer.out.weight[:, rows].T
    assert torch.allclose(layer(x), total)
