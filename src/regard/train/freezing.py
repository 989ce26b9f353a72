"""Freeze parameters by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Exclude the parameters whose names match one of the patterns from training; return their names.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> freeze(model, ["0.*"])
    ['0.weight', '0.bias']

    `*` stands for any characters. A pattern that matches nothing raises, and so do patterns that match everything.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = sorted({name.partition(".")[0] + ".*" if "." in name else name for name in names})
            raise ValueError(f"no parameter matches {pattern!r}; the parts of the model are {', '.join(parts)}")
    frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freezing {', '.join(map(repr, patterns))} leaves nothing to train; leave a pattern out")
    return frozen
