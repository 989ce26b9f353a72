"""Which checkpoints of a run are averaged: the newest, of those that were trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..tasks import run_folder
from ..train import average
from ..train import checkpoint as checkpoints
from . import fingerprints
from .terminal import print_status

MERGED_RECORDS = ("plan.json", fingerprints.FILE)  # a run that is resumed may be told to train otherwise


def average_last(run: Path, *, last: int) -> Path:
    """The mean of the last checkpoints of a run, in its folder `averaged`, in place of the one before."""
    to = run / "averaged"
    newest_checkpoints(run, last=last)  # what cannot be averaged takes nothing away
    if to.exists():
        checkpoints.remove(to)
    return average_checkpoints([run], to, last=last)


def average_checkpoints(folders: Sequence[Path], out: Path, *, last: int) -> Path:
    """The mean of checkpoints, and of the last ones of runs; tells which they are, and of which run there are fewer."""
    chosen = [newest_checkpoints(folder, last=last) for folder in folders]
    paths = [path for some in chosen for path in some]
    made = average(paths, out, records=MERGED_RECORDS)
    for folder, some in zip(folders, chosen, strict=True):
        if len(some) < last and checkpoints.all_checkpoints(folder):
            more = "save more of them by --save-every and --keep"
            print_status(f"of the {last} checkpoints to average, {folder} holds {len(some)}; {more}")
    print_status(f"averaged {', '.join(map(str, paths))}")
    return made


def newest_checkpoints(folder: Path, *, last: int) -> list[Path]:
    """The last checkpoints of a run but that of step 0, as many as there are; a checkpoint stands for itself."""
    saved = checkpoints.all_checkpoints(folder)
    if not saved:
        return [_check_trained(run_folder.open_run(folder))]
    trained = [path for path in saved if checkpoints.step_of(path) > 0]
    if not trained:
        raise ValueError(f"{folder} holds no checkpoint of a step after 0 to be averaged; train it first")
    return trained[-last:]


def _check_trained(path: Path) -> Path:
    if path.resolve().name == checkpoints.path_of(path, 0).name:
        raise ValueError(f"{path} holds the weights before the first step; name checkpoints of later steps")
    return path
