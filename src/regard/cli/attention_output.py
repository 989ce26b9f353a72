"""`--attention FILE`: what a model has looked at, a picture of one example or a capture of several."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import regard

from ..ops.weights import Weights
from ..tasks.pairs import TextPair
from ..tasks.seq2seq_task import Writer
from ..tasks.word_alignment import layer_of
from ..train.checkpoint import write_bytes
from .files import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE, TAPE = ".png", ".safetensors"


def max_examples(path: Path | None, most: int, *read: Path | str | None) -> int:
    """How many examples the file holds: one in a picture, else `most`; raises unless it can be written.

    It must be none of the files and folders that are `read`.
    """
    check_writable(path, *read, flag="--attention", ends=(PICTURE, TAPE))
    return 1 if path is not None and path.suffix == PICTURE else most


def check_fits(path: Path | None, count: int, most: int) -> None:
    """Raise if there are more examples than the file holds."""
    if path is None or count <= most:
        return
    if path.suffix == PICTURE:
        raise ValueError(
            f"--attention {path.name} is a picture of one example, got more; give it one, or write --attention "
            f"{path.stem}{TAPE}, which holds many and is shown by regard view"
        )
    raise ValueError(f"--attention {path.name} holds at most {most} examples, got more; give it fewer at a time")


def check_single_input(path: Path | None, folders: Sequence[Path]) -> None:
    """Raise if several models would have to share the file."""
    if path is not None and len(folders) > 1:
        raise ValueError(f"--attention is that of one model, got {len(folders)} folders; name one")


def save_pairs(
    writer: Writer, pairs: Sequence[TextPair], path: Path, *, layer: int | None = None, head: int | None = None
) -> None:
    """What was looked at while each target was written: a heat map of one pair, or the capture of all."""
    tape = writer.tape(pairs)
    if path.suffix == TAPE:
        tape.save(path)
        return
    name = layer_of(writer.models[0], layer)
    calls = [key for key in tape if key[0] == name]  # one, or one a step where each needs the one before
    every = torch.cat([_weights(tape[key])[0] for key in calls], 1)  # h target source
    look = every.mean(0) if head is None else every[head]
    _, source = tape.tokens_of(calls[0])
    target = writer.tokenizers.encode(pairs)[0]["target"].tolist()
    written = writer.tokenizers.target_labels(target, pairs[0].source)
    draw(regard.views.heatmap(look, written, source), path)


def draw(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all."""
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:])
    write_bytes(path, drawn.getvalue(), then="try again")


def _weights(A: object) -> Weights:
    assert isinstance(A, Weights)
    return A
