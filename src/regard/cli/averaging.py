"""Average the newest checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..tasks import run_folder
from ..train import average
from ..train import checkpoint as checkpoints
from . import fingerprints
from .terminal import print_status

MERGED_RECORDS = (
    "plan.json",
    fingerprints.FILE,
)  # may differ between checkpoints, since a resumed run may change its settings


def average_last(run: Path, *, last: int) -> Path:
    """Average the last checkpoints of a run into its folder `averaged`, which is replaced."""
    to = run / "averaged"
    newest_checkpoints(run, last=last)  # raises before the earlier average is removed
    if to.exists():
        checkpoints.remove(to)
    return average_checkpoints([run], to, last=last)


def average_checkpoints(folders: Sequence[Path], out: Path, *, last: int) -> Path:
    """Average checkpoints, and the last checkpoints of runs; print which, and which runs hold fewer than `last`."""
    chosen = [newest_checkpoints(folder, last=last) for folder in folders]
    paths = [path for group in chosen for path in group]
    made = average(paths, out, records=MERGED_RECORDS)
    for folder, group in zip(folders, chosen, strict=True):
        if len(group) < last and checkpoints.all_checkpoints(folder):
            more = "to keep more, train with a smaller --save-every and a larger --keep"
            print_status(f"{folder} holds {len(group)} checkpoints instead of the {last} to average; {more}")
    print_status(f"averaged {', '.join(map(str, paths))}")
    return made


def newest_checkpoints(folder: Path, *, last: int) -> list[Path]:
    """Return at most `last` newest checkpoints of a run, without that of step 0; a checkpoint returns itself."""
    saved = checkpoints.all_checkpoints(folder)
    if not saved:
        return [_check_trained(run_folder.open_run(folder))]
    trained = [path for path in saved if checkpoints.step_of(path) > 0]
    if not trained:
        raise ValueError(f"{folder} holds only the checkpoint of step 0, which is untrained; train the run first")
    return trained[-last:]


def _check_trained(path: Path) -> Path:
    if path.resolve().name == checkpoints.path_of(path, 0).name:
        raise ValueError(f"{path} is the checkpoint of step 0, which is untrained; name checkpoints of later steps")
    return path
