"""Scores over the whole range of their numbers."""

import pytest
import torch

from regard import Additive, Dot, Sigmoid, attend, weights


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("near", "far"), [(1.0, 1e4), (14.0, 300.0), (1e3, 1.0), (60.0, 60.0)])
def test_additive_scores_are_right_however_far_apart_queries_and_keys_lie(near, far, dtype, backend):
    q, k = torch.linspace(-near, near, 31, dtype=dtype), torch.linspace(-far, far, 40, dtype=dtype)
    u = torch.tensor([0.7], dtype=dtype)
    A = weights(q.view(1, 1, 31, 1), k.view(1, 1, 40, 1), score=Additive(u), normalize=Sigmoid(), backend=backend)
    expected = (u * torch.tanh(q[:, None] + k)).sigmoid()
    torch.testing.assert_close(A.dense()[0, 0], expected)


def test_a_negative_scale_rounds_no_query():
    q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=torch.bfloat16)
    negative, turned = attend(q, k, v, score=Dot(scale=-0.3)), attend(-q, k, v, score=Dot(scale=0.3))
    assert torch.equal(negative, turned)
