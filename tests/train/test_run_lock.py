"""One process trains in a run folder at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from regard.tasks.run_folder import checkpoint_to_resume
from regard.train import Constant, Recipe, Shuffled, fit, run_lock
from regard.train.run_lock import LOCK, RunLocked, check_unlocked

HOLD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from regard.train.run_lock import run_lock
    with run_lock(Path(sys.argv[1]), print):
        print("held", flush=True)
        time.sleep(60)
    """
)


class Line(torch.nn.Linear):
    def loss(self, batch):
        return self(batch).square().mean()


def train(folder, **settings):
    settings = {"steps": 1, "rate": Constant(0.1)} | settings
    return fit(Line(1, 1), Shuffled([torch.ones(1, 1)]), Recipe(**settings), folder=folder)


@pytest.fixture
def held(tmp_path):
    """A run folder that another process holds, and the process."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield tmp_path / "run", process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.processes
def test_second_process_is_refused_with_host_process_and_start(held):
    run, process = held
    expected = rf"is in use by process {process.pid} on {socket.gethostname()}, which began at \d{{4}}-.* UTC; wait"
    with pytest.raises(RunLocked, match=expected):
        train(run)
    with pytest.raises(RunLocked, match=expected):
        checkpoint_to_resume(run, resume=True, say=print)
    with pytest.raises(RunLocked, match=expected):
        checkpoint_to_resume(run, resume=False, say=print)
    assert [path.name for path in run.iterdir()] == [LOCK]


@pytest.mark.processes
def test_lock_of_a_killed_process_is_taken_over_and_reported(held):
    run, process = held
    process.send_signal(signal.SIGKILL)
    process.wait()
    check_unlocked(run)
    said = []
    with run_lock.run_lock(run, said.append):
        assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()
    [line] = said
    assert line.startswith(f"{run} was locked by process {process.pid} on {socket.gethostname()}, which began at ")
    assert line.endswith("; that process has ended, so this one takes the lock over")
    assert not (run / LOCK).exists()


def test_run_holds_its_lock_while_it_trains_and_leaves_none(tmp_path):
    seen = []

    class Watcher:
        def advance(self, report):
            seen.append(json.loads((tmp_path / LOCK).read_text())["pid"])
            with pytest.raises(RunLocked, match=f"process {os.getpid()} on "):
                check_unlocked(tmp_path)

        def say(self, line):
            assert "locked by" not in line

        def close(self):
            pass

    fit(Line(1, 1), Shuffled([torch.ones(1, 1)]), Recipe(steps=2), folder=tmp_path, show=Watcher())
    assert seen == [os.getpid()] * 2
    assert not (tmp_path / LOCK).exists()
    check_unlocked(tmp_path)


def test_a_folder_cannot_be_locked_twice_in_a_process(tmp_path):
    with run_lock.run_lock(tmp_path, print), pytest.raises(RunLocked, match="in use by process"):
        train(tmp_path)
    train(tmp_path)


@pytest.mark.processes
def test_worker_that_outlives_a_killed_run_does_not_hold_its_lock(tmp_path):
    script = HOLD.replace("time.sleep(60)", "import os\n    if os.fork() == 0: time.sleep(5)\n    os._exit(0)")
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.DEVNULL, check=True, timeout=60)
    said = []
    with run_lock.run_lock(tmp_path, said.append):
        assert "that process has ended" in said[0]


def test_without_locks_of_the_file_system_the_file_decides(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(run_lock.UNSUPPORTED[0], "no locks")

    monkeypatch.setattr(run_lock.fcntl, "lockf", unsupported)
    here = socket.gethostname()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    for host, pid, gone in (("elsewhere", 1, False), (here, os.getpid(), False), (here, child.pid, True)):
        (tmp_path / LOCK).write_text(json.dumps({"host": host, "pid": pid, "start": "then"}))
        if gone:
            train(tmp_path)
        else:
            with pytest.raises(RunLocked, match=f"process {pid} on {host}, which began at then; .* delete "):
                train(tmp_path)


def test_torn_lock_file_is_replaced(tmp_path):
    (tmp_path / LOCK).write_text('{"host": "he')
    train(tmp_path)
    assert not (tmp_path / LOCK).exists()
