"""Training: `fit`, one visible loop over any model with a `loss(batch)`, and what it is made of."""

from .averaging import average
from .batches import Epochs, Shuffled
from .checkpoint import find, load
from .distributed import Group, joined, own_device
from .failures import CheckpointError, Failure, NonFiniteError, ResourceError, Stopped
from .fit import Outcome, fit
from .losses import Summed
from .progress import Bar, Lines, Progress, Report, Silence
from .recipe import Recipe
from .scheduled_sampling import Exponential, InverseSigmoid, Linear
from .schedules import Constant, Cosine, InverseSquareRoot, Plateau

__all__ = [
    "Bar",
    "CheckpointError",
    "Constant",
    "Cosine",
    "Epochs",
    "Exponential",
    "Failure",
    "Group",
    "InverseSigmoid",
    "InverseSquareRoot",
    "Linear",
    "Lines",
    "NonFiniteError",
    "Outcome",
    "Plateau",
    "Progress",
    "Recipe",
    "Report",
    "ResourceError",
    "Shuffled",
    "Silence",
    "Stopped",
    "Summed",
    "average",
    "find",
    "fit",
    "joined",
    "load",
    "own_device",
]
