"""regard: attention in neural networks, fast and visible.

One operator, `attend`, and the matrix it never stores, `weights`; terms fill its four slots: score, mask, bias and
normalize.
"""

from importlib import import_module
from types import ModuleType

from .ops.operator import attend, explain, weights
from .ops.terms.biases import Added, Alibi, Gaussian, Relative
from .ops.terms.masks import (
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
from .ops.terms.normalizers import Entmax, Hard, Sigmoid, SinkSoftmax, Softmax, Sparsemax, Tapered
from .ops.terms.parse import parse
from .ops.terms.scores import Additive, Bilinear, Cosine, Dot, Location
from .ops.weights import Summary, Weights

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

ROOMS = ("data", "decode", "lens", "models", "nn", "tasks", "train", "views")


def __getattr__(name: str) -> ModuleType:
    """The other rooms, imported when first asked for: `regard.nn.Attention` after `import regard` alone."""
    if name not in ROOMS:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return import_module(f"regard.{name}")
