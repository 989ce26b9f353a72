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
from .fine_tuning_flags import FineTuningFlags
from .terminal import print_status, progress
from .training_flags import Training


@dataclass(frozen=True, kw_only=True)
class LanguageBatching:
    """The size of a batch, and the distance between its windows."""

    tokens: Annotated[int, "Number of tokens of a batch, in windows of --length tokens.", "--batch-tokens"] = 8192
    stride: Annotated[int | None, "Distance between the starts of windows, in tokens. Default: --length."] = None

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
    finetuning: FineTuningFlags
    training: Training


def train(plan: LanguagePlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a language model on a text.

    Examples:

        regard train language --text a.txt --valid-text b.txt --out runs/a

        regard train language --text shakespeare.txt --tokenizer char --model llama --length 128 --out runs/play

    The best checkpoint has the lowest loss on the validation text; without one it is the last checkpoint.
    """
    return language.train(
        plan.data.read(),
        valid=None if plan.valid is None else plan.valid.read(prefix="valid-"),
        out=out,
        recipe=plan.training.recipe("loss", "bits", "perplexity"),
        **plan.finetuning.unless_kept(model=plan.model, vocabulary=plan.vocabulary),
        base=plan.finetuning.tuning,
        tokens=plan.batching.tokens,
        stride=plan.batching.stride,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class LanguageEvaluation(TextFile):
    """The flags of `regard evaluate` for a language model."""

    overlap: Annotated[
        int | None, "Minimum number of preceding tokens that each token is predicted from. Default: half of --length."
    ] = None

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute perplexity per word, bits per character and loss per token."""
        lines, model = self.read(), LanguageModel.load(only(folders), device=device)
        overlap = model.length // 2 if self.overlap is None else self.overlap
        with progress("reading") as show:
            found = model.evaluate(lines, overlap=overlap, show=show)
        if overlap:
            print_status(
                f"each token is predicted from at least {overlap} tokens; evaluations in training cut the text into "
                "windows, --overlap 0"
            )
        return dict(found)


@dataclass(frozen=True, kw_only=True)
class LanguageScoring(TextFile):
    """The flags of `regard score` for a language model."""

    def run(self, folders: Sequence[Path], device: str | None) -> list[float]:
        """Compute log p of each line."""
        lines = self.read()
        with progress("scoring") as show:
            return LanguageModel.load(only(folders), device=device).score(list(lines), show=show)


def generate(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "",
    tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 200,
    samples: Annotated[int, typer.Option(help="Number of texts to generate.")] = 1,
    temperature: Annotated[
        float,
        typer.Option(
            help="Sampling temperature: below 1 for more likely text, 0 for the most likely token at each step."
        ),
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from this number of most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that together have this probability.")
    ] = None,
    line: Annotated[bool, typer.Option("--line", help="Stop at the end of the line.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    attention: Annotated[
        Path | None,
        typer.Option(
            help="Write the attention of one text to this file: .png (all heads) or .safetensors for regard view."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Generate a text that continues a prompt.

    Examples:

        regard generate runs/play --prompt "ROMEO:" --tokens 300 --temperature 0.8

        regard generate runs/play --prompt "ROMEO:" --tokens 60 --attention heads.png

    The run must be a language model, trained by regard train language.
    """
    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {seed}")
    max_examples(attention, 1, folder)
    if attention is not None and samples > 1:
        raise ValueError(f"--attention supports one text, got --samples {samples}; remove one of the two flags")
    model = LanguageModel.load(folder, device=device)
    if attention is not None and tokens > (left := model.room(prompt)):
        raise ValueError(
            f"--attention supports only texts that fit into the context: after this prompt {left} tokens are left, "
            f"got --tokens {tokens}; pass --tokens {left} or less"
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
            _save_attention(model.tape(prompt + texts[0]), attention)


def _save_attention(tape: Tape, path: Path) -> None:
    if path.suffix == TAPE:
        tape.save(path)
    else:
        draw(regard.views.grid(tape), path)


def only(folders: Sequence[Path]) -> Path:
    """Return the only folder; raise if there are several."""
    if len(folders) != 1:
        raise ValueError(f"language models cannot be used as an ensemble, got {len(folders)} folders; name one")
    return folders[0]
