"""regard: attention in neural networks, fast and visible.

One operator, `attend`, and the matrix it never stores, `weights`; terms fill its four slots: score, mask, bias and
normalize.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Added",
    "Additive",
    "Alibi",
    "Bias",
    "Bilinear",
    "Blocks",
    "Causal",
    "Chunked",
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
    "Mask",
    "Near",
    "Neighborhood",
    "Normalizer",
    "Padding",
    "Prefix",
    "Relative",
    "Rule",
    "Score",
    "Sigmoid",
    "SinkSoftmax",
    "Softmax",
    "Sparsemax",
    "Summary",
    "Tapered",
    "Weights",
    "Window",
    "attend",
    "check_term",
    "explain",
    "merge",
    "parse",
    "term",
    "weights",
]

ROOMS = ("data", "decode", "lens", "models", "nn", "tasks", "train", "views")
FROM_LENS = ("capture", "check")

# The module of each public name; a module is imported when a name of it is first used, and PyTorch with it.
NAMES_BY_MODULE = {
    "ops.merge": "merge",
    "ops.operator": "attend explain weights",
    "ops.terms.biases": "Added Alibi Bias Gaussian Relative",
    "ops.terms.masks": "Blocks Causal Chunked Dense Diagonal Dilated Documents "
    "Global Mask Near Neighborhood Padding Prefix Rule Window",
    "ops.terms.normalizers": "Entmax Hard Normalizer Sigmoid SinkSoftmax Softmax Sparsemax Tapered",
    "ops.terms.parse": "parse",
    "ops.term_check": "check_term",
    "ops.terms.scores": "Additive Bilinear Cosine Dot Location Score",
    "ops.terms.term": "term",
    "ops.weights": "Summary Weights",
}
MODULE_OF = {name: module for module, names in NAMES_BY_MODULE.items() for name in names.split()}


if TYPE_CHECKING:
    from . import data as data
    from . import decode as decode
    from . import lens as lens
    from . import models as models
    from . import nn as nn
    from . import tasks as tasks
    from . import train as train
    from . import views as views
    from .lens.capture import capture as capture
    from .lens.linter.check import check as check
    from .ops.merge import merge
    from .ops.operator import attend, explain, weights
    from .ops.term_check import check_term
    from .ops.terms.biases import Added, Alibi, Bias, Gaussian, Relative
    from .ops.terms.masks import (
        Blocks,
        Causal,
        Chunked,
        Dense,
        Diagonal,
        Dilated,
        Documents,
        Global,
        Mask,
        Near,
        Neighborhood,
        Padding,
        Prefix,
        Rule,
        Window,
    )
    from .ops.terms.normalizers import Entmax, Hard, Normalizer, Sigmoid, SinkSoftmax, Softmax, Sparsemax, Tapered
    from .ops.terms.parse import parse
    from .ops.terms.scores import Additive, Bilinear, Cosine, Dot, Location, Score
    from .ops.terms.term import term
    from .ops.weights import Summary, Weights
else:

    def __getattr__(name: str) -> Any:
        """Import a name or a room when first used: `regard.attend`, `regard.nn.Attention` after `import regard`."""
        if name in FROM_LENS:
            return getattr(import_module("regard.lens"), name)
        if name in MODULE_OF:
            value = globals()[name] = getattr(import_module(f"regard.{MODULE_OF[name]}"), name)
            return value
        if name not in ROOMS:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        return import_module(f"regard.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *ROOMS, *FROM_LENS})
