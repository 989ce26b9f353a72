"""Turns: captions and images as a captioner is trained on them, every caption a turn of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..data import Captions, DataError, Tokenizer
from ..train.dataclass_json import check_types
from .batching import TOO_LONG, Long
from .image_inputs import Image


class ImageWithCaptions(Protocol):
    """An image and what people say of it, as `regard.data.Captioned` has them."""

    @property
    def image(self) -> Image: ...
    @property
    def captions(self) -> tuple[str, ...]: ...


Examples = Captions | Sequence[ImageWithCaptions]


@dataclass(frozen=True, kw_only=True)
class CaptionLengths:
    """The longest caption there may be."""

    limit: Annotated[int, "the most tokens a caption may have"] = 64
    long: Annotated[Long, "what becomes of longer ones; how many there are is said"] = "drop"

    def __post_init__(self) -> None:
        check_types(self)
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")


class CaptionExamples(Sequence[Mapping[str, list[int]]]):
    """Every caption a turn of its own: the ids of what is said, as `target`; `owners[n]` is the image of turn n.

    Captions that are too long are left out, cut or refused, as `lengths` say. No picture is opened.
    """

    def __init__(
        self,
        examples: Examples,
        tokenizer: Tokenizer,
        lengths: CaptionLengths,
        *,
        say: Callable[[str], None],
    ) -> None:
        where: Callable[[int], str] = getattr(examples, "where", "image {}".format)
        owners = _owners(examples)
        rows = tokenizer.encode_all(list(texts_of(examples)), eos=True)
        long = [turn for turn, row in enumerate(rows) if len(row) > lengths.limit]
        if long and (lengths.long == "error" or (lengths.long == "drop" and len(long) == len(rows))):
            raise DataError(
                f"{where(owners[long[0]])}: the caption has {len(rows[long[0]])} tokens, more than "
                f"{lengths.limit}, as {len(long):,} of {len(rows):,} do",
                hint=TOO_LONG[lengths.long],
            )
        if long:
            done = "dropped" if lengths.long == "drop" else "truncated"
            say(f"{len(long):,} of {len(rows):,} captions have more than {lengths.limit} tokens and are {done}")
        left_out = set(long) if lengths.long == "drop" else set()
        kept = [turn for turn in range(len(rows)) if turn not in left_out]
        self.owners = [owners[turn] for turn in kept]
        self._rows = [rows[turn][: lengths.limit] for turn in kept]

    @property
    def longest(self) -> int:
        """The tokens of the longest caption."""
        return max(map(len, self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return {"target": self._rows[number]}


@dataclass(frozen=True)
class ExampleImages(Sequence[Image]):
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


def _owners(examples: Examples) -> list[int]:
    """The image of each caption, image by image."""
    if isinstance(examples, Captions):
        each = examples.each()
        number = {examples.where(n): n for n in range(len(examples))}
        return [number[each.where(turn)] for turn in range(len(each))]
    return [n for n, example in enumerate(examples) for _ in example.captions]
