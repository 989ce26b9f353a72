"""Search: how what is written is looked for, in the words of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..decode.penalties import MAX_ALPHA
from ..tasks.seq2seq_task import length_limit
from .terminal import print_status

Beam = Annotated[int, typer.Option("--beam", help="hypotheses side by side; 1 is greedy")]
Nbest = Annotated[int, typer.Option("--nbest", help="print so many for each line: number ||| text ||| score")]
Penalty = Annotated[float, typer.Option("--length-penalty", help="alpha of Wu et al. 2016; 0 for none")]
LENGTH = "the most tokens to write (half as many again as the longest target of the training, and ten)"
MaxLength = Annotated[int | None, typer.Option("--max-length", help=LENGTH)]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The flags of a search, checked together; `settings` is what `Writer.n_best` makes of them."""

    beam: int
    nbest: int = 1
    penalty: float = 0.6
    min_length: int = 0
    max_length: int | None = None
    no_repeat: int | None = None

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--beam", self.beam, 1),
            ("--nbest", self.nbest, 1),
            ("--min-length", self.min_length, 0),
            ("--max-length", self.max_length, 1),
            ("--no-repeat", self.no_repeat, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{flag} must be {least} or more, got {value}")
        if not -MAX_ALPHA <= self.penalty <= MAX_ALPHA:
            raise ValueError(
                f"--length-penalty must be from -{MAX_ALPHA} to {MAX_ALPHA}, got {self.penalty}; 0.6 is usual"
            )
        for low, least, high, most in (
            ("--nbest", self.nbest, "--beam", self.beam),
            ("--min-length", self.min_length, "--max-length", self.max_length),
        ):
            if most is not None and least > most:
                raise ValueError(
                    f"{low} must be at most {high}, got {low} {least} and {high} {most}; pass {high} {least} or more"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """The same as Python names them."""
        return {
            "n": self.nbest,
            "beam": self.beam,
            "alpha": self.penalty,
            "min_length": self.min_length,
            "max_length": self.max_length,
            "no_repeat": self.no_repeat,
        }

    def print_unfinished(self, what: str, cut: int, number: int, *, longest: int) -> None:
        """Say how many did not come to an end, and where they were cut off."""
        if cut:
            most = length_limit(longest, min_length=self.min_length, max_length=self.max_length)
            print_status(
                f"{cut:,} of {number:,} {what} did not come to an end and were cut off at {most} tokens; "
                "--max-length N allows more"
            )
