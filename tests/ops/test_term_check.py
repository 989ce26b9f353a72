"""check_term passes the library's own terms and names the broken rule of wrong ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import regard as R
from regard import Bias, Mask, Normalizer, Score, check_term, term
from regard.ops.term_check import CHECKS
from regard.ops.terms.mask_tiles import Tiles

RIGHT = [
    R.Dot(),
    R.Dot(cap=5.0),
    R.Cosine(0.5),
    R.Additive(torch.randn(8)),
    R.Bilinear(torch.randn(8, 8)),
    R.Causal() & R.Window(3),
    ~R.Dilated(6, 2) | R.Global([1, 3]),
    R.Chunked(3),
    R.Padding([9, 4]),
    R.Alibi(4),
    R.Relative.shaw(torch.randn(5, 8)),
    R.Added(torch.randn(7, 11)),
    R.Softmax(),
    R.SinkSoftmax(torch.randn(4)),
    R.Sigmoid(-1.0),
    R.Entmax(1.5),
    R.Tapered(R.Softmax(), R.Gaussian(torch.rand(7), 2.0)),
]


@pytest.mark.parametrize("own", RIGHT, ids=repr)
def test_terms_of_the_library_pass(own):
    report = check_term(own)
    assert report, report
    assert len(report.passed) >= 8
    assert f"{len(report.passed)} checks passed" in str(report)


def test_a_term_without_a_slope_passes_if_told():
    assert "gradients" in found(R.Hard())
    assert check_term(R.Hard(), smooth=False)


def found(own, **options) -> list[str]:
    return [finding.name for finding in check_term(own, **options).findings]


def repeated(q: Tensor, k: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


@term
class RightDistance(Score):
    def tile(self, q, k):
        return -(q[..., :, None, :] - repeated(q, k)[..., None, :, :]).square().sum(-1)


@term
class UngroupedDistance(Score):
    def tile(self, q, k):
        return -torch.cdist(q, k).square()


@term
class ScaledByAllKeys(Score):
    """The mean over keys is that of the block."""

    def tile(self, q, k):
        return q @ repeated(q, k / k.square().mean((1, 2), keepdim=True)).mT


@term
class DetachedQuery(Score):
    def tile(self, q, k):
        return q.detach() @ repeated(q, k).mT


@term
class ScaledInPlace(Score):
    def prepare(self, q, k, heads):
        return q.mul_(0.5), k


@term
class NormAtZero(Score):
    def tile(self, q, k):
        return -(q[..., :, None, :] - repeated(q, k)[..., None, :, :]).square().sum(-1).sqrt()


@term
class WrongGroupOrder(Score):
    def tile(self, q, k):
        return q @ k.repeat(1, q.shape[1] // k.shape[1], 1, 1).mT


@term
class RoundedScore(Score):
    def tile(self, q, k):
        return (q @ repeated(q, k).mT).bfloat16().to(q.dtype)


@term
class RowWindow(Mask):
    """Counts rows of the call rather than positions."""

    def over(self, at):
        return at.j <= at.row + 2


@term
class FloatMask(Mask):
    def over(self, at):
        return (at.j <= at.i).float()


@term
class TooFull(Mask):
    """The rule of chunks, with a tile called full by its first row."""

    def over(self, at):
        return at.j <= at.i

    def tiles(self, grid):
        return Tiles(grid.j.low <= grid.i.high, grid.j.low <= grid.i.low)


@term
class TooEmpty(Mask):
    def over(self, at):
        return at.j <= at.i

    def tiles(self, grid):
        return Tiles(grid.j.high <= grid.i.low, grid.j.high <= grid.i.low)


@term
class RowDistance(Bias):
    def over(self, at):
        return -(at.row - at.j).abs().to(at.dtype)


@term
class DetachedTable(Bias):
    table: Tensor

    def over(self, at):
        return at.slice_of(self.table.detach(), "h").to(at.dtype) * (at.i - at.j).abs()


@term
class UnslicedTable(Bias):
    """The table has the heads of the whole call, and a block may have fewer."""

    table: Tensor

    def over(self, at):
        return self.table[:, None, None] * (at.i - at.j).abs()


@term
class PlainSoftmax(Normalizer):
    """A row that sees nothing is -inf - -inf."""

    def statistic(self, s, at):
        return s.logsumexp(-1, keepdim=True)

    def map(self, s, statistic, at):
        return (s - statistic).exp()


@term
class LocalSoftmax(Normalizer):
    """Normalizes whatever part of the row it is given."""

    def map(self, s, statistic, at):
        return s.masked_fill(s == -torch.inf, -1e4).softmax(-1) * (s > -torch.inf)


@term
class HiddenShare(Normalizer):
    def map(self, s, statistic, at):
        return torch.sigmoid(s.clamp(min=-2))


@term
class Overflowing(Normalizer):
    def statistic(self, s, at):
        return s.exp().sum(-1, keepdim=True)

    def map(self, s, statistic, at):
        return s.exp() / torch.where(statistic == 0, 1.0, statistic)


class NoTerm(Score):
    """Without `@term`: a setting is no field."""

    def __init__(self, power: float) -> None:
        object.__setattr__(self, "power", power)

    def tile(self, q, k):
        return (q @ repeated(q, k).mT) * self.power


WRONG = [
    (UngroupedDistance(), "grouped-heads"),
    (ScaledByAllKeys(), "hidden-keys"),
    (DetachedQuery(), "gradients"),
    (ScaledInPlace(), "runs"),
    (NormAtZero(), "equal-vectors"),
    (WrongGroupOrder(), "grouped-heads"),
    (RoundedScore(), "gradients"),
    (RowWindow(), "one-query"),
    (FloatMask(), "runs"),
    (TooFull(), "tiles"),
    (TooEmpty(), "tiles"),
    (RowDistance(), "one-query"),
    (DetachedTable(torch.randn(4)), "gradients"),
    (UnslicedTable(torch.randn(4)), "parts"),
    (PlainSoftmax(), "empty-rows"),
    (LocalSoftmax(), "parts"),
    (HiddenShare(), "hidden-keys"),
    (Overflowing(), "precision"),
    (NoTerm(2.0), "value"),
]


@pytest.mark.parametrize(("own", "name"), WRONG, ids=lambda x: type(x).__name__ if not isinstance(x, str) else x)
def test_a_wrong_term_is_named(own, name):
    report = check_term(own)
    assert not report
    assert name in [finding.name for finding in report.findings], report
    assert "likely cause" in str(report)


def test_the_right_one_among_them_passes():
    assert check_term(RightDistance(), expected=lambda q, k: -torch.cdist(q, k).square())


WRONG_VALUES = [
    (R.Dot(), lambda q, k: q @ k.mT),
    (R.Causal(), lambda b, h, i, j: i <= j),
    (R.Alibi(4), lambda b, h, i, j: (i - j).abs() * -0.5),
    (R.Softmax(), lambda s: s.sigmoid()),
]
RIGHT_VALUES = [
    (R.Dot(), lambda q, k: q @ k.mT / 8**0.5),
    (R.Causal(), lambda b, h, i, j: j <= i),
    (R.Alibi(4), lambda b, h, i, j: (i - j).abs() * -(0.25 ** (h + 1.0))),
    (R.Softmax(), lambda s: s.softmax(-1)),
]


@pytest.mark.parametrize(("own", "expected"), WRONG_VALUES, ids=lambda x: type(x).__name__)
def test_other_values_than_those_of_the_definition_are_found(own, expected):
    assert found(own, expected=expected) == ["expected"]


@pytest.mark.parametrize(("own", "expected"), RIGHT_VALUES, ids=lambda x: type(x).__name__)
def test_the_values_of_the_definition_pass(own, expected):
    report = check_term(own, expected=expected)
    assert report, report
    assert "expected" in report.passed


def test_every_check_has_a_wrong_term_that_it_finds():
    assert {name for _, name in WRONG} | {"expected"} == set(CHECKS)


def test_inputs_of_other_sizes():
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 9, 6)
    assert check_term(R.Bilinear(torch.randn(2, 3, 6)), q=q, k=k)
    assert "runs" in found(R.Bilinear(torch.randn(2, 3, 6)))
    with pytest.raises(ValueError, match="equal heads"):
        check_term(R.Dot(), q=q, k=k[:, :1])
    with pytest.raises(TypeError, match="takes a Score, Mask, Bias or Normalizer, got int"):
        check_term(3)


def test_a_report_is_a_value():
    report = check_term(R.Causal())
    assert dataclasses.is_dataclass(report)
    assert report.term == "Causal()"
