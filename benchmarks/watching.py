"""What `capture` adds to small models on a CPU: 12 layers of width 64, batch 1, one thread, checks included.

At these sizes a layer takes less than a millisecond, and what is measured is Python's time for each of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.lens import capture, importance

DIM, HEADS, LAYERS = 64, 4, 12


class Block(nn.Module):
    """A layer as people write it: attention by PyTorch's kernel, or as two products and a softmax."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = HEADS, fused
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (y.view(b, n, HEADS, DIM // HEADS).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            heads = (q @ k.transpose(-2, -1) / sqrt(DIM // HEADS)).softmax(-1) @ v
        x = x + self.out(heads.transpose(1, 2).reshape(b, n, DIM))
        return x + self.mlp(x)


def written_out() -> nn.Module:
    return nn.Sequential(*(Block(fused=False) for _ in range(LAYERS)))


def by_sdpa() -> nn.Module:
    return nn.Sequential(*(Block(fused=True) for _ in range(LAYERS)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


@contextmanager
def plain_path() -> Iterator[None]:
    """Turn off the fast path of PyTorch's own layers, which no capture can look into."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def watching(make: Callable[[], nn.Module], n: int) -> Callable[[], dict[str, Callable[[], object]]]:
    """The calls to compare on one text of n tokens."""

    def build() -> dict[str, Callable[[], object]]:
        torch.manual_seed(0)
        model, x = make().eval().requires_grad_(False), torch.randn(1, n, DIM)

        def watched() -> None:
            with capture(model) as tape:
                model(x)
            assert len(tape.layers) == LAYERS

        def plain() -> object:
            with plain_path():
                return model(x)

        def in_bare_mode() -> object:
            with plain_path(), BareMode():
                return model(x)

        fast = "plain, PyTorch's fast path"
        return {"capture": watched, "plain": plain, fast: lambda: model(x), "a mode that does nothing": in_bare_mode}

    return build


def weighing(make: Callable[[], nn.Module], n: int) -> Callable[[], dict[str, Callable[[], object]]]:
    """Forward and backward on one text of n tokens, plain, with the importance of each head, and under capture."""

    def build() -> dict[str, Callable[[], object]]:
        torch.manual_seed(0)
        model, x = make().eval(), torch.randn(1, n, DIM)

        def plain() -> None:
            model(x).square().mean().backward()

        def weighed() -> None:
            with importance(model) as scores:
                plain()
            assert len(scores) == LAYERS

        def watched() -> None:
            with capture(model):
                plain()

        return {"importance": weighed, "plain": plain, "capture": watched}

    return build


class BareMode(TorchFunctionMode):
    """A function mode that calls each function as it is: the least that Python's following of functions costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def entering() -> dict[str, Callable[[], object]]:
    """The block of a model that was captured before, around nothing."""
    model, x = written_out().eval(), torch.randn(1, 16, DIM)
    with torch.no_grad(), capture(model):
        model(x)

    def enter() -> None:
        with suppress(ValueError), capture(model):  # nothing is recorded, which raises at the end of the block
            pass

    return {"capture": enter, "nothing": lambda: None}
