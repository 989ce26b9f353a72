"""Biases are the numbers of their papers."""

import warnings

import pytest
import torch

from regard import Added, Alibi, Gaussian, Relative, Sigmoid, attend, explain, weights
from regard.ops.terms.biases import Bias, MaskWarning
from regard.ops.terms.term import term

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


ONES = torch.ones(5, 5)


@pytest.mark.parametrize("values", [ONES.tril(), torch.eye(5)[None], ONES.tril().bool().float().expand(2, 3, 5, 5)])
def test_a_bias_of_zeros_and_ones_is_added_and_warned_of(values):
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    with pytest.warns(MaskWarning, match=r"write mask=Dense\(values.bool\(\)\)") as caught:
        out = attend(q, k, v, bias=Added(values))
    assert caught[0].filename == __file__
    close(out, torch.softmax(q @ k.mT / 2 + values, -1) @ v)


@pytest.mark.parametrize(
    "values",
    [
        0 * ONES,
        ONES,
        2 * torch.eye(5),
        torch.eye(5) - 1e-6,
        torch.eye(5).requires_grad_(),
        torch.zeros(5, 5).fill_diagonal_(-1),
    ],
)
def test_other_biases_are_not_taken_for_masks(values):
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(q, k, v, bias=Added(values))


def test_the_warning_comes_once_for_each_line_that_calls():
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            attend(q, k, v, bias=Added(ONES.tril()))
    assert len(caught) == 1


@term
class Scaled(Bias):
    """q_i . q_i: a bias that reads the queries."""

    def over(self, at):
        return at.queries().square().sum(-1, keepdim=True)


FIXED = {
    "alibi": Alibi(3),
    "added": Added(torch.randn(40, 40)),
    "table": Relative.t5(torch.randn(3, 8)),
    "gaussian": Gaussian(torch.full((40,), 3.0), 2.0),
    "sum": Alibi(3) + Added(torch.randn(40, 40)),
}


@pytest.mark.parametrize("bias", FIXED.values(), ids=FIXED)
def test_a_fixed_bias_trains_on_the_fused_kernel(bias):
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 3, 40, 16)]
    assert "-> sdpa" in explain(*leaves, bias=bias)
    grads, truth = (
        torch.autograd.grad(attend(*leaves, bias=bias, backend=name).square().sum(), leaves)
        for name in ("sdpa", "reference")
    )
    close(grads, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        (Relative.shaw(torch.randn(9, 16)), "the bias reads the queries"),
        (Scaled() + Alibi(3), "the bias reads the queries"),
        (Alibi(slopes=torch.ones(3, requires_grad=True)), "no gradient to a bias that learns"),
    ],
)
def test_a_bias_that_learns_or_reads_the_queries_does_not(bias, why):
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 3, 40, 16)]
    (line,) = (line for line in explain(*leaves, bias=bias).splitlines() if " sdpa " in line)
    assert why in line
    assert "chosen" not in line


def test_biases_are_scaled_summed_and_subtracted():
    at = [torch.tensor(x) for x in (0, 0, 2, 1)]
    alibi, values = Alibi(2), torch.arange(9.0).view(3, 3)  # at this point: -1/16, and 7
    one = alibi(*at)
    written = [
        (2 * alibi, 2 * one),
        (alibi * torch.tensor([3.0, 5.0]), 3 * one),
        (alibi / 4, one / 4),
        (-alibi, -one),
        (alibi + values, one + 7),
        (values + alibi, one + 7),
        (alibi - values, one - 7),
        (values - alibi, 7 - one),
        (sum([alibi, alibi, alibi]), 3 * one),
        (2 * (alibi - values), 2 * (one - 7)),
    ]
    for bias, want in written:
        assert bias(*at) == want, bias
    assert repr(2 * (alibi + alibi) - alibi) == "2 * (Alibi(heads=2) + Alibi(heads=2)) + -1 * Alibi(heads=2)"
