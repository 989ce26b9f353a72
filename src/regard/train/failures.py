"""Errors that end a run early, each kind with its exit code for the command line."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Failure(RuntimeError):
    """A run that cannot continue; the process should end with `exit_code`."""

    exit_code = 1


class CheckpointError(Failure):
    """A checkpoint is corrupted or belongs to another model, and there is no other to fall back to."""

    exit_code = 3


class NonFiniteError(Failure):
    """The loss or its gradient is not a finite number."""

    exit_code = 4


class ResourceError(Failure):
    """The disk is full, or memory has run out."""

    exit_code = 5


class Stopped(SystemExit):
    """A signal ended the run after its state was saved; left alone, the process exits with 128 + the signal."""

    def __init__(self, number: int, said: str) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.said = said

    def __str__(self) -> str:
        return self.said


@contextmanager
def disk_errors(path: Path, *, then: str = "resume") -> Iterator[None]:
    """Turn disk errors inside into a `ResourceError` that names the path, the reason and the next step."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        full = number in FULL_DISK
        hint = "make room on the disk" if full else "check that the disk has room and the folder can be written"
        reason = os.strerror(number) if number else str(error)
        raise ResourceError(f"{path} could not be written: {reason}; {hint}, then {then}") from error


@contextmanager
def memory_errors(hint: str) -> Iterator[None]:
    """Turn running out of memory inside, on the device or the host, into a `ResourceError`."""
    try:
        yield
    except Failure:  # has its message already
        raise
    except (MemoryError, RuntimeError) as error:
        spent = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
        if not spent:
            raise
        reason = str(error).strip().partition("\n")[0] or "the machine has none left"
        raise ResourceError(f"out of memory: {reason}; {hint}") from error
