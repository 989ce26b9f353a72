"""Kernels of other libraries: looked for where they have been imported, and believed where their output agrees.

Nothing of theirs is imported here, and what their arguments mean is read from what they document. So some rows of what
is read are compared with what the kernel returned, and where they differ nothing is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..recording.observed import ObservedAttention
from ..terms.interpret import Reader
from .output_check import explains
from .patching import Kernel, Layout, Unread, itself

ROWS = 64  # of each matrix that are compared with the output
BY_TOKEN = Layout(lambda out: out.transpose(1, 2), lambda heads: heads.transpose(1, 2).contiguous())  # b i h e


def imported(
    modules: Sequence[str],
    functions: Sequence[str],
    told: Callable[[str, dict[str, Any]], list[dict[str, Any]]],
    layout: Callable[[Tensor], Layout],
    dropout: str,
) -> list[Kernel]:
    """Those functions of these modules that are there already; `told` takes the name of one before its arguments."""
    homes = tuple(module for name in modules if (module := sys.modules.get(name)) is not None)
    found = [(itself(vars(home)[name]), name) for home in homes for name in functions if callable(vars(home).get(name))]
    return [
        Kernel(
            function=function,
            homes=homes,
            told=partial(_told, told, name),
            layout=layout,
            explained=_is_explained,
            otherwise=f"what {name} returned is not what its arguments, as they are documented, make of its values",
            dropout=dropout,
        )
        for function, name in {id(function): (function, name) for function, name in found}.values()
    ]


def check_plain_numbers(name: str, *tensors: Tensor) -> None:
    """Raise `Unread` of tensors that are scaled elsewhere, or stand for others."""
    if kinds := {x.dtype for x in tensors if not x.is_floating_point() or x.dtype.itemsize == 1}:
        raise Unread(f"it calls {name} with numbers of {', '.join(map(str, kinds))}, which are not understood")


def _told(
    told: Callable[[str, dict[str, Any]], list[dict[str, Any]]],
    name: str,
    given: dict[str, Any],
    compiled: bool,
    reader: Reader,
) -> list[dict[str, Any]]:
    """What is read; what is not there in another version of a library is `Unread`, and stops no model."""
    try:
        return told(name, given)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise Unread(f"the arguments of {name} are not those that are known: {error}") from error


def _is_explained(seen: ObservedAttention, out: Tensor, readings: int) -> bool:
    return explains(seen, out, rows=ROWS)
