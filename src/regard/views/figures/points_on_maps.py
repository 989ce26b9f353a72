"""The figure of deformable attention: dots where a query samples the feature maps."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from torch import Tensor

from ...lens.recording.sampled_weights import SampledWeights
from .canvas import TEXT_POINTS, add_title, frame, paper
from .figure_inputs import to_pixels

SIDE = 4.0  # inches: the longer side of the map
DOT, LEGEND_DOT = 300.0, 40.0  # areas in square points: of the dot of a weight of 1, and of a dot in the legend


def points(
    A: SampledWeights,
    picture: Tensor | npt.NDArray[Any] | None = None,
    *,
    query: int,
    head: int = 0,
    batch: int = 0,
    title: str = "",
) -> Figure:
    """Draw the points that a query of one head samples, each as large as its weight, in one colour per feature map.

    >>> import torch
    >>> A = SampledWeights(torch.rand(1, 2, 5, 4, 2), torch.full((1, 2, 5, 4), 0.25), [0, 0, 1, 1], [(6, 8), (3, 4)])
    >>> len(points(A, query=3).axes[0].collections)
    2

    The picture lies under the dots in grey; its dims are y x, y x c or c y x. All maps cover the whole picture.
    Points off the maps are not drawn; the figure says how many these are.
    """
    if not isinstance(A, SampledWeights):
        raise TypeError(
            f"A must be the SampledWeights of a layer, got {type(A).__name__}; heatmap(A) draws other weights"
        )
    for name, value, n in (("batch", batch, A.shape[0]), ("head", head, A.shape[1]), ("query", query, A.shape[2])):
        if not -n <= index(value) < n:
            raise IndexError(f"{name} must be from 0 to {n - 1}, or negative from the end, got {value}")
    places = A.locations[batch, head, query].detach().double().cpu().numpy()
    weights = A.weights[batch, head, query].detach().double().cpu().numpy()
    on_map = [bool(0 <= x <= 1 and 0 <= y <= 1) for x, y in places]
    under = None if picture is None else to_pixels(picture)
    high, wide = A.maps[0] if under is None else under.shape[:2]
    scale = SIDE / max(high, wide)
    figure = paper(wide * scale + 0.6, high * scale + 0.9)
    axes = figure.add_subplot()
    if under is not None:
        axes.imshow(under if under.ndim == 2 else under[..., :3].mean(-1), cmap="gray", extent=(0, 1, 1, 0))
    colours = colormaps["plasma"]
    for level, (height, width) in enumerate(A.maps):
        own = [n for n, each in enumerate(A.levels) if each == level and on_map[n]]
        colour = colours(0.1 + 0.75 * level / max(1, len(A.maps) - 1))
        x, y = places[own].T
        axes.scatter(
            x,
            y,
            DOT * abs(weights[own]),
            color=[colour],
            edgecolors="white",
            label=f"{height} x {width}",
            clip_on=False,
        )
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect=high / wide)
    off = len(on_map) - sum(on_map)
    note = f"{off} of {len(on_map)} points are off the map" if off else None
    legend = figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=TEXT_POINTS, title=note)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([LEGEND_DOT])
    frame(axes)
    add_title(figure, title)
    return figure
