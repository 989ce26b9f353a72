"""SampledWeights: deformable attention, a few weights per query over points sampled from feature maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor

from ...ops.memory_limit import LIMIT, parse_size
from ..real_tokens import RealTokens
from .edge_weights import EdgeWeights
from .reduced import Reduced
from .store import TensorInMemory

CHUNK_CORNERS = 2**22  # corners of points that are added up at once


@dataclass(frozen=True, eq=False, repr=False)
class SampledWeights:
    """Attention over points sampled from feature maps (Zhu et al. 2021): a place and a weight per query and point.

    `locations` of dims b h i p 2 hold x and y of each point, from 0 at the left and top edge of a map to 1 at the right
    and bottom edge; `weights` are of dims b h i p. `levels`, p, are the numbers of the maps that the points lie on, and
    `maps` the (height, width) of each map. The keys are the cells of all maps, row by row, the first map first. A point
    between cells is read by bilinear interpolation, so its weight is shared among the four cells around it; what falls
    off the map is lost. Nothing of size queries x cells is stored.

    >>> # One query reads two points of a map of 2 x 3 cells: the middle of the first cell, and between two cells:
    >>> places = torch.tensor([[1 / 6, 0.25], [2 / 3, 0.75]])
    >>> A = SampledWeights(places.view(1, 1, 1, 2, 2), torch.tensor([0.4, 0.6]).view(1, 1, 1, 2), [0, 0], [(2, 3)])
    >>> A
    SampledWeights(1 x 1 x 1 x 6, 2 points on a map of 2 x 3)
    >>> A[0, 0, 0]
    tensor([0.4000, 0.0000, 0.0000, 0.0000, 0.3000, 0.3000])

    >>> # The attention that each cell receives from all queries, map by map:
    >>> A.received_maps()[0]
    tensor([[[[0.4000, 0.0000, 0.0000],
              [0.0000, 0.3000, 0.3000]]]])

    >>> # The strongest points of each query, and their places:
    >>> A.topk(1).indices
    tensor([[[[1]]]])
    >>> A.locations[0, 0, 0, 1]
    tensor([0.6667, 0.7500])

    `entropy` and `max` are over the points of a query. `regard.views.points(A, query=0)` draws the points of a query.
    """

    locations: Tensor  # b h i p 2
    weights: Tensor  # b h i p
    levels: Sequence[int]  # p
    maps: Sequence[tuple[int, int]]  # height and width of each map

    def __post_init__(self) -> None:
        locations, weights = self.locations, self.weights
        if weights.ndim != 4 or not weights.is_floating_point():
            raise ValueError(
                f"weights must hold floats of dims b h i p, got {weights.dtype} of shape {tuple(weights.shape)}"
            )
        if locations.shape != (*weights.shape, 2) or not locations.is_floating_point():
            raise ValueError(
                f"locations must hold floats of shape {(*weights.shape, 2)}, x and y of each point, "
                f"got {locations.dtype} of shape {tuple(locations.shape)}"
            )
        object.__setattr__(self, "levels", tuple(map(index, self.levels)))
        object.__setattr__(self, "maps", tuple((index(height), index(width)) for height, width in self.maps))
        if not self.maps or min(map(min, self.maps)) < 1:
            raise ValueError(f"maps must name the height and width of at least one map, got {self.maps}")
        if len(self.levels) != weights.shape[-1] or not set(self.levels) <= set(range(len(self.maps))):
            raise ValueError(
                f"levels must name one of {len(self.maps)} maps for each of {weights.shape[-1]} points, "
                f"got {self.levels}"
            )

    @property
    def shape(self) -> torch.Size:
        """The dims `b h i j`, as other entries of a tape have them: j counts the cells of all maps."""
        return torch.Size((*self.weights.shape[:3], sum(map(math.prod, self.maps))))

    @property
    def real(self) -> RealTokens:
        """All queries and cells: a model may hide cells by zeros in its values, which the weights do not show."""
        return RealTokens.all_of(self.shape)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{height} x {width}" for height, width in self.maps)
        on = f"a map of {sizes}" if len(self.maps) == 1 else f"{len(self.maps)} maps of {sizes}"
        return f"SampledWeights({' x '.join(map(str, self.shape))}, {self.weights.shape[-1]} points on {on})"

    def __getitem__(self, key: tuple[int, int, int]) -> Tensor:
        if not isinstance(key, tuple) or len(key) != 3:
            raise TypeError(
                f"write A[batch, head, query] for a row of SampledWeights, got A[{key!r}]; A.dense() is the matrix"
            )
        return self.row(key[2])[key[0], key[1]]

    def row(self, query: int) -> Tensor:
        """Return the weights of one query over the cells of all maps: `b h j`."""
        n = self.shape[2]
        if not -n <= index(query) < n:
            raise IndexError(f"query must be from 0 to {n - 1}, or negative from the end, got {query}")
        return self._over_cells(self.locations[:, :, [query]], self.weights[:, :, [query]])

    def received(self) -> Tensor:
        """Return the attention that each cell receives from all queries: `b h j`."""
        b, h, _, j = self.shape
        received = self.weights.new_zeros(b, h, j)
        size = max(1, CHUNK_CORNERS // max(1, 4 * self.weights[:, :, :1].numel()))
        for locations, weights in zip(self.locations.split(size, 2), self.weights.split(size, 2), strict=True):
            received += self._over_cells(locations, weights)
        return received

    def received_maps(self) -> list[Tensor]:
        """Return the attention that the cells of each map receive from all queries: a list of `b h height width`."""
        parts = self.received().split([height * width for height, width in self.maps], -1)
        return [part.unflatten(-1, size) for part, size in zip(parts, self.maps, strict=True)]

    def entropy(self) -> Tensor:
        """Return -sum A log A over the points of each query: `b h i`."""
        return torch.special.entr(self.weights).sum(-1)

    def max(self) -> Tensor:
        """Return the largest weight of a point of each query: `b h i`."""
        return self.weights.amax(-1)

    def topk(self, k: int) -> torch.return_types.topk:
        """Return the k largest weights of each query and the numbers of their points: `b h i k` twice."""
        points = self.weights.shape[-1]
        if not 1 <= index(k) <= points:
            raise ValueError(f"k must be from 1 to {points}, the number of points of a query, got {k}")
        return self.weights.topk(k, -1)

    def dense(self, limit: str = LIMIT) -> Tensor:
        """Return the matrix `b h i j` of queries by cells, if it takes no more memory than `limit`."""
        need = self.shape.numel() * self.weights.element_size()
        if need > parse_size(limit):
            raise ValueError(
                f"the dense matrix takes {need / 1e9:.3g} GB, more than limit={limit!r}; "
                "ask for a row, A.row(query), or raise the limit of A.dense(limit=...)"
            )
        return torch.stack([self.row(query) for query in range(self.shape[2])], 2)

    def measures(self) -> Reduced:
        """Return entropy, received and max as a layer of a tape has them: `b h i` or `b h j`."""
        found = {"entropy": self.entropy(), "received": self.received(), "max": self.max()}
        return Reduced(self.shape, {name: TensorInMemory(x) for name, x in found.items()}, self.real)

    def select_heads(self, heads: Sequence[int]) -> SampledWeights:
        """Return these heads alone."""
        return replace(self, locations=self.locations[:, list(heads)], weights=self.weights[:, list(heads)])

    def map_tensors(self, function: Callable[[Tensor, str], Tensor]) -> SampledWeights:
        """Return the same weights with each tensor replaced by a function of it and of its name."""
        locations = function(self.locations, "locations of points")
        return replace(self, locations=locations, weights=function(self.weights, "weights of points"))

    def _over_cells(self, locations: Tensor, weights: Tensor) -> Tensor:
        """Add up the weights of some queries over the cells: `b h j`."""
        b, h, _, j = self.shape
        cells, shares = corner_cells(locations, self.levels, self.maps)
        found = weights.new_zeros(b * h, j)
        shares = (weights[..., None] * shares).to(weights.dtype)
        return found.scatter_add(1, cells.reshape(b * h, -1), shares.reshape(b * h, -1)).view(b, h, j)


SparseWeights = EdgeWeights | SampledWeights


def corner_cells(locations: Tensor, levels: Sequence[int], maps: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the four cells around each point, `... p 4`, among the cells of all maps, and their shares of it.

    The share of a corner that is off the map is 0.
    """
    at = torch.tensor(list(levels), dtype=torch.long, device=locations.device)
    sizes = torch.tensor([[width, height] for height, width in maps], device=locations.device)
    starts = torch.tensor([0, *(math.prod(size) for size in maps)], device=locations.device).cumsum(0)[at]
    size = sizes[at]  # p 2: x, y
    # A point at half a cell from the edge is the middle of the first cell. One that is not finite is off the map.
    place = (locations * size - 0.5).nan_to_num(-2, -2, -2)
    first = place.floor()
    after = place - first
    first = torch.minimum(first, size.to(first)).clamp(min=-2).long()
    steps = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], device=locations.device)
    corners = first[..., None, :] + steps  # ... p 4 2
    shares = torch.where(steps == 1, after[..., None, :], 1 - after[..., None, :]).prod(-1)
    inside = ((corners >= 0) & (corners < size[:, None])).all(-1)
    x, y = corners.clamp(min=0).minimum(size[:, None] - 1).unbind(-1)
    return starts[:, None] + y * size[:, None, 0] + x, torch.where(inside, shares, 0)
