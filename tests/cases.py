"""Every term beside its meaning in plain Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import regard as R
from tests.oracle import Case, Row, Shape

D = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D)


def none(shape: Shape) -> list[Tensor]:
    return []


def same(shape: Shape) -> bool:
    return shape.i == shape.j


def grid_of(n: int) -> tuple[int, int]:
    """The rows and columns of the squarest grid of n cells."""
    rows = max(m for m in range(1, n + 1) if n % m == 0 and m * m <= n)
    return rows, n // rows


def window_of(grid: Tensor) -> tuple[int, int]:
    """A window of 3 x 4 cells, or as much of it as fits."""
    return min(3, grid.shape[0]), min(4, grid.shape[1])


def in_neighborhood(row: Row, j: int) -> bool:
    grid = row.t[0]
    query, key = divmod(row.r, grid.shape[1]), divmod(j, grid.shape[1])
    for place, cell, n, window in zip(query, key, grid.shape, window_of(grid), strict=True):
        first = min(max(place - window // 2, 0), n - window)
        if not first <= cell < first + window:
            return False
    return True


# -- scores -----------------------------------------------------------------------------------------------------------


def cosine(row: Row) -> Tensor:
    return row.k @ row.q / (row.q.norm() * row.k.norm(dim=-1))


SCORES = [
    Case("Dot", none, dict),
    Case("Dot-scale", none, lambda: {"score": R.Dot(scale=-0.3)}, score=lambda row: row.k @ row.q * -0.3),
    Case(
        "Dot-temperature",
        lambda shape: [torch.rand(shape.h, dtype=D)],
        lambda t: {"score": R.Dot(scale=t)},
        score=lambda row: row.k @ row.q * row.t[0][row.h],
    ),
    Case(
        "Dot-cap",
        none,
        lambda: {"score": R.Dot(cap=1.5)},
        score=lambda row: torch.tanh(row.k @ row.q / row.q.shape[-1] ** 0.5 / 1.5) * 1.5,
    ),
    Case("Cosine", none, lambda: {"score": R.Cosine(0.5)}, score=lambda row: cosine(row) / 0.5),
    Case(
        "Cosine-learned",
        lambda shape: [torch.rand((), dtype=D) + 0.5],
        lambda t: {"score": R.Cosine(t)},
        score=lambda row: cosine(row) / row.t[0],
    ),
    Case(
        "Bilinear",
        lambda shape: [randn(shape.d, shape.d + 3) / 4],
        lambda w: {"score": R.Bilinear(w)},
        score=lambda row: row.k @ (row.q @ row.t[0]),
        key_width=lambda shape: shape.d + 3,
    ),
    Case(
        "Bilinear-heads",
        lambda shape: [randn(shape.h, shape.d, shape.d) / 4],
        lambda w: {"score": R.Bilinear(w)},
        score=lambda row: row.k @ (row.q @ row.t[0][row.h]),
    ),
    Case(
        "Additive",
        lambda shape: [randn(shape.d)],
        lambda u: {"score": R.Additive(u)},
        score=lambda row: torch.tanh(row.q + row.k) @ row.t[0],
    ),
    Case(
        "Additive-heads",
        lambda shape: [randn(shape.h, shape.d)],
        lambda u: {"score": R.Additive(u)},
        score=lambda row: torch.tanh(row.q + row.k) @ row.t[0][row.h],
    ),
    Case(
        "Location",
        lambda shape: [randn(shape.j + 2, shape.d) / 3],
        lambda w: {"score": R.Location(w)},
        score=lambda row: row.t[0][: row.n_j] @ row.q,
    ),
    Case(
        "Location-heads",
        lambda shape: [randn(shape.h, shape.j, shape.d) / 3],
        lambda w: {"score": R.Location(w)},
        score=lambda row: row.t[0][row.h, : row.n_j] @ row.q,
    ),
    Case(
        "Score-of",
        lambda shape: [randn(shape.h), randn(shape.j)],
        lambda t, keys: {
            "score": R.Score.of(lambda score, b, h, i, j: torch.tanh(score) * t[h] + keys[j] * (i % 3)),
            "mask": R.Causal(),
        },
        lambda row, j: j <= row.i,
        score=lambda row: torch.tanh(row.k @ row.q / row.q.shape[-1] ** 0.5) * row.t[0][row.h] + row.t[1] * (row.i % 3),
        fits=lambda shape: shape.j > 0,
    ),
    Case(
        "Score-of-cosine",
        none,
        lambda: {"score": R.Score.of(lambda score, b, h, i, j: score - 0.125 * h * (i - j).abs(), R.Cosine(0.5))},
        score=lambda row: cosine(row) / 0.5 - 0.125 * row.h * row.away,
    ),
]

# -- masks ------------------------------------------------------------------------------------------------------------


def lengths(shape: Shape) -> Tensor:
    return torch.tensor([(3 * b + shape.j // 2) % (shape.j + 1) for b in range(shape.b)], dtype=torch.long)


def documents(n: int, b: int = 1) -> Tensor:
    return torch.stack([torch.arange(n) // (3 + row) % 3 for row in range(b)])


DOCS = documents(200, 4)
KEEP = torch.rand(4, 3, 200, 200, generator=torch.Generator().manual_seed(1)) < 0.4
LAYOUT = torch.rand(60, 60, generator=torch.Generator().manual_seed(2)) < 0.4
CENTER = torch.rand(4, 4, 200, generator=torch.Generator().manual_seed(3), dtype=D) * 30

MASKS = [
    Case("Causal", none, lambda: {"mask": R.Causal()}, lambda row, j: j <= row.i),
    Case("Window", none, lambda: {"mask": R.Window(3)}, lambda row, j: abs(row.i - j) < 3),
    Case(
        "Window-sides",
        none,
        lambda: {"mask": R.Window(before=5, after=1)},
        lambda row, j: row.i - 5 <= j <= row.i + 1,
    ),
    Case(
        "Dilated",
        none,
        lambda: {"mask": R.Dilated(3, 2)},
        lambda row, j: abs(row.i - j) < 6 and (row.i - j) % 2 == 0,
    ),
    Case(
        "Window-heads",
        lambda shape: [torch.arange(shape.h) * 3 + 1, torch.arange(shape.h) % 2],
        lambda width, after: {"mask": R.Window(width) | R.Window(before=2, after=after)},
        lambda row, j: abs(row.i - j) < row.t[0][row.h] or bool(row.i - 2 <= j <= row.i + row.t[1][row.h]),
    ),
    Case(
        "Window-tuple",
        none,
        lambda: {"mask": R.Causal() & R.Window((2, 5, 1, 40))},
        lambda row, j: j <= row.i and abs(row.i - j) < (2, 5, 1, 40)[row.h],
        fits=lambda shape: shape.h == 4,
    ),
    Case(
        "Chunked", none, lambda: {"mask": R.Causal() & R.Chunked(5)}, lambda row, j: j <= row.i and row.i // 5 == j // 5
    ),
    Case(
        "Neighborhood",
        lambda shape: [torch.zeros(grid_of(shape.i), dtype=torch.bool)],
        lambda grid: {"mask": R.Neighborhood(tuple(grid.shape), window_of(grid))},
        lambda row, j: in_neighborhood(row, j),
        fits=lambda shape: shape.j >= shape.i > 0,
    ),
    Case("Not-Diagonal", none, lambda: {"mask": ~R.Diagonal()}, lambda row, j: row.i != j),
    Case("Diagonal", none, lambda: {"mask": R.Diagonal()}, lambda row, j: row.i == j),
    Case(
        "Prefix-LM",
        none,
        lambda: {"mask": R.Causal() | R.Prefix(3)},
        lambda row, j: j <= row.i or j < 3,
    ),
    Case(
        "Prefix-batch",
        lambda shape: [lengths(shape)],
        lambda n: {"mask": R.Causal() & R.Prefix(n)},
        lambda row, j: j <= row.i and j < row.t[0][row.b],
    ),
    Case(
        "Longformer",
        none,
        lambda: {"mask": R.Window(2) | R.Global(2)},
        lambda row, j: abs(row.i - j) < 2 or 0 <= row.i < 2 or j < 2,
    ),
    Case(
        "Global-tokens",
        none,
        lambda: {"mask": R.Window(2) | R.Global((1, 5))},
        lambda row, j: abs(row.i - j) < 2 or row.i in (1, 5) or j in (1, 5),
    ),
    Case(
        "Global-batch",
        lambda shape: [torch.stack([torch.arange(2) * 3 + b for b in range(shape.b)] or [torch.arange(2)])],
        lambda t: {"mask": R.Window(2) | R.Global(t)},
        lambda row, j: abs(row.i - j) < 2 or row.i in row.t[0][row.b] or j in row.t[0][row.b],
        fits=lambda shape: shape.b > 0,
    ),
    Case(
        "Near",
        lambda shape: [CENTER[: shape.b, : shape.h, : shape.i]],
        lambda center: {"mask": R.Near(center, 4.5)},
        lambda row, j: bool(abs(j - row.t[0][row.b, row.h, row.r]) <= 4.5),
    ),
    Case(
        "Padding",
        lambda shape: [lengths(shape)],
        lambda n: {"mask": R.Padding(n)},
        lambda row, j: j < row.t[0][row.b],
    ),
    Case(
        "Padding-keep",
        lambda shape: [KEEP[: shape.b, 0, 0, : shape.j]],
        lambda keep: {"mask": R.Causal() & R.Padding(keep)},
        lambda row, j: j <= row.i and bool(row.t[0][row.b, j]),
    ),
    Case(
        "Documents",
        lambda shape: [DOCS[: shape.b, : shape.i]],
        lambda ids: {"mask": R.Causal() & R.Documents(ids)},
        lambda row, j: j <= row.i and bool(row.t[0][row.b, row.r] == row.t[0][row.b, j]),
        fits=lambda shape: same(shape) and shape.b > 0,
    ),
    Case(
        "Documents-packed",
        lambda shape: [torch.tensor([0, shape.i // 3, shape.i]), torch.tensor([0, shape.j // 2, shape.j])],
        lambda query, key: {"mask": R.Documents.from_cu_seqlens(query, key)},
        lambda row, j: (row.r >= row.t[0][1]) == (j >= row.t[1][1]),
    ),
    Case(
        "Documents-cross",
        lambda shape: [DOCS[0, : shape.i], DOCS[1, : shape.j]],
        lambda query, key: {"mask": R.Documents(query, key)},
        lambda row, j: bool(row.t[0][row.r] == row.t[1][j]),
    ),
    Case(
        "Blocks",
        lambda shape: [LAYOUT[: -(-shape.i // 4), : -(-shape.j // 4)]],
        lambda layout: {"mask": R.Blocks(layout, 4)},
        lambda row, j: bool(row.t[0][row.r // 4, j // 4]),
    ),
    Case(
        "Dense",
        lambda shape: [KEEP[: shape.b, :1, : shape.i, : shape.j]],
        lambda keep: {"mask": R.Dense(keep)},
        lambda row, j: bool(row.t[0][row.b, 0, row.r, j]),
    ),
    Case(
        "Rule",
        none,
        lambda: {"mask": R.Rule(lambda b, h, i, j: (i + 2 * j + h) % 3 > 0)},
        lambda row, j: (row.i + 2 * j + row.h) % 3 > 0,
    ),
    Case(
        "Nested",
        none,
        lambda: {"mask": ~(R.Window(3) & R.Causal()) & (R.Prefix(20) | R.Diagonal())},
        lambda row, j: not (abs(row.i - j) < 3 and j <= row.i) and (j < 20 or row.i == j),
    ),
    Case(
        "Xor",
        lambda shape: [KEEP[0, 0, : shape.i, : shape.j]],
        lambda keep: {"mask": (R.Causal() ^ R.Prefix(4)) & keep},
        lambda row, j: (j <= row.i) != (j < 4) and bool(row.t[0][row.r, j]),
    ),
    Case("Minus", none, lambda: {"mask": R.Causal() - R.Window(2)}, lambda row, j: j <= row.i and abs(row.i - j) >= 2),
    Case("Nothing", none, lambda: {"mask": R.Prefix(0)}, lambda row, j: False),
]

# -- biases -----------------------------------------------------------------------------------------------------------


def bucket(distance: int, count: int, farthest: int, bidirectional: bool) -> int:
    base = 0
    if bidirectional:
        count //= 2
        base = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return base + distance
    grown = math.log(distance / exact) / math.log(farthest / exact) * (count - exact)
    return base + min(exact + int(grown), count - 1)


def added(shape: Shape) -> list[Tensor]:
    values = randn(shape.h, shape.i, shape.j)
    values[KEEP[0, :1, : shape.i, : shape.j].expand_as(values)] = -math.inf
    return [values]


BIASES = [
    Case(
        "Alibi",
        none,
        lambda: {"bias": R.Alibi(4), "mask": R.Causal()},
        lambda row, j: j <= row.i,
        bias=lambda row: -(2.0 ** (-2 * (row.h + 1))) * row.away,
        fits=lambda shape: shape.h == 4,
    ),
    Case(
        "Alibi-learned",
        lambda shape: [torch.rand(shape.h, dtype=D)],
        lambda slopes: {"bias": R.Alibi(slopes=slopes)},
        bias=lambda row: -row.t[0][row.h] * row.away,
    ),
    Case(
        "Relative-t5",
        lambda shape: [randn(shape.h, 8)],
        lambda table: {"bias": R.Relative.t5(table, max_distance=20)},
        bias=lambda row: row.t[0][row.h, [bucket(j - row.i, 8, 20, True) for j in row.js]],
    ),
    Case(
        "Relative-t5-causal",
        lambda shape: [randn(shape.h, 6)],
        lambda table: {"bias": R.Relative.t5(table, 17, bidirectional=False), "mask": R.Causal()},
        lambda row, j: j <= row.i,
        bias=lambda row: row.t[0][row.h, [bucket(j - row.i, 6, 17, False) for j in row.js]],
    ),
    Case(
        "Relative-shaw",
        lambda shape: [randn(7, shape.d)],
        lambda keys: {"bias": R.Relative.shaw(keys)},
        bias=lambda row: row.t[0][[max(-3, min(3, j - row.i)) + 3 for j in row.js]] @ row.q / row.q.shape[-1] ** 0.5,
    ),
    Case(
        "Relative-shaw-heads",
        lambda shape: [randn(shape.h, 5, shape.d)],
        lambda keys: {"bias": R.Relative.shaw(keys, scale=0.5), "mask": R.Window(4)},
        lambda row, j: abs(row.i - j) < 4,
        bias=lambda row: row.t[0][row.h, [max(-2, min(2, j - row.i)) + 2 for j in row.js]] @ row.q * 0.5,
    ),
    Case(
        "Gaussian",
        lambda shape: [CENTER[: shape.b, : shape.h, : shape.i], torch.rand(shape.i, dtype=D) + 2],
        lambda center, sigma: {"bias": R.Gaussian(center, sigma)},
        bias=lambda row: -((row.places - row.t[0][row.b, row.h, row.r]) ** 2) / (2 * row.t[1][row.r] ** 2),
    ),
    Case(
        "Added",
        added,
        lambda values: {"bias": R.Added(values)},
        bias=lambda row: row.t[0][row.h, row.r],
        fits=lambda shape: shape.h <= 3 and shape.i * shape.j > 0,
        smooth=False,
    ),
    Case(
        "Sum",
        lambda shape: [randn(shape.i, shape.j) + 3, torch.rand(shape.h, dtype=D)],
        lambda values, slopes: {"bias": R.Added(values) + R.Alibi(slopes=slopes), "mask": R.Causal()},
        lambda row, j: j <= row.i,
        bias=lambda row: row.t[0][row.r] - row.t[1][row.h] * row.away,
        fits=lambda shape: shape.i * shape.j > 0,
    ),
    Case(
        "Bias-of",
        lambda shape: [randn(shape.h, 9)],
        lambda table: {"bias": R.Bias.of(lambda b, h, i, j: table[h, (j - i).clamp(-4, 4) + 4] / (b + 1))},
        bias=lambda row: row.t[0][row.h, [max(-4, min(4, j - row.i)) + 4 for j in row.js]] / (row.b + 1),
    ),
    Case(
        "Scaled",
        lambda shape: [torch.rand(shape.h, dtype=D), torch.rand(shape.h, dtype=D), randn(shape.i, shape.j)],
        lambda factor, slopes, values: {"bias": factor * R.Alibi(slopes=slopes) - 2 * R.Added(values) + values},
        bias=lambda row: -row.t[0][row.h] * row.t[1][row.h] * row.away - row.t[2][row.r],
        fits=lambda shape: shape.i * shape.j > 0,
    ),
]

# -- normalizers ------------------------------------------------------------------------------------------------------


def project(s: Tensor, alpha: float) -> Tensor:
    """Entmax by bisection on the threshold, gradients by the support's closed form."""
    z = s.detach() * (alpha - 1)
    low, high = z.max() - 1, z.max()
    for _ in range(100):
        middle = (low + high) / 2
        if ((z - middle).clamp(min=0) ** (1 / (alpha - 1))).sum() > 1:
            low = middle
        else:
            high = middle
    p = (z - low).clamp(min=0) ** (1 / (alpha - 1))
    slope = torch.where(p > 0, p ** (2 - alpha), 0.0)
    change = s - s.detach()
    return p + slope * (change - (slope * change).sum() / slope.sum())


def hard(s: Tensor) -> Tensor:
    one = torch.zeros_like(s)
    one[max(range(len(s)), key=lambda n: (s[n].item(), -n))] = 1
    soft = torch.softmax(s, -1)
    return one + soft - soft.detach()


def causal(row: Row, j: int) -> bool:
    return j <= row.i


NORMALIZERS = [
    Case(
        "SinkSoftmax",
        none,
        lambda: {"normalize": R.SinkSoftmax(0.5), "mask": R.Causal()},
        causal,
        normalize=lambda row, s: s.exp() / (s.exp().sum() + math.exp(0.5)),
    ),
    Case(
        "SinkSoftmax-learned",
        lambda shape: [randn(shape.h)],
        lambda sink: {"normalize": R.SinkSoftmax(sink), "mask": R.Window(3)},
        lambda row, j: abs(row.i - j) < 3,
        normalize=lambda row, s: s.exp() / (s.exp().sum() + row.t[0][row.h].exp()),
    ),
    Case(
        "Sigmoid",
        lambda shape: [randn(shape.h)],
        lambda bias: {"normalize": R.Sigmoid(bias), "mask": R.Causal()},
        causal,
        normalize=lambda row, s: torch.sigmoid(s + row.t[0][row.h]),
    ),
    Case(
        "Sparsemax",
        none,
        lambda: {"normalize": R.Sparsemax(), "mask": R.Causal()},
        causal,
        normalize=lambda row, s: project(s, 2.0),
        smooth=False,
    ),
    Case(
        "Entmax",
        none,
        lambda: {"normalize": R.Entmax(1.5), "mask": R.Causal()},
        causal,
        normalize=lambda row, s: project(s, 1.5),
        smooth=False,
    ),
    Case(
        "Entmax-1.3",
        none,
        lambda: {"normalize": R.Entmax(1.3)},
        normalize=lambda row, s: project(s, 1.3),
        smooth=False,
    ),
    Case(
        "Hard",
        none,
        lambda: {"normalize": R.Hard(), "mask": R.Causal()},
        causal,
        normalize=lambda row, s: hard(s),
        smooth=False,
    ),
    Case(
        "Tapered",
        lambda shape: [CENTER[: shape.b, : shape.h, : shape.i]],
        lambda center: {
            "normalize": R.Tapered(R.Softmax(), R.Gaussian(center, 2.0)),
            "mask": R.Near(center, 4.0),
        },
        lambda row, j: bool(abs(j - row.t[0][row.b, row.h, row.r]) <= 4.0),
        normalize=lambda row, s: (
            torch.softmax(s, -1) * torch.exp(-((row.places[row.seen] - row.t[0][row.b, row.h, row.r]) ** 2) / 8.0)
        ),
    ),
]

CASES = SCORES + MASKS + BIASES + NORMALIZERS

SHAPES = [
    Shape(i=1, j=1, d=3, e=5),
    Shape(b=2, h=4, g=2, i=7, j=7),
    Shape(b=2, h=2, g=1, i=7, j=11, d=5, e=3),
    Shape(h=3, g=3, i=13, j=6, d=4, e=7),
    Shape(b=3, h=2, g=2, i=1, j=9, offset=4),
    Shape(h=2, g=1, i=9, j=9, offset=-3, strided=True),
    Shape(h=4, g=4, i=63, j=63, d=16, e=9),
    Shape(b=1, h=2, g=1, i=63, j=129, d=7, e=16, strided=True),
    Shape(h=1, g=1, i=129, j=63, d=8, e=8),
    Shape(b=3, h=2, g=1, i=5, j=11, offset=(6, -2, 3)),
]
EMPTY = [Shape(b=0), Shape(i=0), Shape(j=0), Shape(b=0, i=0, j=0)]
