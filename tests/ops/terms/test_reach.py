"""Bounds for caches that forget: how far back a mask shows keys, and which terms read absolute key positions."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard.ops.terms.biases import Bias
from regard.ops.terms.normalizers import Normalizer
from regard.ops.terms.reach import depends_on_distance_only, look_back, reads_key_positions
from regard.ops.terms.scores import Score
from regard.ops.terms.term import term

CENTRED = R.Gaussian(torch.tensor(9.0), 2.0)
BOUNDED = [
    (R.Window(5), 4),
    (R.Window(1), 0),
    (R.Window((7, 1, 3)), 6),
    (R.Window(before=torch.tensor([4, 2]), after=0), 4),
    (R.Window(before=3, after=2), 3),
    (R.Window(before=0, after=7), 0),
    (R.Dilated(3, 4), 8),
    (R.Diagonal(), 0),
    (R.Causal() & R.Window(5), 4),
    (R.Window(3) & R.Dilated(4, 2), 2),
    (R.Window(3) | R.Dilated(4, 2), 6),
    (R.Causal() & (R.Diagonal() | R.Window(7)), 6),
    (R.Window(4) & ~R.Diagonal(), 3),
]
UNBOUNDED = [
    R.Causal(),
    ~R.Window(3),
    R.Causal() & ~R.Diagonal(),
    R.Causal() | R.Window(3),
    R.Window(3) | ~R.Dilated(2, 2),
]
OF_MORE_THAN_DISTANCE = [
    R.Causal() & R.Chunked(4),
    R.Prefix(3),
    R.Global(2),
    R.Padding((4,)),
    R.Near(torch.zeros(9), 2),
    R.Documents(torch.zeros(9, dtype=torch.long)),
    R.Blocks(torch.ones(3, 3, dtype=torch.bool), 3),
    R.Dense(torch.ones(9, 9, dtype=torch.bool)),
    R.Rule(lambda b, h, i, j: i - j < 3),
]


def farthest_back(mask, n=40):
    """The largest i - j of a visible entry, over n queries and n keys."""
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    zero = torch.zeros_like(i)
    return int((i - j)[mask(zero, zero, i, j)].max())


@pytest.mark.parametrize(("mask", "keys"), BOUNDED, ids=[repr(mask) for mask, _ in BOUNDED])
def test_a_bound_is_the_farthest_key_that_a_query_sees(mask, keys):
    assert look_back(mask) == keys == farthest_back(mask)


@pytest.mark.parametrize("mask", UNBOUNDED, ids=repr)
def test_a_mask_that_shows_the_first_key_to_the_last_query_has_no_bound(mask):
    assert farthest_back(mask, 41) == 40
    assert look_back(mask) is None
    assert depends_on_distance_only(mask)


def test_no_mask_has_no_bound():
    assert look_back(None) is None


@pytest.mark.parametrize("mask", OF_MORE_THAN_DISTANCE, ids=repr)
def test_a_mask_of_more_than_the_distance_has_no_bound_even_within_a_window(mask):
    for whole in (mask, ~mask, R.Window(3) & mask, mask | R.Window(3), R.Causal() & ~(R.Window(3) & ~mask)):
        assert not depends_on_distance_only(whole)
        assert look_back(whole) is None


def change_without_first_keys(**terms):
    """How much the last queries' weights change if the keys before their window are dropped."""
    q, k = torch.randn(2, 1, 2, 20, 4, dtype=torch.float64)
    mask = R.Causal() & R.Window(5)
    whole = R.weights(q, k, mask=mask, **terms).dense()[:, :, 12:, 8:]
    kept = R.weights(q[:, :, 12:], k[:, :, 8:], mask=mask, **terms).dense()
    return (whole - kept).abs().max()


RELATIVE = [
    {"score": R.Dot(cap=2.0)},
    {"score": R.Additive(torch.ones(4).double())},
    {"bias": R.Alibi(2)},
    {"bias": R.Relative.t5(torch.randn(2, 8))},
    {"bias": R.Alibi(2) + R.Relative.shaw(torch.randn(7, 4).double())},
    {"normalize": R.Sparsemax()},
    {"normalize": R.Tapered(R.Softmax(), R.Alibi(2))},
]
ABSOLUTE = [
    {"score": R.Location(torch.randn(20, 4).double())},
    {"bias": CENTRED},
    {"bias": R.Alibi(2) + CENTRED},
    {"bias": CENTRED + R.Alibi(2)},
    {"normalize": R.Tapered(R.Softmax(), CENTRED)},
    {"normalize": R.Tapered(R.Softmax(), R.Alibi(2) + CENTRED)},
]


@pytest.mark.parametrize("terms", RELATIVE, ids=repr)
def test_weights_under_a_term_of_distances_are_the_same_without_the_first_keys(terms):
    assert not any(map(reads_key_positions, terms.values()))
    assert change_without_first_keys(**terms) < 1e-12


@pytest.mark.parametrize("terms", ABSOLUTE, ids=repr)
def test_weights_under_a_term_of_key_positions_change_without_the_first_keys(terms):
    assert all(map(reads_key_positions, terms.values()))
    assert change_without_first_keys(**terms) > 1e-3


def test_a_term_that_is_not_known_to_read_distances_counts_as_reading_positions():
    class Own(Bias):
        """A bias written by a user."""

    @term
    class Late(Normalizer):
        """Weights that grow along the keys."""

        def map(self, s, statistic, at):
            return torch.sigmoid(s) * (1 + at.j)

    class Shifted(Score):
        """A score written by a user."""

    assert reads_key_positions(Own())
    assert reads_key_positions(Late())
    assert change_without_first_keys(normalize=Late()) > 1e-3
    assert reads_key_positions(Shifted())
    assert reads_key_positions(R.Added(torch.zeros(9, 9)))
    assert not reads_key_positions(None)
