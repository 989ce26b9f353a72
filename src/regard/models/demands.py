"""What configs demand of their fields: checks that raise with name, expectation and value."""

from __future__ import annotations

from typing import Any, get_args

from ..ops.demands import must_be_share as must_be_share
from ..ops.demands import must_count


def must_be_one_of(name: str, value: object, known: Any) -> None:
    """Raise unless `value` is among those of a `Literal`."""
    if value not in get_args(known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(known)))}, got {value!r}")


def must_be_token(name: str, value: int, vocabulary: int) -> None:
    """Raise unless `value` is a token of a vocabulary of that size."""
    must_count(name, value)
    if value >= vocabulary:
        raise ValueError(f"{name} must be a token of the vocabulary of {vocabulary}, got {value}")


def must_tie(tied: str, source_vocabulary: int, target_vocabulary: int) -> None:
    """Raise unless two vocabularies are as `tied` needs them."""
    if tied == "all" and source_vocabulary != target_vocabulary:
        raise ValueError(
            f"tied='all' needs one vocabulary for both sides, got source_vocabulary={source_vocabulary} and "
            f"target_vocabulary={target_vocabulary}; pass tied='output'"
        )
