"""Checkpoint averaging: the mean of the weights of several checkpoints, which often decodes better than the last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import checkpoint, saving
from .failures import CheckpointError


def average(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write to `out` a checkpoint whose weights are the mean of those in `folders` (Vaswani et al. 2017, section 6.1).

    Sums are in float64 and results in the dtype they had; integers, such as counts of batches, are those of the last
    folder, and so are `config.json`, `tokenizer.json` and whatever else a model is built from. `out` cannot be resumed.
    """
    paths, out = [Path(folder) for folder in folders], Path(out)
    if not paths:
        raise ValueError("folders must name at least one checkpoint, got none")
    if out.exists():
        raise ValueError(f"out must be a new folder, got {out}, which exists")
    for path in paths:
        checkpoint.verify(path)
    mean = checkpoint.read_tensors(paths[-1])
    dtypes = {name: x.dtype for name, x in mean.items() if x.is_floating_point()}
    mean |= {name: mean[name].double() for name in dtypes}
    for path in paths[:-1]:
        other = checkpoint.read_tensors(path)
        for name in mean.keys() ^ other.keys():
            raise CheckpointError(f"{path} and {paths[-1]} are of different models: only one has {name!r}")
        for name in dtypes:
            if other[name].shape != mean[name].shape:
                shapes = f"{tuple(other[name].shape)} and {tuple(mean[name].shape)}"
                raise CheckpointError(f"{path} and {paths[-1]} are of different models: {name!r} has shapes {shapes}")
            mean[name] += other[name]
    weights = mean | {name: (mean[name] / len(paths)).to(dtype) for name, dtype in dtypes.items()}
    others = sorted(file for file in paths[-1].iterdir() if file.name not in saving.OWN)
    files = {file.name: file.read_text(encoding="utf8") for file in others}
    checkpoint.write(out, {**files, checkpoint.MODEL: weights})
    return out
