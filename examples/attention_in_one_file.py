"""Attention in one file: the equation, gradients through it, and the weights without ever storing the matrix.

The parts 1 to 4 are written with PyTorch alone. The last one asserts that the library gives the same numbers.
Letters: b batch, h heads, i query positions, j key positions, d the width of queries and keys, e of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import regard
from regard import Alibi, Causal, Window

# 1. The equation: scores, then mask and bias, then a softmax over the keys, then a weighted sum of the values.


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Scaled dot products of every query with every key."""
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (b h i d) @ (b h d j) -> b h i j


def softmax(scores: Tensor) -> Tensor:
    """exp(s) / sum exp(s) over the keys. A query that sees no key, whose scores are all -inf, gets zeros."""
    largest = scores.amax(-1, keepdim=True)  # b h i 1
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # avoids -inf - -inf
    e = torch.exp(scores - largest)  # b h i j; exp(-inf) = 0: hidden keys get no weight
    total = e.sum(-1, keepdim=True)  # b h i 1
    return e / torch.where(total == 0, 1.0, total)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias, hidden where not visible) v. It stores the matrix b h i j."""
    scores = (scores_of(q, k) + bias).masked_fill(~visible, -math.inf)  # b h i j
    return softmax(scores) @ v  # (b h i j) @ (b h j e) -> b h i e


# Masks and biases are functions of positions: given rows i and columns j, they return a block of any size.

Positions = Callable[[Tensor, Tensor], Tensor]


def causal_window(i: Tensor, j: Tensor, width: int = 16) -> Tensor:
    """Query i sees key j if j is not after i and fewer than `width` positions before it."""
    return (j <= i) & (i - j < width)  # (i 1), (1 j) -> i j


def alibi(i: Tensor, j: Tensor, heads: int = 4) -> Tensor:
    """A penalty that grows with the distance, steeper in some heads than in others (Press et al. 2022)."""
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)  # h
    return -slopes[:, None, None] * (i - j).abs()  # h i j


# 2. The same output in blocks of keys: a running maximum and a running sum replace the matrix (Milakov & Gimelshein
#    2018). Memory is O(N) instead of O(N^2). This is the idea of FlashAttention.


def blocks(n: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` positions; the last may be shorter."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def tile(q: Tensor, k: Tensor, visible: Positions, bias: Positions, rows: slice, keys: slice) -> Tensor:
    """The scores of some queries and some keys, hidden ones -inf: b h rows keys."""
    i = torch.arange(rows.start, rows.stop)[:, None]  # rows 1
    j = torch.arange(keys.start, keys.stop)[None, :]  # 1 keys
    scores = scores_of(q[..., rows, :], k[..., keys, :]) + bias(i, j).to(q.dtype)
    return scores.masked_fill(~visible(i, j), -math.inf)


def attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, visible: Positions, bias: Positions, size: int = 32
) -> tuple[Tensor, Tensor]:
    """The output, b h i e, and the log-sum-exp of each row of scores, b h i."""
    outputs, statistics = [], []
    for rows in blocks(q.shape[-2], size):
        largest = q.new_full((*q.shape[:-2], rows.stop - rows.start, 1), -math.inf)  # b h rows 1
        total, out = torch.zeros_like(largest), torch.zeros_like(largest)
        for keys in blocks(k.shape[-2], size):
            s = tile(q, k, visible, bias, rows, keys)  # b h rows keys
            larger = torch.maximum(largest, s.amax(-1, keepdim=True))
            safe = larger.masked_fill(larger == -math.inf, 0.0)
            e, shrink = torch.exp(s - safe), torch.exp(largest - safe)
            total = total * shrink + e.sum(-1, keepdim=True)  # sums so far, relative to the new maximum
            out = out * shrink + e @ v[..., keys, :]  # (b h rows keys) @ (b h keys e) -> b h rows e
            largest = larger
        outputs.append(out / torch.where(total == 0, 1.0, total))
        statistics.append((largest + total.log()).squeeze(-1))  # -inf for a row that sees no key
    return torch.cat(outputs, -2), torch.cat(statistics, -1)


# 3. The lazy matrix: with one number a row, its log-sum-exp, any weight can be computed from its own score.


class LazyWeights:
    """Attention weights A, b h i j, of which only q, k and one number a row are stored."""

    def __init__(self, q: Tensor, k: Tensor, visible: Positions, bias: Positions, size: int = 32) -> None:
        self.q, self.k, self.visible, self.bias, self.size = q, k, visible, bias, size
        nothing = k.new_zeros((*k.shape[:-1], 0))  # values of width 0: only the statistic is wanted
        _, self.lse = attention_in_blocks(q, k, nothing, visible, bias, size)  # b h i

    def block(self, rows: slice, keys: slice) -> Tensor:
        """A[i, j] = exp(s[i, j] - lse[i]), for a rectangle: b h rows keys."""
        scores = tile(self.q, self.k, self.visible, self.bias, rows, keys)
        lse = self.lse[..., rows, None]  # b h rows 1
        return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0))

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        for rows in blocks(self.q.shape[-2], self.size):
            for keys in blocks(self.k.shape[-2], self.size):
                yield rows, keys, self.block(rows, keys)

    def entropy(self) -> Tensor:
        """-sum_j A log A of each query, in nats: b h i."""
        total = torch.zeros_like(self.lse)
        for rows, _, a in self.tiles():
            total[..., rows] -= torch.xlogy(a, a).sum(-1)
        return total

    def received(self) -> Tensor:
        """sum_i A: how much attention each key gets from all queries: b h j."""
        total = self.k.new_zeros(self.k.shape[:-1])
        for _, keys, a in self.tiles():
            total[..., keys] += a.sum(-2)
        return total


# 4. Gradients: the backward pass needs the same blocks again and no more memory. Written out for the whole matrix:


def gradients(q: Tensor, k: Tensor, v: Tensor, a: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of sum(out * grad), with out = a @ v and a = softmax(q k^T / sqrt(d))."""
    dv = a.transpose(-2, -1) @ grad  # b h j e
    da = grad @ v.transpose(-2, -1)  # b h i j
    ds = a * (da - (a * da).sum(-1, keepdim=True))  # the Jacobian of a softmax, row by row
    scale = 1 / math.sqrt(q.shape[-1])
    return ds @ k * scale, ds.transpose(-2, -1) @ q * scale, dv


# 5. The library gives the same numbers.


def main() -> None:
    """Compare each part with the library."""
    torch.manual_seed(0)
    b, h, n, d, e = 2, 4, 100, 16, 24
    q, k = torch.randn(2, b, h, n, d).unbind()
    v = torch.randn(b, h, n, e)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    terms = {"mask": Causal() & Window(16), "bias": Alibi(h)}

    plain = attention(q, k, v, causal_window(i, j), alibi(i, j))
    torch.testing.assert_close(plain, regard.attend(q, k, v, **terms), atol=1e-5, rtol=1e-5)
    blocked, lse = attention_in_blocks(q, k, v, causal_window, alibi)
    torch.testing.assert_close(blocked, plain, atol=1e-5, rtol=1e-5)

    lazy, A = LazyWeights(q, k, causal_window, alibi), regard.weights(q, k, **terms)
    torch.testing.assert_close(lse, A.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lazy.block(slice(7, 40), slice(3, 90)), A[..., 7:40, 3:90], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lazy.entropy(), A.entropy(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lazy.received(), A.received(), atol=1e-5, rtol=1e-5)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(b, h, n, e)
    theirs = torch.autograd.grad(regard.attend(*leaves, mask=Causal()), leaves, grad)
    weights = softmax(scores_of(q, k).masked_fill(j > i, -math.inf))
    for mine, library in zip(gradients(q, k, v, weights, grad), theirs, strict=True):
        torch.testing.assert_close(mine, library, atol=1e-5, rtol=1e-5)

    print(f"output, gradients, log-sum-exp, entropy and received attention equal the library's, n = {n}")
    for n in (100, 10_000):
        print(f"n = {n:6,}: the lazy matrix stores {(2 * d + 1) * n:9,} numbers a head, the dense one {n * n:11,}")


if __name__ == "__main__":
    main()
