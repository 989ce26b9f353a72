"""Norms by name, for configs: a name is looked up here and nowhere else."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn

from ..nn import RMSNorm
from ..nn.norms import Norm

NormName = Literal["layer", "rms"]

_NORMS: dict[str, type[nn.LayerNorm] | type[RMSNorm]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


def norm_of(name: NormName, *, eps: float) -> Norm:
    """The norm of this name, of any width."""
    return partial(_NORMS[name], eps=eps)
