"""Paired bootstrap: whether two systems differ on the same test examples by more than their choice explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import check_int

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MetricStatistics:
    """A metric as a function of the summed statistics of its examples, `rows` of shape (examples, statistics)."""

    rows: Numbers
    score: Callable[[Numbers], float]
    better: str = "higher"

    @property
    def value(self) -> float:
        """The metric over all examples."""
        return self.score(self.rows.sum(0))

    @classmethod
    def mean(cls, values: Sequence[float], *, scale: float = 1.0, better: str = "higher") -> MetricStatistics:
        """Return a metric that is the mean of a value for each example, times `scale`."""
        return cls.ratio(values, [1.0] * len(values), scale=scale, better=better)

    @classmethod
    def ratio(
        cls, over: Sequence[float], under: Sequence[float], *, scale: float = 1.0, better: str = "higher"
    ) -> MetricStatistics:
        """Return a metric that is the quotient of two sums, times `scale`; 0 if the second sum is 0."""
        rows = np.stack([np.asarray(over, np.float64), np.asarray(under, np.float64)], 1)
        return cls(rows, lambda sums: float(scale * sums[0] / sums[1]) if sums[1] else 0.0, better)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The metric of two systems, the interval of 95 % of their difference, b - a, and its p-value."""

    a: float
    b: float
    low: float
    high: float
    p: float
    samples: int

    @property
    def difference(self) -> float:
        """The metric of b, minus that of a."""
        return self.b - self.a


def paired_bootstrap(
    a: MetricStatistics, b: MetricStatistics, *, samples: int = 1000, seed: int = 0
) -> PairedDifference:
    """Compare a metric of two systems by resampling the test examples, the same ones for both (Koehn 2004).

    >>> one = MetricStatistics.mean([0.0, 1.0, 0.0, 1.0] * 50)
    >>> found = paired_bootstrap(one, MetricStatistics.mean([1.0, 1.0, 0.0, 1.0] * 50), samples=200)
    >>> found.a, found.b, 0 < found.low < found.difference < found.high, found.p < 0.01
    (0.5, 0.75, True, True)

    The interval is that of the middle 95 % of the resampled differences. p is the share of samples, shifted to a mean
    difference of 0, whose difference is at least as large as the one found (Riezler & Maxwell 2005): two-sided, with
    the sample found counted once, so that it is never 0.
    """
    check_int("samples", samples, least=1)
    if len(a.rows) != len(b.rows) or not len(a.rows):
        raise ValueError(
            f"both systems need statistics of the same one or more examples, got {len(a.rows)} and {len(b.rows)}"
        )
    generator, n = np.random.default_rng(seed), len(a.rows)
    found = np.empty(samples)
    for sample in range(samples):
        chosen = generator.integers(n, size=n)
        found[sample] = b.score(b.rows[chosen].sum(0)) - a.score(a.rows[chosen].sum(0))
    difference = b.value - a.value
    # Differences that are equal but for rounding count as equal.
    extreme = np.abs(found - found.mean()) >= abs(difference) - 1e-9 * max(1.0, abs(a.value))
    low, high = np.percentile(found, [2.5, 97.5])
    return PairedDifference(
        a=a.value,
        b=b.value,
        low=float(low),
        high=float(high),
        p=float((extreme.sum() + 1) / (samples + 1)),
        samples=samples,
    )


def sacrebleu_statistics(metric: Any, hypotheses: Sequence[str], streams: Any) -> MetricStatistics:
    """Return the statistics of a metric of sacreBLEU, BLEU or chrF, whose score is that of its `corpus_score`."""
    rows = metric._extract_corpus_statistics(list(hypotheses), streams)
    return MetricStatistics(
        np.asarray(rows, np.float64), lambda sums: float(metric._compute_score_from_stats(sums.tolist()).score)
    )
