"""Flags of beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..decode.penalties import MAX_ALPHA
from ..tasks.seq2seq_task import Sampling, length_limit
from .terminal import print_status

Beam = Annotated[int, typer.Option("--beam", help="Beam size; 1 is greedy search.")]
Nbest = Annotated[
    int, typer.Option("--nbest", help="Number of outputs to print for each line, as: line number ||| text ||| score.")
]
LENGTH_PENALTY = "Exponent alpha of the length penalty (Wu et al. 2016); 0 for none."
Penalty = Annotated[float, typer.Option("--length-penalty", help=LENGTH_PENALTY)]
COVERAGE = "Weight of the coverage penalty, which favours outputs that attend to every source token; 0 for none."
Coverage = Annotated[float, typer.Option("--coverage-penalty", help=COVERAGE)]
Prefix = Annotated[str, typer.Option("--prefix", help="Text that every output begins with.")]
Prefixes = Annotated[
    Path | None, typer.Option("--prefixes", help="File with the beginning of each output, a line for each input line.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="Draw outputs at random instead of searching: 1 by the model's probabilities, below 1 likelier outputs.",
    ),
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from this number of most likely tokens.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Draw from the most likely tokens that together have this probability.")
]
Seed = Annotated[
    int, typer.Option("--seed", help="Random seed of drawn outputs; the same seed gives the same outputs.")
]
MAX_COVERAGE, MAX_TEMPERATURE = 100.0, 100.0
LENGTH = "Maximum number of output tokens. Default: 1.5 x the longest training target, plus 10."
MaxLength = Annotated[int | None, typer.Option("--max-length", help=LENGTH)]


def sampling_of(temperature: float | None, top_k: int | None, top_p: float | None, seed: int) -> Sampling | None:
    """Return the settings of random outputs, None if no flag asks for them."""
    if temperature is top_k is top_p is None:
        if seed:
            raise ValueError("--seed is for outputs drawn at random; add --temperature 1, or leave it out")
        return None
    if temperature is not None and not 0 < temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"--temperature must be above 0 and at most {MAX_TEMPERATURE:g}, got {temperature:g}; for the most likely "
            "tokens leave it out and give --beam 1"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p:g}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {seed}")
    return Sampling(seed=seed, temperature=1.0 if temperature is None else temperature, top_k=top_k, top_p=top_p)


@dataclass(frozen=True, kw_only=True)
class Search:
    """The flags of a search, checked together; `settings` are the arguments of `Writer.n_best`."""

    beam: int
    nbest: int = 1
    penalty: float = 0.6
    min_length: int = 0
    max_length: int | None = None
    no_repeat: int | None = None
    coverage: float = 0.0
    prefix: str = ""
    prefixes: Sequence[str] | None = None
    sampling: Sampling | None = None

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
        if not 0 <= self.coverage <= MAX_COVERAGE:
            raise ValueError(f"--coverage-penalty must be between 0 and {MAX_COVERAGE:g}, got {self.coverage}")
        if self.prefix and self.prefixes is not None:
            raise ValueError("--prefix and --prefixes both give the beginnings of outputs; leave one out")
        if self.sampling is not None and self.coverage:
            raise ValueError(
                "--coverage-penalty is for search, and --temperature, --top-k and --top-p draw; leave it out"
            )
        for low, least, high, most in (
            ("--nbest", self.nbest, "--beam", self.nbest if self.sampling else self.beam),
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
            "coverage": self.coverage,
        }

    @property
    def one_best(self) -> dict[str, Any]:
        """The flags as arguments of `Writer.write`."""
        return {name: value for name, value in self.settings.items() if name != "n"}

    def settings_of(self, lines: Sequence[str], *, before: int) -> dict[str, Any]:
        """The arguments for some lines of the input, after `before` others."""
        prefixes = None
        if self.prefixes is not None:
            prefixes = self.prefixes[before : before + len(lines)]
            if len(prefixes) < len(lines):
                raise ValueError(
                    f"--prefixes has {len(self.prefixes):,} lines, and the input has more; give one for each"
                )
        elif self.prefix:
            prefixes = [self.prefix] * len(lines)
        sampling = None if self.sampling is None else self.sampling.after(before * self.nbest)
        return {**self.settings, "prefixes": prefixes, "sampling": sampling}

    def check_prefixes(self, lines: int) -> None:
        """Raise if there are more prefixes than there were lines."""
        if self.prefixes is not None and len(self.prefixes) != lines:
            raise ValueError(f"--prefixes has {len(self.prefixes):,} lines, but the input has {lines:,}")

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
