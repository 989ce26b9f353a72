"""Calls on a named backend, skipped where it objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention import flex_attention

import regard
from regard.ops.backend_plan import BackendPlan
from regard.ops.backends import flex
from regard.ops.call import Call
from regard.ops.dispatch import BACKENDS


def attend_on(backend: str, q: Tensor, k: Tensor, v: Tensor, **terms: Any) -> Tensor:
    with flex_on_the_cpu():
        plan = BACKENDS[backend].plan(Call.of(q, k, v, **terms))
        if not isinstance(plan, BackendPlan):
            pytest.skip(f"{backend}: {plan[0]}")
        return regard.attend(q, k, v, **terms, backend=backend)


@contextmanager
def flex_on_the_cpu() -> Iterator[None]:
    """FlexAttention without its compiler: dense, and forward alone, but the same terms through the same adapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "DEVICES", ("cuda", "cpu"))
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield
