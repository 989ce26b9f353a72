"""Views: attention to look at. Figures are matplotlib `Figure` values, returned and never shown."""

from .figure import alignment, by_layer, caption, grid, heatmap, image, mask, text

__all__ = ["alignment", "by_layer", "caption", "grid", "heatmap", "image", "mask", "text"]
