"""Dropout whose coins are cheap on a CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.torch_state import is_traced

SIDES = 2**16


class Dropout(nn.Dropout):
    """x * coins / (1 - p), where each coin is 0 with probability p and 1 otherwise; in evaluation x itself.

    >>> x = torch.ones(1000, 1000)
    >>> Dropout(0.1)(x).unique()
    tensor([0.0000, 1.1111])

    Without MKL, PyTorch draws 64 bits for each coin, one after the other on one core, and a small Transformer spends a
    tenth of its training on that. Here a coin takes 16 of the 64: p is rounded to a multiple of 2**-16, and the kept
    entries are scaled by what it is rounded to.
    """

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        zeros = round(self.p * SIDES)
        if not self.training or zeros == 0:
            return x
        if zeros == SIDES or x.device.type != "cpu" or torch.backends.mkl.is_available() or is_traced():
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        coins = bits[: x.numel()].float().ge_(zeros - SIDES // 2).mul_(SIDES / (SIDES - zeros))
        return x * coins.view(x.shape).to(x.dtype)
