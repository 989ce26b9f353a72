"""`regard explain` and `bench`: the operator, without a model."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from torch import Tensor

import regard

from ..ops.terms.biases import Bias
from ..ops.terms.masks.mask_algebra import Mask
from ..ops.terms.normalizers import Normalizer
from ..ops.terms.parse import parse
from ..ops.terms.scores import Score
from ..train import own_device
from .device import Device

REPOSITORY = Path(__file__).parents[3]


def explain(
    shape: Annotated[str, typer.Option(help="of the queries: batch,heads,length,width", metavar="B,H,N,D")],
    keys: Annotated[int | None, typer.Option(help="the number of keys, where it is not that of queries")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="the heads of keys and values, where they are fewer")] = None,
    mask: Annotated[str | None, typer.Option(help="which keys a query may see, such as Causal() & Window(256)")] = None,
    bias: Annotated[str | None, typer.Option(help="what is added to scores, such as Alibi(8)")] = None,
    score: Annotated[str | None, typer.Option(help="how a query and a key are compared, such as Dot(cap=30.0)")] = None,
    normalize: Annotated[str | None, typer.Option(help="what makes weights of scores, such as Entmax(1.5)")] = None,
    dtype: Annotated[
        Literal["float32", "float64", "float16", "bfloat16"], typer.Option(help="of queries, keys and values")
    ] = "float32",
    device: Device = None,
) -> None:
    """Say which backend would run an attention, what it costs, and what the others object to.

    Example:

        regard explain --shape 1,8,65536,64 --mask "Causal() & Window(256)"

    Terms are written as in Python; the attention itself is not computed.
    """
    for name, size, least in (("--keys", keys, 0), ("--kv-heads", kv_heads, 1)):
        if size is not None and size < least:
            raise ValueError(f"{name} must be {least} or more, got {size}")
    b, h, n, d = _sizes(shape)
    made = getattr(torch, dtype), own_device(device)
    try:
        q = _lazy_zeros((b, h, n, d), *made)
        k, v = _lazy_zeros((2, b, h if kv_heads is None else kv_heads, n if keys is None else keys, d), *made)
    except (MemoryError, OverflowError, ValueError):
        raise ValueError(f"shape must be one that memory could hold, got {shape}; make it smaller") from None
    print(
        regard.explain(
            q,
            k,
            v,
            mask=_parse_term("mask", mask, Mask),
            bias=_parse_term("bias", bias, Bias),
            score=_parse_term("score", score, Score),
            normalize=_parse_term("normalize", normalize, Normalizer),
        )
    )


def bench(
    arguments: Annotated[list[str] | None, typer.Argument(help="handed on to them", metavar="ARGUMENT")] = None,
) -> None:
    """Run the benchmarks of a clone of the repository: tests first, then tables.

    Example:

        regard bench operator --only window --repeats 5
    """
    if not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
        raise ValueError("benchmarks come with the repository and not with the package; run this in a clone")
    command = [sys.executable, "-m", "benchmarks", *(arguments or [])]
    raise typer.Exit(subprocess.run(command, cwd=REPOSITORY).returncode)


def _sizes(shape: str) -> list[int]:
    parts = shape.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"shape must be batch,heads,length,width, such as 1,8,65536,64, got {shape!r}")
    return [int(part) for part in parts]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory of a CPU, as numpy's do until they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _parse_term(slot: str, source: str | None, kind: Any) -> Any:
    if source is None:
        return None
    term = parse(source)
    if not isinstance(term, kind):
        raise ValueError(f"{slot} must be a {kind.__name__.lower()}, got {term!r}")
    return term
