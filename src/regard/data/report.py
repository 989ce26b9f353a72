"""Report: what an epoch has brought."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Report:
    """Counts of an epoch so far: nothing is cut or left out without being counted here.

    >>> print(Report(examples=1000, dropped=3, tokens=19_500, cells=20_000))
    1,000 examples, 19,500 tokens, 2.5% padding, 3 dropped as too long

    Examples, tokens and cells are those of this rank's batches; the others count what happened on all.
    """

    examples: int = 0
    dropped: int = 0
    truncated: int = 0
    uneven: int = 0
    tokens: int = 0
    cells: int = 0

    @property
    def padding(self) -> float:
        """The share of the batches that is padding."""
        return 1 - self.tokens / self.cells if self.cells else 0.0

    def __str__(self) -> str:
        parts = [f"{self.examples:,} examples, {self.tokens:,} tokens, {self.padding:.1%} padding"]
        parts += [f"{self.dropped:,} dropped as too long"] * (self.dropped > 0)
        parts += [f"{self.truncated:,} truncated"] * (self.truncated > 0)
        parts += [f"{self.uneven:,} left out to share evenly"] * (self.uneven > 0)
        return ", ".join(parts)
