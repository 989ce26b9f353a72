"""Which of the dims before a matrix are the batch, and which are the heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import ablate, ablation_importance, capture
from regard.lens.eager.dim_origins import FEATURES, REPEATED, ROWS, UNKNOWN, Factor
from regard.lens.eager.given_layout import GivenLayout, LayoutMismatch
from regard.lens.eager.head_layout import (
    HeadLayout,
    LayerEvidence,
    as_matrix,
    choose_layout,
    common_batch_dims,
    head_count,
    permute_batch_dims,
    replace_heads,
    to_heads_function,
    with_batch_dims,
)
from regard.ops.terms.masks import Causal
from tests.lens.eager import head_styles
from tests.lens.eager.head_styles import MANY_HEADS, ONE_AT_A_TIME, ONE_HEAD, Attend, Kernel, ScaledDotProduct
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
    ("lead", "heads", "layout"),
    [
        ((2, 3), 3, ((2, 3), 1)),
        ((2, 3), None, ((2, 3), 1)),
        ((3, 2), 3, ((3, 2), 0)),  # heads before the batch
        ((2, 3, 5), 3, ((2, 3, 5), 1)),  # heads before windows
        ((2, 3, 5), 15, ((2, 15), 1)),  # groups of heads
        ((2, 3, 5), 7, ((2, 3, 5), 2)),
    ],
)
def test_the_dim_of_the_heads_is_found_by_their_number(lead, heads, layout):
    assert HeadLayout.of(lead, heads) == (torch.Size(layout[0]), layout[1])


def texts(n):
    return Factor(ROWS, n)


def features(n):
    return Factor(FEATURES, n)


@pytest.mark.parametrize(
    ("dims", "layout"),
    [
        ([(texts(2), features(3))], ((2, 3), 1)),
        ([(features(3), texts(2))], ((3, 2), 0)),
        ([(features(3),)], ((1, 3), 1)),
        ([(texts(2),), (features(3),), (texts(5),)], ((2, 3, 5), 1)),
        ([(texts(2),), (features(3),), (features(5),)], ((2, 15), 1)),
        ([(texts(2),), (features(3), Factor(REPEATED, 5))], ((2, 15), 1)),
        ([(texts(2),), (texts(5),), (features(3),)], ((10, 3), 1)),
        ([(features(3),), (texts(5),), (features(2),)], None),
        ([(texts(2),), (texts(5),)], None),
    ],
)
def test_heads_are_the_features_among_the_batch_dims(dims, layout):
    seen = HeadLayout.from_origins(dims)
    assert seen == (None if layout is None else (torch.Size(layout[0]), layout[1]))


@pytest.mark.parametrize(
    ("lead", "heads", "inputs", "layout", "is_guess"),
    [
        ((8,), 4, [(8, 10, 16)], ((8, 1), 1), False),  # as many texts as rows: no heads
        ((8,), 4, [(2, 10, 16)], ((2, 4), 1), False),  # texts times heads
        ((8,), 4, [(10, 2, 16)], ((2, 4), 1), False),  # the batch second
        ((8,), 4, [(10, 8, 16)], ((8, 1), 1), False),
        ((8,), 4, [(8, 10, 4), (2, 10, 16)], ((2, 4), 1), False),  # folded before it came to the layer
        ((8,), 4, [(3, 10, 16)], ((8, 1), 1), True),
        ((8,), 4, [], ((8, 1), 1), True),
        ((8,), None, [(8, 10, 16)], ((8, 1), 1), False),
        ((8,), None, [(2, 10, 16)], ((8, 1), 1), True),
        ((4,), 4, [], ((1, 4), 1), True),
        ((1,), 4, [], ((1, 1), 1), False),
        ((), None, [], ((1, 1), 1), False),
        ((1, 2), None, [], ((1, 2), 1), False),
        ((2, 1), None, [], ((2, 1), 1), False),
        ((1, 1, 2), None, [], ((1, 1, 2), 2), False),
        ((2, 3), 3, [], ((2, 3), 1), False),
        ((3, 2), 3, [], ((3, 2), 0), False),
        ((2, 3), None, [(2, 10, 16)], ((2, 3), 1), False),
        ((2, 3), None, [(3, 10, 16)], ((2, 3), 0), False),
        ((2, 3), None, [(7, 10, 16)], ((2, 3), 1), True),
        ((3, 3), 3, [(3, 10, 16)], ((3, 3), 1), True),
        ((2, 3, 5), 3, [], ((2, 3, 5), 1), False),
        ((2, 3, 5), None, [], ((2, 3, 5), 2), True),
    ],
)
def test_the_input_of_the_layer_tells_the_batch_from_the_heads(lead, heads, inputs, layout, is_guess):
    found, guess = choose_layout(lead, None, LayerEvidence(heads, tuple(map(torch.Size, inputs))))
    assert found == (torch.Size(layout[0]), layout[1])
    assert (guess is not None) == is_guess


def test_batch_rows_of_known_origin_are_never_heads():
    evidence = LayerEvidence(4, (torch.Size((2, 10, 16)),))  # which alone would tell of heads
    assert choose_layout((8,), [(texts(8),)], evidence).layout == (torch.Size((8, 1)), 1)
    assert choose_layout((8,), [(Factor(UNKNOWN, 8),)], evidence).layout == (torch.Size((2, 4)), 1)
    assert choose_layout((8,), [(texts(7),)], evidence).layout == (torch.Size((2, 4)), 1)  # origins of other matrices


def test_dims_that_the_scores_had_along_the_way_count():
    assert choose_layout((6,), None, LayerEvidence(3), finer=(2, 3)).layout == (torch.Size((2, 3)), 1)


@pytest.mark.parametrize(
    ("text", "lead", "heads", "layout"),
    [
        ("b i j", (2, 3), 3, ((6, 1), 1)),
        ("b h i j", (2, 3), None, ((2, 3), 1)),
        ("h b i j", (2, 3), None, ((2, 3), 0)),
        ("(b h) i j", (6,), 3, ((2, 3), 1)),
        ("(h b) i j", (6,), 3, ((3, 2), 0)),
        ("(b h=2) i j", (6,), 3, ((3, 2), 1)),
        ("(h=2 b) i j", (6,), None, ((2, 3), 0)),
    ],
)
def test_a_given_layout_is_taken(text, lead, heads, layout):
    found, guess = choose_layout(lead, None, LayerEvidence(heads, given=GivenLayout.parse(text)))
    assert (found, guess) == ((torch.Size(layout[0]), layout[1]), None)


@pytest.mark.parametrize(
    ("text", "lead", "heads", "message"),
    [
        ("b h i j", (6,), None, "layout='b h i j' has two batch dims, but its matrices have 1"),
        ("(b h) i j", (2, 3), None, "has one batch dim, but its matrices have 2"),
        ("(b h) i j", (6,), None, r"but their number is unknown; pass '\(b h=4\) i j'"),
        ("(h b) i j", (6,), 4, r"but 6 matrices are no multiple of 4 heads; pass '\(h=4 b\) i j'"),
    ],
)
def test_a_given_layout_that_does_not_fit_is_told_of(text, lead, heads, message):
    with pytest.raises(LayoutMismatch, match=message):
        choose_layout(lead, None, LayerEvidence(heads, given=GivenLayout.parse(text)))


def test_the_number_of_folded_heads_may_be_seen():
    given = LayerEvidence(given=GivenLayout.parse("(b h) i j"))
    assert choose_layout((6,), [(texts(2), features(3))], given).layout == (torch.Size((2, 3)), 1)


@pytest.mark.parametrize(
    ("batch_dims", "layout"),
    [
        ((6,), ((2, 3), 1)),
        ((6,), ((3, 2), 0)),
        ((2, 3), ((2, 3), 1)),
        ((3, 2), ((3, 2), 0)),
        ((2, 3, 5), ((2, 3, 5), 1)),
    ],
)
def test_matrices_that_broadcast_are_rearranged_like_whole_ones(batch_dims, layout):
    size, layout = torch.Size(batch_dims), HeadLayout(torch.Size(layout[0]), layout[1])
    whole = torch.randn(*batch_dims, 4, 7)
    to_heads = to_heads_function(size, layout)
    rearranged = to_heads(whole)
    assert rearranged.shape == (whole[..., 0, 0].numel() // 3, 3, 4, 7)
    one = whole[..., :1, :].mean(tuple(range(len(batch_dims))), keepdim=True)
    if len(batch_dims) > 1:
        torch.testing.assert_close(layout.of_matrices(one) + rearranged, to_heads(whole + one))
    assert torch.equal(replace_heads(whole, -rearranged, to_heads), -whole)


def test_a_single_matrix_is_one_head_of_one_batch_row():
    assert to_heads_function(torch.Size(()), HeadLayout.one_head(()))(torch.randn(4, 7)).shape == (1, 1, 4, 7)


def module_with(**attributes):
    part = nn.Module()
    vars(part).update(attributes)
    return part


@pytest.mark.parametrize(
    ("parts", "heads"),
    [
        ([("layer", module_with(num_heads=3))], 3),
        ([("layer", module_with(head_num=3))], 3),
        ([("layer", module_with(num_heads="3"))], None),
        ([("layer", module_with(num_heads=3)), ("layer.core", module_with())], 3),
        ([("layer", module_with(num_heads=3)), ("layer.heads.0", module_with())], None),
        ([("a", module_with(heads=3)), ("a.b", module_with()), ("a.b.c", module_with())], None),
    ],
)
def test_the_number_of_heads_is_an_attribute_of_the_layer_or_its_parent(parts, heads):
    assert head_count(parts) == heads


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


every_batch = pytest.mark.parametrize("batch", [head_styles.H, 2 * head_styles.H, 3, 1])
every_name = pytest.mark.parametrize("name", ["num_heads", "head_num", None])


def seen(model, batch):
    x = torch.randn(batch, head_styles.N, head_styles.DIM)
    with torch.no_grad():
        expected = model(x)
        with capture(model) as tape:
            out = model(x)
    assert torch.equal(out, expected)
    assert not tape.guessed
    return tape


@every_batch
@pytest.mark.parametrize("product", [ScaledDotProduct, Kernel])
@pytest.mark.parametrize("attention", ONE_AT_A_TIME, ids=lambda f: f.__name__)
def test_batch_rows_of_a_head_at_a_time_are_no_heads(attention, product, batch):
    model = Attend(attention, product=product)
    tape = seen(model, batch)
    assert {A.shape[:2] for A in tape.values()} == {(batch, 1)}
    rows = torch.cat([A[:].flatten(1, 2) for A in tape.values()], 1)
    torch.testing.assert_close(rows, model.found.flatten(1, 2), atol=1e-6, rtol=1e-5)


@every_batch
@every_name
@pytest.mark.parametrize("attention", ONE_HEAD, ids=lambda f: f.__name__)
def test_batch_rows_of_a_single_head_are_no_heads(attention, name, batch):
    model = Attend(attention, name=name)
    (A,) = seen(model, batch).values()
    close(A, model.found)


@every_batch
@every_name
@pytest.mark.parametrize("attention", MANY_HEADS, ids=lambda f: f.__name__)
def test_heads_that_were_split_off_the_features_are_heads(attention, name, batch):
    model = Attend(attention, name=name)
    (A,) = seen(model, batch).values()
    close(A, model.found)
