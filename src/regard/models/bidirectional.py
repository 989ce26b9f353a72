"""Bidirectional: a recurrent network over a sequence from both ends, for rows of different lengths."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .padding import check_lengths
from .recurrent_decoder import CELLS, Cell, run_rnn


class Bidirectional(nn.Module):
    """[forward; backward] states of a GRU or LSTM, `hidden` wide in all; each row is read without its padding.

    >>> import torch
    >>> rnn, x = Bidirectional(8, 12), torch.randn(2, 7, 8)
    >>> states = rnn(x, torch.tensor([7, 4]))
    >>> states.shape, torch.allclose(states[1, :4], rnn(x[1:, :4])[0], atol=1e-6), bool(states[1, 4:].any())
    (torch.Size([2, 7, 12]), True, False)

    The RNN needs lengths on the CPU. A model that calls it several times moves them there once.
    """

    def __init__(self, dim: int, hidden: int, *, layers: int = 1, cell: Cell = "lstm", dropout: float = 0.0) -> None:
        super().__init__()
        if hidden % 2:
            raise ValueError(f"hidden must be even, half for each direction, got {hidden}")
        between = dropout if layers > 1 else 0.0
        self.cell = CELLS[cell](dim, hidden // 2, layers, batch_first=True, bidirectional=True, dropout=between)

    def forward(
        self, x: Float[Tensor, "b n dim"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b n hidden"]:
        if lengths is None:
            return run_rnn(self.cell, x)[0]
        lengths, n = lengths.cpu(), x.shape[1]
        check_lengths("lengths", lengths, x)
        # A packed row must have a token: an empty row reads one token of padding, which the caller hides.
        packed = pack_padded_sequence(x, lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(run_rnn(self.cell, packed)[0], batch_first=True, total_length=n)[0]
