"""`regard train language` and `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import regard

from ..lens import Tape
from ..tasks import language
from ..tasks.language import LanguageModel, LanguageModelSettings
from ..tasks.vocabulary import Vocabulary
from ..train import Outcome
from ..train.dataclass_json import check_types
from ..train.failures import disk_errors
from .attention_output import TAPE, draw, max_examples
from .device import Device
from .files import TextFile
from .terminal import progress
from .training_flags import Training


@dataclass(frozen=True, kw_only=True)
class LanguageBatching:
    """The size of a batch, and the windows in it."""

    tokens: Annotated[int, "the tokens of a batch, in windows of --length", "--batch-tokens"] = 8192
    stride: Annotated[int | None, "windows begin so many tokens apart (their length)"] = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class LanguagePlan:
    """The sections of `regard train language`."""

    data: TextFile
    valid: TextFile | None
    vocabulary: Vocabulary
    model: LanguageModelSettings
    batching: LanguageBatching
    training: Training


def train(plan: LanguagePlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a language model on a text.

    Examples:

        regard train language --text a.txt --valid-text b.txt --out runs/a

        regard train language --text shakespeare.txt --tokenizer char --model llama --length 128 --out runs/play

    The best checkpoint is that with the lowest loss on the validation text, or the last where there is none.
    """
    return language.train(
        plan.data.read(),
        valid=None if plan.valid is None else plan.valid.read(prefix="valid-"),
        out=out,
        recipe=plan.training.recipe("loss", "bits", "perplexity"),
        model=plan.model,
        vocabulary=plan.vocabulary,
        tokens=plan.batching.tokens,
        stride=plan.batching.stride,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class LanguageEvaluation(TextFile):
    """What `regard evaluate` asks of a language model."""

    overlap: Annotated[int | None, "how many tokens before it each one sees at least (half of --length)"] = None

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Perplexity a word, bits a character, loss a token."""
        lines, model = self.read(), LanguageModel.load(only(folders), device=device)
        with progress("reading") as show:
            return dict(model.evaluate(lines, overlap=self.overlap, show=show))


@dataclass(frozen=True, kw_only=True)
class LanguageScoring(TextFile):
    """What `regard score` asks of a language model."""

    def run(self, folders: Sequence[Path], device: str | None) -> list[float]:
        """log p of each line."""
        lines = self.read()
        with progress("scoring") as show:
            return LanguageModel.load(only(folders), device=device).score(list(lines), show=show)


def generate(
    folder: Annotated[Path, typer.Argument(help="a run", metavar="DIR")],
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "",
    tokens: Annotated[int, typer.Option(help="how many tokens to write")] = 200,
    samples: Annotated[int, typer.Option(help="how many texts to write")] = 1,
    temperature: Annotated[float, typer.Option(help="below 1 for likelier text; 0 for the likeliest tokens")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="draw from so many of the likeliest tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw from the likeliest tokens that make up this probability")
    ] = None,
    line: Annotated[bool, typer.Option("--line", help="end where the line ends")] = False,
    seed: Annotated[int, typer.Option(help="the same seed writes the same text")] = 0,
    attention: Annotated[
        Path | None,
        typer.Option(help="what was looked at in one text: a .png of every head, or a .safetensors for regard view"),
    ] = None,
    device: Device = None,
) -> None:
    """Write a text that goes on from a prompt.

    Examples:

        regard generate runs/play --prompt "ROMEO:" --tokens 300 --temperature 0.8

        regard generate runs/play --prompt "ROMEO:" --tokens 60 --attention heads.png

    A run is a folder that regard train language has written.
    """
    if samples < 1:
        raise ValueError(f"--samples must be 1 or more, got {samples}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be 0 or more and below 2^63, got {seed}")
    max_examples(attention, 1, folder)
    if attention is not None and samples > 1:
        raise ValueError(f"--attention is of one text, got --samples {samples}; leave one of them out")
    model = LanguageModel.load(folder, device=device)
    if attention is not None and tokens > (left := model.room(prompt)):
        raise ValueError(
            f"--attention is of a text that the model sees whole, and after this prompt it sees {left} tokens more, "
            f"got --tokens {tokens}"
        )
    texts = model.generate(
        prompt,
        tokens=tokens,
        samples=samples,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        until_line_end=line,
    )
    for text in texts:
        print(prompt + text.rstrip("\n") if line else prompt + text)
    if attention is not None:
        with disk_errors(attention, then="try again"):
            _show(model.tape(prompt + texts[0]), attention)


def _show(tape: Tape, path: Path) -> None:
    if path.suffix == TAPE:
        tape.save(path)
    else:
        draw(regard.views.grid(tape.values()), path)


def only(folders: Sequence[Path]) -> Path:
    """The folder, where a task takes one."""
    if len(folders) != 1:
        raise ValueError(f"a language model works alone, got {len(folders)} folders; name one")
    return folders[0]
