"""`--device`: where a command computes."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..train import own_device


def _check_available(device: str | None) -> str | None:
    """The device, if there is such a one: what is not there is told before anything is read."""
    own_device(device)
    return device


Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option("--device", help="where to compute (a GPU where there is one)", callback=_check_available),
]
