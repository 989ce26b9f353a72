"""Measures of weights that are known in closed form, so that nothing needs to be compared with."""

import pytest
import torch

from regard import Causal, Diagonal, Dot, Weights, Window, weights
from regard.ops.blocks import prepared_call

B, H, I, J = 2, 3, 50, 70
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    for name, value in (("ROWS_PER_BLOCK", 16), ("KEYS_PER_TILE", 8), ("SCORES_PER_BLOCK", 2**10)):
        monkeypatch.setattr(prepared_call, name, value)


def even(offset: int, **terms) -> Weights:
    """A zero query looks evenly at all it may see: row r at r + offset + 1 keys, from the first on."""
    q, k = torch.zeros(B, H, I, 4).double(), torch.randn(B, H, J, 4).double()
    return weights(q, k, mask=Causal(), offset=offset, **terms)


def diagonal(n: int) -> Weights:
    q, k = torch.randn(2, B, H, n, 4).double()
    return weights(q, k, mask=Diagonal())


def rising(n: int, mask) -> Weights:
    """Every key scores higher than the one before it."""
    return weights(torch.ones(1, 1, n, 1), torch.arange(n).view(1, 1, n, 1) / 10, score=Dot(1.0), mask=mask)


ASKED = {
    "alone": lambda A, name: getattr(A, name)(),
    "after the statistic": lambda A, name: (A.statistic, getattr(A, name)())[1],
    "in a summary": lambda A, name: getattr(A.summary(), name),
    "in a summary after the statistic": lambda A, name: (A.statistic, getattr(A.summary(), name))[1],
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("offset", [J - I, 0, -10])
@pytest.mark.parametrize("measure", ["entropy", "received", "max", "distance"])
def test_even_weights_have_the_measures_of_their_closed_form(measure, offset, asked):
    seen = (torch.arange(I).double() + offset + 1).clamp(min=0)
    weight = torch.where(seen > 0, 1 / seen, 0.0)
    expected = {
        "entropy": seen.clamp(min=1).log(),
        "received": torch.stack([weight[seen > j].sum() for j in range(J)]),
        "max": weight,
        "distance": (seen - 1).clamp(min=0) / 2,
    }[measure]
    close(ASKED[asked](even(offset), measure), expected.expand(B, H, -1))


@pytest.mark.parametrize("offset", [J - I, 0, -10])
def test_the_lse_of_even_weights_is_the_log_of_how_many_keys_are_seen(offset):
    seen = (torch.arange(I).double() + offset + 1).clamp(min=0)
    A = even(offset)
    close(A.lse, seen.log().expand(B, H, -1))
    close(A.summary().statistic, seen.log().expand(B, H, -1))


def test_topk_comes_in_falling_order_with_the_numbers_of_its_keys():
    found = rising(40, Causal()).topk(3)
    assert (found.values.diff(dim=-1) < 0)[0, 0, 2:].all()
    assert torch.equal(found.indices[0, 0, 2:], torch.arange(2, 40)[:, None] - torch.arange(3))


def test_topk_names_every_key_once_where_a_row_sees_fewer():
    found = rising(40, Window(3)).topk(40)
    assert torch.equal(found.indices.sort(-1).values, torch.arange(40).expand(1, 1, 40, 40))
    assert torch.equal(found.indices[0, 0, 2:-2, 0], torch.arange(4, 40))
    assert (found.values[..., 5:] == 0).all()


def test_row_r_is_pooled_into_bin_r_times_rows_over_i():
    members = torch.tensor([3.0, 2.0, 2.0]).double()  # 0 1 2 | 3 4 | 5 6
    A = diagonal(7)
    close(A.pool(3, 3, how="sum"), members.diag().expand(B, H, 3, 3))
    close(A.pool(3, 3), (1 / members).diag().expand(B, H, 3, 3))
    close(A.pool(3, 3, how="max"), torch.eye(3).double().expand(B, H, 3, 3))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_row_that_is_no_number_makes_none_of_its_own_bins_alone(rows):
    q, k = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 6, 4)
    q[:, :, 2] = torch.nan
    A = weights(q, k)
    ids = torch.arange(8) * rows // 8
    lost = [row == ids[2] for row in range(rows)]
    assert A.pool(rows, 2).isnan().all(-1).flatten().tolist() == lost
    assert A.pool(rows, 2).isnan().any(-1).flatten().tolist() == lost
    assert A.mass(ids, torch.arange(6) % 2).isnan().any(-1).flatten().tolist()[:rows] == lost


def test_a_pooled_map_holds_the_mass_of_every_block():
    close(even(0).pool(1, 1, how="sum"), torch.full((B, H, 1, 1), float(I)).double())
    close(even(0).summary().map.sum((-1, -2)), torch.full((B, H), float(I)).double())


def test_mass_is_a_sum_over_keys_and_a_mean_over_queries():
    groups = torch.arange(37) * 5 // 37
    close(diagonal(37).mass(groups, groups), torch.eye(5).double().expand(B, H, 5, 5))
    each = torch.stack([groups, 4 - groups])
    expected = torch.stack([torch.eye(5), torch.eye(5).flip(0)]).double()
    close(diagonal(37).mass(each, groups), expected[:, None].expand(B, H, 5, 5))
