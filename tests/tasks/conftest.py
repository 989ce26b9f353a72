"""Runs that several files of tests load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.tiny_translators import trained


@pytest.fixture(scope="session", params=["rnn", "transformer"])
def translator_folder(request, tmp_path_factory) -> Path:
    """The folder of a translator of each kind, hardly trained."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, request.param)
    return out
