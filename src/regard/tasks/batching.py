"""Batching: how many tokens a batch has, and what becomes of examples that are too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ..data import Batches, DataError
from ..data.padding import round_up
from ..train import Group
from ..train.dataclass_json import check_types
from .encoded_dataset import EncodedExamples

Long = Literal["drop", "truncate", "error"]
# What to do where examples are too long, and one must not be, or all would be dropped.
TOO_LONG: dict[Long, str] = {
    "error": "raise the limit, or choose long='drop' or long='truncate'",
    "drop": "raise the limit, or choose long='truncate'",
}


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The size of a batch, and the longest example it may hold."""

    tokens: Annotated[int, "the most tokens of a batch: rows times longest row, padding included", "--batch-tokens"] = (
        4096
    )
    limit: Annotated[int, "the most tokens an example may have, on either side"] = 256
    long: Annotated[Long, "what becomes of longer ones; how many there are is said"] = "drop"
    multiple: Annotated[int, "pad lengths to a multiple of this, so that few shapes come up", "--pad-to"] = 1

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("limit", "multiple"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.tokens < round_up(self.limit, self.multiple):
            raise ValueError(
                f"tokens of a batch must hold the longest example, got tokens={self.tokens} and limit={self.limit}"
            )

    def over(
        self, examples: EncodedExamples, *, pad: Mapping[str, int], seed: int, group: Group, say: Callable[[str], None]
    ) -> Batches:
        """The batches of a training run for this process; raises if an example may not be as long as it is."""
        if not len(examples):
            raise DataError("there are no examples", hint="expected at least one")
        long = examples.longest > self.limit
        if long.any():
            first, count = int(long.argmax()), int(long.sum())
            if self.long == "error" or (self.long == "drop" and count == len(examples)):
                lengths = ", ".join(f"{name} {counts[first]}" for name, counts in examples.lengths.items())
                raise DataError(
                    f"{examples.where(first)}: the example has more than {self.limit} tokens ({lengths}), as "
                    f"{count:,} of {len(examples):,} do",
                    hint=TOO_LONG[self.long],
                )
            done = "dropped" if self.long == "drop" else "truncated"
            say(f"{count:,} of {len(examples):,} examples have more than {self.limit} tokens and are {done}")
        return Batches(
            examples,
            tokens=self.tokens,
            limit=self.limit,
            long=self.long,
            pad=pad,
            multiple=self.multiple,
            seed=seed,
            shard=(group.rank, group.size),
        )
