"""Batch size in tokens, and the handling of examples that are too long."""

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
# Hints of errors: an example is too long with long="error", or all are with long="drop".
TOO_LONG: dict[Long, str] = {
    "error": "raise the limit, or choose long='drop' or long='truncate'",
    "drop": "raise the limit, or choose long='truncate'",
}


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The size of a batch, and the longest example it may hold."""

    tokens: Annotated[
        int, "Maximum number of tokens of a batch, padding included: rows x longest row.", "--batch-tokens"
    ] = 4096
    limit: Annotated[int, "Maximum number of tokens of an example, for source and target each."] = 256
    long: Annotated[
        Long,
        "Handling of longer examples: drop them, truncate them, or stop with an error. Their number is printed.",
    ] = "drop"
    multiple: Annotated[
        int, "Pad lengths to a multiple of this number of tokens, so that batches have fewer shapes.", "--pad-to"
    ] = 1

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("limit", "multiple"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.tokens < round_up(self.limit, self.multiple):
            raise ValueError(
                f"a batch must have room for the longest example, got tokens={self.tokens} and limit={self.limit}"
            )

    def over(
        self, examples: EncodedExamples, *, pad: Mapping[str, int], seed: int, group: Group, say: Callable[[str], None]
    ) -> Batches:
        """Return the batches of a training run for this process; raise if `long` forbids their lengths."""
        if not len(examples):
            raise DataError("there are no examples", hint="expected at least one")
        long = examples.longest > self.limit
        if long.any():
            first, count = int(long.argmax()), int(long.sum())
            if self.long == "error" or (self.long == "drop" and count == len(examples)):
                lengths = ", ".join(f"{name} {counts[first]}" for name, counts in examples.lengths.items())
                raise DataError(
                    f"{examples.where(first)}: the example has more than {self.limit} tokens ({lengths}), like "
                    f"{count:,} of {len(examples):,} examples",
                    hint=TOO_LONG[self.long],
                )
            done = "dropped" if self.long == "drop" else "truncated"
            say(f"{count:,} of {len(examples):,} examples have more than {self.limit} tokens and were {done}")
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
