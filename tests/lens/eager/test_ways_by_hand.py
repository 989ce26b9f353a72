"""Attention written by hand in many ways: each is shown as a float64 run of the same code has it.

A way is a function of q, k and v, `b h n d`, that returns the averages, `b h i d`, and the weights that it multiplied
with the values, `b h i j`.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import Tape, ablate, capture, importance

B, H, N, D = 2, 3, 7, 4
DIM, SCALE = H * D, D**-0.5


class Layer(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.num_heads, self.way, self.found = H, way, None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed, found = self.way(q, k, v)
        self.found = found.detach()
        return self.out(mixed.transpose(1, 2).flatten(2))


class OneText(Layer):
    """One text without a batch dim and one head, as in scripts: q, k and v are `n d`."""

    def forward(self, x):
        q, k, v = self.qkv(x[0]).chunk(3, -1)
        mixed, found = self.way(q / 2, k, v)
        self.found = found.detach()[None, None]
        return self.out(mixed)


def texts():
    torch.manual_seed(1)
    return torch.randn(B, N, DIM)


def truth_of(layer, x):
    """The weights of the same code in float64."""
    exact = type(layer)(layer.way).double()
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    with torch.no_grad():
        exact(x.double())
    return exact.found


def capture_equal(layer, x, **options):
    """A tape of the layer, whose output is equal to the bit."""
    with torch.no_grad():
        want = layer(x)
        with capture(layer, **options) as tape:
            got = layer(x)
    assert torch.equal(got, want)
    return tape


def check(layer):
    x = texts()
    tape = capture_equal(layer, x)
    (A,) = tape.values()
    truth = truth_of(layer, x)
    assert A.shape == truth.shape
    assert (A.dense() - truth).abs().max() < 2e-4
    return A


def scores(q, k):
    return q @ k.mT * SCALE


def later():
    """True where a key comes after the query."""
    return torch.ones(N, N, dtype=torch.bool).triu(1)


# --- A softmax by hand ------------------------------------------------------------------------------------------------


def exp_over_sum(q, k, v):
    e = scores(q, k).exp()
    a = e / e.sum(-1, keepdim=True)
    return a @ v, a


def exp_over_sum_below_the_maximum(q, k, v):
    s = scores(q, k)
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    a = e / (e.sum(-1, keepdim=True) + 1e-9)
    return a @ v, a


def exp_in_place(q, k, v):
    a = scores(q, k)
    a -= a.amax(-1, keepdim=True)
    a.exp_()
    a /= a.sum(-1, keepdim=True)
    return a @ v, a


def exp_times_a_mask(q, k, v):
    e = scores(q, k).exp() * (~later()).to(q.dtype)
    a = e / e.sum(-1)[..., None]
    return a @ v, a


def exp_filled_with_zeros(q, k, v):
    e = scores(q, k).exp().masked_fill(later(), 0.0)
    a = e * e.sum(-1, keepdim=True).reciprocal()
    return a @ v, a


def exp_below_a_diagonal(q, k, v):
    e = torch.tril(torch.exp(scores(q, k)))
    a = e / e.sum(-1, keepdim=True)
    return a @ v, a


def exp_normalized(q, k, v):
    a = F.normalize(scores(q, k).exp(), p=1, dim=-1)
    return a @ v, a


def exp_with_keys_first(q, k, v):
    e = (k @ q.mT * SCALE).exp()
    a = e / e.sum(-2, keepdim=True)
    return a.mT @ v, a.mT


def exp_of_other_scores(q, k, v):
    e = torch.tanh(scores(q, k)).exp()
    a = e / e.sum(-1, keepdim=True)
    return a @ v, a


def sum_after_the_product(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    total = e.sum(-1, keepdim=True)
    return (e @ v) / total, e / total


def sum_after_the_product_in_place(q, k, v):
    e = scores(q, k).masked_fill(later(), -torch.inf).exp()
    total = e.sum(-1, keepdim=True)
    return torch.matmul(e, v).div_(total), e / total


def exp_of_log_softmax(q, k, v):
    a = F.log_softmax(scores(q, k), dim=-1).exp()
    return a @ v, a


def exp_of_special_log_softmax_of_other_scores(q, k, v):
    a = torch.special.log_softmax(torch.tanh(scores(q, k)), -1).exp()
    return a @ v, a


def exp_of_log_softmax_with_keys_first(q, k, v):
    a = (k @ q.mT * SCALE).log_softmax(-2).exp()
    return a.mT @ v, a.mT


def logsumexp(q, k, v):
    s = scores(q, k)
    a = torch.exp(s - torch.logsumexp(s, -1, keepdim=True))
    return a @ v, a


def special_softmax(q, k, v):
    a = torch.special.softmax(scores(q, k), -1)
    return a @ v, a


def softmax_module(q, k, v):
    a = nn.Softmax(dim=-1)(torch.matmul(q, k.permute(0, 1, 3, 2)).div(math.sqrt(D)))
    return torch.matmul(a, v), a


def softmin(q, k, v):
    a = F.softmin(-scores(q, k), dim=-1)
    return a @ v, a


def softmin_of_distances(q, k, v):
    a = F.softmin(torch.cdist(q, k).square() * SCALE, dim=-1)
    return a @ v, a


SOFTMAX = (
    exp_over_sum,
    exp_over_sum_below_the_maximum,
    exp_in_place,
    exp_times_a_mask,
    exp_filled_with_zeros,
    exp_below_a_diagonal,
    exp_normalized,
    exp_with_keys_first,
    sum_after_the_product,
    sum_after_the_product_in_place,
    exp_of_log_softmax,
    exp_of_log_softmax_with_keys_first,
    logsumexp,
    special_softmax,
    softmax_module,
    softmin,
)
OF_OTHER_SCORES = (exp_of_other_scores, exp_of_special_log_softmax_of_other_scores, softmin_of_distances)


def named(way):
    return way.__name__


@pytest.mark.parametrize("way", SOFTMAX, ids=named)
def test_a_softmax_by_hand_is_a_softmax_of_queries_and_keys(way):
    A = check(Layer(way))
    assert repr(A.call.normalize) == "Softmax()"
    assert A.call.bias is None
    assert A.call.q.shape == (B, H, N, D)


@pytest.mark.parametrize("way", OF_OTHER_SCORES, ids=named)
def test_a_softmax_by_hand_of_other_scores_stores_them(way):
    A = check(Layer(way))
    assert A.call.bias is not None


# --- Rows that need not sum to 1 --------------------------------------------------------------------------------------


def softmax_plus_one(q, k, v):
    e = scores(q, k).exp()
    a = e / (1 + e.sum(-1, keepdim=True))
    return a @ v, a


def softmax_plus_one_below_the_maximum(q, k, v):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    a = e / (e.sum(-1, keepdim=True) + torch.exp(-top))
    return a @ v, a


def softmax_plus_one_of_shifted_rows(q, k, v):
    """The one is not shifted with the row: a sink that differs by row."""
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    a = e / (e.sum(-1, keepdim=True) + 1)
    return a @ v, a


def a_sink_per_head(q, k, v):
    e = scores(q, k).exp()
    a = e / (e.sum(-1, keepdim=True) + torch.linspace(0.2, 2, H, dtype=q.dtype).exp()[:, None, None])
    return a @ v, a


def sigmoid(q, k, v):
    a = torch.sigmoid(scores(q, k) - math.log(N))
    return a @ v, a


def sigmoid_module(q, k, v):
    a = nn.Sigmoid()(scores(q, k))
    return a @ v, a


def expit_in_place(q, k, v):
    a = scores(q, k).sigmoid_()
    return a @ v, a


def sigmoid_with_a_bias_per_head(q, k, v):
    a = torch.special.expit(scores(q, k) + torch.linspace(-2, 1, H, dtype=q.dtype)[:, None, None])
    return a @ v, a


def sigmoid_times_a_mask(q, k, v):
    a = torch.sigmoid(scores(q, k)).masked_fill(later(), 0.0)
    return a @ v, a


def relu(q, k, v):
    a = F.relu(scores(q, k)) / N
    return a @ v, a


def relu_by_a_clamp(q, k, v):
    a = scores(q, k).clamp(min=0)
    return a @ v, a


def relu_in_place(q, k, v):
    a = scores(q, k).relu_()
    a.div_(N)
    return a @ v, a


def relu_of_shifted_scores(q, k, v):
    a = torch.relu(scores(q, k) + 0.3) * 0.5
    return a @ v, a


def squared_relu(q, k, v):
    a = F.relu(scores(q, k) / N) ** 2
    return a @ v, a


def squared_relu_below_a_diagonal(q, k, v):
    a = F.relu(scores(q, k)).square().tril() / N
    return a @ v, a


def relu_times_itself(q, k, v):
    a = torch.relu(scores(q, k).masked_fill(later(), -torch.inf))
    a = a * a
    return a @ v, a


OTHER_ROWS = {
    softmax_plus_one: "SinkSoftmax",
    softmax_plus_one_below_the_maximum: "SinkSoftmax",
    softmax_plus_one_of_shifted_rows: "SinkSoftmax",
    a_sink_per_head: "SinkSoftmax",
    sigmoid: "Sigmoid",
    sigmoid_module: "Sigmoid",
    expit_in_place: "Sigmoid",
    sigmoid_with_a_bias_per_head: "Sigmoid",
    sigmoid_times_a_mask: "Sigmoid",
    relu: "Rectified",
    relu_by_a_clamp: "Rectified",
    relu_in_place: "Rectified",
    relu_of_shifted_scores: "Rectified",
    squared_relu: "Rectified",
    squared_relu_below_a_diagonal: "Rectified",
    relu_times_itself: "Rectified",
}


@pytest.mark.parametrize("way", OTHER_ROWS, ids=named)
def test_weights_that_are_no_softmax_have_their_own_normalizer(way):
    A = check(Layer(way))
    assert type(A.call.normalize).__name__ == OTHER_ROWS[way]
    assert A.call.bias is None
    assert A.call.q.any()


def test_the_one_of_softmax_plus_one_is_a_sink_of_zero():
    for way in (softmax_plus_one, softmax_plus_one_below_the_maximum):
        assert repr(check(Layer(way)).call.normalize) == "SinkSoftmax(0.0)"


def test_weights_that_are_no_softmax_are_saved(tmp_path):
    tape = capture_equal(Layer(squared_relu), texts())
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    torch.testing.assert_close(again[0][:], tape[0][:])


# --- Products by other functions --------------------------------------------------------------------------------------


def three_factors(q, k, v):
    """The average and the output projection in one einsum."""
    a = scores(q, k).softmax(-1)
    projection = torch.eye(DIM, dtype=q.dtype).view(DIM, H, D)
    return torch.einsum("bhij,bhjd,chd->bic", a, v, projection).unflatten(-1, (H, D)).transpose(1, 2), a


def bilinear(q, k, v):
    """Luong's general score in one einsum."""
    between = torch.eye(D, dtype=q.dtype) + 0.1
    a = torch.einsum("bhid,de,bhje->bhij", q, between, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", a, v), a


def scaled_in_the_einsum(q, k, v):
    a = torch.einsum("bhid,bhjd,h->bhij", q, k, torch.linspace(0.1, 1, H, dtype=q.dtype)).softmax(-1)
    return torch.einsum("bhjd,bhij->bhid", v, a), a


def sublists(q, k, v):
    a = (torch.einsum(q, [0, 1, 2, 4], k, [0, 1, 3, 4], [0, 1, 2, 3]) * SCALE).softmax(-1)
    return torch.einsum(a, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]), a


def linear_algebra(q, k, v):
    a = torch.linalg.matmul(q * SCALE, k.mT).softmax(-1)
    return torch.linalg.matmul(a, v), a


def elementwise(q, k, v):
    a = ((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * SCALE).softmax(-1)
    return a @ v, a


def distances(q, k, v):
    a = (-(torch.cdist(q, k) ** 2) * SCALE).softmax(-1)
    return a @ v, a


def into_a_buffer(q, k, v):
    s = torch.empty(B, H, N, N, dtype=q.dtype)
    torch.matmul(q, k.mT, out=s)
    s *= SCALE
    a = torch.softmax(s, -1)
    return a @ v, a


def folded_heads(q, k, v):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    s = torch.baddbmm(torch.empty(B * H, N, N, dtype=q.dtype), q, k.mT, beta=0, alpha=SCALE)
    a = s.float().softmax(-1).to(q.dtype)
    out = torch.baddbmm(torch.empty_like(v), a, v, beta=0)
    return out.unflatten(0, (B, H)), a.unflatten(0, (B, H))


PRODUCTS = (
    three_factors,
    bilinear,
    scaled_in_the_einsum,
    sublists,
    linear_algebra,
    elementwise,
    distances,
    into_a_buffer,
    folded_heads,
)


@pytest.mark.parametrize("way", PRODUCTS, ids=named)
def test_products_by_other_functions_are_products(way):
    check(Layer(way))


def test_einops_is_seen():
    einops = pytest.importorskip("einops")

    def by_names(q, k, v):
        a = (einops.einsum(q, k, "b h i d, b h j d -> b h i j") * SCALE).softmax(-1)
        return einops.einsum(a, v, "b h i j, b h j d -> b h i d"), a

    check(Layer(by_names))


def tensordot(q, k, v):
    a = torch.tensordot(q, k, dims=([1], [1])).softmax(-1)
    return torch.tensordot(a, v, dims=1), a


def linear(q, k, v):
    a = F.linear(q, k).softmax(-1)
    return F.linear(a, v.T), a


def values_by_linear(q, k, v):
    a = (q @ k.T).softmax(-1)
    return F.linear(a, v.T), a


def values_first_by_linear(q, k, v):
    a = (q @ k.T).softmax(-1)
    return F.linear(v.T, a).T, a


def inner(q, k, v):
    a = torch.inner(q, k).softmax(-1)
    return torch.inner(a, v.T), a


def several_matrices(q, k, v):
    a = (q @ k.T).softmax(-1)
    return torch.linalg.multi_dot([a, v, torch.eye(DIM, dtype=q.dtype)]), a


def implicit_einsum(q, k, v):
    a = torch.einsum("id,jd", q, k).softmax(-1)
    return torch.einsum("ij,jk", a, v), a


def added_to_a_matrix(q, k, v):
    a = torch.addmm(torch.zeros(N, N, dtype=q.dtype).masked_fill(later(), -torch.inf), q, k.T, alpha=0.5).softmax(-1)
    return torch.addmm(torch.zeros_like(v), a, v, beta=0), a


OF_ONE_TEXT = (
    tensordot,
    linear,
    values_by_linear,
    values_first_by_linear,
    inner,
    several_matrices,
    implicit_einsum,
    added_to_a_matrix,
)


@pytest.mark.parametrize("way", OF_ONE_TEXT, ids=named)
def test_products_of_two_matrices_are_products(way):
    A = check(OneText(way))
    assert A.call.bias is None


# --- Scores of all kinds ----------------------------------------------------------------------------------------------


def top_keys(q, k, v):
    s = scores(q, k)
    least = s.topk(4, -1).values[..., -1:]
    a = s.masked_fill(s < least, -torch.finfo(s.dtype).max).softmax(-1)
    return a @ v, a


def mixed_before(q, k, v):
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    a = torch.einsum("bhij,hg->bgij", scores(q, k), mix).softmax(-1)
    return a @ v, a


def capped(q, k, v):
    a = (5 * torch.tanh(scores(q, k) / 5)).softmax(-1)
    return a @ v, a


def alibi(q, k, v):
    slopes, at = 2.0 ** -torch.arange(1, H + 1, dtype=q.dtype), torch.arange(N)
    s = scores(q, k) + slopes[:, None, None] * (at - at[:, None]).clamp(max=0)
    a = (s + torch.full((N, N), -torch.inf, dtype=q.dtype).triu(1)).softmax(-1)
    return a @ v, a


def skewed(q, k, v):
    """Relative positions as in the Music Transformer."""
    table = torch.sin(torch.arange(N * D, dtype=q.dtype)).view(N, D)
    padded = F.pad(q @ table.mT, (1, 0))
    relative = padded.reshape(B, H, N + 1, N)[:, :, 1:]
    a = ((q @ k.mT + relative) * SCALE).masked_fill(later(), -torch.inf).softmax(-1)
    return a @ v, a


def in_place(q, k, v):
    s = q @ k.mT
    s /= math.sqrt(D)
    s += torch.full((N, N), -1e9, dtype=q.dtype).triu(1)
    s.sub_(0.5)
    a = s.softmax(-1)
    return a @ v, a


def scaled_before(q, k, v):
    a = F.softmax((q / D**0.25) @ (k / D**0.25).transpose(-1, -2), dim=-1)
    return a @ v, a


SCORES = (top_keys, mixed_before, capped, alibi, skewed, in_place, scaled_before)


@pytest.mark.parametrize("way", SCORES, ids=named)
def test_scores_of_all_kinds_are_seen(way):
    check(Layer(way))


def query_chunks(q, k, v):
    parts = [(scores(x, k)).softmax(-1) for x in q.split(4, 2)]
    return torch.cat([a @ v for a in parts], 2), torch.cat(parts, 2)


def test_chunks_of_queries_are_seen():
    layer, x = Layer(query_chunks), texts()
    tape = capture_equal(layer, x)
    shown = torch.cat([A.dense() for A in tape.values()], 2)
    assert (shown - truth_of(layer, x)).abs().max() < 2e-4


def window_by_unfold(q, k, v):
    """Five keys around each query, gathered."""
    keys, values = (F.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1) for x in (k, v))
    a = (torch.einsum("bhid,bhidw->bhiw", q, keys) * SCALE).softmax(-1)
    return torch.einsum("bhiw,bhidw->bhid", a, values), a


def test_gathered_windows_are_rows_of_their_own_keys():
    layer, x = Layer(window_by_unfold), texts()
    tape = capture_equal(layer, x)
    (A,) = tape.values()
    torch.testing.assert_close(A.dense().flatten().sort().values, layer.found.flatten().sort().values)


def average_kept_aside(q, k, v):
    a = scores(q, k).softmax(-1)
    a.mean(1)
    return a @ v, a


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        a = scores(q, k).softmax(-1)
        return a @ v, a

    @staticmethod
    def backward(ctx, grad, _):
        return grad, grad, grad


def by_an_autograd_function(q, k, v):
    return Whole.apply(q, k, v)


@pytest.mark.parametrize("way", [average_kept_aside, by_an_autograd_function], ids=named)
def test_other_styles_are_seen(way):
    check(Layer(way))


# --- What is no attention, and what is not known ----------------------------------------------------------------------


class CastWeights(nn.Module):
    """A feed-forward layer of one text with weights that it casts: products of tensors that are no parameters."""

    def __init__(self, activation):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(20, DIM)), nn.Parameter(torch.randn(DIM, 20))
        self.activation = activation

    def forward(self, x):
        hidden = self.activation(F.linear(x, self.up.to(torch.float64).float() * 0.9))
        return F.linear(hidden, self.down.to(torch.float64).float() * 1.1)


class Experts(nn.Module):
    """Feed-forward layers as one batch of products."""

    def __init__(self, activation):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, DIM, 20)), nn.Parameter(torch.randn(4, 20, DIM))
        self.activation = activation

    def forward(self, x):
        up, down = self.up.to(torch.float64).float(), self.down.to(torch.float64).float()
        return self.activation(x.expand(4, -1, -1) @ up) @ down


@pytest.mark.parametrize("kind", [CastWeights, Experts])
@pytest.mark.parametrize("activation", [F.relu, torch.sigmoid, lambda x: F.relu(x).square()])
def test_a_feed_forward_layer_is_no_attention(kind, activation):
    model = nn.ModuleList([kind(activation), Layer(special_softmax)])
    with torch.no_grad(), capture(model) as tape:
        model[0](torch.randn(N, DIM))
        model[1](texts())
    assert tape.layers == ["1"]
    assert not tape.unseen


def exponentials_that_are_not_divided(q, k, v):
    e = scores(q, k).exp()
    return e @ v, e


def exponentials_over_their_largest(q, k, v):
    e = scores(q, k).exp()
    a = e / e.amax(-1, keepdim=True)
    return a @ v, a


@pytest.mark.filterwarnings("ignore::regard.lens.CaptureWarning")
@pytest.mark.parametrize("way", [exponentials_that_are_not_divided, exponentials_over_their_largest], ids=named)
def test_exponentials_that_are_no_softmax_are_never_shown_as_one(way):
    model, x = nn.Sequential(Layer(way), Layer(special_softmax)), texts()
    tape = capture_equal(model, x)
    if "0" in tape.layers:
        assert (tape["0"].dense() - truth_of(model[0], x)).abs().max() < 2e-4
    else:
        assert [each.layer for each in tape.unseen] == ["0"]


# --- Ablation and gradients -------------------------------------------------------------------------------------------

CHANGED = (
    exp_over_sum,
    sum_after_the_product,
    exp_of_log_softmax,
    softmax_plus_one_of_shifted_rows,
    sigmoid,
    squared_relu,
    three_factors,
    sublists,
)


def without_head(way):
    """The way with zeros for the averages of head 1."""

    def changed(q, k, v):
        mixed, weights = way(q, k, v)
        return mixed * (torch.arange(H) != 1).view(-1, 1, 1), weights

    return changed


@pytest.mark.parametrize("way", CHANGED, ids=named)
def test_a_head_is_ablated(way):
    x = texts()
    with ablate(layer := Layer(way), {"": [1]}):
        out = layer(x)
    torch.testing.assert_close(out, Layer(without_head(way))(x))


@pytest.mark.parametrize("way", CHANGED, ids=named)
def test_gradients_of_heads_are_kept(way):
    kept = []

    def watched(q, k, v):
        mixed, weights = way(q, k, v)
        mixed.retain_grad()
        kept.append(mixed)
        return mixed, weights

    layer, x = Layer(watched), texts()
    with capture(layer, values=True, gradients=True) as tape:
        layer(x).square().sum().backward()
    torch.testing.assert_close(tape.extras(0).gradient, kept[0].grad)
    torch.testing.assert_close(tape[0].dense() @ tape.extras(0).v, kept[0].detach())
    with importance(layer) as found:
        layer(x).square().sum().backward()
    mixed = kept[1]
    torch.testing.assert_close(found[""], (mixed * mixed.grad).sum(-1).abs().sum((0, 2)).detach())


# --- torch.func -------------------------------------------------------------------------------------------------------


def one(q, k, v):
    return scores(q, k).softmax(-1) @ v


def one_causal(q, k, v):
    return scores(q, k).masked_fill(later(), -1e9).softmax(-1) @ v


def one_kernel(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def one_kernel_of_a_batch(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=~later())[0]


def one_by_exp(q, k, v):
    e = scores(q, k).exp()
    return e / e.sum(-1, keepdim=True) @ v


def softmax_of(q, k, v):
    return scores(q, k).softmax(-1)


def causal_softmax_of(q, k, v):
    return scores(q, k).masked_fill(later(), -torch.inf).softmax(-1)


ONE = {
    one: softmax_of,
    one_causal: causal_softmax_of,
    one_kernel: softmax_of,
    one_kernel_of_a_batch: causal_softmax_of,
    one_by_exp: softmax_of,
}
MAPS = {
    "heads in texts": lambda f: torch.vmap(torch.vmap(f)),
    "texts in heads": lambda f: torch.vmap(torch.vmap(f), in_dims=1, out_dims=1),
    "texts": lambda f: torch.vmap(f),
    "heads": lambda f: torch.vmap(f, in_dims=1, out_dims=1),
    "gradients of texts": lambda f: torch.vmap(torch.func.grad_and_value(lambda *qkv: f(*qkv).sum())),
    "derivatives": lambda f: lambda q, k, v: torch.func.jvp(lambda q: f(q, k, v), (q,), (q,))[0],
}


class Mapped(nn.Module):
    """An attention inside a transform of torch.func."""

    def __init__(self, f):
        super().__init__()
        self.f, self.num_heads = f, H

    def forward(self, q, k, v):
        return self.f(q, k, v)


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated")
@pytest.mark.parametrize("mapped", MAPS)
@pytest.mark.parametrize("function", ONE, ids=named)
def test_attention_inside_a_transform_of_torch_func_is_seen(function, mapped):
    if mapped in ("texts", "heads", "gradients of texts") and function is one_kernel_of_a_batch:
        pytest.skip("it takes one head")
    if mapped == "derivatives" and function in (one_kernel, one_kernel_of_a_batch):
        pytest.skip("PyTorch has no derivative of its kernel in forward mode")
    model = Mapped(MAPS[mapped](function))
    q, k, v = torch.randn(3, B, H, N, D)
    with capture(model) as tape:
        out = model(q, k, v)
    want = model(q, k, v)
    assert all(map(torch.equal, *((x if isinstance(x, tuple) else (x,)) for x in (out, want))))
    (A,) = tape.values()
    torch.testing.assert_close(A.dense(), ONE[function](q, k, v))


def test_keys_that_are_not_mapped_are_shared():
    model = Mapped(torch.vmap(torch.vmap(one, in_dims=(0, None, None))))
    q, k = torch.randn(B, H, N, D), torch.randn(B, N, D)
    with capture(model) as tape:
        model(q, k, k)
    torch.testing.assert_close(tape[0].dense(), softmax_of(q, k[:, None], k))


def reads_a_value(q, k, v):
    """A rule that looks at a factor cannot do so inside of a vmap."""
    s = scores(q, k)
    return (s * (s > 0).to(s.dtype)).softmax(-1) @ v


def test_scores_that_a_rule_would_look_at_are_stored():
    model = Mapped(torch.vmap(torch.vmap(reads_a_value)))
    q, k, v = torch.randn(3, B, H, N, D)
    with capture(model) as tape:
        model(q, k, v)
    torch.testing.assert_close(tape[0].dense(), scores(q, k).relu().softmax(-1))


def halved(q, k, v):
    return 0.5 * scores(q, k).softmax(-1) @ v


def clamped(q, k, v):
    return scores(q, k).softmax(-1).clamp(min=0.15) @ v


@pytest.mark.parametrize("function", [halved, clamped], ids=named)
def test_weights_that_are_changed_inside_a_vmap_are_the_final_ones(function):
    model = Mapped(torch.vmap(torch.vmap(function)))
    q, k, v = torch.randn(3, B, H, N, D)
    with capture(model) as tape:
        model(q, k, v)
    a = softmax_of(q, k, v)
    torch.testing.assert_close(tape[0].dense(), 0.5 * a if function is halved else a.clamp(min=0.15))
