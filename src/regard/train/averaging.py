"""Checkpoint averaging: the mean of the weights of several checkpoints, which often decodes better than the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from . import checkpoint, training_state
from .failures import CheckpointError


def average(folders: Sequence[str | Path], out: str | Path, *, records: Collection[str] = ()) -> Path:
    """Write to `out` a checkpoint with the mean of the weights in `folders` (Vaswani et al. 2017, section 6.1).

    Sums are in float64 and results in the original dtype; integers, such as counts of batches, come from the last
    folder. `config.json`, `tokenizer.json` and other files that a model is built from must be the same in all; files
    named in `records`, which describe the training, come from the last folder. `out` cannot be resumed.
    """
    paths, out = [Path(folder) for folder in folders], Path(out)
    if not paths:
        raise ValueError("folders must name at least one checkpoint, got none")
    if out.exists():
        raise ValueError(f"out must be a new folder, got {out}, which exists")
    for path in paths:
        checkpoint.verify(path)
    files = _files(paths[-1])
    for path in paths[:-1]:
        _check_matches(path, _files(path), paths[-1], files, records)
    mean = checkpoint.read_tensors(paths[-1])
    dtypes = {name: x.dtype for name, x in mean.items() if x.is_floating_point()}
    mean |= {name: mean[name].double() for name in dtypes}
    for path in paths[:-1]:
        other = checkpoint.read_tensors(path)
        for name in mean.keys() ^ other.keys():
            raise _different_models(path, paths[-1], f"only one has {name!r}")
        for name in dtypes:
            if other[name].shape != mean[name].shape:
                shapes = f"{tuple(other[name].shape)} and {tuple(mean[name].shape)}"
                raise _different_models(path, paths[-1], f"{name!r} has shapes {shapes}")
            mean[name] += other[name]
    weights = mean | {name: (mean[name] / len(paths)).to(dtype) for name, dtype in dtypes.items()}
    checkpoint.write(out, {**files, checkpoint.MODEL: weights})
    return out


def _files(path: Path) -> dict[str, str]:
    """Read the files of a checkpoint other than its weights and training state."""
    names = sorted(file.name for file in path.iterdir() if checkpoint.NAME.fullmatch(file.name))
    return {name: checkpoint.read_text(path, name) for name in names if name not in training_state.OWN}


def _check_matches(
    path: Path, files: Mapping[str, str], last: Path, theirs: Mapping[str, str], records: Collection[str]
) -> None:
    for name in sorted((files.keys() | theirs.keys()) - set(records)):
        if files.get(name) != theirs.get(name):
            how = f"{name} differs" if name in files and name in theirs else f"only one has {name}"
            raise _different_models(path, last, how)


def _different_models(path: Path, last: Path, how: str) -> CheckpointError:
    """Return the error for checkpoints whose files or tensors differ."""
    return CheckpointError(
        f"{path} and {last} are of different models: {how}; average checkpoints of one run, or use models over one "
        "vocabulary as an ensemble (regard translate A B)"
    )
