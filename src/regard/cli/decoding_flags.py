"""Flags of beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..decode.penalties import MAX_ALPHA
from ..tasks.seq2seq_task import length_limit
from .terminal import print_status

Beam = Annotated[int, typer.Option("--beam", help="Beam size; 1 is greedy search.")]
Nbest = Annotated[
    int, typer.Option("--nbest", help="Number of outputs to print for each line, as: line number ||| text ||| score.")
]
Penalty = Annotated[
    float, typer.Option("--length-penalty", help="Exponent alpha of the length penalty (Wu et al. 2016); 0 for none.")
]
LENGTH = "Maximum number of output tokens. Default: 1.5 x the longest training target, plus 10."
MaxLength = Annotated[int | None, typer.Option("--max-length", help=LENGTH)]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The flags of a search, checked together; `settings` are the arguments of `Writer.n_best`."""

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
                raise ValueError(f"{flag} must be at least {least}, got {value}")
        if not -MAX_ALPHA <= self.penalty <= MAX_ALPHA:
            raise ValueError(
                f"--length-penalty must be between -{MAX_ALPHA} and {MAX_ALPHA}, got {self.penalty}; 0.6 is common"
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
        """The flags as arguments of `Writer.n_best`."""
        return {
            "n": self.nbest,
            "beam": self.beam,
            "alpha": self.penalty,
            "min_length": self.min_length,
            "max_length": self.max_length,
            "no_repeat": self.no_repeat,
        }

    def print_method(self) -> None:
        """Print how an evaluation decodes, if evaluations in training decode otherwise."""
        if self.beam > 1:
            print_status(f"beam search with --beam {self.beam}; evaluations in training use greedy search, --beam 1")

    def print_unfinished(self, what: str, unfinished: int, number: int, *, longest: int) -> None:
        """Print how many outputs reached the maximum length before they ended."""
        if unfinished:
            most = length_limit(longest, min_length=self.min_length, max_length=self.max_length)
            print_status(
                f"{unfinished:,} of {number:,} {what} reached the maximum of {most} tokens before they ended; "
                "raise it with --max-length"
            )
