"""`regard explain` and `regard bench`: the attention operator without a model."""

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
    shape: Annotated[str, typer.Option(help="Shape of the queries: batch,heads,length,width.", metavar="B,H,N,D")],
    keys: Annotated[int | None, typer.Option(help="Number of keys. Default: the number of queries.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Number of key and value heads. Default: the number of query heads.")
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="Mask: which keys a query may attend to, e.g. Causal() & Window(256). Default: all."),
    ] = None,
    bias: Annotated[str | None, typer.Option(help="Bias added to the scores, e.g. Alibi(8). Default: none.")] = None,
    score: Annotated[
        str | None, typer.Option(help="Score of a query and a key, e.g. Dot(cap=30.0). Default: Dot().")
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(help="Normalizer that turns scores into weights, e.g. Entmax(1.5). Default: Softmax()."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float64", "float16", "bfloat16"],
        typer.Option(help="Number format of queries, keys and values."),
    ] = "float32",
    device: Device = None,
) -> None:
    """Print which backend would run an attention call, its cost, and why the other backends cannot run it.

    Example:

        regard explain --shape 1,8,65536,64 --mask "Causal() & Window(256)"

    Terms are written as in Python. The attention itself is not computed.
    """
    for name, size, least in (("--keys", keys, 0), ("--kv-heads", kv_heads, 1)):
        if size is not None and size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    b, h, n, d = _sizes(shape)
    options = getattr(torch, dtype), own_device(device)
    try:
        q = _lazy_zeros((b, h, n, d), *options)
        k, v = _lazy_zeros((2, b, h if kv_heads is None else kv_heads, n if keys is None else keys, d), *options)
    except (MemoryError, OverflowError, ValueError):
        raise ValueError(f"tensors of shape {shape} do not fit into memory; pass a smaller --shape") from None
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
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments passed through to python -m benchmarks.", metavar="ARGUMENT")
    ] = None,
) -> None:
    """Run the benchmarks, in a clone of the repository: first the tests, then the measurements.

    Example:

        regard bench operator --only window --repeats 5
    """
    if not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
        raise ValueError("the installed package does not contain the benchmarks; run this in a clone of the repository")
    command = [sys.executable, "-m", "benchmarks", *(arguments or [])]
    raise typer.Exit(subprocess.run(command, cwd=REPOSITORY).returncode)


def _sizes(shape: str) -> list[int]:
    parts = shape.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--shape must be batch,heads,length,width, e.g. 1,8,65536,64, got {shape!r}")
    return [int(part) for part in parts]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU they take no memory, since numpy allocates pages only when they are written."""
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
