"""Layers that call a kernel of a library, inputs for them, and what a capture of them shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.lens import capture

HEADS, WIDTH = 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


class Held(nn.Module):
    """Calls what it holds on what it is called with."""

    def __init__(self, call, **given):
        super().__init__()
        self.call, self.given = call, given

    def forward(self, *args):
        return self.call(*args, **self.given)


class OfModule(nn.Module):
    def forward(self, q, k, v):
        import flash_attn

        return flash_attn.flash_attn_func(q, k, v, causal=True)


def inputs(n=7, m=7, groups=HEADS, batch=2, dtype=torch.float64):
    """b i h d."""
    torch.manual_seed(0)
    sizes = ((n, HEADS), (m, groups), (m, groups))
    return [torch.randn(batch, length, heads, WIDTH, dtype=dtype) for length, heads in sizes]


def side_by_side(queries, keys, groups=HEADS):
    """i h d of several texts, and where they begin and the longest is."""
    torch.manual_seed(0)
    sizes = ((sum(queries), HEADS), (sum(keys), groups), (sum(keys), groups))
    tokens = [torch.randn(length, heads, WIDTH, dtype=torch.float64) for length, heads in sizes]
    starts = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
    return (*tokens, *starts, max(queries), max(keys))


def capture_one(layer, *args):
    """The one entry of a tape of the layer, and what it returned, the same as without."""
    want = layer(*args)
    with capture(layer) as tape:
        got = layer(*args)
    got, want = (x if torch.is_tensor(x) else x[0] for x in (got, want))
    assert torch.equal(got, want)
    ((_, A),) = tape.items()
    return A, got


def assert_shows(A, want):
    """The weights are equal. Keys behind the last query that no query sees are not kept, like unused cache slots."""
    torch.testing.assert_close(A[:], want[..., : A.shape[-1]], rtol=1e-6, atol=1e-6)
    assert not want[..., A.shape[-1] :].any()


def both(model, args, x):
    model["one"](*args)
    model["two"](x, x, x)


def assert_not_recorded(layer, *args, match):
    """The layer is left out with a warning; one after it is recorded, so that the tape is not empty."""
    model, x = nn.ModuleDict({"one": layer, "two": nn.MultiheadAttention(WIDTH, 2)}), torch.randn(3, 1, WIDTH)
    with pytest.warns(UserWarning, match=match), capture(model) as tape:
        both(model, args, x)
    assert list(tape) == [("two", 0)]


MISMATCH = r"one was not recorded: flash_attn_func did not return what its documented arguments give"


class QkvLayer(nn.Module):
    """An attention without parameters over q, k and v side by side, `b i h (3 d)`."""

    num_heads = HEADS

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(*x.chunk(3, -1))


def qkv():
    """b i h (3 d)."""
    torch.manual_seed(0)
    return torch.randn(2, 7, HEADS, 3 * WIDTH, dtype=torch.float64)
