"""A backend's decision about one call: a plan that runs it, or its objections."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Objections = list[str]  # reasons why a backend cannot run a call, in words a user can act on


class BackendPlan(NamedTuple):
    """A backend's decision to run a call.

    A backend is a module with a `name` and a function `plan(call) -> BackendPlan | Objections`. `run` keeps what `plan`
    found out about the call, so nothing is checked twice.
    """

    backend: str
    run: Callable[[], tuple[Tensor, Tensor | None]]  # returns the output and the row statistic `b h i 1`, if any
