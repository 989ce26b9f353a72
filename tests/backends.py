"""Calls on a named backend, skipped where it objects."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import regard
from regard.ops.call import Call
from regard.ops.dispatch import BACKENDS


def attend_on(backend: str, q: Tensor, k: Tensor, v: Tensor, **terms: Any) -> Tensor:
    if found := BACKENDS[backend].objections(Call.of(q, k, v, **terms)):
        pytest.skip(f"{backend}: {found[0]}")
    return regard.attend(q, k, v, **terms, backend=backend)
