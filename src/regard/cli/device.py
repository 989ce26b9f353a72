"""The flag `--device`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..train import own_device


def _check_available(device: str | None) -> str | None:
    """Return the device; raise before any file is read if it is not available."""
    own_device(device)
    return device


Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(
        "--device", help="Device to compute on. Default: cuda if available, else cpu.", callback=_check_available
    ),
]
