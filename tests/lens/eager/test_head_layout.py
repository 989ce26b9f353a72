"""Which of the dims before a matrix are the batch, and which are the heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import ablate, ablation_importance, capture
from regard.lens.eager.head_layout import (
    HeadLayout,
    as_matrix,
    common_batch_dims,
    head_count,
    merged_batch_dims,
    permute_batch_dims,
    replace_heads,
    to_heads_function,
    with_batch_dims,
)
from regard.ops.terms.masks import Causal
from tests.lens.eager.written_out import (
    DIM,
    B,
    D,
    H,
    Layer,
    N,
    close,
    einsum,
    einsum_by_tokens,
    flat_throughout,
    hidden,
    nano_gpt,
    values_first,
    watched,
)
from tests.lens.sdpa_layers import assert_close

HEADS = 4


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


def test_heads_that_are_layers_of_their_own_are_single_heads():
    model = Heads().eval()
    with capture(model) as tape, torch.no_grad():
        model(torch.randn(4, N, DIM))
    assert tape.layers == ["heads.0", "heads.1"]
    for name, layer in zip(tape.layers, model.heads, strict=True):
        assert tape[name].shape == (4, 1, N, N)
        close(tape[name], layer.found)


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


def test_heads_are_counted_in_ablation_importance():
    model = nn.Sequential(Layer(nano_gpt), Layer(einsum)).eval()
    x = torch.randn(B, N, DIM)
    costs = ablation_importance(model, lambda: model(x).square().mean())
    assert {name: cost.shape for name, cost in costs.items()} == {"0": (H,), "1": (H,)}


class Folded(nn.Module):
    """Calls the kernel with heads within the batch, or before windows, as a subclass rearranges them."""

    num_heads = HEADS

    def forward(self, x, mask=None):
        q, k, v = self.rearrange(x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))  # 3 of b h n d
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class InBatch(Folded):
    def rearrange(self, x):
        return x.flatten(1, 2)


class BeforeWindows(Folded):
    def rearrange(self, x):
        return x.unflatten(3, (3, -1))  # windows of 3 tokens


@pytest.mark.parametrize("kind", [InBatch, BeforeWindows])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_a_kernel_call_may_be_in_the_batch_or_before_windows(kind, masked):
    x, model = torch.randn(2, 9, 3 * HEADS * 4), kind()
    q, k, _ = model.rearrange(x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))
    sees = torch.rand(*q.shape[:-2], q.shape[-2], q.shape[-2]) < 0.7
    mask = sees | torch.eye(q.shape[-2], dtype=torch.bool) if masked else None
    with torch.no_grad(), capture(model, values=True) as tape:
        out = model(x, mask)
    scores = q @ k.mT / 2
    truth = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    truth = truth.unflatten(0, (2, HEADS)) if kind is InBatch else truth.transpose(1, 2).flatten(0, 1)
    assert tape[0].shape[1] == HEADS
    assert_close(tape[0], truth.double())
    with torch.no_grad(), ablate(model, {"": [1]}):
        heads = model(x, mask)
    heads, before = (y.unflatten(0, (2, HEADS)) if kind is InBatch else y for y in (heads, out))
    assert not heads[:, 1].any()
    assert torch.equal(heads[:, [0, 2, 3]], before[:, [0, 2, 3]])


@pytest.mark.parametrize(
    ("lead", "heads", "first", "layout"),
    [
        ((6,), 3, False, ((2, 3), 1)),
        ((6,), 3, True, ((3, 2), 0)),
        ((6,), None, False, ((6, 1), 1)),
        ((), None, False, ((1, 1), 1)),
        ((2, 3), 3, False, ((2, 3), 1)),
        ((2, 3), None, False, ((2, 3), 1)),
        ((3, 2), 3, False, ((3, 2), 0)),  # heads before the batch
        ((2, 3, 5), 3, False, ((2, 3, 5), 1)),  # heads before windows
        ((2, 3, 5), 15, False, ((2, 15), 1)),  # groups of heads
        ((2, 3, 5), 7, False, ((2, 3, 5), 2)),
    ],
)
def test_the_dim_of_the_heads_is_found_by_their_number(lead, heads, first, layout):
    assert HeadLayout.of(lead, heads, first) == (torch.Size(layout[0]), layout[1])


@pytest.mark.parametrize(("batch_dims", "heads"), [((6,), 3), ((2, 3), 3), ((3, 2), 3), ((2, 3, 5), 3)])
def test_matrices_that_broadcast_are_rearranged_like_whole_ones(batch_dims, heads):
    size, layout = torch.Size(batch_dims), HeadLayout.of(batch_dims, heads, first=False)
    whole = torch.randn(*batch_dims, 4, 7)
    to_heads = to_heads_function(size, heads)
    rearranged = to_heads(whole)
    assert rearranged.shape == (whole[..., 0, 0].numel() // heads, heads, 4, 7)
    one = whole[..., :1, :].mean(tuple(range(len(batch_dims))), keepdim=True)
    if len(batch_dims) > 1:
        torch.testing.assert_close(layout.of_matrices(one) + rearranged, to_heads(whole + one))
    assert torch.equal(replace_heads(whole, -rearranged, to_heads), -whole)


def test_a_single_matrix_is_one_head_of_one_batch_row():
    assert to_heads_function(torch.Size(()), None)(torch.randn(4, 7)).shape == (1, 1, 4, 7)


def module_with(**attributes):
    part = nn.Module()
    vars(part).update(attributes)
    return part


@pytest.mark.parametrize(
    ("parts", "matrices", "heads"),
    [
        ([("layer", module_with(num_heads=3))], 6, 3),
        ([("layer", module_with(n_head=3))], 6, 3),
        ([("layer", module_with(num_heads=4))], 6, None),
        ([("layer", module_with(num_heads="3"))], 6, None),
        ([("layer", module_with(num_heads=3)), ("layer.core", module_with())], 6, 3),
        ([("layer", module_with(num_heads=3)), ("layer.heads.0", module_with())], 6, None),
        ([("a", module_with(heads=3)), ("a.b", module_with()), ("a.b.c", module_with())], 6, None),
    ],
)
def test_the_number_of_heads_is_an_attribute_of_the_layer_or_its_parent(parts, matrices, heads):
    assert head_count(parts, matrices) == heads


@pytest.mark.parametrize(
    ("args", "kwargs", "out", "dims"),
    [
        ((torch.zeros(2, 3, 5, 4), 0, 1), {}, torch.zeros(6, 5, 4), (2, 3)),
        ((torch.zeros(2, 3, 5, 4),), {}, torch.zeros(2, 15, 4), None),
        ((torch.zeros(3, 5, 4),), {}, torch.zeros(3, 20), None),
        (([torch.zeros(2, 5)] * 3,), {}, torch.zeros(6, 5), (3, 0)),
        (([torch.zeros(2, 5)] * 3, 1), {}, torch.zeros(2, 15), None),
        (([torch.zeros(2, 5)] * 3,), {"dim": 1}, torch.zeros(2, 15), None),
        ((), {}, torch.zeros(1), None),
    ],
)
def test_merged_dims_are_the_first_two_of_four_or_the_parts_of_a_concatenation(args, kwargs, out, dims):
    assert merged_batch_dims(args, kwargs, out) == dims


def test_batch_dims_may_be_split_joined_and_permuted():
    x = torch.randn(6, 4, 7)
    two, one = torch.Size((2, 3)), torch.Size((6,))
    assert torch.equal(with_batch_dims(x, one, two), x.view(2, 3, 4, 7))
    assert torch.equal(with_batch_dims(x.view(2, 3, 4, 7), two, one), x)
    assert torch.equal(with_batch_dims(x[:1], one, two), x[:1][None])
    assert torch.equal(with_batch_dims(x[0], one, two), x[0])
    assert torch.equal(with_batch_dims(x.view(2, 3, 4, 7)[:, :1], two, one), x[[0, 0, 0, 3, 3, 3]])
    assert torch.equal(permute_batch_dims(x.view(2, 3, 4, 7), (1, 0)), x.view(2, 3, 4, 7).transpose(0, 1))
    assert common_batch_dims(torch.Size((2, 1)), torch.Size((1, 3))) == two
    assert as_matrix(x[0, 0]).shape == (1, 7)
