"""The formulas of docs/scale.md: measures of parts of the keys merge to those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from regard import Alibi, Causal, weights


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
