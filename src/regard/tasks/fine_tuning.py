"""Fine-tuning: begin a run with the weights and tokenizers of another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from ..train import checkpoint as checkpoints
from ..train.dataclass_json import check_types, from_json
from ..train.freezing import freeze
from ..train.lora import add_lora
from . import run_folder

BASE = "base.json"  # a file in the checkpoints of a fine-tuned run: the run it began with, and the files it kept


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """A run to begin with, and the parameters to train.

    The new run has the model, the weights and the tokenizers of `run`, and a new optimizer. Parameters whose names
    match a pattern in `freeze`, such as "encoder.*", stay as they are. With `lora` only a low-rank change of the
    attention projections is trained, of this rank; it is merged into the weights of each checkpoint.
    """

    run: str
    freeze: tuple[str, ...] = ()
    lora: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"lora must be a rank of at least 1, got {self.lora}")
        if self.lora is not None and self.freeze:
            raise ValueError("lora freezes all weights of the run itself; leave out freeze")


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """The content of `base.json`."""

    tuning: FineTuning
    checkpoint: str
    manifest: str  # sha256 of the manifest of that checkpoint
    kept: tuple[str, ...]  # files of that checkpoint that the new run has too
    new: str | None  # beginning of the names of parameters that are new
    trained: int
    frozen: int

    def text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def check_kept(base: str | Path | FineTuning | None, **given: bool) -> None:
    """Raise if a setting is given that a run begun with another takes over from it; `given` says which are."""
    if base is not None:
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"a fine-tuned run keeps the {name} of its base; leave {name} out")


def as_fine_tuning(base: str | Path | FineTuning | None) -> FineTuning | None:
    """Return the folder of a run as settings."""
    return FineTuning(run=str(base)) if isinstance(base, (str, Path)) else base


def saved_tuning(checkpoint: Path) -> FineTuning | None:
    """Return the settings that a checkpoint of a fine-tuned run was trained with, None for another run."""
    if not (checkpoint / BASE).exists():
        return None
    record = json.loads(run_folder.read_text(checkpoint, BASE))
    return from_json(FineTuning, json.dumps(record["tuning"]), source=str(checkpoint / BASE))


def saved_new(checkpoint: Path) -> str | None:
    """Return the beginning of the names of parameters that were new when fine-tuning began."""
    return json.loads(run_folder.read_text(checkpoint, BASE)).get("new")


def choose_parameters(model: nn.Module, tuning: FineTuning, *, new: str | None = None) -> None:
    """Freeze parameters, or add LoRA; parameters whose names begin with `new` are trained with LoRA too."""
    if tuning.lora is not None:
        add_lora(model, rank=tuning.lora)
        for name, parameter in model.named_parameters():
            if new is not None and name.startswith(new):
                parameter.requires_grad_(True)
    elif tuning.freeze:
        freeze(model, tuning.freeze)


def begin(
    model: nn.Module,
    checkpoint: Path,
    tuning: FineTuning,
    files: Mapping[str, str],
    say: Callable[[str], None],
    *,
    new: str | None = None,
) -> str:
    """Copy the weights of a checkpoint into a model and choose the parameters to train; return the text of `BASE`.

    Parameters whose names begin with `new` are left as they are.
    """
    weights, own = checkpoints.read_tensors(checkpoint), checkpoints.tensors(model)
    if new is not None:
        weights |= {name: x for name, x in own.items() if name.startswith(new)}
    checkpoints.put(weights, model, source=str(checkpoint / checkpoints.MODEL))
    choose_parameters(model, tuning, new=new)
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    kept = [name for name, text in files.items() if _same_text(checkpoint, name, text)]
    but = "" if new is None else f" except {new}*"
    say(
        f"fine-tuning {checkpoint}: all weights{but} and {', '.join(kept)} are kept; training {counts[True]:,} of "
        f"{sum(counts.values()):,} parameters with a new optimizer"
    )
    return BaseRecord(
        tuning=tuning,
        checkpoint=str(checkpoint.resolve()),
        manifest=checkpoints.digest_of(checkpoint / checkpoints.MANIFEST),
        kept=(checkpoints.MODEL, *kept),
        new=new,
        trained=counts[True],
        frozen=counts[False],
    ).text()


def _same_text(checkpoint: Path, name: str, text: str) -> bool:
    return (checkpoint / name).exists() and run_folder.read_text(checkpoint, name) == text
