"""Deformable attention, written out in the ways of several libraries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import SampledWeights, capture
from regard.nn import Attention

B, HEADS, QUERIES, POINTS, WIDTH = 2, 4, 5, 3, 6
DIM, MAPS = HEADS * WIDTH, ((4, 7), (2, 3))
CELLS = sum(height * width for height, width in MAPS)


def sampled(layer, v, places):
    """Values that each level has at its places: a list of (b h) d i p."""
    v = v.permute(0, 2, 3, 1).flatten(0, 1).split([height * width for height, width in MAPS], -1)
    grids = (2 * places - 1).transpose(1, 2).flatten(0, 1).unbind(2)
    options = {"align_corners": False, **layer.options}
    pairs = zip(v, MAPS, grids, strict=True)
    return [F.grid_sample(part.unflatten(-1, size), grid, **options) for part, size, grid in pairs]


def folded(A):
    """(b h) 1 i (l p)."""
    return A.transpose(1, 2).flatten(3).flatten(0, 1).unsqueeze(1)


def joined(out):
    """(b h) d i -> b i (h d)."""
    return out.unflatten(0, (-1, HEADS)).flatten(1, 2).mT


def stacked(layer, v, places, A):
    """As in Deformable DETR."""
    return joined((torch.stack(sampled(layer, v, places), -2).flatten(-2) * folded(A)).sum(-1))


def stacked_and_flattened(layer, v, places, A):
    """As in mmcv, with a view of all heads at once."""
    out = (torch.stack(sampled(layer, v, places), dim=-2).flatten(-2) * folded(A)).sum(-1)
    return out.view(len(v), DIM, QUERIES).transpose(1, 2).contiguous()


def concatenated(layer, v, places, A):
    """As in RT-DETR of ultralytics."""
    return joined((torch.cat(sampled(layer, v, places), dim=-1) * folded(A)).sum(-1))


def summed_over_levels_and_points(layer, v, places, A):
    return joined((torch.stack(sampled(layer, v, places), -2) * folded(A).unflatten(-1, (-1, POINTS))).sum((-1, -2)))


def weights_first(layer, v, places, A):
    return joined((folded(A) * torch.cat(sampled(layer, v, places), -1)).sum(dim=-1))


def einsum(layer, v, places, A):
    return joined(torch.einsum("ndip,nip->ndi", torch.cat(sampled(layer, v, places), -1), folded(A).squeeze(1)))


def einsum_over_two(layer, v, places, A):
    values = torch.stack(sampled(layer, v, places)).unflatten(1, (-1, HEADS))
    return torch.einsum("bihlp,lbhdip->bihd", A, values).flatten(2)


def matmul(layer, v, places, A):
    values = torch.cat(sampled(layer, v, places), -1).permute(0, 2, 1, 3)  # (b h) i d p
    return joined((values @ folded(A).squeeze(1).unsqueeze(-1)).squeeze(-1).mT)


def matmul_of_rows(layer, v, places, A):
    values = torch.cat(sampled(layer, v, places), -1).permute(0, 2, 3, 1)  # (b h) i p d
    return joined((folded(A).squeeze(1).unsqueeze(-2) @ values).squeeze(-2).mT)


def unfolded(layer, v, places, A):
    """Heads as a dim of their own before the product."""
    values = torch.stack(sampled(layer, v, places), 3).unflatten(0, (-1, HEADS)).flatten(-2)  # b h d i (l p)
    return (values * A.transpose(1, 2).flatten(3).unsqueeze(2)).sum(-1).permute(0, 3, 1, 2).flatten(2)


def queries_and_points_in_one_dim(layer, v, places, A):
    """A grid of (i p) rows and one column."""
    values = []
    for part, size, grid in zip(v.permute(0, 2, 3, 1).split(layer.cells, -1), MAPS, places.unbind(3), strict=True):
        rows = (2 * grid - 1).transpose(1, 2).reshape(-1, QUERIES * POINTS, 1, 2)
        read = F.grid_sample(part.flatten(0, 1).unflatten(-1, size), rows, align_corners=False)
        values.append(read.reshape(-1, WIDTH, QUERIES, POINTS))
    return joined((torch.stack(values, -2).flatten(-2) * folded(A)).sum(-1))


WAYS = (
    *(stacked, stacked_and_flattened, concatenated, summed_over_levels_and_points, weights_first, einsum),
    *(einsum_over_two, matmul, matmul_of_rows, unfolded, queries_and_points_in_one_dim),
)


class Deformable(nn.Module):
    """Attends to points of two feature maps; keeps its places, `b i h l p 2`, and weights, `b i h l p`."""

    cells = tuple(height * width for height, width in MAPS)

    def __init__(self, way=stacked, **options):
        super().__init__()
        self.n_heads, self.way, self.options = HEADS, way, options
        self.values, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.offsets, self.attention = (nn.Linear(DIM, HEADS * len(MAPS) * POINTS * n) for n in (2, 1))

    def forward(self, x, memory):
        v = self.values(memory).unflatten(-1, (HEADS, WIDTH))
        offsets = self.offsets(x).view(len(x), QUERIES, HEADS, len(MAPS), POINTS, 2)
        logits = self.attention(x).view(len(x), QUERIES, HEADS, -1)
        A = (3 * logits).softmax(-1).unflatten(-1, (-1, POINTS))
        places = 0.5 + 0.4 * offsets
        self.kept = places.detach(), A.detach()
        return self.out(self.way(self, v, places, A))


def texts(b=B, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = (b, QUERIES, DIM), (b, CELLS, DIM)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


class Pair(nn.Module):
    """A deformable attention after an attention that is recorded in any case."""

    def __init__(self, other):
        super().__init__()
        self.seen, self.other = Attention(DIM, heads=2), other

    def forward(self, x, memory):
        return self.other(self.seen(x), memory)


def watched(model, *inputs, **options):
    """The tape of a model, whose output is that without capture, to the bit."""
    want = model(*inputs)
    with capture(model, **options) as tape:
        assert torch.equal(model(*inputs), want)
    return tape


def assert_shows(A, places, weights):
    """The entry has the places and weights that a layer used, `b i h l p 2` and `b i h l p`."""
    assert isinstance(A, SampledWeights)
    torch.testing.assert_close(A.weights, weights.transpose(1, 2).flatten(3), rtol=0, atol=0)
    torch.testing.assert_close(A.locations, places.transpose(1, 2).flatten(3, 4), rtol=1e-6, atol=1e-6)
