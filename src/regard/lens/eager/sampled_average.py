"""SampledAverage: a weighted sum of points sampled from feature maps, its places and weights, and the proof of them.

Some queries of the output are computed once more in float64, from the places, the weights and the maps. Places and
weights that do not give the output are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..interception.kernel_call import NotUnderstood
from ..interception.output_check import MIN_RELATIVE_ERROR, ROUNDING_UNITS
from ..recording.sampled_weights import SampledWeights, corner_cells
from .dim_origins import STACKED, UNKNOWN, Dim, DimOrigins, join_dims
from .head_layout import HeadChoice

MAPS, CHANNELS, QUERIES, POINTS = "maps", "channels", "queries", "points"
LEVELS = (STACKED, UNKNOWN)  # the kind of a dim that counts levels; UNKNOWN if each has one point
SUM_TOLERANCE = 0.02  # the weights of a query sum to 1, in bfloat16 too
COMPARED_QUERIES = 8
SMALL = 0.1  # a sum below this share of the largest value is compared as if it were as large: its points are at an edge
MISMATCH = "its output is not the sum of its points times their weights"

Choose = Callable[[Sequence[int], Sequence[Dim] | None], HeadChoice]


class GridSample(NamedTuple):
    """A call of `F.grid_sample`: maps of n c height width, and a grid of n i p 2."""

    maps: Tensor
    grid: Tensor
    problem: str  # why its points are no bilinear interpolation within [0, 1]; empty if they are

    @classmethod
    def of(
        cls,
        input: Tensor,
        grid: Tensor,
        mode: str = "bilinear",
        padding_mode: str = "zeros",
        align_corners: bool | None = None,
    ) -> GridSample:
        """Return the call with these arguments of `F.grid_sample`."""
        wrong = [f"mode={mode!r}"] if mode != "bilinear" else []
        wrong += [f"padding_mode={padding_mode!r}"] if padding_mode != "zeros" else []
        wrong += ["align_corners=True"] if align_corners else []
        return cls(input, grid, f"it samples points with {', '.join(wrong)}" if wrong else "")


@dataclass(frozen=True, kw_only=True)
class SampledAverage:
    """An average of sampled points; g counts the maps of a level, which are texts, heads or both."""

    calls: tuple[GridSample, ...]
    locations: Tensor  # g i p 2
    weights: Tensor  # g i p
    levels: tuple[int, ...]
    values: Tensor  # g cells c
    out: Tensor  # g i c
    groups: tuple[int, ...]  # sizes whose product is g
    given: Tensor  # the weights as the model has them

    def sampled_weights(self, origins: DimOrigins, choose: Choose) -> tuple[SampledWeights, str | None]:
        """Return the weights, if they give the output, and the reason why the choice of heads is a guess.

        `choose` takes the sizes of the groups, and their origins if these are known.
        """
        if problem := next((call.problem for call in self.calls if call.problem), ""):
            raise NotUnderstood(problem)
        if not self._gives_output():
            raise NotUnderstood(MISMATCH)
        known = [
            origin.dims[:1]
            for x in (self.given, *(call.maps for call in self.calls))
            if (origin := origins.get(x)) is not None and x.shape[:1] == self.groups
        ]
        layout, guess = choose(self.groups, join_dims(known) if known else None)
        given = self.weights, self.locations.flatten(2)
        weights, locations = (layout.of_matrices(x.reshape(*layout.lead, *x.shape[1:])) for x in given)
        return SampledWeights(locations.unflatten(-1, (-1, 2)), weights, self.levels, _sizes(self.calls)), guess

    def _gives_output(self) -> bool:
        """Whether some queries of the output are the weighted sums of their points, computed in float64."""
        i = self.weights.shape[1]
        rows = torch.linspace(0, i - 1, min(COMPARED_QUERIES, i), dtype=torch.float64).round().long()
        rows = rows.to(self.weights.device)
        cells, shares = corner_cells(self.locations[:, rows].double(), self.levels, _sizes(self.calls))
        values = self.values
        at = cells.flatten(1)[..., None].expand(-1, -1, values.shape[-1])
        corners = values.gather(1, at).view(*cells.shape, -1).double()  # g rows p 4 c
        terms = corners * (self.weights[:, rows].double()[..., None] * shares)[..., None]
        expected, size = terms.sum((2, 3)), terms.abs().sum((2, 3)).norm(dim=-1)
        error = (expected - self.out[:, rows].double()).norm(dim=-1)
        tolerance = max(ROUNDING_UNITS * torch.finfo(self.out.dtype).eps, MIN_RELATIVE_ERROR)
        least = SMALL * values.norm(dim=-1).amax().double() if values.numel() else 0
        return bool((error <= tolerance * size.clamp(min=least)).all())


class _Atom(NamedTuple):
    """A factor of a dim of sampled values."""

    dim: int
    kind: str
    size: int


def average_of(
    calls: Sequence[GridSample], dims: Sequence[Dim], weights: Tensor, summed: Collection[int], out: Tensor
) -> SampledAverage | None:
    """Return the average of sampled values, whose dims have these origins, over the dims `summed`.

    None if it is not over levels and points, or if the weights are no distribution over them.
    """
    atoms = [_Atom(dim, *factor) for dim, factors in enumerate(dims) for factor in factors]
    over = [atom for atom in atoms if atom.dim in summed]
    rest = [atom for atom in atoms if atom.dim not in summed]
    are_points = over and {atom.kind for atom in over} <= {POINTS, QUERIES, *LEVELS}
    if not are_points or not {atom.kind for atom in rest} <= {MAPS, CHANNELS, QUERIES, POINTS}:
        return None
    parts = weights.detach()[(None,) * (len(dims) - weights.ndim)]
    parts = parts.reshape([atom.size if parts.shape[atom.dim] > 1 else 1 for atom in atoms])
    places = _places(calls, atoms)
    if places is None:
        return None
    texts = [atom for atom in rest if atom.kind == MAPS]
    heads = [atom for atom in rest if atom.kind == CHANNELS and _varies(parts, atoms.index(atom))]
    channels = [atom for atom in rest if atom.kind == CHANNELS and atom not in heads]
    queries = [atom for atom in rest if atom.kind in (QUERIES, POINTS)]
    for atom in channels:
        parts = parts.narrow(atoms.index(atom), 0, 1)
    in_order = [*texts, *heads, *queries, *over, *channels]
    g, i, p = (prod(atom.size for atom in each) for each in ((*texts, *heads), queries, over))

    def by_query(x: Tensor) -> Tensor:
        """Rearrange a tensor with a dim for each atom, and others behind these, to g i p."""
        behind = x.shape[len(atoms) :]
        x = x.expand(*(1 if atom in channels else atom.size for atom in atoms), *behind)
        return _permute_atoms(x, atoms, in_order).reshape(g, i, p, *behind)

    given = by_query(parts)
    total = given.sum(-1, dtype=torch.float32)
    if bool((given < 0).any()) or bool(((total - 1).abs() > SUM_TOLERANCE).any()):
        return None
    grid, levels = map(by_query, places)
    of_maps = [atom for kind in (MAPS, CHANNELS) for atom in atoms if atom.kind == kind]
    values = [call.maps.detach().reshape(*(atom.size for atom in of_maps), -1) for call in calls]
    values = [_permute_atoms(x, of_maps, [*texts, *heads, *channels]).reshape(g, -1, x.shape[-1]) for x in values]
    return SampledAverage(
        calls=tuple(calls),
        locations=(grid + 1) / 2,
        weights=given,
        levels=tuple(levels[0, 0].tolist()) if g * i else (0,) * p,
        values=torch.cat(values, -1).mT,
        out=_permute_atoms(out.reshape([x.size for x in rest]), rest, [*texts, *heads, *queries, *channels]).reshape(
            g, i, -1
        ),
        groups=(prod(atom.size for atom in texts), *(atom.size for atom in heads)),
        given=weights,
    )


def _permute_atoms(x: Tensor, before: Sequence[_Atom], after: Sequence[_Atom]) -> Tensor:
    """Permute a tensor with a dim for each atom; dims behind these stay."""
    return x.permute([*(before.index(atom) for atom in after), *range(len(before), x.ndim)])


def _varies(parts: Tensor, dim: int) -> bool:
    """Whether the numbers along a dim differ."""
    return parts.shape[dim] > 1 and bool((parts != parts.narrow(dim, 0, 1)).any())


def _places(calls: Sequence[GridSample], atoms: Sequence[_Atom]) -> tuple[Tensor, Tensor] | None:
    """Return the grids of all calls and the number of each call, with a dim for each atom; channels have size 1."""

    def count(*kinds: str) -> int:
        return prod(atom.size for atom in atoms if atom.kind in kinds)

    grids = [call.grid.detach() for call in calls]
    numbers = [torch.full(grid.shape[:3], n, device=grid.device) for n, grid in enumerate(grids)]
    if count(*LEVELS) == len(calls) and len({grid.shape for grid in grids}) == 1:
        grid, level, lead = torch.stack(grids), torch.stack(numbers), 4
    elif count(*LEVELS) == 1 and sum(grid.shape[2] for grid in grids) == count(POINTS):
        grid, level, lead = torch.cat(grids, 2), torch.cat(numbers, 2), 3
    elif count(*LEVELS) == 1 and sum(grid.shape[1] for grid in grids) == count(QUERIES):
        grid, level, lead = torch.cat(grids, 1), torch.cat(numbers, 1), 3
    else:
        return None
    order = (*LEVELS, MAPS, QUERIES, POINTS, CHANNELS)  # the order of dims in the joined grids
    inner = sorted(atoms, key=lambda atom: order.index(atom.kind))
    sizes = [1 if atom.kind == CHANNELS else atom.size for atom in inner]
    grid, level = (_permute_atoms(x.reshape(*sizes, *x.shape[lead:]), inner, atoms) for x in (grid, level))
    return grid, level


def _sizes(calls: Sequence[GridSample]) -> list[tuple[int, int]]:
    """Return the height and width of the maps of each call."""
    return [(call.maps.shape[2], call.maps.shape[3]) for call in calls]
