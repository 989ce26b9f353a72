"""The sizes of one attention: what terms check themselves against."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """The letters of one attention: q is `b h i d`, k is `b g j k_width`."""

    b: int
    h: int
    g: int
    i: int
    j: int
    d: int
    k_width: int
    readable: bool  # True if tensor values can be read without synchronizing a device or breaking a graph
