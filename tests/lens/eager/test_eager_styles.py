"""Attention in the styles of tutorials and papers: weighted sums, other orders of dims, and what is no attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.lens import capture
from regard.ops.terms.masks import Causal

B, H, N, D = 2, 3, 5, 4
DIM = H * D


class Layer(nn.Module):
    """Attends by a function of q, k, v, each b n dim, that says which weights, b h i j, it used."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.heads, self.attention, self.found = nn.Linear(DIM, 3 * DIM), H, attention, None

    def forward(self, x):
        out, found = self.attention(*self.qkv(x).chunk(3, -1))
        self.found = found.detach().clone()
        return out


class Single(Layer):
    """One that says nothing of heads."""

    def __init__(self, attention):
        super().__init__(attention)
        del self.heads


def seen(layer, context=torch.no_grad, **options):
    x = torch.randn(B, N, DIM)
    with context():
        out = layer(x)
        with capture(layer, **options) as tape:
            again = layer(x)
    assert torch.equal(out, again)
    return tape, again


def check(layer, context=torch.no_grad):
    tape, _ = seen(layer, context)
    (told,) = tape.values()
    torch.testing.assert_close(told[:], layer.found, atol=1e-6, rtol=1e-5)
    return told


def split(x):
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def pooled(q, k, v):
    weights = F.softmax((torch.tanh(k) * q[:, :1]).sum(-1), dim=1)
    return torch.sum(weights.unsqueeze(-1) * v, dim=1), weights[:, None, None]


def pooled_by_index(q, k, v):
    weights = F.softmax((k @ q[:, 0, :, None]).squeeze(-1), dim=-1)
    return (v * weights[..., None]).sum(1), weights[:, None, None]


def columns(q, k, v):
    weights = torch.softmax(torch.tanh(k) @ q[:, 0, :, None], dim=1)
    return (weights * v).sum(dim=1, keepdim=True), weights.mT[:, None]


def expanded(q, k, v):
    weights = torch.softmax((k * q[:, :1]).sum(2), dim=1)
    return torch.sum(v * weights.unsqueeze(2).expand_as(v), 1), weights[:, None, None]


def keys_first(q, k, v):
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    weights = F.softmax((q[:, 0] * k).sum(2), dim=0)
    return (weights.unsqueeze(-1) * v).sum(0), weights.t()[:, None, None]


def all_pairs(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(1)).sum(2), weights[:, None]


def by_einsum(q, k, v):
    weights = torch.einsum("bd,bjd->bj", q[:, 0], k).softmax(-1)
    return torch.einsum("bj,bjd->bd", weights, v), weights[:, None, None]


@pytest.mark.parametrize(
    "attention",
    [pooled, pooled_by_index, columns, expanded, keys_first, all_pairs, by_einsum],
    ids=lambda f: f.__name__,
)
def test_a_weighted_sum_is_an_attention(attention):
    check(Single(attention))
    tape, out = seen(Single(attention), torch.enable_grad, values=True, gradients=True)
    out.square().sum().backward()
    extras, (told,) = tape.extras(0), tape.values()
    mixed = told[:] @ extras.v
    torch.testing.assert_close(mixed.squeeze(1), out.detach().reshape(mixed.squeeze(1).shape))
    torch.testing.assert_close(extras.gradient, 2 * mixed)


def batch_last(q, k, v):
    """As in Transformer-XL: scores i j b h."""
    q, k, v = (x.unflatten(-1, (H, D)).transpose(0, 1) for x in (q, k, v))
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * D**-0.5
    weights = scores.masked_fill(torch.ones(N, N, 1, 1).triu(1).bool().view(N, N, 1, 1), -torch.inf).softmax(1)
    return torch.einsum("ijbh,jbhd->ibhd", F.dropout(weights, 0.1, training=False), v), weights.permute(2, 3, 0, 1)


def ellipsis(q, k, v):
    q, k, v = map(split, (q, k, v))
    weights = torch.einsum("...id,...jd->...ij", q, k).softmax(-1)
    return torch.einsum("...ij,...jd->...id", weights, v), weights


def parts_of_heads(q, k, v):
    """As in the Set Transformer: heads behind each other in the batch."""
    q, k, v = (torch.cat(x.split(D, 2), 0) for x in (q, k, v))
    weights = torch.softmax(q.bmm(k.transpose(1, 2)) / DIM**0.5, 2)
    return weights.bmm(v), weights.unflatten(0, (H, B)).transpose(0, 1)


def heads_before_batch(q, k, v):
    q, k, v = (x.view(B, N, H, D).permute(2, 0, 1, 3).contiguous().view(-1, N, D) for x in (q, k, v))
    hidden = torch.ones(N, N).triu(1).bool().expand(B, N, N).repeat(H, 1, 1)
    weights = (torch.bmm(q, k.transpose(1, 2)) / D**0.5).masked_fill(hidden, -torch.inf).softmax(2)
    return torch.bmm(weights, v), weights.view(H, B, N, N).transpose(0, 1)


def heads_as_first_dim(q, k, v):
    q, k, v = (split(x).transpose(0, 1) for x in (q, k, v))
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights.transpose(0, 1)


def windows_behind_heads(q, k, v):
    q, k, v = (torch.stack((split(x), split(x).flip(2)), 2) for x in (q, k, v))  # b h windows n d
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize(
    "attention",
    [
        batch_last,
        ellipsis,
        parts_of_heads,
        heads_before_batch,
        heads_as_first_dim,
        windows_behind_heads,
    ],
    ids=lambda f: f.__name__,
)
def test_dims_in_other_orders_are_batch_and_heads(attention):
    check(Layer(attention))


def test_heads_before_the_batch_are_told_by_queries_and_keys():
    told = check(Layer(heads_before_batch))
    assert told.call.mask == Causal()
    assert told.call.bias is None
    assert told.call.q.shape == (B, H, N, D)


def test_as_many_texts_as_heads_are_not_taken_for_these():
    layer, x = Layer(windows_behind_heads), torch.randn(H, N, DIM)
    with capture(layer) as tape, torch.no_grad():
        layer(x)
    torch.testing.assert_close(tape[0][:], layer.found, atol=1e-6, rtol=1e-5)


def test_groups_of_heads_are_heads():
    def attention(q, k, v):
        q = q.unflatten(-1, (H, 2, 2)).permute(0, 2, 3, 1, 4)  # b groups heads n d
        k, v = (split(x)[:, :, None, :, :2] for x in (k, v))
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights.flatten(1, 2)

    layer = Layer(attention)
    layer.heads = 2 * H
    check(layer)


class Experts(nn.Module):
    """A mixture of experts, and a language model's word of averages."""

    def __init__(self, mix):
        super().__init__()
        self.gate, self.mix, self.words = nn.Linear(DIM, H), mix, nn.Parameter(torch.randn(7, DIM))
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(H)])

    def forward(self, x):
        return self.mix(self, x)


def routed_sum(m, x):
    return (m.gate(x).softmax(-1).unsqueeze(-1) * torch.stack([e(x) for e in m.experts], -2)).sum(-2)


def routed_product(m, x):
    weights = m.gate(x).softmax(-1)
    return (weights.unsqueeze(-2) @ torch.stack([e(x) for e in m.experts], -2)).squeeze(-2)


def routed_einsum(m, x):
    weights = F.softmax(m.gate(x), dim=-1)
    return torch.einsum("bne,bend->bnd", weights, torch.stack([e(x) for e in m.experts], 1))


def mean_word(m, x):
    return (x @ m.words.T).softmax(-1) @ m.words


def branches(m, x):
    """As in a selective kernel: a softmax over branches, for each feature."""
    weights = torch.stack([e(x.mean(1)) for e in m.experts], 1).softmax(1).unsqueeze(-1).unsqueeze(-1)
    maps = torch.stack([e(x).mT for e in m.experts], 1)[..., None].expand(-1, -1, -1, -1, 2)
    return (weights * maps).sum(1)


@pytest.mark.parametrize(
    "mix", [routed_sum, routed_product, routed_einsum, mean_word, branches], ids=lambda f: f.__name__
)
def test_an_average_of_experts_or_words_is_no_attention(mix):
    with pytest.raises(ValueError, match="no attention of Experts was recorded"):
        seen(Experts(mix))


def cut_by_slice(q, k, v):
    scores = q @ k.mT
    scores[:, -2, 1:] = -1e9
    weights = scores.softmax(-1)
    return weights @ v, weights[:, None]


def written_through_a_view(q, k, v):
    scores = q @ k.mT
    scores[:, -2].add_(3 * torch.arange(N))
    weights = scores.softmax(-1)
    return weights @ v, weights[:, None]


def weights_written_through_a_view(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    weights[:, -2].zero_()
    again = (k @ q.mT).softmax(-1)
    return weights @ v + again @ v, again[:, None]


@pytest.mark.parametrize(
    "attention",
    [cut_by_slice, written_through_a_view, weights_written_through_a_view],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*was not recorded")
def test_what_was_written_to_is_not_taken_for_what_it_was(attention, context, monkeypatch):
    monkeypatch.setattr("regard.lens.eager.tracker.ROWS", 2)  # the row that changes is not one that is looked at
    check(Single(attention), context)


def tempered(q, k, v):
    weights = (q @ k.mT * q.mean(-1, keepdim=True).exp()).softmax(-1)
    return weights @ v, weights[:, None]


@pytest.mark.parametrize("attention", [heads_before_batch, batch_last, columns, tempered], ids=lambda f: f.__name__)
def test_a_checkpoint_computes_it_again_as_before(attention):
    layer, x = Layer(attention), torch.randn(B, N, DIM, requires_grad=True)
    (before,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)
    with capture(layer) as tape:
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert len(tape) == 1
    assert torch.equal(x.grad, before)


def test_scores_that_were_hidden_and_made_small_are_seen():
    def attention(q, k, v):
        hidden = torch.ones(N, N).triu(1).bool()
        weights = ((q @ k.mT).masked_fill(hidden, -1e4) / 1e3).softmax(-1)
        return weights @ v, weights[:, None]

    check(Single(attention))


def through_numpy(q, k, v):
    q, k, v = map(split, (q, k, v))
    weights = torch.from_numpy((q @ k.mT).softmax(-1).numpy())
    return weights @ v, weights


def both_ways(q, k, v):
    return pooled(q, k, v)[0] + through_numpy(q, k, v)[0].mean((1, 2)).repeat(1, H), pooled(q, k, v)[1]


class Beside(nn.Module):
    """Two layers, of which one does something to its weights that is not followed."""

    def __init__(self):
        super().__init__()
        self.known, self.other = Layer(ellipsis), Layer(both_ways)

    def forward(self, x):
        return self.known(x), self.other(x)


def test_what_is_missing_is_told_of():
    model, x = Beside(), torch.randn(B, N, DIM)
    with (
        pytest.warns(UserWarning, match=r"other was not recorded: it computes softmax\(q @ k.mT\)"),
        capture(model) as tape,
        torch.no_grad(),
    ):
        model(x)
    assert tape.layers == ["known", "other"]
    with capture(model, layers="known") as tape, torch.no_grad():  # where a warning would be an error
        model(x)
    assert tape.layers == ["known"]
