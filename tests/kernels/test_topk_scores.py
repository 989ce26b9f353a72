"""Scores of each query with its own runs of keys."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.topk_scores import score_key_runs


@pytest.mark.parametrize(("h", "g", "d", "size"), [(1, 1, 3, 4), (4, 2, 16, 8), (2, 1, 20, 1)])
def test_scores_are_those_of_the_keys_of_each_run(h, g, d, size, device):
    q, k = torch.randn(2, h, 5, d, device=device), torch.randn(2, g, 33, d, device=device)
    runs = torch.stack([torch.randperm(33 // size)[:3] for _ in range(2 * h * 5)]).view(2, h, 5, 3)
    s = score_key_runs(q, k, runs.to(device), size).cpu()
    keys = (runs[..., None] * size + torch.arange(size)).flatten(-2)
    dense = (q @ k.repeat_interleave(h // g, 1).mT).cpu()
    torch.testing.assert_close(s, dense.gather(-1, keys), atol=1e-5, rtol=1e-5)


def test_scores_past_the_last_key_are_zero(device):
    q, k = torch.ones(1, 1, 2, 4, device=device), torch.ones(1, 1, 6, 4, device=device)
    runs = torch.tensor([[1], [0]], device=device)[None, None]  # keys 4 to 7, of which 6 and 7 are none
    assert score_key_runs(q, k, runs, 4).tolist() == [[[[4, 4, 0, 0], [4, 4, 4, 4]]]]


def test_half_precision_is_multiplied_in_float32_wherever_it_lies_in_memory(device):
    q, k = torch.randn(1, 2, 20, 3, device=device).half().mT, torch.randn(1, 2, 20, 7, device=device).half().mT
    runs = torch.zeros(1, 2, 3, 1, dtype=torch.long, device=device)
    s = score_key_runs(q, k, runs, 4)
    assert s.dtype == torch.float32
    torch.testing.assert_close(s, q.float() @ k[:, :, :4].float().mT, atol=1e-4, rtol=1e-4)


def test_no_queries_have_no_scores(device):
    q, k = torch.ones(1, 1, 0, 4, device=device), torch.ones(1, 1, 6, 4, device=device)
    assert score_key_runs(q, k, torch.zeros(1, 1, 0, 2, dtype=torch.long, device=device), 4).shape == (1, 1, 0, 8)
