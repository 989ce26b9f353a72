"""Attention that is not understood is told of, whatever was done to its scores; a softmax of anything else is not."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import capture

B, H, N, D = 2, 3, 5, 4
DIM = H * D
in_each_mode = pytest.mark.parametrize(
    "context", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda f: f.__name__
)
LOST = r"other was not recorded: it computes softmax\(q @ k.mT\), but the result was never multiplied"


def split(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Attends by a function of itself and q, k, v, each b h n d, that says which weights, b h i j, it used."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.num_heads, self.attention, self.found = nn.Linear(DIM, 3 * DIM), H, attention, None
        self.before, self.after, self.conv = nn.Linear(H, H), nn.Linear(H, H), nn.Conv2d(H, H, 3, padding=1)
        self.mixing, self.deep = nn.Parameter(torch.randn(H, H)), nn.Sequential(nn.Linear(H, 8), nn.Linear(8, H))

    def forward(self, x):
        out, self.found = self.attention(self, *map(split, self.qkv(x).chunk(3, -1)))
        return out


def plain(layer, q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


class Beside(nn.Module):
    """A layer that is known, and another."""

    def __init__(self, other):
        super().__init__()
        self.known, self.other = Layer(plain), other

    def forward(self, x):
        return self.other(self.known(x).transpose(1, 2).flatten(2) + x)


def seen(other, context=torch.no_grad):
    model = Beside(other).eval()
    with context(), capture(model) as tape:
        model(torch.randn(B, N, DIM))
    return tape


def over_heads(linear, x):
    return linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def talking(layer, q, k, v):
    """As in CaiT."""
    weights = over_heads(layer.after, over_heads(layer.before, q @ k.mT).softmax(-1))
    return weights @ v, weights


def talking_of_one_query(layer, q, k, v):
    return talking(layer, q[:, :, :1], k, v)


def talking_by_einsum(layer, q, k, v):
    weights = torch.einsum("bhij,hg->bgij", torch.einsum("bhid,bhjd->bhij", q, k), layer.mixing).softmax(-1)
    weights = torch.einsum("bhij,hg->bgij", weights, layer.mixing)
    return weights @ v, weights


def talking_by_one_einsum(layer, q, k, v):
    scores = torch.einsum("bhij,hg->bijg", torch.einsum("bhid,bhjd->bhij", q, k), layer.mixing)
    weights = scores.softmax(2)
    return torch.einsum("bijh,hg,bgjd->bgid", weights, layer.mixing, v), weights.movedim(-1, 1)


def talking_by_product(layer, q, k, v):
    weights = (layer.mixing @ (q @ k.mT).flatten(2)).view(B, H, N, N).softmax(-1)
    weights = (layer.mixing @ weights.flatten(2)).view(B, H, N, N)
    return weights @ v, weights


def many_tokens(layer, q, k, v):
    """As in Multi-Token Attention."""
    weights = layer.conv(layer.conv(q @ k.mT).softmax(-1))
    return weights @ v, weights


def deep(layer, q, k, v):
    weights = over_heads(layer.deep, q @ k.mT).softmax(-1).roll(1, 1)
    return weights @ v, weights


def bounded(layer, q, k, v):
    weights = torch.tanh(q @ k.mT).softmax(-1).roll(1, 1)
    return weights @ v, weights


def one_or_the_other(layer, q, k, v):
    weights = torch.where(torch.eye(N).bool(), q @ k.mT, k @ q.mT).softmax(-1).roll(1, 1)
    return weights @ v, weights


def in_order(layer, q, k, v):
    scores, places = (q @ k.mT).sort(-1)
    weights = scores.softmax(-1).gather(-1, places.argsort(-1))
    return weights @ v, weights


def largest(layer, q, k, v):
    scores, places = (q @ k.mT).topk(3, -1)
    weights = torch.zeros(B, H, N, N).scatter(-1, places, scores.softmax(-1))
    return weights @ v, weights


def head_by_head(layer, q, k, v):
    weights = torch.stack([torch.tanh(scores).softmax(-1) for scores in (q @ k.mT).unbind(1)[1:]], 1)
    return weights @ v[:, 1:], weights


def shifted(layer, q, k, v):
    weights = F.pad(q @ k.mT, (1, 0)).view(B, H, N + 1, N)[:, :, 1:].softmax(-1).roll(1, 1)
    return weights @ v, weights


def written_to(layer, q, k, v):
    scores = q @ k.mT
    scores[:, :, -1, 1:] = -1e9
    weights = scores.softmax(-1).roll(1, 1)
    return weights @ v, weights


@in_each_mode
@pytest.mark.parametrize(
    "attention",
    [
        talking,
        talking_of_one_query,
        talking_by_einsum,
        talking_by_product,
        many_tokens,
        deep,
        bounded,
        one_or_the_other,
        in_order,
        largest,
        head_by_head,
        shifted,
        written_to,
    ],
    ids=lambda f: f.__name__,
)
def test_weights_that_are_mixed_are_shown_as_they_multiply_the_values(attention, context):
    layer = Layer(attention)
    tape = seen(layer, context)  # where a warning would be an error
    torch.testing.assert_close(tape["other"][:], layer.found.detach(), atol=1e-6, rtol=1e-5)
    assert list(tape.changed) == ["other"]


@in_each_mode
def test_weights_that_one_einsum_mixes_and_multiplies_are_told_of(context):
    with pytest.warns(UserWarning, match=LOST):
        tape = seen(Layer(talking_by_one_einsum), context)
    assert tape.layers == ["known"]


def followed(change):
    """Attention whose scores a function of the layer changes, and whose weights are left as they are."""

    def attention(layer, q, k, v):
        weights = change(layer, q @ k.mT).softmax(-1)
        return weights @ v, weights

    return attention


def between_features(layer, q, k, v):
    """As in XCiT."""
    q, k, v = q.mT, k.mT, v.mT
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 1.5).softmax(-1)
    return weights @ v, weights


def of_a_class(layer, q, k, v):
    return plain(layer, q[:, :, :1], k, v)


@pytest.mark.parametrize(
    "attention",
    [
        followed(lambda layer, s: over_heads(layer.before, s)),
        followed(lambda layer, s: over_heads(layer.deep, s)),
        followed(lambda layer, s: layer.conv(s)),
        followed(lambda layer, s: torch.einsum("bhij,hg->bgij", s, layer.mixing)),
        followed(lambda layer, s: torch.where(torch.eye(N).bool(), s, 2 * s.mT)),
        followed(lambda layer, s: s.sort(-1).values),
        between_features,
        of_a_class,
    ],
)
def test_weights_that_are_left_are_shown_whatever_the_scores_are(attention):
    layer = Layer(attention)
    tape = seen(layer)  # where a warning would be an error
    torch.testing.assert_close(tape["other"][:], layer.found, atol=1e-6, rtol=1e-5)


class Other(nn.Module):
    """Something with a softmax that is no attention."""

    def __init__(self, function):
        super().__init__()
        self.function, self.words = function, nn.Embedding(9, DIM)
        self.classes, self.gate, self.square = nn.Linear(DIM, 9), nn.Linear(DIM, 1), nn.Linear(DIM, DIM)
        self.conv, self.pairs, self.norm = nn.Conv1d(DIM, DIM, 1), nn.Linear(N * N, 9), nn.LayerNorm(DIM)

    def forward(self, x):
        return self.function(self, x)


def classifier(m, x):
    return m.classes(x).softmax(-1)


def tied_classifier(m, x):
    return (x.flatten(0, 1) @ m.words.weight.T / 2).softmax(-1)


def classifier_by_einsum(m, x):
    return torch.einsum("bnd,cd->bnc", x, m.words.weight).softmax(-1)


def mean_word(m, x):
    return (x.flatten(0, 1) @ m.words.weight.T).softmax(-1) @ m.words.weight


def router(m, x):
    weights = m.classes(x).softmax(-1)
    return sum(weights[..., n : n + 1] * m.square(x) for n in range(9))


def pooling_gate(m, x):
    return m.gate(x).softmax(1).squeeze(-1)


def loss(m, x):
    return F.kl_div(m.classes(x).log_softmax(-1), m.classes(x + 1).softmax(-1), reduction="batchmean")


def after_linear_attention(m, x):
    mixed = m.norm(m.square(x) @ (x.mT @ m.square(x)) + x)
    return m.square(F.gelu(mixed)).softmax(-1)


def after_a_graph(m, x):
    return m.square(F.relu(torch.ones(B, N, N) @ x)).softmax(-1)


def after_a_graph_by_einsum(m, x):
    return torch.einsum("bnd,cd->bnc", F.relu(torch.ones(B, N, N) @ x), m.words.weight).softmax(-1)


def after_a_convolution(m, x):
    return F.relu(m.conv((x @ x.mT @ x).mT)).softmax(1)


def of_pairs(m, x):
    return m.pairs((x @ x.mT).flatten(1)).softmax(-1)


def of_means(m, x):
    return (x @ x.mT).mean(-1).softmax(-1)


@in_each_mode
@pytest.mark.parametrize(
    "function",
    [
        classifier,
        tied_classifier,
        classifier_by_einsum,
        mean_word,
        router,
        pooling_gate,
        loss,
        after_linear_attention,
        after_a_graph,
        after_a_graph_by_einsum,
        after_a_convolution,
        of_pairs,
        of_means,
    ],
    ids=lambda f: f.__name__,
)
def test_a_softmax_of_anything_else_is_not_told_of(function, context):
    assert seen(Other(function), context).layers == ["known"]  # where a warning would be an error


class Beads(nn.Module):
    """Of each token and the next, scores side by side, and weights put where they belong: it is not understood."""

    def forward(self, x):
        near = torch.stack((torch.arange(N), torch.arange(N).roll(-1)), -1).expand(B, N, 2)
        both = x[torch.arange(B)[:, None, None], near]
        scores = torch.stack([(x[:, :, None] @ both[:, :, n, :, None]).flatten(1) for n in range(2)], -1)
        return torch.zeros(B, N, N).scatter(-1, near, scores.softmax(-1)) @ x


class BeadsAttention(Beads):
    """The same, by a name that tells."""


class GatedAttention(nn.Module):
    """Attends by a part of it, and has a softmax of its own."""

    def __init__(self):
        super().__init__()
        self.core, self.gate = Layer(plain), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.core(x).transpose(1, 2).flatten(2) * self.gate(x @ torch.eye(DIM)).softmax(-1)


@in_each_mode
def test_a_layer_that_is_an_attention_by_its_name_is_told_of(context):
    with pytest.warns(UserWarning, match="other was not recorded: its softmax input could not be traced back"):
        assert seen(BeadsAttention(), context).layers == ["known"]


@pytest.mark.parametrize("layers", [["known"], ["*"]], ids=str)
def test_a_layer_that_is_not_asked_for_is_not_told_of(layers):
    model = Beside(BeadsAttention()).eval()
    told = pytest.warns(UserWarning, match="other was not recorded") if layers == ["*"] else nullcontext()
    with told, capture(model, layers=layers):
        model(torch.randn(B, N, DIM))


@pytest.mark.parametrize("kind", [Beads, GatedAttention])
def test_other_layers_with_a_softmax_are_not_told_of(kind):
    assert "known" in seen(kind()).layers  # where a warning would be an error


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (lambda: Layer(talking_by_one_einsum), r"[(]model[)] was not recorded: it computes softmax\(q @ k.mT\), but"),
        (BeadsAttention, "its softmax input could not"),
    ],
    ids=["talking", "beads"],
)
def test_a_model_of_which_nothing_is_understood_is_refused_with_a_reason(kind, told):
    model = kind()
    refused = pytest.raises(ValueError, match=f"no attention of {type(model).__name__} was recorded: .*{told}")
    with torch.no_grad(), refused, capture(model):
        model(torch.randn(B, N, DIM))
