"""Modulate: combine the output of a decoder with the context its attention returned."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Modulate(nn.Module):
    """A new output from an output h and its context c, with any leading dims.

    | how | | |
    |---|---|---|
    | `"concatenate"` | tanh(W [c; h]) | the attentional vector of Luong et al. 2015, eq. 5 |
    | `"gate"` | (1 - z) * h + z * V c, z = sigmoid(W [c; h] + b) | after the context gate of Tu et al. 2017 |
    | `"dot"` | h * W c | the context scales each feature |

    >>> Modulate(16, 24, how="gate")(torch.randn(2, 5, 16), torch.randn(2, 5, 24)).shape
    torch.Size([2, 5, 16])

    `how` may also be a module of your own, from `(h, c)` to the new h.
    """

    def __init__(self, dim: int, context_dim: int | None = None, *, how: str | nn.Module = "concatenate") -> None:
        super().__init__()
        if isinstance(how, str) and how not in MODULATIONS:
            raise ValueError(f"how must be one of {', '.join(MODULATIONS)}, or a module, got {how!r}")
        self.how = MODULATIONS[how](dim, dim if context_dim is None else context_dim) if isinstance(how, str) else how

    def forward(self, h: Float[Tensor, "*b dim"], context: Float[Tensor, "*b context_dim"]) -> Float[Tensor, "*b dim"]:
        return self.how(h, context)


class Concatenate(nn.Module):
    """tanh(W [c; h])."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.mix = nn.Linear(context_dim + dim, dim, bias=False)

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat((context, h), -1)))


class ContextGate(nn.Module):
    """(1 - z) * h + z * V c, z = sigmoid(W [c; h] + b)."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(context_dim + dim, dim)
        self.value = nn.Linear(context_dim, dim, bias=False)

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        z = torch.sigmoid(self.gate(torch.cat((context, h), -1)))
        return (1 - z) * h + z * self.value(context)


class ContextScale(nn.Module):
    """h * W c."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(context_dim, dim, bias=False)

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        return h * self.scale(context)


MODULATIONS = {"concatenate": Concatenate, "gate": ContextGate, "dot": ContextScale}
