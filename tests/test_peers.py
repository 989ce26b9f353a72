"""regard agrees with what its users already trust."""

import entmax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import (
    Added,
    Alibi,
    Blocks,
    Causal,
    Chunked,
    Cosine,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Dot,
    Entmax,
    Gaussian,
    Global,
    Hard,
    Near,
    Neighborhood,
    Padding,
    Prefix,
    Relative,
    Rule,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Tapered,
    Window,
    attend,
    weights,
)
from regard.ops.terms.biases import Bias
from regard.ops.terms.masks.mask_algebra import Mask

B, H, G, I, J, D, E = 2, 4, 2, 7, 13, 8, 5
BACKENDS = ("tiled", "reference")
close = torch.testing.assert_close


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(i: int = I, j: int = J, g: int = G, e: int = E) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(B, H, i, D, seed=1), numbers(B, g, j, D, seed=2), numbers(B, g, j, e, seed=3)


def keep(*shape: int) -> torch.Tensor:
    seen = numbers(*shape, seed=4) > 0
    seen[..., 0] = True
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
class TestScaledDotProductAttention:
    def test_plain_attention_is_equal(self, backend):
        q, k, v = qkv(g=H)
        close(attend(q, k, v, backend=backend), F.scaled_dot_product_attention(q, k, v))

    def test_bool_mask_has_the_same_polarity(self, backend):
        q, k, v = qkv(g=H)
        seen = keep(B, H, I, J)
        close(attend(q, k, v, mask=Dense(seen), backend=backend), F.scaled_dot_product_attention(q, k, v, seen))

    def test_float_mask_is_added(self, backend):
        q, k, v = qkv(g=H)
        values = numbers(B, H, I, J).masked_fill(~keep(B, H, I, J), float("-inf"))
        close(attend(q, k, v, bias=Added(values), backend=backend), F.scaled_dot_product_attention(q, k, v, values))

    def test_causal_is_is_causal_for_equal_lengths(self, backend):
        q, k, v = qkv(i=J, g=H)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        close(attend(q, k, v, mask=Causal(), backend=backend), expected)

    def test_grouped_heads_are_enable_gqa(self, backend):
        q, k, v = qkv()
        close(attend(q, k, v, backend=backend), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    def test_scale_is_the_scale_of_dot(self, backend):
        q, k, v = qkv(g=H)
        expected = F.scaled_dot_product_attention(q, k, v, scale=0.7)
        close(attend(q, k, v, score=Dot(scale=0.7), backend=backend), expected)

    @pytest.mark.parametrize("e", [1, 3, 17])
    def test_values_may_be_wider_or_narrower_than_keys(self, backend, e):
        q, k, v = qkv(g=H, e=e)
        close(attend(q, k, v, backend=backend), F.scaled_dot_product_attention(q, k, v))

    @pytest.mark.parametrize(("i", "j"), [(7, 13), (13, 7)])
    def test_top_left_causal_is_ours_at_offset_zero(self, backend, i, j):
        q, k, v = qkv(i=i, j=j, g=H)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        close(attend(q, k, v, mask=Causal(), offset=0, backend=backend), expected)

    def test_causal_is_bottom_right_for_unequal_lengths(self, backend):
        q, k, v = qkv(g=H)
        ours = attend(q, k, v, mask=Causal(), backend=backend)
        bottom_right = torch.ones(I, J, dtype=torch.bool).tril(J - I)
        close(ours, F.scaled_dot_product_attention(q, k, v, bottom_right))
        assert not torch.allclose(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def test_gradients_are_equal(self, backend):
        tensors = [x.requires_grad_() for x in qkv()]
        ours = torch.autograd.grad(attend(*tensors, backend=backend).sin().sum(), tensors)
        theirs = torch.autograd.grad(F.scaled_dot_product_attention(*tensors, enable_gqa=True).sin().sum(), tensors)
        close(ours, theirs)


class TestMultiheadAttention:
    def heads(self, batch_first: bool = True) -> tuple[nn.MultiheadAttention, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        module = nn.MultiheadAttention(H * D, H, batch_first=batch_first, dtype=torch.float64).eval()
        nn.init.normal_(module.in_proj_bias)
        return module, numbers(B, I, H * D, seed=5), numbers(B, J, H * D, seed=6)

    def projected(self, module: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        w, bias = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        pairs = zip((query, key, key), w, bias, strict=True)
        return [F.linear(x, a, c).unflatten(-1, (H, D)).transpose(1, 2) for x, a, c in pairs]

    def test_its_weights_are_ours(self):
        module, query, key = self.heads()
        q, k, v = self.projected(module, query, key)
        out, theirs = module(query, key, key, need_weights=True, average_attn_weights=False)
        close(weights(q, k).dense(), theirs)
        close(module.out_proj(attend(q, k, v).transpose(1, 2).flatten(2)), out)

    def test_its_averaged_weights_are_the_mean_over_heads(self):
        module, query, key = self.heads()
        q, k, _ = self.projected(module, query, key)
        close(weights(q, k).dense().mean(1), module(query, key, key)[1])

    def test_its_key_padding_mask_is_padding_negated(self):
        module, query, key = self.heads()
        q, k, _ = self.projected(module, query, key)
        lengths = torch.tensor([5, J])
        hidden = torch.arange(J) >= lengths[:, None]
        _, theirs = module(query, key, key, key_padding_mask=hidden, average_attn_weights=False)
        close(weights(q, k, mask=Padding(~hidden)).dense(), theirs)
        close(weights(q, k, mask=Padding(lengths)).dense(), theirs)

    def test_its_attn_mask_is_dense_negated(self):
        module, query, key = self.heads()
        q, k, _ = self.projected(module, query, key)
        seen = keep(B, H, I, J)
        _, theirs = module(query, key, key, attn_mask=~seen.flatten(0, 1), average_attn_weights=False)
        close(weights(q, k, mask=Dense(seen)).dense(), theirs)

    def test_both_its_masks_are_a_conjunction(self):
        module, query, key = self.heads()
        q, k, _ = self.projected(module, query, key)
        seen, hidden = keep(I, J), torch.arange(J) >= torch.tensor([[5], [J]])
        _, theirs = module(
            query, key, key, key_padding_mask=hidden, attn_mask=~seen, average_attn_weights=False, need_weights=True
        )
        close(weights(q, k, mask=Dense(seen) & Padding(~hidden)).dense(), theirs)


def masks(i: int, j: int) -> dict[str, Mask]:
    ids = torch.arange(max(i, j)) // 4
    return {
        "Causal": Causal(),
        "Window": Window(3),
        "Window one-sided": Window(before=4, after=1),
        "Dilated": Dilated(2, 3),
        "Chunked": Chunked(4),
        "Neighborhood": Neighborhood((1, max(i, j)), (1, 5)),
        "Diagonal": Diagonal(),
        "Prefix": Prefix(3),
        "Prefix per row": Prefix(torch.tensor([0, 5])),
        "Global": Global(2),
        "Global tuple": Global((1, 6)),
        "Global tensor": Global(torch.tensor([[0, 3], [2, 5]])),
        "Near": Near(numbers(B, H, i, seed=7).abs() * 4, 2.5),
        "Near per row": Near(torch.arange(i).double(), 1),
        "Padding": Padding((5, j)),
        "Padding keep": Padding(keep(B, j)),
        "Documents": Documents(ids[:i], ids[:j]),
        "Documents per batch row": Documents(
            torch.stack([ids[:i], ids[:i] // 2]), torch.stack([ids[:j], ids[:j] // 2])
        ),
        "Blocks": Blocks(keep(H, -(-i // 3), -(-j // 3)), 3),
        "Dense": Dense(keep(B, 1, i, j)),
        "Rule": Rule(lambda b, h, i, j: (i + 2 * j + h + b) % 3 > 0),
        "And Or Not": (Causal() | Prefix(2)) & ~Diagonal() & Padding((5, j)),
        "Empty rows": ~Global(3) & Causal(),
    }


def biases(i: int, j: int) -> dict[str, Bias]:
    return {
        "Alibi": Alibi(H),
        "Alibi slopes": Alibi(slopes=numbers(H)),
        "Relative t5": Relative.t5(numbers(H, 8), max_distance=10),
        "Relative t5 one-sided": Relative.t5(numbers(H, 8), max_distance=10, bidirectional=False),
        "Relative shaw": Relative.shaw(numbers(7, D)),
        "Relative shaw per head": Relative.shaw(numbers(H, 7, D), scale=0.4),
        "Gaussian": Gaussian(numbers(B, H, i).abs() * 4, 2.0),
        "Gaussian wide": Gaussian(torch.arange(i).double(), numbers(B, H, 1).abs() + 1),
        "Added": Added(numbers(H, i, j).masked_fill(~keep(H, i, j), float("-inf"))),
        "Sum": Alibi(H) + Added(numbers(1, i, j)) + Relative.shaw(numbers(5, D)),
    }


def public(kind: type) -> set[str]:
    found = {name: getattr(regard, name) for name in regard.__all__}
    return {name for name, x in found.items() if isinstance(x, type) and issubclass(x, kind) and x is not kind}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexAttention:
    def flex(self, q, k, v, mask_mod=None, score_mod=None):
        blocks = None
        if mask_mod is not None:
            blocks = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=blocks, score_mod=score_mod, enable_gqa=True)

    def test_every_mask_and_bias_is_compared(self):
        assert public(Mask) == {name.split()[0] for name in masks(I, J)} & public(Mask)
        assert public(Bias) == {name.split()[0] for name in biases(I, J)} & public(Bias)

    @pytest.mark.libraries
    @pytest.mark.parametrize("name", sorted(public(Mask)))
    def test_a_mask_is_a_mask_mod_as_it_stands(self, name):
        mask = masks(J, J)[name]
        q, k, v = qkv(i=J)
        close(attend(q, k, v, mask=mask), self.flex(q, k, v, mask_mod=mask))

    @pytest.mark.libraries
    @pytest.mark.parametrize("name", [name for name in masks(I, J) if name != "Neighborhood"])  # which is of one grid
    def test_a_bound_mask_is_a_mask_mod_for_unequal_lengths(self, name):
        mask = masks(I, J)[name]
        q, k, v = qkv()
        close(attend(q, k, v, mask=mask), self.flex(q, k, v, mask_mod=mask.bind(q, k, J - I)))

    @pytest.mark.libraries
    @pytest.mark.parametrize("name", [name for name in biases(J, J) if "shaw" not in name and name != "Sum"])
    def test_a_bias_is_a_score_mod_as_it_stands(self, name):
        bias = biases(J, J)[name]
        q, k, v = qkv(i=J)
        theirs = self.flex(q, k, v, score_mod=lambda s, b, h, i, j: s + bias(b, h, i, j))
        close(attend(q, k, v, bias=bias), theirs, atol=1e-6, rtol=1e-6)

    @pytest.mark.libraries
    @pytest.mark.parametrize("name", biases(I, J))
    def test_a_bound_bias_is_a_score_mod_for_unequal_lengths(self, name):
        bias = biases(I, J)[name]
        q, k, v = qkv()
        bound = bias.bind(q, k, J - I)
        theirs = self.flex(q, k, v, score_mod=lambda s, b, h, i, j: s + bound(b, h, i, j))
        close(attend(q, k, v, bias=bias), theirs, atol=1e-6, rtol=1e-6)

    @pytest.mark.libraries
    def test_the_offset_may_be_a_tensor(self):
        q, k, v = qkv()
        mask, bias = Causal() & Window(4), Relative.shaw(numbers(7, D))
        seen, bound = mask.bind(q, k, torch.tensor(3)), bias.bind(q, k, torch.tensor(3))
        theirs = self.flex(q, k, v, mask_mod=seen, score_mod=lambda s, b, h, i, j: s + bound(b, h, i, j))
        close(attend(q, k, v, mask=mask, bias=bias, offset=3), theirs)

    @pytest.mark.libraries
    def test_longer_queries_than_keys_agree(self):
        q, k, v = qkv(i=J, j=I)
        theirs = self.flex(q, k, v, mask_mod=Causal().bind(q, k, I - J))
        close(attend(q, k, v, mask=Causal()), theirs)
        assert (theirs[:, :, : J - I] == 0).all()

    def test_without_its_query_shaw_refuses(self):
        with pytest.raises(TypeError, match=r"bind\(q, k, offset\)"):
            Relative.shaw(numbers(7, D))(*torch.zeros(4, dtype=torch.long))


def of_scores(s: torch.Tensor, **terms) -> torch.Tensor:
    """The weights of scores given outright: keys are unit vectors, so that q . k is s itself."""
    unit = torch.eye(s.shape[-1], dtype=s.dtype).expand(*s.shape[:-2], -1, -1)
    return weights(s, unit, score=Dot(scale=1.0), **terms).dense()


ENTMAX = {
    "sparsemax": (Sparsemax(), entmax.sparsemax),
    "entmax of 2": (Entmax(2.0), entmax.sparsemax),
    "entmax15": (Entmax(), entmax.entmax15),
    "entmax of 1.3": (Entmax(1.3), lambda s, dim: entmax.entmax_bisect(s, 1.3, dim, n_iter=80)),
    "entmax of 1.7": (Entmax(1.7), lambda s, dim: entmax.entmax_bisect(s, 1.7, dim, n_iter=80)),
}


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", ENTMAX)
@pytest.mark.parametrize("backend", BACKENDS)
class TestEntmaxPackage:
    def test_the_weights_are_equal(self, backend, name, spread):
        normalize, theirs = ENTMAX[name]
        s = numbers(2, 3, 11, 19) * spread
        close(of_scores(s, normalize=normalize, backend=backend), theirs(s, dim=-1), atol=1e-9, rtol=1e-9)

    def test_the_gradients_are_equal(self, backend, name, spread):
        normalize, theirs = ENTMAX[name]
        s = (numbers(2, 3, 11, 19) * spread).requires_grad_()
        cotangent = numbers(2, 3, 11, 19, seed=8)
        (ours,) = torch.autograd.grad(of_scores(s, normalize=normalize, backend=backend), s, cotangent)
        (expected,) = torch.autograd.grad(theirs(s, dim=-1), s, cotangent)
        close(ours, expected, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
class TestElementaryFunctions:
    s = numbers(2, 3, 11, 19) * 3

    def test_softmax_is_torch_softmax(self, backend):
        close(of_scores(self.s, normalize=Softmax(), backend=backend), self.s.softmax(-1))

    def test_lse_is_torch_logsumexp(self, backend):
        A = weights(self.s, torch.eye(19).double().expand(2, 3, 19, 19), score=Dot(scale=1.0), backend=backend)
        close(A.lse, self.s.logsumexp(-1))

    def test_sink_softmax_is_softmax_with_one_more_score(self, backend):
        sink = numbers(3, seed=9)
        more = torch.cat([self.s, sink[:, None, None].expand(2, 3, 11, 1)], -1)
        ours = of_scores(self.s, normalize=SinkSoftmax(sink), backend=backend)
        close(ours, more.softmax(-1)[..., :-1])

    def test_sigmoid_is_torch_sigmoid(self, backend):
        close(of_scores(self.s, normalize=Sigmoid(), backend=backend), self.s.sigmoid())
        bias = numbers(3, seed=9)
        ours = of_scores(self.s, normalize=Sigmoid(bias), backend=backend)
        close(ours, (self.s + bias[:, None, None]).sigmoid())

    def test_hard_is_one_hot_of_argmax(self, backend):
        expected = F.one_hot(self.s.argmax(-1), 19).double()
        close(of_scores(self.s, normalize=Hard(), backend=backend), expected)

    def test_hard_has_the_gradient_of_softmax(self, backend):
        s = self.s.clone().requires_grad_()
        cotangent = numbers(2, 3, 11, 19, seed=8)
        (ours,) = torch.autograd.grad(of_scores(s, normalize=Hard(), backend=backend), s, cotangent)
        (theirs,) = torch.autograd.grad(s.softmax(-1), s, cotangent)
        close(ours, theirs)

    def test_tapered_softmax_is_softmax_times_a_gaussian(self, backend):
        center = numbers(2, 3, 11).abs() * 5
        expected = self.s.softmax(-1) * torch.exp(-((torch.arange(19) - center[..., None]) ** 2) / 8)
        close(of_scores(self.s, normalize=Tapered(Softmax(), Gaussian(center, 2.0)), backend=backend), expected)

    def test_cosine_is_torch_cosine_similarity(self, backend):
        q, k, _ = qkv(g=H)
        expected = (F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1) / 0.3).softmax(-1)
        close(weights(q, k, score=Cosine(0.3), backend=backend).dense(), expected)

    def test_capped_dot_is_a_scaled_tanh(self, backend):
        q, k, _ = qkv(g=H)
        expected = (2.0 * torch.tanh(q @ k.mT * D**-0.5 / 2.0)).softmax(-1)
        close(weights(q, k, score=Dot(cap=2.0), backend=backend).dense(), expected)


def t5_bucket(distance: int, buckets: int, reach: int, bidirectional: bool) -> int:
    """Raffel et al. 2020, section 2.1: half the buckets for single distances, the rest growing to `reach`.

    A logarithmic bucket m starts at exact * (reach / exact) ** (m / growing), compared here in whole numbers.
    """
    if bidirectional:
        half = buckets // 2
        if distance > 0:
            return half + t5_bucket(-distance, half, reach, False)
        return t5_bucket(distance, half, reach, False)
    behind = max(-distance, 0)
    exact = buckets // 2
    growing = buckets - exact
    if behind < exact:
        return behind
    started = [m for m in range(growing) if behind**growing * exact**m >= exact**growing * reach**m]
    return exact + started[-1]


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (16, 64), (32, 20), (8, 100)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_t5_follows_the_buckets_of_the_paper(bidirectional, buckets, reach):
    n_i, n_j = 9, 300
    table = numbers(H, buckets)
    bias = Relative.t5(table, max_distance=reach, bidirectional=bidirectional)
    for offset in (0, 150, n_j - n_i):
        q, k = torch.zeros(1, H, n_i, D).double(), torch.zeros(1, H, n_j, D).double()
        found = weights(q, k, bias=bias, offset=offset, normalize=Sigmoid()).dense()[0]
        rows = [[t5_bucket(j - (r + offset), buckets, reach, bidirectional) for j in range(n_j)] for r in range(n_i)]
        close(found, table[:, torch.tensor(rows)].sigmoid())
