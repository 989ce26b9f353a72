"""Attention that models write out themselves, in the ways people write it."""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import ablate, capture, importance, rollout
from regard.lens.eager.symbolic_scores import Scores, SoftmaxOutput
from regard.ops.terms.masks import Causal
from tests.lens.eager.written_out import (
    CAUSAL,
    DIM,
    B,
    D,
    H,
    Layer,
    N,
    annotated,
    attention,
    close,
    distances,
    einsum,
    hidden,
    in_place,
    nano_gpt,
    watched,
)


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
def test_it_is_seen_in_terms(attention):
    layer = Layer(attention).eval()
    _, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert told.call.bias is None
    assert told.call.q.shape == (B, H, N, D)


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


CHANGED = "no attention of Layer was recorded: .* the weights that it multiplies with v are not the softmax"


def test_a_mask_after_the_softmax_is_a_term():
    def halved(q, k, v):
        weights = (q @ k.mT).softmax(-1).masked_fill(distances() < 0, 0.0)
        return weights @ v, weights

    layer = Layer(halved).eval()
    tape, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert told.call.mask == Causal()
    assert tape.changed == {"": "masked"}


@pytest.mark.parametrize("given", [{}, {"hard": True}, {"tau": 0.5, "dim": -1}])
def test_weights_that_are_drawn_are_shown_as_drawn(given):
    def drawn(q, k, v):
        weights = F.gumbel_softmax(q @ k.mT / 3, **given)
        return weights @ v, weights

    layer = Layer(drawn).eval()
    tape, told = watched(layer, torch.randn(B, N, DIM))
    close(told, layer.found)
    assert tape.changed == {"": "drawn at random"}


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


@pytest.fixture
def frozen():
    """Objects of other tests are not among `gc.get_objects()`."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("attention", CAUSAL, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("frozen")
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


def test_weights_of_an_earlier_product_are_a_call_of_their_own():
    def halved(q, k, v):
        weights = (q @ k.mT).softmax(-1) * 0.5
        return nano_gpt(q, k, weights @ v)

    layer = Layer(halved).eval()
    with capture(layer) as tape, torch.no_grad():
        layer(torch.randn(B, N, DIM))
    close(tape[1], layer.found)
    close(tape[0].entropy() * 0 + tape[0].received().sum(-1, keepdim=True) / N, torch.full((B, H, N), 0.5))


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
    tape, told = watched(layer, torch.randn(1, 64, DIM, dtype=dtype))
    bound = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-4, "rtol": 1e-2}
    torch.testing.assert_close(told[:], layer.found.float(), **bound)
    assert list(tape.changed) == [""]


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
