"""The folder of a run: its task, and the files needed to use the model.

Each checkpoint in it is complete. Besides the weights it has `config.json`, with the task and a closed schema of its
own, and the tokenizers; `regard.train` adds the files needed to resume.
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
from ..train.run_lock import check_unlocked
from ..train.training_state import RECIPE

T = TypeVar("T")
CONFIG = "config.json"
COMMANDS = {
    "translation": "translate",
    "language": "generate",
    "summarization": "summarize",
    "answering": "answer",
    "classification": "classify",
    "captioning": "caption",
}
FORMAT = 1


def checkpoint_to_resume(out: str | Path, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from, None for a new run; write nothing.

    Raise if the folder is not empty, unless `resume` is set, or if another process trains in it.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, but {out} is a file")
    if not out.exists() or not any(out.iterdir()):
        return None
    check_unlocked(out)
    if not resume:
        if checkpoints.all_checkpoints(out):
            raise ValueError(f"{out} already has a run; resume it (resume=True, --resume) or name another folder")
        raise ValueError(f"{out} is not empty; name another folder, or resume it (resume=True, --resume)")
    return checkpoints.usable(out, say)


def config_text(task: str, config: Any) -> str:
    """Return the text of `config.json`."""
    return json.dumps({"format": FORMAT, "task": task, **to_json(config)}, indent=2, ensure_ascii=False) + "\n"


def open_run(folder: str | Path) -> Path:
    """Return the checkpoint of a run to use, or the folder itself if it is a checkpoint; verify its checksums."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a run written by regard train")
    if not (
        checkpoints.all_checkpoints(folder) or any((folder / name).exists() for name in (checkpoints.MANIFEST, RECIPE))
    ):
        raise ValueError(f"{folder} has no checkpoints; expected a run written by regard train")
    path = find(folder)
    checkpoints.verify(path)
    return path


def task_of(checkpoint: Path) -> str:
    """Return the task of a checkpoint."""
    return str(_read(checkpoint)["task"])


def config_of(checkpoint: Path, task: str, cls: type[T]) -> T:
    """Return the task's part of `config.json`; raise if the checkpoint belongs to another task."""
    config = _read(checkpoint)
    if config["task"] != task:
        use = COMMANDS.get(config["task"])
        raise ValueError(
            f"{checkpoint} is a checkpoint of the task {config['task']!r}, expected {task!r}"
            + (f"; use regard {use}" if use else "")
        )
    own = {key: value for key, value in config.items() if key not in ("format", "task")}
    try:
        return from_json(cls, json.dumps(own), source=str(checkpoint / CONFIG))
    except ValueError as error:
        raise CheckpointError(f"{error}; it may have been written by another version of regard") from None


def read_text(checkpoint: Path, name: str) -> str:
    """Read a text file of a checkpoint, such as its `tokenizer.json`."""
    return checkpoints.read_text(checkpoint, name)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into the model, and set it to evaluation mode."""
    checkpoints.put(checkpoints.read_tensors(checkpoint), model, source=str(checkpoint / checkpoints.MODEL))
    model.eval()


def _read(checkpoint: Path) -> dict[str, Any]:
    source = checkpoint / CONFIG
    try:
        config = json.loads(checkpoints.read_text(checkpoint, CONFIG))
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{source} is not valid JSON, so the checkpoint was not written by regard or is damaged"
        ) from None
    if not isinstance(config, dict) or config.get("format") != FORMAT or not isinstance(config.get("task"), str):
        raise CheckpointError(
            f"{source} does not have format {FORMAT}; it may have been written by another version of regard"
        )
    return config
