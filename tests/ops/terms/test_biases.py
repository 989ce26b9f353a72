"""Biases are the numbers of their papers."""

import pytest
import torch

from regard import Alibi, Relative, Sigmoid, weights

close = torch.testing.assert_close

SLOPES = {
    1: [2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2**-n for n in range(1, 9)],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [2**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_has_the_slopes_of_the_paper(heads):
    i, j = torch.tensor(7), torch.tensor([3, 7, 9])
    bias = Alibi(heads)(torch.tensor(0), torch.arange(heads)[:, None], i, j)
    close(bias, -torch.tensor(SLOPES[heads])[:, None] * torch.tensor([4.0, 0.0, 2.0]))


@pytest.mark.parametrize("offset", [0, 40])
def test_a_learned_table_bound_to_its_queries_is_the_same_table(offset):
    table = torch.randn(3, 8, dtype=torch.double, requires_grad=True)
    q, k = torch.randn(2, 3, 30, 4), torch.randn(2, 3, 70, 4)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 3, 30, 70)), indexing="ij")
    term, grad = Relative.t5(table, 20), torch.randn(2, 3, 30, 70)
    bound, free = term.bind(q, k, offset)(b, h, i, j), term(b, h, i + offset, j)
    close(bound, free.to(bound.dtype))
    grads = [torch.autograd.grad(x, table, grad.to(x.dtype))[0] for x in (bound, free)]
    close(*grads, atol=1e-4, rtol=1e-5)


def test_the_gradient_of_a_learned_table_is_summed_query_by_query():
    table = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    q, k = torch.zeros(1, 1, 64, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 64, 4, dtype=torch.bfloat16)
    at = torch.meshgrid(*map(torch.arange, (1, 1, 64, 64)), indexing="ij")
    (grad,) = torch.autograd.grad(Relative.t5(table, 20).bind(q, k, 0)(*at).sum(), table)
    # One by one in half precision a sum stops growing at 256.
    close(grad.float(), torch.tensor([[64.0, 2016.0, 0.0, 2016.0]]), atol=0, rtol=0.01)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("offset", [0, 4])
def test_shaw_reads_the_key_of_the_distance_to_the_key(offset, backend):
    keys = torch.tensor([-2.0, -1.0, 0.5, 3.0, 4.0])  # of distances j - i from -2 to 2, farther ones as the farthest
    q, k = torch.ones(1, 1, 5, 1), torch.zeros(1, 1, 9, 1)
    A = weights(q, k, bias=Relative.shaw(keys[:, None], scale=1.0), normalize=Sigmoid(), offset=offset, backend=backend)
    expected = [[keys[max(-2, min(2, j - (r + offset))) + 2] for j in range(9)] for r in range(5)]
    close(A.dense()[0, 0].logit(), torch.tensor(expected))
