"""One tile of weights added to its sums: small weights, rows that are no number, and keys that no query sees."""

from __future__ import annotations

import platform

import pytest
import torch

import regard as R
from regard import weights
from regard.kernels.summary.bins import assign_bins
from regard.kernels.summary.generic import summarize_generic
from regard.kernels.tiles import TileConfig
from tests.kernels.judged import NAMES, TERMS, judged


@pytest.mark.parametrize("shifted", [True, False], ids=["softmax", "with a sink"])
@pytest.mark.parametrize("bins", [5, 7, 75], ids=["parts of their own", "across parts", "a row each"])
def test_half_precision_sums_keep_small_weights(bins, shifted, device):
    """With a sink, rows sum to less than 1."""
    n = 80 if bins == 5 else 75
    q, k = (2 * torch.randn(1, 1, n, 16, device=device).half() for _ in range(2))
    k[:, :, 0] = 12 * torch.nn.functional.normalize(q.mean(2), dim=-1)  # most of them look there
    s = q.double() @ k.double().mT / 4
    lse = torch.logsumexp(s, -1) + (0 if shifted else 0.5)
    A = (s - lse[..., None]).exp()
    ids = torch.arange(n, device=device) * bins // n
    even = (n // bins,) * 2 if n % bins == 0 else None
    config = TileConfig(32, 32, 4, 2)
    found = summarize_generic(
        q, k, lse.float(), want=frozenset((*NAMES, "map")), scale=0.25, offset=0, config=config, sums_to_one=shifted,
        bins=assign_bins(ids.int(), ids.int(), (bins, bins), config, even),
    )  # fmt: skip
    member = torch.nn.functional.one_hot(ids, bins).double()
    assert A.min() < 2**-20
    torch.testing.assert_close(found.map.double(), member.mT @ A @ member, atol=1e-9, rtol=2e-3)
    torch.testing.assert_close(found.received.double(), A.sum(-2), atol=1e-9, rtol=1e-3)
    torch.testing.assert_close(found.max.double(), A.amax(-1), atol=0, rtol=1e-4)
    torch.testing.assert_close(found.entropy.double(), -(A * A.log()).sum(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["plain", "causal", "documents", "alibi", "added", "cap"])
def test_a_nan_row_is_not_treated_as_an_empty_row(name, device):
    q, k = torch.randn(2, 2, 19, 16, device=device), torch.randn(2, 1, 40, 16, device=device)
    seen = judged(q, k, TERMS[name])[1].dense() != 0
    k[1, 0, 30, 5] = torch.nan
    A, _ = judged(q, k, TERMS[name])
    rows = seen[..., 30] & torch.tensor([False, True])[:, None, None]
    summary = A.summary()
    for got in (summary.entropy, summary.max, summary.distance, A.topk(1).values[..., 0]):
        assert torch.equal(got.isnan().cpu(), rows)
    cells = seen & rows[..., None]
    assert torch.equal(summary.received.isnan().cpu(), cells.any(-2))
    # A GPU's NaN has no sign. The interpreter has the processor's, on x86 a minus here, which maxima by bits lose.
    if device != "cpu" or name != "alibi" or platform.machine() == "aarch64":
        assert torch.equal(A.pool(19, 40, "max").isnan().cpu(), cells)


def test_a_key_that_no_query_sees_may_hold_anything(device):
    q, k = torch.randn(1, 2, 5, 16, device=device), torch.randn(1, 2, 40, 16, device=device)
    k[:, :, 10] = torch.nan  # after the last query, in the tile of keys it sees
    A = weights(q, k, mask=R.Causal(), offset=3)
    summary = A.summary()
    for got in (A.received(), summary.received, summary.map, A.pool(5, 40, "max"), A.T @ q):
        assert got.isfinite().all()
