"""A pytest plugin for the runs of `test_mutants`: the copy is what is imported, failing examples stay as found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings


def pytest_configure() -> None:
    import regard

    if Path(os.environ["REGARD_COPY"]) not in Path(regard.__file__).parents:
        raise pytest.UsageError(f"regard comes from {regard.__file__}, not from {os.environ['REGARD_COPY']}")
    settings.register_profile("unshrunk", settings.get_profile("fast"), phases=[Phase.explicit, Phase.generate])
    settings.load_profile("unshrunk")
