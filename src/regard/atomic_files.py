"""Write files atomically: under a temporary name, forced to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` when the block ends without an error.

    A reader of `path` finds the old file or the whole new one, even if the process is killed or the disk is full.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path, doing: str = "writing") -> Path:
    """Return the hidden name beside `path` that this process uses until its work on `path` is complete."""
    return path.with_name(f".{path.name}-{doing}-{os.getpid()}.regard")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the usual permissions; safetensors makes files that only their owner can read."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_parent_folder(path: Path) -> None:
    """Raise if a file cannot be written to `path`: it is a folder, or its parent folder is missing or read-only."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder; create it before you save {path.name} there")
    if (path.is_file() or not path.exists()) and not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path.parent} is read-only; save {path.name} in another folder")
