"""Fixtures of the training tests."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.train.small_run import Nursery, remains, small


@pytest.fixture
def scratch():
    """A folder in memory where there is such a place: these tests save often, and kill processes, not machines."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """What the small run leaves when nothing happens to it."""
    folder = tmp_path_factory.mktemp("run") / "uninterrupted"
    small(folder)
    return remains(folder)
