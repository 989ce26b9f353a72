"""Prefix: the tokens each row is given before it chooses its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .stepper import Stepper, read, rows_of

POSITIONS = 1024  # how many logits over the vocabulary are held at once while tokens are merely read

Tokens = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class TargetPrefix:
    """Rows of given tokens: `common`, as many as every row has, and `rest`, what the longer rows have beyond it."""

    common: Tensor  # b n
    rest: Tensor  # b m, zeros behind
    late: Tensor  # b, how many of `rest` each row has

    @staticmethod
    def of(prefix: Tokens) -> TargetPrefix:
        """The prefix as users write it: a tensor `(b, n)`, or b sequences of their own lengths."""
        rows = _rows(prefix)
        if not rows:
            nothing = torch.empty(0, 1, dtype=torch.long)
            return TargetPrefix(nothing, nothing, nothing[:, 0])
        n = min(map(len, rows))
        if n == 0:
            raise ValueError(
                f"prefix must give each row a token to start from, got none for row {[*map(len, rows)].index(0)}; "
                "write prefix=[[start]] * b"
            )
        return TargetPrefix(
            torch.stack([row[:n] for row in rows]),
            torch.nn.utils.rnn.pad_sequence([row[n:] for row in rows], batch_first=True),
            torch.tensor([len(row) - n for row in rows], device=rows[0].device),
        )

    def begin(self, stepper: Stepper, source: Any) -> Any:
        """The state in which the last of the common tokens is the next to be read."""
        state = stepper.start(source)
        if (rows := rows_of(state)) is not None and rows != len(self.common):
            raise ValueError(
                f"prefix must have a row for each row of the source, got {len(self.common)} rows and a source of "
                f"{rows}; write prefix=[[start]] * {rows}"
            )
        for piece in pieces(self.common[:, :-1]):
            state = read(stepper, piece, state)
        return state


def pieces(tokens: Tensor) -> Sequence[Tensor]:
    """The tokens `(rows, n)` cut along n, so that the logits of a piece stay within bounds."""
    return tokens.split(max(1, POSITIONS // max(1, len(tokens))), dim=1) if tokens.shape[1] else ()


def _rows(prefix: Tokens) -> list[Tensor]:
    if isinstance(prefix, Tensor) and prefix.ndim != 2:
        hint = "prefix[:, None]" if prefix.ndim == 1 else "prefix.view(b, n)"
        raise ValueError(f"prefix must have dims b n, got shape {tuple(prefix.shape)}; write {hint}")
    rows = []
    for row in prefix:
        x = torch.as_tensor(row)
        if x.ndim != 1 or (len(x) and (x.is_floating_point() or x.dtype == torch.bool)):
            raise TypeError(
                f"prefix must be a tensor (b, n) or b sequences of whole numbers, got the row {row!r}; "
                "write prefix=[[start]] * b"
            )
        rows.append(x.long())
    return rows
