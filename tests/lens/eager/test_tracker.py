"""Attention that models write out themselves, in the ways people write it."""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import ablate, ablation_importance, capture, importance, rollout
from regard.lens.eager.symbolic_scores import Scores, SoftmaxOutput
from regard.lens.interception.module_scan import multiplies
from regard.ops.terms.masks import Causal, Padding, Window

B, H, N, D = 2, 3, 7, 4
DIM = H * D


class Layer(nn.Module):
    """Projects, attends by a function, and remembers the weights, b h i j, that the function says it used."""

    def __init__(self, attention, *, heads=H):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.num_heads, self.attention, self.found = heads, attention, None

    def forward(self, x, memory=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if memory is not None:
            _, k, v = self.qkv(memory).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed, self.found = self.attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def hidden(q, k):
    """True where a key comes after the query."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)


def nano_gpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = F.softmax(att.masked_fill(hidden(q, k), float("-inf")), dim=-1)
    return F.dropout(att, 0.1, training=False) @ v, att


def annotated(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~hidden(q, k) == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, v), p_attn


def additive_mask(q, k, v):
    mask = torch.zeros(N, N).masked_fill(hidden(q, k), torch.finfo(q.dtype).min)
    scores = torch.matmul(q, k.mT) / math.sqrt(D)
    scores = scores + mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v), weights


def in_place(q, k, v):
    scores = torch.matmul(q, k.mT)
    scores /= math.sqrt(D)
    scores += 0.25
    scores.masked_fill_(hidden(q, k), -1e4)
    weights = torch.softmax(scores, -1)
    return weights @ v, weights


def by_index(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    scores[hidden(q, k).expand_as(scores)] = -torch.inf
    weights = scores.softmax(-1)
    return weights @ v, weights


def chosen(q, k, v):
    scores = 0.5 * (q @ k.mT)
    weights = torch.where(hidden(q, k), torch.tensor(-1e30), scores).softmax(-1)
    return weights @ v, weights


def chosen_the_other_way(q, k, v):
    scores = torch.where(~hidden(q, k), q @ k.mT * 0.5, -1e30)
    weights = nn.Softmax(dim=-1)(scores)
    return torch.nan_to_num(weights) @ v, weights


def stable(q, k, v):
    scores = q @ k.mT * 0.5
    scores = scores.masked_fill(hidden(q, k), -torch.inf)
    weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
    return weights.masked_fill(hidden(q, k), 0.0) @ v, weights


def einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
    weights = scores.masked_fill(hidden(q, k), -torch.finfo(scores.dtype).max).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v), weights


def einsum_by_tokens(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", [q, k]).masked_fill(torch.ones(N, N).triu(1) == 1, -1e20)
    weights = torch.softmax(scores / D**0.5, dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [weights, v]).transpose(1, 2), weights


def flat(q, k, v):
    """Heads in the batch, and a mask over a view that has them apart."""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.bmm(q * D**-0.5, k.transpose(1, 2))
    scores = scores.view(B, H, N, N) + torch.zeros(B, 1, N, N).masked_fill(hidden(q, k), -torch.inf)
    weights = F.softmax(scores.view(B * H, N, N), dim=-1)
    return torch.bmm(weights, v).view(B, H, N, D), weights.view(B, H, N, N)


def flat_throughout(q, k, v):
    """Heads in the batch, which the layer tells by `num_heads`."""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = torch.baddbmm(torch.empty(B * H, N, N), q, k.mT, beta=0, alpha=D**-0.5)
    weights = scores.masked_fill(hidden(q, k), -1e9).softmax(-1)
    return (weights @ v).unflatten(0, (B, H)), weights.unflatten(0, (B, H))


def keys_first(q, k, v):
    scores = (k @ q.mT).masked_fill(hidden(q, k).mT, -torch.inf) * D**-0.5
    weights = scores.softmax(-2)
    return (v.mT @ weights).mT, weights.mT


def values_first(q, k, v):
    weights = (q @ k.mT * D**-0.5).masked_fill(hidden(q, k), -torch.inf).softmax(-1)
    return (v.transpose(2, 3) @ weights.permute(0, 1, 3, 2)).mT, weights


CAUSAL = (
    nano_gpt,
    annotated,
    additive_mask,
    in_place,
    by_index,
    chosen,
    chosen_the_other_way,
    stable,
    einsum,
    einsum_by_tokens,
    flat,
    flat_throughout,
    keys_first,
    values_first,
)


def watched(layer, *args, **options):
    with capture(layer, **options) as tape, torch.no_grad():
        layer(*args)
    (name,) = tape
    return tape, tape[name]


def close(told, found):
    torch.testing.assert_close(told[:], found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
def test_it_is_seen_in_terms(attention):
    layer = Layer(attention).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert told.call.bias is None
    assert told.call.q.shape == (B, H, N, D)


def attention(change):
    """Attention whose scores a function changes between the product and the softmax."""

    def attend(q, k, v):
        weights = change(q @ k.mT * D**-0.5).softmax(-1)
        return weights @ v, weights

    return attend


def distances(n=N):
    return torch.arange(n)[:, None] - torch.arange(n)


LENGTHS = torch.tensor([N, 4])
PAD = torch.arange(N) >= LENGTHS[:, None]


@pytest.mark.parametrize(
    ("change", "mask", "bias"),
    [
        (lambda s: s, None, None),
        (lambda s: s.masked_fill(PAD[:, None, None], -1e9), Padding((N, 4)), None),
        (lambda s: s + PAD[:, None, None] * -3e38, Padding((N, 4)), None),
        (lambda s: s.masked_fill(distances().abs() > 2, -torch.inf), Window(3), None),
        (lambda s: s - 0.5 * distances().abs(), None, "Relative"),
        (lambda s: s + torch.tensor([1.0, 2.0, 0.5]).view(-1, 1, 1) * -distances().abs(), None, "Relative"),
        (lambda s: s * torch.tensor([1.0, 2.0, 0.5]).view(-1, 1, 1), None, None),
        (lambda s: s / torch.tensor(0.7), None, None),
        (lambda s: s.float().clone(), None, None),
        (lambda s: torch.add(s, torch.arange(N) / 7.0, alpha=2), None, "Added"),
        (lambda s: (s + 1) * 2 - torch.arange(N) / 7.0, None, "Added"),
    ],
)
def test_masks_biases_and_temperatures_are_terms(change, mask, bias):
    layer = Layer(attention(change)).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert repr(told.call.mask) == repr(mask)
    assert type(told.call.bias).__name__ == (bias or "NoneType")
    assert bool(told.call.q.any())


@pytest.mark.parametrize(
    "change",
    [
        torch.tanh,
        lambda s: s.clamp(-0.2, 0.2),
        lambda s: s * (distances() > 0),
        lambda s: s.relu_(),
        lambda s: s.index_fill_(2, torch.tensor([1]), 0.0),
        lambda s: s.view(-1).mul_(3.0).view_as(s),
        lambda s: s.masked_fill(distances() > 2, 0.3),
        lambda s: torch.einsum("bhij,hg->bgij", s, torch.eye(H).roll(1, 0)),
    ],
)
def test_scores_that_are_more_than_a_product_are_kept_themselves(change):
    layer = Layer(attention(change)).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert "Added" in repr(told)


def test_a_large_matrix_that_is_kept_is_told_of():
    layer = Layer(attention(torch.tanh)).eval()
    with pytest.warns(UserWarning, match="storing it densely, queries x keys, takes"):
        watched(layer, torch.randn(1, 400, DIM))


def test_of_layers_that_are_not_asked_for_no_matrix_is_kept():
    model, x = nn.Sequential(Layer(nano_gpt), Layer(attention(torch.tanh))).eval(), torch.randn(1, 400, DIM)
    with capture(model, layers="0", budget="1MB") as tape, torch.no_grad():  # where a warning would be an error
        model(x)
    assert tape.layers == ["0"]
    with pytest.raises(ValueError, match=r"no layer that attended matches .*; there were 0, 1"):
        watched(model, x, layers="2")


def test_another_text_is_attended_to():
    layer = Layer(attention(lambda s: s)).eval()
    _, told = watched(layer, torch.randn(B, N, DIM), torch.randn(B, 5, DIM))
    close(told, layer.found)
    assert told.shape == (B, H, N, 5)


def test_numbers_that_change_only_some_rows_in_place_are_noticed():
    """A few rows are compared with the model's own weights; what was written to is known without them."""

    def change(scores):
        scores.select(2, 1).zero_()
        return scores

    layer = Layer(attention(change)).eval()
    _, told = watched(layer, torch.randn(B, 100, DIM))
    close(told, layer.found)


class Heads(nn.Module):
    """A list of layers of one head each."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.heads = nn.ModuleList(Layer(self.one, heads=1) for _ in range(self.num_heads))

    def one(self, q, k, v):
        weights = (q[:, 0] @ k[:, 0].mT).softmax(-1)
        return (weights @ v[:, 0])[:, None], weights[:, None]

    def forward(self, x):
        return sum(head(x) for head in self.heads)


def test_heads_that_are_layers_of_their_own_are_not_taken_out_of_the_batch():
    model = Heads().eval()
    with capture(model) as tape, torch.no_grad():
        model(torch.randn(4, N, DIM))
    assert tape.layers == ["heads.0", "heads.1"]
    for name, layer in zip(tape.layers, model.heads, strict=True):
        assert tape[name].shape == (4, 1, N, N)
        close(tape[name], layer.found)


class Bahdanau(nn.Module):
    """Additive attention of one query, as tutorials write it, over weights of some shape."""

    def __init__(self, shape):
        super().__init__()
        self.w, self.u, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.shape, self.found = shape, None

    def forward(self, query, memory):
        energy = self.v(torch.tanh(self.w(query)[:, None] + self.u(memory)))  # b j 1
        if self.shape == "b j 1":
            weights = energy.softmax(1)
            self.found = weights.mT[:, None]
            return memory.mT @ weights
        weights = F.softmax(energy.squeeze(-1), dim=1)
        self.found = weights[:, None, None]
        return weights.unsqueeze(1).bmm(memory)


@pytest.mark.parametrize("shape", ["b j", "b j 1"])
def test_scores_of_a_network_are_seen(shape):
    model = Bahdanau(shape)
    _, told = watched(model, torch.randn(B, DIM), torch.randn(B, N, DIM))
    assert told.shape == (B, 1, 1, N)
    close(told, model.found)


def test_what_follows_the_softmax_and_changes_its_weights_is_told_of():
    def halved(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights.masked_fill(distances() > 0, 0.0) @ v, weights

    layer = Layer(halved).eval()
    with (
        pytest.warns(
            UserWarning,
            match="not recorded: the weights that it multiplies with v are not the softmax",
        ),
        pytest.raises(ValueError, match="no attention of Layer was recorded"),
    ):
        watched(layer, torch.randn(B, N, DIM))


@pytest.mark.parametrize("given", [{}, {"hard": True}, {"tau": 0.5, "dim": -1}])
def test_weights_that_are_drawn_are_told_of(given):
    def drawn(q, k, v):
        weights = F.gumbel_softmax(q @ k.mT / 3, **given)
        return weights @ v, weights

    with (
        pytest.warns(
            UserWarning,
            match="not recorded: the weights that it multiplies with v are not the softmax",
        ),
        pytest.raises(ValueError, match="no attention of Layer was recorded"),
    ):
        watched(Layer(drawn).eval(), torch.randn(B, N, DIM))


class Router(nn.Module):
    """A softmax that chooses, and a classifier's: neither averages anything."""

    def __init__(self):
        super().__init__()
        self.gate, self.classes = nn.Linear(DIM, 4), nn.Linear(DIM, 9)

    def forward(self, x):
        weight, best = self.gate(x).softmax(-1).topk(2)
        return (self.classes(x * weight.sum(-1, keepdim=True))).softmax(-1), best


def test_a_softmax_that_averages_nothing_is_no_attention():
    model = Router()
    with pytest.raises(ValueError, match="no attention of Router was recorded"), capture(model):
        model(torch.randn(B, N, DIM))


class Cached(nn.Module):
    """Attends to all it has been shown so far."""

    def __init__(self):
        super().__init__()
        self.qkv, self.keys, self.values = nn.Linear(DIM, 3 * DIM), None, None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.keys = k if self.keys is None else torch.cat((self.keys, k), 2)
        self.values = v if self.values is None else torch.cat((self.values, v), 2)
        scores = q @ self.keys.mT * D**-0.5
        i, j = scores.shape[-2:]
        return (
            scores.masked_fill(torch.ones(i, j, dtype=torch.bool).triu(j - i + 1), -torch.inf).softmax(-1) @ self.values
        )


def test_rows_of_new_tokens_join_those_of_the_prompt():
    model, x = Cached(), torch.randn(1, N, DIM)
    with capture(model) as tape, torch.no_grad():
        model(x[:, :4])
        for n in range(4, N):
            model(x[:, n : n + 1])
    whole = Cached()
    whole.load_state_dict(model.state_dict())
    _, expected = watched(whole, x)
    (name,) = tape
    assert tape[name].shape == (1, H, N, N)
    close(tape[name], expected[:])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", [nano_gpt, einsum, in_place], ids=lambda f: f.__name__)
def test_outputs_and_gradients_are_those_of_the_model(attention, training):
    layer, x = Layer(attention).train(training), torch.randn(B, N, DIM)

    def run():
        torch.manual_seed(0)
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        return out, layer.qkv.weight.grad.clone()

    expected = run()
    with capture(layer, values=True, gradients=True) as tape:
        out = run()
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    (name,) = tape
    extras = tape.extras(name)
    assert extras.v.shape == extras.gradient.shape == (B, H, N, D)
    assert torch.equal(extras.projection, layer.out.weight)


@pytest.mark.parametrize("attention", [flat_throughout, einsum_by_tokens, values_first], ids=lambda f: f.__name__)
def test_gradients_have_the_dims_of_the_heads(attention):
    layer, x = Layer(attention).eval(), torch.randn(B, N, DIM)
    with capture(layer, values=True, gradients=True) as tape:
        layer(x).square().sum().backward()
    plain = Layer(nano_gpt).eval()
    plain.load_state_dict(layer.state_dict())
    with capture(plain, values=True, gradients=True) as expected:
        plain(x).square().sum().backward()
    for name in ("v", "gradient"):
        told, known = (getattr(each.extras(next(iter(each))), name) for each in (tape, expected))
        torch.testing.assert_close(told, known)


def test_measures_and_flow_are_those_of_the_weights():
    model = nn.Sequential(Layer(nano_gpt), Layer(annotated)).eval()
    with capture(model, keep=["entropy"]) as kept, torch.no_grad():
        model(torch.randn(1, N, DIM))
    with capture(model) as tape, torch.no_grad():
        model(torch.randn(1, N, DIM))
    assert kept.layers == tape.layers == ["0", "1"]
    assert rollout(list(tape.values()), token=-1).shape[-1] == N


@pytest.mark.parametrize("within", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_it_is_seen_in_other_modes(within):
    layer = Layer(nano_gpt).eval()
    with within():
        _, told = watched(layer, torch.randn(B, N, DIM))
        torch.testing.assert_close(told[:].float(), layer.found.float(), atol=0.02, rtol=0.02)
    assert told.call.mask == Causal()


class Probe(nn.Module):
    """Counts what is held of the layers before it."""

    def forward(self, x):
        self.held = sum(type(each) in (Scores, SoftmaxOutput) for each in gc.get_objects())
        return x


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
def test_nothing_is_held_of_layers_that_are_done(attention):
    model = nn.Sequential(layer := Layer(lambda q, k, v: (attention(q, k, v)[0], None)), Probe()).eval()
    with capture(model), torch.no_grad():
        model(torch.randn(B, N, DIM))
    assert layer.found is None
    assert not model[1].held


def gated(q, k, v):
    shown = (~hidden(q, k)).float()
    scores = q @ k.mT * shown + -1e4 * (1 - shown)
    weights = (scores / math.sqrt(D)).softmax(-1)
    return weights @ v, weights


def bounded(q, k, v):
    least = torch.finfo(q.dtype).min
    scores = q @ k.mT + torch.full((N, N), least).triu(1)
    weights = torch.max(scores, torch.tensor(least)).clamp(min=-5e4, max=5e4).softmax(-1)
    return weights @ v, weights


def chosen_by_method(q, k, v):
    weights = (q @ k.mT).where(~hidden(q, k), -1e30).softmax(-1)
    return weights @ v, weights


def chosen_by_name(q, k, v):
    weights = torch.where(condition=hidden(q, k), input=torch.tensor(-1e30), other=q @ k.mT).softmax(-1)
    return weights @ v, weights


def hidden_by_a_number(q, k, v):
    weights = (q @ k.mT - 65500.0 * hidden(q, k)).softmax(-1)
    return weights @ v, weights


def einsum_with_dots(q, k, v):
    scores = torch.einsum("...id,...jd->...ij", q, k).masked_fill(hidden(q, k), -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("b...ij,b...je->b...ie", weights, v), weights


def heads_first(q, k, v):
    scores = (q.transpose(0, 1) @ k.transpose(0, 1).mT).masked_fill(hidden(q, k), -torch.inf)
    weights = scores.softmax(-1).permute(1, 0, 2, 3)
    return weights @ v, weights


def scores_turned(q, k, v):
    scores = (k.transpose(0, 1) @ q.transpose(0, 1).mT).permute(dims=(1, 0, 3, 2)).masked_fill(hidden(q, k), -1e9)
    weights = scores.softmax(-1)
    return weights @ v, weights


def summing_to_one_again(q, k, v):
    weights = (q @ k.mT).masked_fill(hidden(q, k), -torch.inf).softmax(-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v, weights


MORE = (
    gated,
    bounded,
    chosen_by_method,
    chosen_by_name,
    hidden_by_a_number,
    einsum_with_dots,
    heads_first,
    scores_turned,
    summing_to_one_again,
)


@pytest.mark.parametrize("attention", MORE, ids=lambda f: f.__name__)
def test_it_is_seen_in_terms_too(attention):
    test_it_is_seen_in_terms(attention)


def added_to_one_text(q, k, v):
    """Scores of one text, and a bias for each of several."""
    weights = (q[:1] @ k[:1].mT + torch.arange(B).view(B, 1, 1, 1) * torch.eye(N)).softmax(-1)
    return weights @ v, weights


def hidden_in_one_text(q, k, v):
    weights = (q[:1] @ k[:1].mT).masked_fill(hidden(q, k).expand(B, 1, N, N), -torch.inf).softmax(-1)
    return weights @ v, weights


def scaled_in_one_text(q, k, v):
    weights = (q[:1] @ k[:1].mT * torch.arange(B).view(B, 1, 1, 1)).softmax(-1)
    return weights @ v, weights


def spread_over_keys(q, k, v):
    weights = (q @ k[:, :, :1].mT + torch.arange(N)).softmax(-1)
    return weights @ v, weights


def gated_by_halves(q, k, v):
    weights = (q @ k.mT * (~hidden(q, k) + 0.5)).softmax(-1)
    return weights @ v, weights


def gated_and_shown(q, k, v):
    """Scores of 0 get weights like any other."""
    weights = (q @ k.mT * ~hidden(q, k) + 0.25 * hidden(q, k)).softmax(-1)
    return weights @ v, weights


def bounded_within(q, k, v):
    weights = (q @ k.mT).clamp(-0.25, 0.25).softmax(-1)
    return weights @ v, weights


def bounded_above(q, k, v):
    weights = (q @ k.mT).clamp(max=0.0).softmax(-1)
    return weights @ v, weights


SPREAD = (added_to_one_text, hidden_in_one_text, scaled_in_one_text, spread_over_keys)


@pytest.mark.parametrize("attention", [*SPREAD, gated_by_halves, gated_and_shown, bounded_within, bounded_above])
def test_scores_that_are_no_terms_are_kept(attention):
    layer = Layer(attention).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.bias.tensors()[0].shape[2:] == (N, N)


def test_whole_numbers_may_be_added():
    def counted(q, k, v):
        weights = (q @ k.mT + torch.arange(N).view(1, N) % 3).softmax(-1)
        return weights @ v, weights

    layer = Layer(counted).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.bias.tensors()[0].shape == (1, 1, 1, N)


def test_a_number_for_each_key_stays_one_beside_a_mask():
    def alibi(q, k, v):
        slopes = torch.linspace(0.1, 0.5, H)[:, None, None]
        mask = torch.full((N, N), torch.finfo(q.dtype).min).triu(1)
        weights = (q @ k.mT + slopes * torch.arange(N) + mask).softmax(-1)
        return weights @ v, weights

    layer = Layer(alibi).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert told.call.bias.tensors()[0].shape == (1, H, 1, N)


def test_heads_in_groups_are_heads():
    def grouped(q, k, v):
        q, k, v = q.unflatten(1, (2, 2)), k[:, ::2, None], v[:, ::2, None]  # b g h/g i d, and one key for a group
        weights = (q @ k.mT).masked_fill(hidden(q, k), -torch.inf).softmax(-1)
        return (weights @ v).flatten(1, 2), weights.flatten(1, 2)

    layer = Layer(grouped, heads=4).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert told.call.k.shape == (B, 2, N, 3)


def test_heads_before_blocks_are_heads():
    def local(q, k, v):
        q, k, v = (t[:, :, :6].unflatten(2, (2, 3)) for t in (q, k, v))  # b h blocks i d
        weights = (q @ k.mT).softmax(-1)
        return (weights @ v).flatten(2, 3), weights.transpose(1, 2).flatten(0, 1)

    layer = Layer(local).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    assert told.shape == (B * 2, H, 3, 3)
    close(told, layer.found)
    tape, _ = watched(layer, torch.randn(B, N, DIM), values=True)
    (name,) = tape
    assert tape.extras(name).v.shape == (B * 2, H, 3, D)


def aside_of_a_vmap(q, k, v):
    torch.vmap(lambda q, k: (q @ k.mT).softmax(-1) @ k)(q, k)
    return nano_gpt(q, k, v)


def aside_of_a_gradient(q, k, v):
    torch.func.grad(lambda q: ((q @ k.mT).softmax(-1) @ k).sum())(q)
    return nano_gpt(q, k, v)


def aside_of_nested_tensors(q, k, v):
    texts = torch.nested.nested_tensor([q[0], q[1, :, :5]])
    torch.matmul(torch.matmul(texts, texts.transpose(-1, -2)).softmax(-1), texts)
    return nano_gpt(q, k, v)


def aside_of_tensors_without_numbers(q, k, v):
    shapes = q.to("meta")
    (shapes @ shapes.mT).softmax(-1) @ shapes
    return nano_gpt(q, k, v)


def aside_of_vectors(q, k, v):
    weights = q[0, 0, :, 0].softmax(0)
    _ = weights.permute(0), weights.t(), (q @ k.mT).max().clamp(min=0.0) + torch.ones(N, N)
    return nano_gpt(q, k, v)


ASIDE = (
    aside_of_vectors,
    aside_of_a_vmap,
    aside_of_a_gradient,
    aside_of_nested_tensors,
    aside_of_tensors_without_numbers,
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attention", ASIDE, ids=lambda f: f.__name__)
def test_what_holds_no_numbers_is_passed_over(attention):
    test_it_is_seen_in_terms(attention)


@pytest.mark.parametrize("rows", [slice(0, 0), slice(None)])
def test_there_may_be_nothing_to_attend_to(rows):
    def empty(q, k, v):
        keys = slice(0, 0) if rows == slice(None) else slice(None)
        weights = (q[:, :, rows] @ k[:, :, keys].mT).softmax(-1)
        return weights @ v[:, :, keys], weights

    layer = Layer(empty).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    assert told.shape == layer.found.shape


def test_weights_that_are_no_softmax_are_told_of():
    def halved(q, k, v):
        weights = (q @ k.mT).softmax(-1) * 0.5
        return nano_gpt(q, k, weights @ v)

    layer = Layer(halved).eval()
    with pytest.warns(UserWarning, match="was not recorded"):
        _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)


class BySign(nn.Module):
    def forward(self, q, k, v):
        return nn.Softmax(-1)(q @ k.mT) @ v


class ByParts(nn.Module):
    def forward(self, q, k, v):
        return self.matmul_qkv(self.softmax(self.matmul_qk(q, k)), v)


class Inherits(BySign):
    """A layer without code of its own."""


class Scales(nn.Module):
    def forward(self, q, k):
        return q @ k.mT * self.softmax_scale


@pytest.mark.parametrize(("kind", "does"), [(BySign, True), (ByParts, True), (Inherits, True), (Scales, False)])
def test_code_tells_who_multiplies(kind, does):
    assert multiplies(kind) is does


def faint(q, k, v, *, change):
    """Attention so even that no weight is large, to which something is done after the softmax."""
    weights = change((q @ k.mT * 0.02).softmax(-1))
    return weights @ v, weights


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * 0.1,
        lambda w: w * torch.tensor([1.0, 0.4, 1.0])[:, None, None],
        lambda w: w * (torch.arange(64) != 4)[:, None],  # a row that is not one of the few
        lambda w: w.masked_fill((torch.arange(64) == 4)[:, None], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_changed_are_not_shown_as_they_were(change, dtype):
    layer = Layer(lambda *qkv: faint(*qkv, change=lambda w: change(w).to(dtype))).to(dtype).eval()
    with (
        pytest.warns(UserWarning, match="was not recorded: the weights that it multiplies with v are not the softmax"),
        pytest.raises(ValueError, match="no attention of Layer was recorded"),
    ):
        watched(layer, torch.randn(1, 64, DIM, dtype=dtype))


def test_weights_that_are_left_as_they_were_are_shown():
    """Among them rows that see nothing."""

    def attend(q, k, v):
        hidden = hidden_from_all_after(q.shape[-2] - 3)
        weights = (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0.0)
        return weights @ v, weights

    def hidden_from_all_after(n):
        return (torch.arange(N) >= n)[:, None] | (torch.arange(N) >= n)

    layer = Layer(attend).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)


def rewritten_bias(q, k, v):
    bias = torch.zeros(64, 64)
    scores = q @ k.mT / 4 + bias
    bias[3:6, :10] = -1e9
    return scores


def rewritten_mask(q, k, v):
    mask = torch.zeros(64, 64, dtype=torch.bool)
    scores = (q @ k.mT / 4).masked_fill(mask, -1e9)
    mask[3:6, :10] = True
    return scores


def rewritten_queries(q, k, v):
    scores = q @ k.mT / 4
    q[:, :, 3:6] = 0
    return scores


def added_to_a_buffer(q, k, v):
    scores = torch.zeros(1, H, 64, 64)
    scores += q @ k.mT
    return scores


def added_by_a_factor(q, k, v):
    return torch.add(torch.arange(64.0) / 64, q @ k.mT, alpha=4.0)


@pytest.mark.parametrize(
    "scores",
    [rewritten_bias, rewritten_mask, rewritten_queries, added_to_a_buffer, added_by_a_factor],
    ids=lambda f: f.__name__,
)
def test_scores_are_what_they_were_when_they_were_found(scores):
    def attend(q, k, v):
        weights = scores(q.clone(), k, v).softmax(-1)
        return weights @ v, weights

    layer = Layer(attend).eval()
    _, told = watched(layer, torch.randn(1, 64, DIM))
    close(told, layer.found)


def mapped(scores):
    return torch.vmap(lambda x: (scores * x).sum())(torch.ones(2, N, N)).sum()


def of_one_feature(scores):
    return torch.einsum("bid,bjd->bij", torch.randn(2, 5, 1), torch.randn(2, 7, 16)).softmax(-1).sum()


def complex_fill(scores):
    z = torch.zeros(3, dtype=torch.complex64)
    return z.masked_fill(z.real == 0, torch.tensor(1j)).real.sum()


@pytest.mark.parametrize("beside", [mapped, of_one_feature, complex_fill], ids=lambda f: f.__name__)
def test_what_else_is_computed_runs_as_without(beside):
    def attend(q, k, v):
        scores = q @ k.mT
        weights = (scores * D**-0.5).softmax(-1)
        return weights @ v + 0 * beside(scores), weights

    layer = Layer(attend).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)


class Plain(nn.Module):
    """Attention to itself."""

    def forward(self, x):
        return torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)


class PartlyCompiled(nn.Module):
    """Two layers, of which the second runs compiled."""

    def __init__(self):
        super().__init__()
        self.plain, self.compiled = Plain(), Plain()
        self.__dict__["run"] = torch.compile(self.compiled, backend="aot_eager")

    def forward(self, x):
        return self.run(self.plain(x))


def test_a_compiled_part_is_told_of():
    with pytest.warns(UserWarning, match="ran inside a torch.compile.d function"):
        tape, _ = watched(PartlyCompiled().eval(), torch.randn(1, N, DIM))
    assert tape.layers == ["plain"]


def live_matrices(n):
    return sum(type(x) is torch.Tensor and x.shape[-2:] == (n, n) for x in gc.get_objects())


@pytest.mark.filterwarnings("ignore:no structure")
def test_of_scores_that_are_reduced_at_once_nothing_is_held():
    model = nn.Sequential(*(Layer(lambda q, k, v: (attention(torch.tanh)(q, k, v)[0], None)) for _ in range(3))).eval()
    with capture(model, keep=["entropy"]) as tape, torch.no_grad():
        model(torch.randn(1, 61, DIM))
    assert len(tape) == 3
    assert live_matrices(61) == 0


def test_while_it_is_trained_logits_are_not_held():
    """The weights are, by the backward pass to come; what led to them is not."""
    model = nn.Sequential(*(Layer(lambda q, k, v: (nano_gpt(q, k, v)[0], None)) for _ in range(3)), Probe())
    with capture(model):
        model(torch.randn(1, N, DIM, requires_grad=True))
    assert not model[-1].held


def without(head, attention):
    """The same attention with zeros for what a head fetched."""

    def attend(q, k, v):
        mixed, weights = attention(q, k, v)
        return mixed * (torch.arange(H) != head).view(-1, 1, 1), weights

    return attend


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
def test_heads_are_ablated(attention):
    layer, other = (Layer(each).eval() for each in (attention, without(1, attention)))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(B, N, DIM)
    with ablate(layer, {"": [1]}):
        out = layer(x)
    torch.testing.assert_close(out, other(x))


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
def test_the_importance_of_heads_is_found(attention):
    fetched = []

    def attend(q, k, v):
        mixed, weights = attention(q, k, v)
        mixed.retain_grad()
        fetched.append(mixed)
        return mixed, weights

    layer = Layer(attend).eval()
    with importance(layer) as found:
        layer(torch.randn(B, N, DIM)).square().sum().backward()
    (mixed,) = fetched
    torch.testing.assert_close(found[""], (mixed * mixed.grad).sum(-1).abs().sum((0, 2)).detach())


def test_heads_of_a_model_that_says_nothing_of_them_are_counted():
    model = nn.Sequential(Layer(nano_gpt), Layer(einsum)).eval()
    x = torch.randn(B, N, DIM)
    costs = ablation_importance(model, lambda: model(x).square().mean())
    assert {name: cost.shape for name, cost in costs.items()} == {"0": (H,), "1": (H,)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_are_rounded_and_cast_up_are_known_by_queries_and_keys(dtype):
    def attend(q, k, v):
        scores = (q @ k.mT * D**-0.5).masked_fill(hidden(q, k), -torch.inf)
        weights = scores.float().softmax(-1)
        return weights.to(dtype) @ v, weights

    layer = Layer(attend).to(dtype).eval()
    _, told = watched(layer, 6 * torch.randn(B, 40, DIM, dtype=dtype))
    assert told.call.mask == Causal()
    assert told.call.bias is None
    assert layer.found.max(-1).values.mean() > 0.3
    torch.testing.assert_close(told[:].float(), layer.found, atol=0.1, rtol=0.1)
