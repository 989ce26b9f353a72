"""Prefix: the tokens of each row before its first choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .constraints import PAD
from .stepper import Stepper, device_of, read, read_rows, rows_of, to_device

POSITIONS_PER_PIECE = 1024  # bounds the logits over the vocabulary that are held at once while a prefix is read

Tokens = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class TargetPrefix:
    """Prefix tokens: `common`, the first n of every row, and `rest`, the others of longer rows.

    The last of `common` is read by the first step, those of `rest` by the steps after it.
    """

    common: Tensor  # b n, padded with PAD on the left
    rest: Tensor  # b m, padded with 0 on the right
    late: Tensor  # b, the number of tokens of `rest` in each row

    @staticmethod
    def of(prefix: Tokens, stepper: Stepper | None = None) -> TargetPrefix:
        """Build from a tensor `(b, n)`, or from b sequences of any lengths, on the device of the stepper."""
        rows = to_device(_rows(prefix), device_of(stepper))
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

    @property
    def rows(self) -> list[Tensor]:
        """The tokens of each row."""
        late = self.late.tolist()
        return [torch.cat((row, more[:n])) for row, more, n in zip(self.common, self.rest, late, strict=True)]

    def begin(self, stepper: Stepper, source: Any) -> tuple[TargetPrefix, Any]:
        """Return the state before the first step, and the prefix that is left to read, whose `common` is read but one.

        Rows of different lengths are read at once if there is no source and the stepper can.
        """
        state = stepper.start(to_device(source, device_of(stepper)))
        if (rows := rows_of(state)) is not None and rows != len(self.common):
            raise ValueError(
                f"prefix must have a row for each row of the source, got {len(self.common)} rows and a source of "
                f"{rows}; write prefix=[[start]] * {rows}"
            )
        if source is None and self.rest.shape[1]:
            given = self.rows
            after = read_rows(stepper, [row[:-1] for row in given], state)
            if after is not None:
                whole = torch.nn.utils.rnn.pad_sequence(given, True, PAD, "left")
                return TargetPrefix(whole, self.rest[:, :0], torch.zeros_like(self.late)), after
        for piece in pieces(self.common[:, :-1]):
            state = read(stepper, piece, state)
        return self, state


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
