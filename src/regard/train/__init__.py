"""Training: `fit`, one visible loop over any model with a `loss(batch)`, and what it is made of."""

from .averaging import average
from .batches import Epochs, Shuffled
from .callbacks import Callback, StepMonitor
from .checkpoint import find, load
from .distributed import Group, own_device, process_group
from .failures import CheckpointError, Failure, NonFiniteError, ResourceError, Stopped
from .fit import Outcome, fit
from .freezing import freeze
from .loader_epochs import LoaderEpochs
from .loggers import CsvLogger, Logger, TensorBoardLogger, WandbLogger
from .lora import add_lora, merge_lora
from .losses import Summed
from .progress import Bar, Progress, ProgressLines, Silence, StepReport
from .recipe import Recipe
from .scheduled_sampling import Exponential, InverseSigmoid, LinearSchedule
from .schedules import Constant, CosineSchedule, InverseSquareRoot, Plateau

# Names of earlier versions.
Cosine = CosineSchedule
Linear = LinearSchedule
Lines = ProgressLines
Report = StepReport
joined = process_group

__all__ = [
    "Bar",
    "Callback",
    "CheckpointError",
    "Constant",
    "Cosine",
    "CosineSchedule",
    "CsvLogger",
    "Epochs",
    "Exponential",
    "Failure",
    "Group",
    "InverseSigmoid",
    "InverseSquareRoot",
    "Linear",
    "LinearSchedule",
    "Lines",
    "LoaderEpochs",
    "Logger",
    "NonFiniteError",
    "Outcome",
    "Plateau",
    "Progress",
    "ProgressLines",
    "Recipe",
    "Report",
    "ResourceError",
    "Shuffled",
    "Silence",
    "StepMonitor",
    "StepReport",
    "Stopped",
    "Summed",
    "TensorBoardLogger",
    "WandbLogger",
    "add_lora",
    "average",
    "find",
    "fit",
    "freeze",
    "joined",
    "load",
    "merge_lora",
    "own_device",
    "process_group",
]
