"""Masks: which keys each query may attend to, as an algebra of small terms.

A mask is a callable over `(b, h, i, j)` that is True where the query at i may attend to the key at j, so it is a
FlexAttention `mask_mod`. Masks combine by `&`, `|` and `~`, print as a picture, and know which tiles of the matrix are
empty or full without evaluating single entries.
"""

from __future__ import annotations

from .mask_algebra import Mask
from .position_masks import Causal, Chunked, Diagonal, Dilated, Global, Neighborhood, Prefix, Rule, Window
from .tensor_masks import Blocks, Dense, Documents, Near, Padding

__all__ = [
    "Blocks",
    "Causal",
    "Chunked",
    "Dense",
    "Diagonal",
    "Dilated",
    "Documents",
    "Global",
    "Mask",
    "Near",
    "Neighborhood",
    "Padding",
    "Prefix",
    "Rule",
    "Window",
]
