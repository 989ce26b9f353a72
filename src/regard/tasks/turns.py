"""Turns: captions and images as a captioner is trained on them, every caption a turn of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..data import Captions, DataError, Tokenizer
from ..train.schema import check_types
from .batching import Long
from .seeing import Image, Sight


class Captioned(Protocol):
    """An image and what people say of it, as `regard.data.Captioned` has them."""

    @property
    def image(self) -> Image: ...
    @property
    def captions(self) -> tuple[str, ...]: ...


Examples = Captions | Sequence[Captioned]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The longest caption there may be."""

    limit: Annotated[int, "the most tokens a caption may have"] = 64
    long: Annotated[Long, "what becomes of longer ones; how many there are is said"] = "drop"

    def __post_init__(self) -> None:
        check_types(self)
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")


class Turns:
    """Every caption a turn of its own: an image, and the ids of what is said of it.

    Captions that are too long are left out, cut or refused, as `lengths` say. Pictures are read when asked for.
    """

    def __init__(
        self,
        examples: Examples,
        tokenizer: Tokenizer,
        lengths: Lengths,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._examples: Any = examples.each() if isinstance(examples, Captions) else examples
        self.where: Callable[[int], str] = getattr(self._examples, "where", "image {}".format)
        owners = [n for n, count in enumerate(_counts(self._examples)) for _ in range(count)]
        rows = tokenizer.encode_all(list(texts_of(examples)), eos=True)
        long = [turn for turn, row in enumerate(rows) if len(row) > lengths.limit]
        if long and (lengths.long == "error" or (lengths.long == "drop" and len(long) == len(rows))):
            raise DataError(
                f"{self.where(owners[long[0]])}: the caption has {len(rows[long[0]])} tokens, more than "
                f"{lengths.limit}, as {len(long):,} of {len(rows):,} do",
                hint="raise the limit, or choose long='drop' or long='truncate'",
            )
        if long:
            done = "dropped" if lengths.long == "drop" else "truncated"
            say(f"{len(long):,} of {len(rows):,} captions have more than {lengths.limit} tokens and are {done}")
        left_out = set(long) if lengths.long == "drop" else set()
        self._turns = [
            (owner, row[: lengths.limit])
            for turn, (owner, row) in enumerate(zip(owners, rows, strict=True))
            if turn not in left_out
        ]

    @property
    def longest(self) -> int:
        """The tokens of the longest caption."""
        return max(len(row) for _, row in self._turns)

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, number: int) -> tuple[Image, list[int]]:
        owner, row = self._turns[number]
        return self._examples[owner].image, row


@dataclass(frozen=True)
class Encode:
    """A turn as the fields of a batch."""

    sight: Sight

    def __call__(self, turn: tuple[Image, list[int]]) -> dict[str, Any]:
        image, row = turn
        return {"image": self.sight(image), "target": row}


@dataclass(frozen=True)
class Seen(Sequence[Image]):
    """The images of examples, read when asked for."""

    examples: Any

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: Any) -> Any:
        return self.examples[number].image


def texts_of(examples: Examples) -> Iterator[str]:
    """Every caption, image by image; no picture is opened where they lie in files."""
    if isinstance(examples, Captions):
        return examples.texts()
    return (caption for example in examples for caption in example.captions)


def _counts(examples: Any) -> Iterator[int]:
    """How many captions each image has."""
    return (1 for _ in examples.texts()) if isinstance(examples, Captions) else (len(one.captions) for one in examples)
