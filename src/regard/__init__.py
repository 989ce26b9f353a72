"""regard: attention in neural networks, fast and visible.

One operator, `attend`, and the matrix it never stores, `weights`; terms fill its four slots: score, mask, bias and
normalize.
"""

from .ops.biases import Added, Alibi, Gaussian, Relative
from .ops.lazy import Summary, Weights
from .ops.masks import (
    Blocks,
    Causal,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Global,
    Near,
    Padding,
    Prefix,
    Rule,
    Window,
)
from .ops.normalizers import Entmax, Hard, Sigmoid, SinkSoftmax, Softmax, Sparsemax, Tapered
from .ops.operator import attend, explain, weights
from .ops.parse import parse
from .ops.scores import Additive, Bilinear, Cosine, Dot, Location

__version__ = "0.1.0"

__all__ = [
    "Added",
    "Additive",
    "Alibi",
    "Bilinear",
    "Blocks",
    "Causal",
    "Cosine",
    "Dense",
    "Diagonal",
    "Dilated",
    "Documents",
    "Dot",
    "Entmax",
    "Gaussian",
    "Global",
    "Hard",
    "Location",
    "Near",
    "Padding",
    "Prefix",
    "Relative",
    "Rule",
    "Sigmoid",
    "SinkSoftmax",
    "Softmax",
    "Sparsemax",
    "Summary",
    "Tapered",
    "Weights",
    "Window",
    "attend",
    "explain",
    "parse",
    "weights",
]
