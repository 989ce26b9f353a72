"""The flag `--attention FILE`: a picture of the attention of one example, or a capture of several."""

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
    """Return how many examples the file can hold: 1 for a picture, else `most`. Raise if it cannot be written.

    The path must not be one of the files and folders in `read`.
    """
    check_writable(path, *read, flag="--attention", ends=(PICTURE, TAPE))
    return 1 if path is not None and path.suffix == PICTURE else most


def check_fits(path: Path | None, count: int, most: int) -> None:
    """Raise if the file cannot hold this many examples."""
    if path is None or count <= most:
        return
    if path.suffix == PICTURE:
        raise ValueError(
            f"--attention {path.name} is a picture of one example, got more; give one example, or write "
            f"a capture with --attention {path.stem}{TAPE} and open it with regard view"
        )
    raise ValueError(f"--attention {path.name} can hold {most} examples, got more; process fewer at a time")


def check_single_input(path: Path | None, folders: Sequence[Path]) -> None:
    """Raise if the attention of several models would go to one file."""
    if path is not None and len(folders) > 1:
        raise ValueError(f"--attention needs exactly one run, got {len(folders)}; name one folder")


def save_pairs(
    writer: Writer, pairs: Sequence[TextPair], path: Path, *, layer: int | None = None, head: int | None = None
) -> None:
    """Write the attention to the sources while the targets are decoded: a heat map of one pair, or a capture of all."""
    tape = writer.tape(pairs)
    if path.suffix == TAPE:
        tape.save(path)
        return
    name = layer_of(writer.models[0], layer)
    calls = [key for key in tape if key[0] == name]  # one call, or one per decoding step (input feeding)
    heads = torch.cat([_weights(tape[key])[0] for key in calls], 1)  # h target source
    weights = heads.mean(0) if head is None else heads[head]
    _, source = tape.tokens_of(calls[0])
    target = writer.tokenizers.encode(pairs)[0]["target"].tolist()
    labels = writer.tokenizers.target_labels(target, pairs[0].source)
    draw(regard.views.heatmap(weights, labels, source), path)


def draw(figure: Figure, path: Path) -> None:
    """Write a figure; if that fails, the file stays as it was."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:])
    write_bytes(path, buffer.getvalue(), then="try again")


def _weights(A: object) -> Weights:
    assert isinstance(A, Weights)
    return A
