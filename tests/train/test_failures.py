"""Failures: an exit code for each kind, and errors of the disk and the memory with the next step."""

import errno
import signal

import pytest
import torch

from regard.train import CheckpointError, Failure, NonFiniteError, ResourceError, Stopped
from regard.train.failures import disk_errors, memory_errors


def test_each_kind_has_an_exit_code_of_its_own():
    kinds = (Failure, CheckpointError, NonFiniteError, ResourceError)
    assert [kind.exit_code for kind in kinds] == [1, 3, 4, 5]
    assert all(issubclass(kind, Failure) for kind in kinds)


def test_a_run_that_was_stopped_exits_as_a_shell_expects():
    stopped = Stopped(signal.SIGTERM, "stopped at step 3")
    assert (stopped.code, stopped.signal, str(stopped)) == (143, signal.SIGTERM, "stopped at step 3")
    assert isinstance(stopped, SystemExit)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_to_be_made_room_on(tmp_path, number):
    message = r"a.txt could not be written: .*; make room on the disk, then resume$"
    with pytest.raises(ResourceError, match=message), disk_errors(tmp_path / "a.txt"):
        raise OSError(number, "unused")


def test_a_folder_that_cannot_be_written_is_told_apart_from_a_full_disk(tmp_path):
    message = r"Permission denied; check that the disk has room .*, then try again$"
    with pytest.raises(ResourceError, match=message), disk_errors(tmp_path / "a.txt", then="try again"):
        raise PermissionError(errno.EACCES, "unused")
    with pytest.raises(ResourceError, match="could not be written: no number; check"), disk_errors(tmp_path):
        raise OSError("no number")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "the machine has none left"),
        (torch.OutOfMemoryError("tried to allocate 2 GiB.\nmore"), "tried to allocate 2 GiB."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_memory_that_has_run_out_is_told_with_what_to_do(error, reason):
    with pytest.raises(ResourceError) as raised, memory_errors("use smaller batches"):
        raise error
    assert str(raised.value) == f"out of memory: {reason}; use smaller batches"
    assert raised.value.__cause__ is error


def test_other_errors_pass_as_they_are(tmp_path):
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as raised, memory_errors("use smaller batches"):
        raise RuntimeError("shapes differ")
    assert type(raised.value) is RuntimeError
    with pytest.raises(KeyError), disk_errors(tmp_path):
        raise KeyError


def test_error_with_its_message_is_not_wrapped_again():
    with (
        pytest.raises(ResourceError, match=r"^out of memory: spent; use smaller batches$"),
        memory_errors("use a smaller model"),
        memory_errors("use smaller batches"),
    ):
        raise MemoryError("spent")
