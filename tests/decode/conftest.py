"""Every search, and every stand-in for a model with its source."""

from __future__ import annotations

import pytest

from tests.decode.searches import MODELS, SEARCHES


@pytest.fixture(params=SEARCHES)
def search(request):
    return SEARCHES[request.param]


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]
