"""Comparisons of two runs: the metrics of their evaluations, and the examples where they differ most."""

import time
from types import SimpleNamespace

import pytest

from regard.data import Pair
from regard.lens import Links, alignment_score
from regard.tasks.paired_bootstrap import MetricStatistics
from regard.tasks.run_comparison import TestOutputs, alignment_statistics, compare_outputs, translation_outputs
from regard.tasks.translation import Translator
from tests.tasks.tiny_translators import PAIRS


def outputs(each, texts=None):
    n = len(each)
    return TestOutputs(
        inputs=[f"input {k}" for k in range(n)],
        references=["reference"] * n,
        outputs=texts or [f"{value}" for value in each],
        metrics={"mean": MetricStatistics.mean(each)},
        each=each,
        each_name="score",
        seconds=1.0,
        parameters=3,
    )


def test_examples_are_those_of_the_largest_difference_on_both_sides():
    a = outputs([5.0, 1.0, 0.0, 9.0, 2.0, 2.0])
    b = outputs([5.0, 4.0, 9.0, 1.0, 1.0, 2.0])
    found = compare_outputs(("a", "b"), a, b, examples=3, samples=100)
    assert [(one.number, one.gain) for one in found.examples] == [(2, 9.0), (1, 3.0), (3, -8.0)]
    assert found.examples[0].outputs == ("0.0", "9.0")
    assert (found.same, found.count) == (2, 6)
    assert found.metrics["mean"].difference == pytest.approx(0.5)


def test_one_side_takes_the_places_that_the_other_cannot_fill():
    a, b = outputs([0.0, 1.0, 2.0, 3.0]), outputs([3.0, 3.0, 3.0, 3.0])
    assert len(compare_outputs(("a", "b"), a, b, examples=3, samples=100).examples) == 3
    assert len(compare_outputs(("b", "a"), b, a, examples=3, samples=100).examples) == 3
    assert compare_outputs(("a", "a"), a, a, examples=3, samples=100).examples == []


def test_other_test_data_is_refused():
    with pytest.raises(ValueError, match="outputs for the same examples; give the same test data"):
        compare_outputs(("a", "b"), outputs([1.0]), outputs([1.0, 2.0]), samples=100)


def test_metrics_of_a_translator_are_those_of_its_evaluation(translator_folder):
    translator = Translator.load(translator_folder, device="cpu")
    pairs = PAIRS[:8]
    found = translation_outputs(translator, pairs, [[pair.target] for pair in pairs], beam=2)
    measured = translator.evaluate(pairs, beam=2)
    for name in ("bleu", "chrf"):
        assert found.metrics[name].value == pytest.approx(measured[name].value, abs=1e-9)
    characters = sum(len(pair.target) for pair in pairs)
    assert found.metrics["loss per character"].value == pytest.approx(-sum(translator.score(pairs)) / characters)
    assert found.parameters == sum(x.numel() for x in translator.models[0].parameters())
    assert [found.outputs[0]] == [one.text for one in translator.translate([pairs[0].source], beam=2)]


def test_alignment_statistics_give_the_alignment_error_rate():
    links = [Links.parse("0-0 1-1 2-2"), Links.parse("0-1"), Links()]
    gold = [Links.parse("0-0 1p1"), Links.parse("0-0 1-1"), Links.parse("0p0")]
    assert alignment_statistics(links, gold).value == pytest.approx(alignment_score(links, gold).error)


def test_seconds_are_those_of_the_test_data_after_a_first_example():
    calls = []

    class Slow:
        models = ()

        def write(self, lines, *, show=None):
            calls.append((list(lines), show))
            time.sleep(0.2 if len(calls) == 1 else 0.0)
            return [SimpleNamespace(text=line) for line in lines]

        def score(self, pairs):
            return [0.0] * len(pairs)

    pairs = [Pair(f"s{n}", "t") for n in range(3)]
    found = translation_outputs(Slow(), pairs, [["t"]] * 3, show=print)
    assert calls == [(["s0"], None), (["s0", "s1", "s2"], print)]
    assert found.seconds < 0.1
