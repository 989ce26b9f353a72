"""The answers to the exercises of chapters 7 to 12 of the book, and the formulas of docs/scale.md."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.testing import assert_close

from regard import Alibi, Causal, Dilated, Window, weights
from regard.data import Scenes
from regard.decode import beam, greedy
from regard.lens import value_norms
from regard.models import Captioner, CaptionerConfig
from regard.nn import Attention, EncoderBlock, FeedForward, Rotary

# Chapter 7


def is_toeplitz(A: torch.Tensor) -> bool:
    return torch.allclose(A[1:, 1:], A[:-1, :-1], atol=1e-6)


def test_rotary_scores_of_equal_tokens_are_toeplitz_and_weights_are_not():
    torch.manual_seed(0)
    n, w = 12, 4
    x = torch.randn(1, 1, 16).expand(1, n, 16)
    layer = Attention(16, 1, rotary=Rotary(16, base=20.0))
    full = layer.weights(x)
    scores = full[0, 0].log() + full.lse[0, 0, :, None]
    assert is_toeplitz(scores)
    # Each row is divided by a sum of its own: the first sees distances 0 to 11, the last -11 to 0.
    assert not is_toeplitz(full[0, 0])
    # In a window that is full, every row sees the same distances, and is divided by the same sum.
    windowed = layer.weights(x, mask=Causal() & Window(w))[0, 0]
    assert is_toeplitz(windowed[w - 1 :, :])
    assert not is_toeplitz(windowed)


# Chapter 8


def test_a_stack_of_windows_reaches_two_tokens_further_per_block():
    torch.manual_seed(0)
    n, w = 12, 3
    for blocks in range(1, 7):
        stack = torch.nn.Sequential(
            *(EncoderBlock(Attention(16, 2, mask=Causal() & Window(w)), FeedForward(16, 32)) for _ in range(blocks))
        )
        x = torch.randn(1, n, 16, requires_grad=True)
        (gradient,) = torch.autograd.grad((stack(x)[0, -1] * torch.randn(16)).sum(), x)
        seen = (gradient[0] != 0).any(-1)
        # The feed-forward works on each token alone, and adds nothing to this.
        assert seen.tolist() == [n - 1 - j <= blocks * (w - 1) for j in range(n)]
    assert math.ceil((n - 1) / (w - 1)) == 6


# Chapter 9


def test_shuffled_places_change_nothing_but_where_they_are():
    torch.manual_seed(0)
    scene = Scenes(pixels=24, most=1)(random.Random(0))
    image = torch.from_numpy(scene.image).permute(2, 0, 1)[None] / 255
    config = CaptionerConfig(vocabulary=9, start=1, dim=16, hidden=32, layers=1, attention="transformer", heads=2)
    model = Captioner(config).eval()
    inputs = torch.tensor([[1, 4, 5]])
    places = model.places(model.features(image))
    order = torch.randperm(places.shape[1])
    assert_close(model.decoder(inputs, places[:, order]), model.decoder(inputs, places))
    # Where a place is, it carries with it; taken off and put on in another order, it is another image.
    bare = model.places.project(model.features(image).flatten(2).mT)
    moved = bare[:, order] + (places - bare)
    assert not torch.allclose(model.decoder(inputs, moved), model.decoder(inputs, places), atol=1e-3)


# Chapter 10


@pytest.mark.parametrize(("n", "w"), [(64, 8), (100, 10), (90, 7)])
def test_a_window_and_a_stride_reach_everything_in_two_layers(n, w):
    x = torch.zeros(1, 1, n, 4)
    seen = weights(x, x, mask=Causal() & (Window(w) | Dilated(n, w)))[0, 0] > 0
    causal = torch.ones(n, n).tril().bool()
    assert not torch.equal(seen, causal)
    assert torch.equal((seen.float() @ seen.float()) > 0, causal)
    assert seen.sum(-1).max() <= w + math.ceil(n / w)
    # Either half alone does not: a window is too short, a stride keeps to its own residue.
    for half in (Window(w), Dilated(n, w)):
        alone = weights(x, x, mask=Causal() & half)[0, 0] > 0
        assert not torch.equal((alone.float() @ alone.float()) > 0, causal)


def test_the_busiest_query_sees_least_where_the_window_is_the_root_of_the_length():
    n = 64
    x = torch.zeros(1, 1, n, 4)
    masks = {w: Causal() & (Window(w) | Dilated(n, w)) for w in (2, 4, 8, 16, 32)}
    busiest = {w: int((weights(x, x, mask=mask)[0, 0] > 0).sum(-1).max()) for w, mask in masks.items()}
    assert min(busiest, key=busiest.get) == 8
    assert busiest[8] == 8 + 64 // 8 - 1


# Chapter 11


class Chain:
    """A model that looks at the last token only: the rows of `chances` are what follows each."""

    def __init__(self, chances: torch.Tensor) -> None:
        self.logits = chances.log()

    def start(self, source):
        return self

    def step(self, tokens, state):
        return self.logits[tokens], self

    def select(self, rows):
        return self


def test_a_beam_of_two_finds_what_greedy_search_walks_past():
    start, a, b, end = range(4)
    chances = torch.zeros(4, 4)
    chances[start, [a, b]] = torch.tensor([0.6, 0.4])
    chances[a, [a, b, end]] = torch.tensor([0.25, 0.25, 0.5])
    chances[b, [a, b, end]] = torch.tensor([0.05, 0.05, 0.9])
    chances[end, end] = 1.0
    asked = {"source": None, "prefix": [[start]], "end": end, "max_length": 6}
    straight = greedy(Chain(chances), **asked)[0]
    best = beam(Chain(chances), width=2, **asked)[0][0]
    assert (straight.tokens, best.tokens) == ((a, end), (b, end))
    assert_close(math.exp(straight.log_probability), 0.30, rtol=1e-5, atol=0)
    assert_close(math.exp(best.log_probability), 0.36, rtol=1e-5, atol=0)


def test_a_wider_beam_may_find_less():
    start, a, b, x, y, z, end = range(7)
    others = list(range(7, 17))
    chances = torch.zeros(17, 17)
    chances[start, [a, b]] = torch.tensor([0.53, 0.47])
    chances[a, x] = 0.4
    chances[a, others] = 0.06
    chances[b, [y, z]] = torch.tensor([0.51, 0.49])  # 0.24 and 0.23 push out a x, which has 0.21
    chances[[y, z]] = torch.zeros(17).index_fill(0, torch.tensor(others), 0.1)
    chances[[x, *others, end], end] = 1.0
    asked = {"source": None, "prefix": [[start]], "end": end, "max_length": 6}
    narrow, wide = (beam(Chain(chances), width=width, **asked)[0][0] for width in (1, 2))
    assert narrow.tokens == (a, x, end)
    assert wide.log_probability < narrow.log_probability - 1


# Chapter 12


def test_the_largest_weight_may_matter_least():
    k = torch.tensor([[6.0, 0.0], [0.0, 0.0], [0.0, 0.0]])[None, None]  # b h j d
    q = torch.tensor([[1.0, 0.0]])[None, None]
    v = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])[None, None]
    A = weights(q, k)
    assert A[0, 0, 0, 0] > 0.9
    out = A @ v

    def without(key: int) -> float:
        rest = [j for j in range(3) if j != key]
        return float((weights(q, k[:, :, rest]) @ v[:, :, rest] - out).norm())

    assert without(0) < 1e-6 < min(without(1), without(2))
    # What a key has to give is its weight times its value: for the first, nothing.
    given = A[0, 0, 0] * value_norms(v, torch.eye(2))[0, 0]
    assert given[0] == 0 < min(given[1], given[2])


# docs/scale.md


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_measures_of_key_shards_merge_by_their_row_statistics(shards):
    torch.manual_seed(0)
    n_i, n_j = 13, 31
    q, k, v = torch.randn(2, 4, n_i, 8), torch.randn(2, 2, n_j, 8), torch.randn(2, 2, n_j, 5)
    terms = {"mask": Causal(), "bias": Alibi(4)}
    whole, offset = weights(q, k, **terms), n_j - n_i
    parts, starts = [], []
    for keys in torch.arange(n_j).chunk(shards):
        starts.append(int(keys[0]))
        parts.append((weights(q, k[:, :, keys], offset=offset - starts[-1], **terms), v[:, :, keys]))
    lse = torch.stack([A.lse for A, _ in parts]).logsumexp(0)  # b h i
    shares = [(A.lse - lse).exp() for A, _ in parts]
    assert_close(lse, whole.lse)
    assert_close(sum(w[..., None] * (A @ x) for w, (A, x) in zip(shares, parts, strict=True)), whole @ v)
    received = [(w[..., None, :] @ A).squeeze(-2) for w, (A, _) in zip(shares, parts, strict=True)]
    assert_close(torch.cat(received, -1), whole.received())
    entropy = sum(w * A.entropy() - torch.special.xlogy(w, w) for w, (A, _) in zip(shares, parts, strict=True))
    assert_close(entropy, whole.entropy())
    assert_close(sum(w * A.distance() for w, (A, _) in zip(shares, parts, strict=True)), whole.distance())
    largest = torch.stack([w * A.max() for w, (A, _) in zip(shares, parts, strict=True)]).amax(0)
    assert_close(largest, whole.max())

    pairs = [A.topk(min(4, A.shape[-1])) for A, _ in parts]
    values = torch.cat([w[..., None] * pair.values for w, pair in zip(shares, pairs, strict=True)], -1)
    keys = torch.cat([start + pair.indices for start, pair in zip(starts, pairs, strict=True)], -1)
    best = values.topk(4)
    assert_close(best.values, whole.topk(4).values)
    assert torch.equal(keys.gather(-1, best.indices), whole.topk(4).indices)

    queries, groups = torch.arange(n_i) // 5, torch.arange(n_j) // 7
    asking = torch.nn.functional.one_hot(queries).float().mT  # groups i
    given = [((asking * w[..., None, :]) @ A) for w, (A, _) in zip(shares, parts, strict=True)]  # b h groups j
    mass = torch.cat(given, -1) @ torch.nn.functional.one_hot(groups).float() / asking.sum(-1)[:, None]
    assert_close(mass, whole.mass(queries, groups))
