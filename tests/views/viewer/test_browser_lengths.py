"""What a reader sees of 100, 10,000 and 100,000 tokens beside the whole matrix, or patterns known in closed form."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import pytest
import torch

from regard import Causal, Window, weights
from regard.lens import Tape
from regard.views import view
from tests.views.browser import opened
from tests.views.conftest import Client

pytestmark = pytest.mark.browser

D, REACH, STRENGTH = 8, 64, 5.0


def whole_matrix(q, k, rows):
    """The causal attention of some queries in float64, written out."""
    q, k = q[0, 0].double().numpy(), k[0, 0].double().numpy()
    scores = q[rows] @ k.T / math.sqrt(D)
    scores[np.asarray(rows)[:, None] < np.arange(len(k))] = -np.inf
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def truth_of(q, k, size):
    """Mean and largest weight of each cell of `size` a side, entropy of each query and what each key receives."""
    n = q.shape[2]
    high, edges = -(-n // size), np.arange(0, n, size)
    mean, most = np.zeros((2, high, high))
    entropy, received = np.zeros(n), np.zeros(n)
    for cell, first in enumerate(edges):
        A = whole_matrix(q, k, range(first, min(first + size, n)))
        mean[cell] = np.add.reduceat(A.sum(0), edges)
        most[cell] = np.maximum.reduceat(A.max(0), edges)
        entropy[first : first + size] = -(A * np.log(np.where(A > 0, A, 1))).sum(1)
        received += A.sum(0)
    counts = np.diff([*edges, n])
    return mean / (counts[:, None] * counts), most, entropy, received


def columns(table):
    """A table by column, numbers as floats."""
    header, *rows = table
    return {name: [row[at] for row in rows] for at, name in enumerate(header)}


def numbers(found, *names):
    return [np.array(found[name], dtype=float) for name in names]


@pytest.mark.parametrize("n", [100, 10_000])
def test_every_number_is_that_of_the_whole_matrix(chromium, n):
    generator = torch.Generator().manual_seed(n)
    q, k, noise = (2 * torch.randn(1, 1, n, D, generator=generator) for _ in range(3))
    other = q + 1e-3 * noise
    tapes = [Tape({("layer", 0): weights(x, k, mask=Causal())}) for x in (q, other)]
    with view(*tapes, open_browser=False) as viewer, opened(chromium, viewer.url) as watched:
        watched.page.wait_for_selector("button.head", timeout=120_000)
        overview = columns(watched.table())
        show_map(watched, "mean")
        size = 2 ** int(columns(watched.table())["level"][0])
        assert (size == 1) == (n == 100)
        mean, most, entropy, received = truth_of(q, k, size)
        assert overview["state"] == ["exact"]
        largest = np.mean([row.max() for row in rows_of(q, k)])
        assert float(overview["entropy"][0]) == pytest.approx(entropy.mean(), rel=1e-4)
        assert float(overview["mean largest weight"][0]) == pytest.approx(largest, rel=1e-4)
        for pool, name, truth in (("mean", "mean weight", mean), ("max", "largest weight", most)):
            show_map(watched, pool)
            told = columns(watched.table())
            assert set(told["state"]) == {"exact"}
            assert set(told["level"]) == {str(int(math.log2(size)))}
            i, j, found, error = numbers(told, "query", "key", name, "relative error")
            assert len(found) == min(truth.size, 1_000_000)  # rows of a CSV
            expected = truth[(i // size).astype(int), (j // size).astype(int)]
            assert (np.abs(found - expected) <= (error + 1e-4) * expected + 1e-9).all()
        for row in (n // 3, n - 7):
            watched.go(view="map", at=f"{row + 0.5},{row - 5.5},12", pool="mean")
            value = watched.point()[0]
            A = whole_matrix(q, k, [row])[0]
            assert value == pytest.approx(A[row - 6], rel=1e-4)
            card = watched.text(".card p.faint").replace("\u2212", "-").replace(",", "")
            assert card.startswith(f"{'mean ' if n > 8192 else ''}entropy of")
            shown = [float(word) for word in card.split() if word.replace(".", "").replace("e-", "").isdecimal()]
            width = 2 if n > 8192 else 1
            first, key = row // width * width, (row - 6) // width * width
            truth = entropy[first : first + width].mean(), received[key : key + width].mean()
            assert shown == pytest.approx(truth, rel=6e-3)
            watched.go(view="text", chosen=f"{row},{row}")
            told = columns(watched.table())
            side = np.array(told["side"])
            place, weight = numbers(told, "position", "weight")
            assert weight[side == "looks at"] == pytest.approx(A[place[side == "looks at"].astype(int)], rel=1e-4)
            watched.go(view="text", chosen=f"{row - 9},{row}")
            told = columns(watched.table())
            side = np.array(told["side"])
            place, weight = numbers(told, "position", "weight")
            span = whole_matrix(q, k, range(row - 9, row + 1)).mean(0)
            assert weight[side == "looks at"] == pytest.approx(span[place[side == "looks at"].astype(int)], rel=1e-4)
        row = n // 2
        less = whole_matrix(q, k, [row])[0] - whole_matrix(other, k, [row])[0]
        watched.go(view="map", against="capture", layout="difference", at=f"{row + 0.5},{row - 5.5},12")
        assert watched.point()[0] == pytest.approx(less[row - 6], rel=1e-2, abs=1e-8)


def rows_of(q, k, step=500):
    n = q.shape[2]
    for first in range(0, n, step):
        yield from whole_matrix(q, k, range(first, min(first + step, n)))


def show_map(watched, pool, at=""):
    """Show the map until no tile on screen is a preview, which takes a while without maps of this size."""
    watched.page.evaluate("hash => { location.hash = hash }", f"view=map&pool={pool}{at}")
    name = "mean of" if pool == "mean" else "largest of"
    for _ in range(1200):
        watched.page.wait_for_timeout(100)
        label = watched.page.locator(".legend-label").all_inner_texts()
        waits = watched.page.evaluate("document.querySelector('.bar.waiting') !== null")
        there = label and (name in label[0] or label[0] == "weight")
        if there and not waits and "preview" not in watched.text(".status"):
            return
    raise AssertionError("previews stay")


class Planted:
    """Queries that look evenly at the last `REACH` keys, but for some that look at one of them above all."""

    def __init__(self, n, count):
        rng = np.random.default_rng(0)
        self.n = n
        self.rows = 4 * REACH * (1 + rng.choice(n // (4 * REACH) - 2, count, replace=False))
        self.keys = self.rows - rng.integers(1, REACH - 1, count)
        q, k = torch.zeros(2, 1, 1, n, D)
        q[0, 0, self.rows, 0], k[0, 0, self.keys, 0] = 1.0, STRENGTH * math.sqrt(D)
        self.A = weights(q, k, mask=Causal() & Window(REACH))
        self.target = dict(zip(self.rows.tolist(), self.keys.tolist(), strict=True))

    def row(self, i):
        """The weights of a query, as keys and weights."""
        keys = np.arange(max(0, i - self.behind), i + 1)
        scores = np.exp(STRENGTH * (keys == self.target.get(i, -1)))
        return keys, scores / scores.sum()

    @cached_property
    def behind(self):
        """How many earlier keys a query sees."""
        return int((self.A[0, 0, 4 * REACH] > 0).sum()) - 1

    def cell(self, i, j, size):
        """Mean and largest weight of a cell."""
        total, most = 0.0, 0.0
        for row in range(i, min(i + size, self.n)):
            keys, weight = self.row(row)
            inside = weight[(keys >= j) & (keys < j + size)]
            total, most = total + inside.sum(), max(most, inside.max(initial=0.0))
        return total / ((min(i + size, self.n) - i) * (min(j + size, self.n) - j)), most

    def received(self, j):
        """What a key receives from all queries."""
        return sum(float(weight[keys == j].sum()) for keys, weight in map(self.row, self.lookers(j)))

    def lookers(self, j):
        """The queries that see a key."""
        return range(j, min(j + self.behind + 1, self.n))

    def measures(self):
        """Entropy and largest weight of each query, and what each key receives, in closed form."""
        m, i = self.behind + 1, np.arange(self.n)
        seen = np.minimum(i + 1, m)
        z = math.exp(STRENGTH) + m - 1
        entropy, largest, even = np.log(seen), 1 / seen, 1 / seen
        entropy[self.rows] = math.log(z) - STRENGTH * math.exp(STRENGTH) / z
        largest[self.rows] = math.exp(STRENGTH) / z
        even[self.rows] = 1 / z
        starts = np.bincount(np.maximum(i - self.behind, 0), even, self.n + 1)
        received = np.cumsum(starts - np.bincount(i + 1, even, self.n + 1))[: self.n]
        np.add.at(received, self.keys, (math.exp(STRENGTH) - 1) / z)
        return entropy, largest, received


def test_planted_patterns_of_100_000_tokens_are_found_where_they_are(chromium):
    planted, rng = Planted(100_000, 200), np.random.default_rng(1)
    tape = Tape({("layer", 0): planted.A})
    tape.summarize()
    m = planted.behind + 1
    sharp = math.exp(STRENGTH) / (math.exp(STRENGTH) + m - 1)
    entropy, largest, received = planted.measures()
    for j in planted.keys[:3]:
        assert received[j] == pytest.approx(planted.received(j))
    with view(tape, open_browser=False) as viewer:
        client = Client(viewer.url)
        tile = "capture=0&layer=0&batch=0&head=0&minus=none"
        for i in rng.choice(planted.rows, 100).tolist() + rng.integers(0, planted.n, 100).tolist():
            _, arrays = client.frame(f"token?capture=0&layer=0&batch=0&head=0&axis=query&first={i}&last={i}&top=1")
            keys, weight = planted.row(i)
            assert np.abs(arrays["weight"][keys] - weight).max() < 1e-6
            assert np.abs(arrays["weight"]).sum() == pytest.approx(1, rel=1e-5)
            header, arrays = client.frame(f"tile?{tile}&level=0&row={i // 256}&col={i // 256}")
            inside = keys[keys >= i // 256 * 256]
            assert header["state"] == "exact"
            assert np.abs(arrays["weight"][i % 256, inside % 256] - weight[-len(inside) :]).max() < 1e-6
        _, arrays = client.frame("measures?capture=0&layer=0&batch=0&head=0&level=0")
        for name, truth in (("entropy", entropy), ("max", largest), ("received", received)):
            assert arrays[name] == pytest.approx(truth, rel=1e-4, abs=1e-5), name
        marked = {(row // 256, key // 256) for row, key in planted.target.items()}
        for r, c in ((0, 0), (1, 0), (0, 1), (1, 1)):  # from the map of the summary
            header, arrays = client.frame(f"largest?{tile}&level=8&row={r}&col={c}")
            assert header["state"] == "exact"
            inside = [(i % 256, j % 256) for i, j in marked if (i // 256, j // 256) == (r, c)]
            assert np.allclose([arrays["max"][at] for at in inside], sharp, rtol=1e-3)
            assert int((arrays["max"] > 0.9 * sharp).sum()) == len(inside) + (r == c == 0)  # query 0
            for i, j in rng.integers(0, arrays["max"].shape, (25, 2)).tolist() + inside[:25]:
                truth = planted.cell((256 * r + i) * 256, (256 * c + j) * 256, 256)
                assert (arrays["mean"][i, j], arrays["max"][i, j]) == pytest.approx(truth, rel=1e-3, abs=1e-9)
        with opened(chromium, viewer.url) as watched:
            told = columns(watched.table())
            assert told["state"] == ["exact"]
            assert float(told["entropy"][0]) == pytest.approx(entropy.mean(), rel=1e-5)
            assert float(told["mean largest weight"][0]) == pytest.approx(largest.mean(), rel=1e-4)
            middle = 8192 * int(planted.rows[0] // 8192) + 4096
            for pool, name in (("mean", "mean weight"), ("max", "largest weight")):
                show_map(watched, pool, f"&at={middle},{middle},8192")
                told = columns(watched.table())
                i, j, level = (np.array(told[name], dtype=int) for name in ("query", "key", "level"))
                [found] = numbers(told, name)
                assert set(told["state"]) == {"exact"}
                size = 2 ** level[0]
                marked = {(row // size * size, key // size * size) for row, key in planted.target.items()}
                some = [n for n in range(len(i)) if (i[n], j[n]) in marked]
                assert some
                for n in [*some[:30], *rng.choice(len(i), 30)]:
                    truth = planted.cell(int(i[n]), int(j[n]), int(size))[pool == "max"]
                    assert found[n] == pytest.approx(truth, rel=1e-3, abs=1e-9)
                if pool == "max":
                    assert found[some] == pytest.approx(sharp, rel=1e-3)
            row, key = planted.rows[0], planted.keys[0]
            watched.go(view="map", at=f"{row + 0.5},{key + 0.5},8", pool="mean")
            assert watched.point() == pytest.approx([sharp], rel=1e-5)
            card = watched.text(".card p.faint").replace("\u2212", "-").replace(",", "")
            width = 2 ** math.ceil(math.log2(planted.n / 8192))  # tokens of a mean of the card
            queries, keys = (range(at // width * width, at // width * width + width) for at in (row, key))
            assert f"mean entropy of queries {queries[0]}\u2013{queries[-1]} " in card, card
            assert f"mean received by keys {keys[0]}\u2013{keys[-1]} " in card, card
            shown = [float(word) for word in card.split() if word.replace(".", "").replace("e-", "").isdecimal()]
            assert shown == pytest.approx([entropy[queries].mean(), received[keys].mean()], rel=6e-3), card
            watched.go(view="text", chosen=f"{row},{row}")
            ends, shown = watched.links("section[data-side=query]")
            assert (ends[0], shown[0]) == (key, pytest.approx(sharp, rel=6e-3))
            watched.go(view="text", chosen=f"{key},{key}", axis="key")
            told = columns(watched.table())
            side = np.array(told["side"])
            place, weight = numbers(told, "position", "weight")
            seen = dict(zip(place[side == "is seen by"].astype(int), weight[side == "is seen by"], strict=True))
            assert seen.keys() == set(planted.lookers(key))
            assert sum(seen.values()) == pytest.approx(planted.received(key), rel=1e-4)
            for i in planted.lookers(key):
                keys, weight = planted.row(i)
                assert seen[i] == pytest.approx(weight[keys == key][0], rel=1e-4)
