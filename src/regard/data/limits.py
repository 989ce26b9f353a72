"""Limits: what becomes of an example that is too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .padding import Example, sequences

LONG = ("error", "drop", "truncate")


@dataclass(frozen=True)
class Limit:
    """The most ids a sequence may have (a number, or one for each field), and what to do where there are more."""

    most: int | Mapping[str, int] | None
    long: str

    def __post_init__(self) -> None:
        if self.long not in LONG:
            raise ValueError(f"long must be one of {', '.join(LONG)}, got {self.long!r}")
        for most in self.most.values() if isinstance(self.most, Mapping) else [self.most]:
            if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
                raise ValueError(f"limit must be a whole number, at least 1, or one for each field, got {self.most!r}")

    def holds(self, example: Example) -> bool:
        """Whether every sequence is short enough."""
        if self.most is None:
            return True
        if isinstance(self.most, int):
            return all(len(value) <= self.most for value in example.values() if value.ndim == 1)
        return all(len(value) <= len(value[: self.of(name)]) for name, value in sequences(example).items())

    def cut(self, example: Example) -> Example:
        """The example with its sequences cut at the end."""
        return {**example, **{name: value[: self.of(name)] for name, value in sequences(example).items()}}

    def of(self, name: str) -> int | None:
        """The most ids of one field."""
        return self.most.get(name) if isinstance(self.most, Mapping) else self.most
