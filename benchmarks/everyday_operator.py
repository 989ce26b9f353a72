"""Everyday calls of the operator: padding, packed texts, float32 and other widths, entropy in the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Causal, Documents, Padding, Window, attend, weights
from regard.ops.terms.masks import Mask

from .everyday_cases import Call, Case, Size

DENSE, ADDED = "SDPA, dense mask", "SDPA, dense mask of numbers"


def cases() -> Iterator[Case]:
    for b, h, n in ((32, 12, 128), (32, 12, 512), (8, 12, 1024), (4, 12, 4096)):
        for grad in (False, True):
            way = "forward + backward" if grad else "forward"
            shape = f"{b} x {h} x {n} x 64, {way}"
            for kept in (0.9, 0.5):
                name = f"Padding, {kept:.0%} kept, {shape}"
                build = functools.partial(padded, b, h, n, kept, False, grad)
                yield Case(name, build, (DENSE, ADDED), {"regard": 1.0}, grad)
            for left in (False, True):
                build = functools.partial(padded, b, h, n, 0.5, True, grad, left=left)
                side = " on the left" if left else ""
                yield Case(f"Causal & Padding{side}, 50% kept, {shape}", build, (DENSE, ADDED), {"regard": 1.0}, grad)
    for n in (4096, 16_384):
        for grad in (False, True):
            name = f"Causal & Documents, 12 x {n} x 64, {'forward + backward' if grad else 'forward'}"
            yield Case(name, functools.partial(packed, 12, n, grad), (DENSE, ADDED), {"regard": 1.0}, grad)
    yield Case("attend and summary, float32, causal, N 16384, d 128", summary32, ("attend",), {"regard": 3.0})
    for d in (80, 96, 192, 256):
        build = functools.partial(summary_of_width, d)
        yield Case(f"attend and summary, causal, N 8192, d {d}", build, ("attend",), {"regard": 2.0})
    build = functools.partial(summary_of_width, 128, kv_heads=4)
    yield Case("attend and summary, causal, N 8192, d 128, 4 key heads", build, ("attend",), {"regard": 2.0})
    yield Case(
        "attend, float32, window 512, N 4096, d 192", functools.partial(window32, 192), (DENSE, ADDED), {"regard": 1.0}
    )
    yield Case(
        "attend, float32, window 512, N 4096, d 256", functools.partial(window32, 256), (DENSE, ADDED), {"regard": 1.0}
    )
    for n, bar in ((1024, 1.0), (4096, 0.33)):
        name = f"entropy in the loss, 4 x 16 x {n} x 64, forward + backward"
        yield Case(name, functools.partial(entropy, n), ("eager, compiled",), {"regard": bar}, True, takes=20)


def drawn(shape: tuple[int, ...], size: Size, grad: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
    dtype = dtype or size.dtype
    return [torch.randn(shape, device=size.device, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def both(run: Callable[[], Tensor], leaves: list[Tensor], grad: bool) -> Call:
    """The call, with its backward if it has one."""
    if not grad:
        return run
    return lambda: torch.autograd.grad(out := run(), leaves, torch.ones_like(out))


def compared(leaves: list[Tensor], mask: Mask, grad: bool) -> dict[str, Call]:
    """Our call beside SDPA, whose mask is built beforehand."""
    q, k, v = leaves
    one = torch.zeros_like(q[:, :1]), torch.zeros_like(k[:, :1])  # equal scores: each visible key has a weight
    visible = weights(*one, mask=mask, backend="reference").dense(limit="4GB") > 0
    added = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    with torch.no_grad():
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        apart = (attend(q, k, v, mask=mask) - want)[visible.any(-1)[..., None].expand_as(want)].abs().max().item()
    if not apart < 0.03:
        raise ValueError(f"attend under {mask} differs from SDPA by {apart:.3g}")
    return {
        "regard": both(functools.partial(attend, q, k, v, mask=mask), leaves, grad),
        DENSE: both(functools.partial(F.scaled_dot_product_attention, q, k, v, attn_mask=visible), leaves, grad),
        ADDED: both(functools.partial(F.scaled_dot_product_attention, q, k, v, attn_mask=added), leaves, grad),
    }


def padded(
    b: int, h: int, n: int, kept: float, causal: bool, grad: bool, size: Size, *, left: bool = False
) -> dict[str, Call]:
    """Texts of which a share is kept, their lengths spread evenly around it; padded on the right, or on the left."""
    b, n = size.of(b, 2), size.of(n, 32)
    leaves = drawn((b, h, n, size.of(64, 16)), size, grad)
    low = max(1 / n, 2 * kept - 1)
    lengths = (torch.linspace(low, 2 * kept - low, b, device=size.device) * n).long().clamp(1, n)
    mask: Mask = Padding(torch.arange(n, device=size.device) >= n - lengths[:, None] if left else lengths)
    return compared(leaves, Causal() & mask if causal else mask, grad)


def packed(h: int, n: int, grad: bool, size: Size) -> dict[str, Call]:
    """Documents of n / 16 tokens in one row."""
    n = size.of(n, 32)
    leaves = drawn((1, h, n, size.of(64, 16)), size, grad)
    ids = torch.arange(n, device=size.device) // (n // 16)
    return compared(leaves, Causal() & Documents(ids), grad)


def summary32(size: Size) -> dict[str, Call]:
    q, k, v = drawn((1, 16, size.of(16_384, 64), size.of(128, 16)), size, dtype=torch.float32)
    return with_summary(q, k, v, Causal())


def summary_of_width(d: int, size: Size, *, kv_heads: int = 16) -> dict[str, Call]:
    q, k, v = drawn((1, 16, size.of(8192, 64), size.of(d, 16)), size)
    return with_summary(q, k[:, :kv_heads], v[:, :kv_heads], Causal())


def with_summary(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> dict[str, Call]:
    """The forward, and the forward with a summary."""

    def summarized() -> object:
        A = weights(q, k, mask=mask)
        return A @ v, A.summary()

    return {"regard": summarized, "attend": functools.partial(attend, q, k, v, mask=mask)}


def window32(d: int, size: Size) -> dict[str, Call]:
    leaves = drawn((1, 8, size.of(4096, 64), size.of(d, 16)), size, dtype=torch.float32)
    return compared(leaves, Causal() & Window(size.of(512, 8)), grad=False)


def entropy(n: int, size: Size) -> dict[str, Call]:
    """The mean entropy of all rows as a part of a loss, and the same written over stored weights and compiled."""
    q, k, _ = drawn((size.of(4, 1), size.of(16, 2), size.of(n, 32), size.of(64, 16)), size, True)

    def ours() -> object:
        return torch.autograd.grad(weights(q, k).entropy().mean(), (q, k))

    expression = torch.compile(stored_entropy)

    def stored() -> object:
        return torch.autograd.grad(expression(q, k), (q, k))

    return {"regard": ours, "eager, compiled": stored}


def stored_entropy(q: Tensor, k: Tensor) -> Tensor:
    log_a = F.log_softmax(q @ k.mT * q.shape[-1] ** -0.5, -1, dtype=torch.float32)
    return -(log_a.exp() * log_a).sum(-1).mean()
