"""Views: attention to look at.

Figures are matplotlib `Figure` values, returned and never shown. `view` and `serve` open the zoomable map in a browser,
and `page` is the same as one offline file.
"""

from .export import MEGABYTES, Page, page
from .figures.curves import curves
from .figures.effects import effects
from .figures.figures import alignment, by_layer, caption, edges, grid, heatmap, image, mask, text
from .figures.points_on_maps import points
from .figures.side_by_side import side_by_side
from .figures.timeline import timeline
from .heads_page.heads_document import heads_page
from .notebook_html import tape_html
from .viewer.server import Viewer, serve, view

__all__ = [
    "MEGABYTES",
    "Page",
    "Viewer",
    "alignment",
    "by_layer",
    "caption",
    "curves",
    "edges",
    "effects",
    "grid",
    "heads_page",
    "heatmap",
    "image",
    "mask",
    "page",
    "points",
    "serve",
    "side_by_side",
    "tape_html",
    "text",
    "timeline",
    "view",
]
