"""Lock of a run folder: one process trains in it at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from .failures import disk_errors

LOCK = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # file systems without locks
HELD = (errno.EACCES, errno.EAGAIN)
_own: dict[Path, int] = {}  # lock files of this process, with its id: a forked worker holds none of them


class RunLocked(ValueError):
    """Another process trains in the run folder."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the lock file names it."""

    host: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which began at {self.start}"

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False for one on another machine, which cannot be asked."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


@contextmanager
def run_lock(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run folder inside the block; raise `RunLocked` if another process holds it.

    The operating system releases the lock when a process ends, however it ends. The lock file that a killed process
    leaves is taken over and reported to `say`. On a file system without locks, the file itself is the lock, and only a
    process of the same machine can be found to have ended.
    """
    path = (run / LOCK).absolute()
    if _own.get(path) == os.getpid():
        raise _refusal(run, _me())
    with disk_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        file = _open(path)
    try:
        before = _acquire(file, run)
        while not _is_at(file, path):  # the process before deleted the file after it was opened here
            file.close()
            with disk_errors(run):
                file = _open(path)
            before = _acquire(file, run)
        if before is not None:
            say(f"{run} was locked by {before}; that process has ended, so this one takes the lock over")
        with disk_errors(path):
            _write(file, _me())
        _own[path] = os.getpid()
        try:
            yield
        finally:
            del _own[path]
            path.unlink(missing_ok=True)
    finally:
        file.close()


def check_unlocked(run: Path) -> None:
    """Raise `RunLocked` if a process trains in the run folder; write nothing."""
    path = (run / LOCK).absolute()
    if _own.get(path) == os.getpid():
        raise _refusal(run, _me())
    try:
        file = path.open("r+", encoding="utf8")
    except OSError:
        return
    with file:
        _acquire(file, run)


def trainer_of(run: Path) -> Holder | None:
    """Return the process that trains in the folder, None if none does; take no lock, so that training may begin."""
    try:
        with (run / LOCK).open(encoding="utf8") as file:
            holder = _read(file)
    except OSError:
        return None
    return None if holder is None or holder.is_gone else holder


def _open(path: Path) -> IO[str]:
    """Open the lock file, new or existing."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf8")


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _acquire(file: IO[str], run: Path) -> Holder | None:
    """Lock the file and return the process that it names, None if it is new; raise if that process still runs."""
    supported = True
    try:
        # A record lock, since forked workers do not inherit it: it ends with the process that trains.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise _refusal(run, _read(file)) from None
        if error.errno not in UNSUPPORTED:
            raise
        supported = False
    holder = _read(file)
    if not supported and holder is not None and not holder.is_gone:
        raise _refusal(run, holder)
    return holder


def _refusal(run: Path, holder: Holder | None) -> RunLocked:
    who = "another process" if holder is None else str(holder)
    return RunLocked(
        f"{run} is in use by {who}; wait until it ends, stop it, or give another folder (if it is gone for certain, "
        f"delete {run / LOCK})"
    )


def _me() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"))


def _read(file: IO[str]) -> Holder | None:
    """Return the process that a lock file names, None if it is empty or was not written in full."""
    file.seek(0)
    try:
        named = json.loads(file.read(4096))
        return Holder(str(named["host"]), int(named["pid"]), str(named["start"]))
    except (ValueError, KeyError, TypeError):
        return None


def _write(file: IO[str], holder: Holder) -> None:
    file.seek(0)
    file.truncate()
    json.dump(asdict(holder), file)
    file.flush()
    os.fsync(file.fileno())
