"""Dropout with a random mask that is cheap to draw on a CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.torch_state import is_traced

MASK_VALUES = 2**16  # a mask entry is drawn as a number of 16 bits


class Dropout(nn.Dropout):
    """x * mask / (1 - p), where each mask entry is 0 with probability p and 1 otherwise; in evaluation x itself.

    >>> x = torch.ones(1000, 1000)
    >>> Dropout(0.1)(x).unique()
    tensor([0.0000, 1.1111])

    Without MKL, PyTorch draws 64 bits for each mask entry, one after the other on one core, which takes a tenth of the
    training time of a small Transformer. This layer draws 16 bits per entry: p is rounded to a multiple of 2**-16, and
    the entries that stay are scaled by the rounded p. The random stream is therefore another than that of `nn.Dropout`.
    """

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        zeros = round(self.p * MASK_VALUES)
        if not self.training or zeros == 0:
            return x
        if zeros == MASK_VALUES or x.device.type != "cpu" or torch.backends.mkl.is_available() or is_traced():
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        mask = bits[: x.numel()].float().ge_(zeros - MASK_VALUES // 2).mul_(MASK_VALUES / (MASK_VALUES - zeros))
        return x * mask.view(x.shape).to(x.dtype)
