"""The folder of a run: what task it is of, and all it takes to use the model without knowing how it was trained.

Each checkpoint in it stands by itself. Beside the weights it holds `config.json`, the task and a closed schema of its
own, and the tokenizers; `regard.train` adds what resuming needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..train import CheckpointError, find
from ..train import checkpoint as checkpoints
from ..train.dataclass_json import from_json, to_json
from ..train.training_state import RECIPE

T = TypeVar("T")
CONFIG = "config.json"
FORMAT = 1


def checkpoint_to_resume(out: str | Path, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """The checkpoint a run in this folder goes on from, None where it is a new one; nothing is written yet.

    A folder that holds a run, or anything else, is refused unless it is to be resumed.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, got {out}, which is a file")
    if not out.exists() or not any(out.iterdir()):
        return None
    if not resume:
        what = "a run" if checkpoints.all_checkpoints(out) else "something"
        raise ValueError(f"{out} already holds {what}; resume it (resume=True, --resume) or name another folder")
    return checkpoints.usable(out, say)


def config_text(task: str, config: Any) -> str:
    """The text of `config.json`."""
    return json.dumps({"format": FORMAT, "task": task, **to_json(config)}, indent=2, ensure_ascii=False) + "\n"


def open_run(folder: str | Path) -> Path:
    """The checkpoint to use of a run, or the checkpoint itself, found to be what was written."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; expected a run that regard train has written")
    if not (
        checkpoints.all_checkpoints(folder) or any((folder / name).exists() for name in (checkpoints.MANIFEST, RECIPE))
    ):
        raise ValueError(f"{folder} holds no run; expected one that regard train has written")
    path = find(folder)
    checkpoints.verify(path)
    return path


def task_of(checkpoint: Path) -> str:
    """The task a checkpoint is of."""
    return str(_read(checkpoint)["task"])


def config_of(checkpoint: Path, task: str, cls: type[T]) -> T:
    """The task's own part of `config.json`; raises if the checkpoint is of another task."""
    found = _read(checkpoint)
    if found["task"] != task:
        raise ValueError(f"{checkpoint} is of the task {found['task']!r}, expected {task!r}")
    own = {key: value for key, value in found.items() if key not in ("format", "task")}
    try:
        return from_json(cls, json.dumps(own), source=str(checkpoint / CONFIG))
    except ValueError as error:
        raise CheckpointError(f"{error}; was it written by another version?") from None


def read_text(checkpoint: Path, name: str) -> str:
    """A text file of a checkpoint, such as its `tokenizer.json`."""
    return checkpoints.read_text(checkpoint, name)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Give the model the weights of an opened checkpoint, and make it ready to use."""
    checkpoints.put(checkpoints.read_tensors(checkpoint), model, source=str(checkpoint / checkpoints.MODEL))
    model.eval()


def _read(checkpoint: Path) -> dict[str, Any]:
    source = checkpoint / CONFIG
    try:
        found = json.loads(checkpoints.read_text(checkpoint, CONFIG))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{source} is not JSON; was the checkpoint written by regard?") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("task"), str):
        raise CheckpointError(f"{source} is not of format {FORMAT}; expected the checkpoint of a task of this version")
    return found
