"""The paired bootstrap agrees with sacreBLEU's, with the normal distribution, and with itself under no difference."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from regard.tasks import metrics
from regard.tasks.paired_bootstrap import MetricStatistics, paired_bootstrap, sacrebleu_statistics

WORDS = [f"w{n}" for n in range(20)]


def corrupted(lines, share, generator):
    """The lines with a share of their words replaced."""
    return [
        " ".join(generator.choice(WORDS) if generator.random() < share else word for word in line.split())
        for line in lines
    ]


@pytest.fixture(scope="module")
def systems():
    generator = np.random.default_rng(1)
    lines = [" ".join(generator.choice(WORDS, size=12)) for _ in range(60)]
    return lines, corrupted(lines, 0.30, generator), corrupted(lines, 0.27, generator)


@pytest.mark.parametrize(("metric", "name"), [(BLEU, "bleu"), (CHRF, "chrf")])
def test_statistics_give_the_metric_and_the_p_value_of_sacrebleu(systems, metric, name, monkeypatch):
    lines, a, b = systems
    ours = [sacrebleu_statistics(metric(), written, [lines]) for written in (a, b)]
    assert [one.value for one in ours] == [
        pytest.approx(getattr(metrics, name)(written, lines).value, abs=1e-9) for written in (a, b)
    ]
    found = paired_bootstrap(*ours, samples=1000)
    theirs = PairedTest([("a", a), ("b", b)], {name.upper(): metric(references=[lines])}, None, n_samples=1000)()[1]
    [scores] = [results for key, results in theirs.items() if key != "System"]
    assert found.b == pytest.approx(scores[1].score)
    assert found.p == pytest.approx(scores[1].p_value, abs=0.06)
    assert 0.02 < found.p < 0.9  # neither is trivial


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    generator = np.random.default_rng(2)
    a = generator.normal(size=400)
    b = a + generator.normal(0.1, 0.5, size=400)
    found = paired_bootstrap(MetricStatistics.mean(a), MetricStatistics.mean(b), samples=4000)
    width = 1.96 * (b - a).std() / 20
    assert found.difference == pytest.approx((b - a).mean())
    assert found.low == pytest.approx(found.difference - width, abs=0.15 * width)
    assert found.high == pytest.approx(found.difference + width, abs=0.15 * width)


def test_p_is_rarely_small_without_a_difference_and_small_with_one():
    generator = np.random.default_rng(3)
    small = 0
    for _ in range(100):
        a, b = generator.normal(size=(2, 50))
        small += paired_bootstrap(MetricStatistics.mean(a), MetricStatistics.mean(b), samples=200).p < 0.05
    assert small <= 13  # 5 are expected, and more than 12 come once in 700 times
    worse = MetricStatistics.mean(a - 1)
    assert paired_bootstrap(MetricStatistics.mean(a), worse, samples=999).p == 1 / 1000


def test_same_outputs_have_no_difference_and_a_p_of_one():
    one = MetricStatistics.ratio([1.0, 0.0, 2.0], [2.0, 1.0, 3.0], scale=100)
    assert one.value == 50
    found = paired_bootstrap(one, one, samples=100)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_other_examples_are_refused():
    with pytest.raises(ValueError, match="statistics of the same one or more examples, got 1 and 2"):
        paired_bootstrap(MetricStatistics.mean([1.0]), MetricStatistics.mean([1.0, 2.0]))
