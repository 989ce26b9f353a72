"""The curves of a run folder: the picture of `regard train --plot`, and the page of `regard view RUN`."""

from __future__ import annotations

import filecmp
import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train import checkpoint as checkpoints
from ..train.loggers import read_curves
from ..train.run_lock import trainer_of
from ..train.training_state import RECIPE

if TYPE_CHECKING:
    from ..lens import HeadHistory
    from ..views.run_page.run_document import RunState

PLOT = "curves.png"
PLAN_FILE = "plan.json"
HEAD_TABLES = ("heads.csv", "head_events.csv")  # a monitor writes them


def write_plot(run: Path) -> Path:
    """Draw the curves of a run into `curves.png` in its folder."""
    from ..views import curves  # it imports matplotlib

    file = BytesIO()
    curves(read_curves(run), best=_best_step(run), title=run.resolve().name).savefig(file, format="png", dpi=150)
    checkpoints.write_bytes(run / PLOT, file.getvalue(), then="try again")
    return run / PLOT


def read_run(run: Path) -> RunState:
    """Return the state of a run for its page; raise if the folder holds no log."""
    from ..views.run_page.run_document import RunState

    curves = read_curves(run)
    trainer, heads = trainer_of(run), _version_of_heads(run)
    if not curves and heads is None and trainer is None:
        raise ValueError(
            f"{run} holds no log.csv with a row; name the folder of a run that logs CSV tables, or a capture of "
            "regard look"
        )
    recipe = _read_json(run / RECIPE)
    plan = _read_json(run / checkpoints.BEST / PLAN_FILE)
    changes = [path.stat().st_mtime for path in run.glob("*.csv")]
    return RunState(
        name=run.resolve().name,
        curves=curves,
        settings=plan or {"recipe": recipe},
        steps=recipe.get("steps"),
        best=_best_step(run),
        trainer=None if trainer is None else str(trainer),
        updated=max(changes, default=None),
        heads_version=heads,
    )


def read_heads(run: Path) -> HeadHistory:
    """Return the history of heads of a run that was trained with --monitor."""
    from ..lens import HeadHistory

    return HeadHistory.load(run)


def _version_of_heads(run: Path) -> str | None:
    """Return a text that changes when a monitor writes to the run; None if it has not watched a step yet."""
    table = run / HEAD_TABLES[0]
    if not table.exists():
        return None
    with table.open(encoding="utf8") as file:
        watched = len(file.readlines(4096)) > 1  # below the names of the columns
    sizes = [path.stat().st_size for name in HEAD_TABLES if (path := run / name).exists()]
    return "-".join(map(str, sizes)) if watched else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, begun at least."""
    return folder.is_dir() and bool((folder / RECIPE).exists() or checkpoints.all_checkpoints(folder))


def _best_step(run: Path) -> int | None:
    """Return the step of the best checkpoint; a copy of a run may hold a folder in place of the link to it."""
    best = run / checkpoints.BEST
    if best.is_symlink() and best.exists():
        return checkpoints.step_of(best.resolve())
    manifest = best / checkpoints.MANIFEST
    same = [
        path
        for path in checkpoints.all_checkpoints(run)
        if manifest.exists() and (path / manifest.name).exists() and filecmp.cmp(manifest, path / manifest.name, False)
    ]
    return checkpoints.step_of(same[0]) if same else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file of settings, {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
