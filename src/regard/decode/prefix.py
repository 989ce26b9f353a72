"""Prefix: the tokens of each row before its first choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .stepper import Stepper, read, rows_of

POSITIONS_PER_PIECE = 1024  # bounds the logits over the vocabulary that are held at once while a prefix is read

Tokens = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class TargetPrefix:
    """Prefix tokens: `common`, the first n of every row, and `rest`, the others of longer rows."""

    common: Tensor  # b n
    rest: Tensor  # b m, padded with 0 on the right
    late: Tensor  # b, the number of tokens of `rest` in each row

    @staticmethod
    def of(prefix: Tokens) -> TargetPrefix:
        """Build from a tensor `(b, n)`, or from b sequences of any lengths."""
        rows = _rows(prefix)
        if not rows:
            nothing = torch.empty(0, 1, dtype=torch.long)
            return TargetPrefix(nothing, nothing, nothing[:, 0])
        n = min(map(len, rows))
        if n == 0:
            raise ValueError(
                f"prefix must hold a token for each row, got none for row {[*map(len, rows)].index(0)}; "
                "write prefix=[[start]] * b"
            )
        return TargetPrefix(
            torch.stack([row[:n] for row in rows]),
            torch.nn.utils.rnn.pad_sequence([row[n:] for row in rows], batch_first=True),
            torch.tensor([len(row) - n for row in rows], device=rows[0].device),
        )

    def begin(self, stepper: Stepper, source: Any) -> Any:
        """Return the state after all common tokens but the last, which the first step reads."""
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
    """Split tokens `(rows, n)` along n, to bound the memory of the logits of a piece."""
    return tokens.split(max(1, POSITIONS_PER_PIECE // max(1, len(tokens))), dim=1) if tokens.shape[1] else ()


def _rows(prefix: Tokens) -> list[Tensor]:
    if isinstance(prefix, Tensor) and prefix.ndim != 2:
        hint = "prefix[:, None]" if prefix.ndim == 1 else "prefix.view(b, n)"
        raise ValueError(f"prefix must have dims b n, got shape {tuple(prefix.shape)}; write {hint}")
    rows = []
    for row in prefix:
        x = torch.as_tensor(row)
        if x.ndim != 1 or (len(x) and (x.is_floating_point() or x.dtype == torch.bool)):
            raise TypeError(
                f"prefix must be a tensor (b, n) or b sequences of integers, got the row {row!r}; "
                "write prefix=[[start]] * b"
            )
        rows.append(x.long())
    return rows
