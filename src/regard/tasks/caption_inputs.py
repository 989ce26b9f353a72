"""Training examples of captioners: one per caption, with the image it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..data import Captions, DataError, Tokenizer
from ..train.dataclass_json import check_types
from .batching import TOO_LONG, Long
from .image_inputs import Image


class ImageWithCaptions(Protocol):
    """An image and its captions, such as `regard.data.Captioned`."""

    @property
    def image(self) -> Image: ...
    @property
    def captions(self) -> tuple[str, ...]: ...


Examples = Captions | Sequence[ImageWithCaptions]


@dataclass(frozen=True, kw_only=True)
class CaptionLengths:
    """The maximum length of captions, and the handling of longer ones."""

    limit: Annotated[int, "Maximum number of tokens of a caption."] = 64
    long: Annotated[
        Long,
        "Handling of longer captions: drop them, truncate them, or stop with an error. Their number is printed.",
    ] = "drop"

    def __post_init__(self) -> None:
        check_types(self)
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")


class CaptionExamples(Sequence[Mapping[str, list[int]]]):
    """One example per caption: its token ids as `target`; `owners[n]` is the number of the image of example n.

    Captions that are too long are dropped, truncated or refused, as `lengths.long` says. No image is opened.
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
        long = [number for number, row in enumerate(rows) if len(row) > lengths.limit]
        if long and (lengths.long == "error" or (lengths.long == "drop" and len(long) == len(rows))):
            raise DataError(
                f"{where(owners[long[0]])}: the caption has {len(rows[long[0]])} tokens, more than "
                f"{lengths.limit}, like {len(long):,} of {len(rows):,} captions",
                hint=TOO_LONG[lengths.long],
            )
        if long:
            done = "dropped" if lengths.long == "drop" else "truncated"
            say(f"{len(long):,} of {len(rows):,} captions have more than {lengths.limit} tokens and were {done}")
        left_out = set(long) if lengths.long == "drop" else set()
        kept = [number for number in range(len(rows)) if number not in left_out]
        self.owners = [owners[number] for number in kept]
        self._rows = [rows[number][: lengths.limit] for number in kept]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest caption."""
        return max(map(len, self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return {"target": self._rows[number]}


@dataclass(frozen=True)
class ExampleImages(Sequence[Image]):
    """The images of examples, each read when it is indexed."""

    examples: Any

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: Any) -> Any:
        return self.examples[number].image


def texts_of(examples: Examples) -> Iterator[str]:
    """Yield every caption, image by image, without opening images that are in files."""
    if isinstance(examples, Captions):
        return examples.texts()
    return (caption for example in examples for caption in example.captions)


def _owners(examples: Examples) -> list[int]:
    """Return the number of the image of each caption."""
    if isinstance(examples, Captions):
        each = examples.each()
        image_numbers = {examples.where(n): n for n in range(len(examples))}
        return [image_numbers[each.where(n)] for n in range(len(each))]
    return [n for n, example in enumerate(examples) for _ in example.captions]
