"""Attention over feature maps: the papers' equations in float64, and timm where it has the same form."""

import pytest
import torch
from torch import nn

from regard import Dot
from regard.nn.vision import CBAM, PatchEmbedding, SelectiveKernel, SelfAttention2d, SqueezeExcite

B, C, Y, X = 2, 16, 5, 7

LAYERS = {
    "patches": lambda: PatchEmbedding(6, patch=(5, 7), channels=C),
    "self": lambda: opened(SelfAttention2d(C, heads=2, width=6)),
    "se": lambda: SqueezeExcite(C, reduction=4),
    "cbam": lambda: CBAM(C, reduction=4, kernel=3),
    "sk": lambda: settled(SelectiveKernel(C, kernels=(3, 5, 7), groups=4, least=8)),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]().double()


def image(*, channels=C, size=(Y, X)):
    return torch.randn(B, channels, *size, dtype=torch.float64)


def opened(layer):
    nn.init.constant_(layer.gamma, 0.7)
    return layer


def settled(layer):
    """Batch norms in evaluation mode, with statistics and weights that are not those of a new one."""
    for norm in layer.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for x, low, high in ((norm.running_mean, -1, 1), (norm.running_var, 0.5, 2), (norm.weight, 0.5, 2)):
                nn.init.uniform_(x, low, high)
            nn.init.uniform_(norm.bias)
    return layer.eval()


# What holds for all of them


def test_state_dict_makes_the_round_trip(layer, request):
    other = LAYERS[request.node.callspec.params["layer"]]().double()
    other.load_state_dict(layer.state_dict())
    x = image()
    assert torch.equal(other(x), layer(x))


def test_gradients_reach_every_parameter_and_are_right(layer):
    x = image()[:, :, :5, :7].clone().requires_grad_()
    layer(x).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in layer.parameters())
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


def test_autocast_stays_near_float32(layer):
    layer, x = layer.float(), image().float()
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
    torch.testing.assert_close(half.float(), layer(x), rtol=0.1, atol=0.1)


def test_each_image_alone_equals_itself_in_the_batch(layer):
    x = image()
    torch.testing.assert_close(torch.cat([layer(x[b : b + 1]) for b in range(B)]), layer(x), rtol=0, atol=1e-12)


# Patches


def test_patches_are_projected_row_by_row():
    layer = PatchEmbedding(6, patch=(2, 3), channels=4).double()
    x = image(channels=4, size=(4, 9))
    tokens = layer(x)
    assert tokens.shape == (B, 6, 6)
    for n in range(6):
        y, left = n // 3 * 2, n % 3 * 3
        patch = x[:, :, y : y + 2, left : left + 3].flatten(1)
        expected = patch @ layer.project.weight.flatten(1).T + layer.project.bias
        torch.testing.assert_close(tokens[:, n], expected, rtol=0, atol=1e-13)


def test_an_image_that_does_not_divide_raises():
    with pytest.raises(ValueError, match=r"patches of \(4, 4\), got \(8, 10\); resize"):
        PatchEmbedding(6, patch=4)(torch.zeros(1, 3, 8, 10))


# Self-attention over places


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("source", [None, (3, 10, 4)])
def test_self_attention_is_that_of_the_paper(heads, source):
    layer = opened(SelfAttention2d(C, heads=heads, width=6, source_channels=source and source[0])).double()
    x = image()
    other = None if source is None else image(channels=source[0], size=source[1:])
    f, g, h = (conv.weight.flatten(1) for conv in (layer.query, layer.key, layer.value))
    out = torch.zeros_like(x)
    for b in range(B):
        places = x[b].flatten(1)  # c n
        sources = places if other is None else other[b].flatten(1)
        o = []
        for rows in torch.arange(6).chunk(heads):
            s = (f[rows] @ places).T @ (g[rows] @ sources)
            o.append((h[rows] @ sources) @ (s.exp() / s.exp().sum(1, keepdim=True)).T)
        out[b] = x[b] + layer.gamma * (layer.out.weight.flatten(1) @ torch.cat(o)).view_as(x[b])
    torch.testing.assert_close(layer(x, other), out, rtol=0, atol=1e-12)


def test_a_new_self_attention_changes_nothing():
    x = image()
    assert torch.equal(SelfAttention2d(C).double()(x), x)


def test_self_attention_follows_its_places_when_they_move():
    layer = opened(SelfAttention2d(C, heads=2)).double()
    x = image()
    torch.testing.assert_close(layer(x.flip(-1).mT), layer(x).flip(-1).mT, rtol=0, atol=1e-12)


def test_weights_say_where_a_place_looks():
    layer = SelfAttention2d(C, source_channels=3).double()
    A = layer.weights(image(), image(channels=3, size=(2, 3)))
    assert A.shape == (B, 1, Y * X, 6)
    torch.testing.assert_close(A.dense().sum(-1), torch.ones(B, 1, Y * X, dtype=torch.float64))


def test_another_score_fits():
    plain, scaled = SelfAttention2d(C, width=4), SelfAttention2d(C, width=4, score=Dot())
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        scaled.query.weight.mul_(2)  # sqrt(4)
    x = torch.randn(B, C, Y, X)
    torch.testing.assert_close(scaled.weights(x).dense(), plain.weights(x).dense())


def test_a_width_with_no_even_split_raises():
    with pytest.raises(ValueError, match="width=2 and heads=3; pass width=3"):
        SelfAttention2d(C, heads=3)


def test_there_is_at_least_one_head():
    with pytest.raises(ValueError, match="heads must be 1 or more, got 0"):
        SelfAttention2d(C, heads=0)


def test_the_repr_says_how_it_is_cut():
    assert "heads=2" in repr(SelfAttention2d(C, heads=2))


@pytest.mark.parametrize(("name", "shape"), [("self", (B, 2, Y * X)), ("sk", (B, C, 1))])
def test_what_attends_does_so_through_its_core(name, shape):
    layer = LAYERS[name]()
    seen = []
    layer.core.register_forward_hook(lambda core, args, out: seen.append(tuple(args[0].shape[:3])))
    layer(torch.randn(B, C, Y, X))
    assert seen == [shape]


# Gates


def test_squeeze_excite_is_that_of_the_paper():
    layer = SqueezeExcite(C, reduction=4).double()
    x = image()
    for b in range(B):
        z = torch.stack([x[b, c].sum() / (Y * X) for c in range(C)])
        hidden = (layer.squeeze.weight @ z + layer.squeeze.bias).clamp(min=0)
        s = 1 / (1 + torch.exp(-(layer.excite.weight @ hidden + layer.excite.bias)))
        torch.testing.assert_close(layer.gates(x)[b], s, rtol=0, atol=1e-13)
        torch.testing.assert_close(layer(x)[b], torch.stack([x[b, c] * s[c] for c in range(C)]), rtol=0, atol=1e-13)


def test_cbam_is_that_of_the_paper():
    layer = CBAM(C, reduction=4, kernel=3).double()
    x = image()
    W_0, W_1, kernel = layer.squeeze.weight, layer.excite.weight, layer.place.weight[0]
    for b in range(B):
        mean, largest = x[b].flatten(1).mean(1), x[b].flatten(1).max(1).values
        gates = torch.sigmoid(W_1 @ (W_0 @ mean).clamp(min=0) + W_1 @ (W_0 @ largest).clamp(min=0))
        refined = x[b] * gates[:, None, None]
        flat = torch.zeros(2, Y + 2, X + 2, dtype=torch.float64)
        flat[:, 1:-1, 1:-1] = torch.stack((refined.mean(0), refined.max(0).values))
        for y in range(Y):
            for x_ in range(X):
                gate = torch.sigmoid((kernel * flat[:, y : y + 3, x_ : x_ + 3]).sum())
                torch.testing.assert_close(layer(x)[b, :, y, x_], refined[:, y, x_] * gate, rtol=0, atol=1e-12)


def test_the_hidden_layer_has_a_channel_even_in_narrow_maps():
    assert SqueezeExcite(3)(torch.randn(B, 3, Y, X)).shape == (B, 3, Y, X)
    assert CBAM(3)(torch.randn(B, 3, Y, X)).shape == (B, 3, Y, X)


@pytest.mark.parametrize("kind", [SqueezeExcite, CBAM])
@pytest.mark.parametrize("shape", [(B, 15, Y, X), (16, Y, X)], ids=str)
def test_gates_are_for_maps_of_their_channels(kind, shape):
    with pytest.raises(ValueError, match=r"x must have dims b c y x with c=16 channels, got shape \("):
        kind(16)(torch.randn(shape))


def test_an_even_kernel_raises():
    with pytest.raises(ValueError, match=r"kernel must be odd.*got 4; pass 5"):
        CBAM(C, kernel=4)


# Selective kernels


def test_selective_kernel_is_that_of_the_paper():
    layer = settled(SelectiveKernel(C, 6, kernels=(3, 5, 7), stride=2, groups=2, least=8)).double()
    x = image()
    maps = []
    for branch, dilation in zip(layer.branches, (1, 2, 3), strict=True):
        conv, norm = branch[0], branch[1]
        u = nn.functional.conv2d(x, conv.weight, stride=2, padding=dilation, dilation=dilation, groups=2)
        maps.append(normed(u, norm, (1, -1, 1, 1)).clamp(min=0))
    z = normed(sum(maps).mean((2, 3)) @ layer.squeeze[0].weight.T, layer.squeeze[1], (1, -1)).clamp(min=0)
    powers = [torch.exp(z @ layer.keys[:, m].T) for m in range(3)]  # eq. 5: e^(A_c z), e^(B_c z), ...
    shares = [power / sum(powers) for power in powers]
    expected = sum(share[:, :, None, None] * u for share, u in zip(shares, maps, strict=True))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weights(x).dense()[:, :, 0], torch.stack(shares, -1), rtol=0, atol=1e-12)


def normed(x, norm, shape):
    mean, var, weight, bias = (v.view(shape) for v in (norm.running_mean, norm.running_var, norm.weight, norm.bias))
    return (x - mean) / (var + norm.eps).sqrt() * weight + bias


def test_the_summary_of_a_selective_kernel_is_never_narrow():
    assert SelectiveKernel(64).keys.shape == (64, 2, 32)
    assert SelectiveKernel(1024).keys.shape == (1024, 2, 64)


@pytest.mark.parametrize("kernels", [(3,), (3, 4), (1, 3), ()])
def test_kernels_that_are_not_odd_sizes_raise(kernels):
    with pytest.raises(ValueError, match="two or more odd sizes from 3 on"):
        SelectiveKernel(C, kernels=kernels)


# Peers


def test_squeeze_excite_equals_timm():
    peer = pytest.importorskip("timm.layers").SEModule(C, rd_channels=4).double()
    layer = SqueezeExcite(C, reduction=4).double()
    copy(peer.fc1, layer.squeeze)
    copy(peer.fc2, layer.excite)
    x = image()
    torch.testing.assert_close(layer(x), peer(x), rtol=0, atol=1e-12)


def test_cbam_equals_timm():
    peer = pytest.importorskip("timm.layers.cbam").CbamModule(C, rd_channels=4).double().eval()
    norm = peer.spatial.conv.bn  # the paper's equation has none: make it the identity
    norm.running_var.fill_(1 - norm.eps)
    layer = CBAM(C, reduction=4).double()
    copy(peer.channel.fc1, layer.squeeze)
    copy(peer.channel.fc2, layer.excite)
    copy(peer.spatial.conv.conv, layer.place)
    x = image()
    torch.testing.assert_close(layer(x), peer(x), rtol=0, atol=1e-12)


def test_selective_kernel_equals_timm():
    peer = settled(pytest.importorskip("timm.layers").SelectiveKernel(C, 6, rd_channels=32, split_input=False)).double()
    layer = settled(SelectiveKernel(C, 6)).double()
    for theirs, ours in zip(peer.paths, layer.branches, strict=True):
        copy(theirs.conv, ours[0])
        copy(theirs.bn, ours[1])
    copy(peer.attn.fc_reduce, layer.squeeze[0])
    copy(peer.attn.bn, layer.squeeze[1])
    with torch.no_grad():
        layer.keys.copy_(peer.attn.fc_select.weight.view(2, 6, 32).transpose(0, 1))
    x = image()
    torch.testing.assert_close(layer(x), peer(x), rtol=0, atol=1e-12)


def copy(theirs, ours):
    """The state of one module into another that differs by dims of 1."""
    ours.load_state_dict({name: x.view_as(ours.state_dict()[name]) for name, x in theirs.state_dict().items()})
