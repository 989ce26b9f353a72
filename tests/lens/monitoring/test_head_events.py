"""Each rule fires at a known step of a made-up history, and not just below its threshold."""

import math
from functools import partial

import pytest
import torch

from regard.lens import HeadHistory, collapsed_entropy, dead_head, equal_heads, rising_logit, sink_head
from regard.lens.monitoring.head_events import RULES


def history(measure, *rows, layer="layers.0"):
    """A history in which head 0 has these numbers at steps 1, 11, 21, ..., and head 1 another number at each step."""
    found = HeadHistory((measure,))
    for n, value in enumerate(rows):
        found.add(1 + 10 * n, {layer: {measure: torch.tensor([value, 7.0 + n % 2])}})
    return found


CASES = [
    # rule, its measure, numbers that fire it, the step, the value, numbers just below
    (rising_logit, "logit", (20, 40, 50.1), 21, 50.1, (20, 40, 50.0)),
    (rising_logit, "logit", (60, 55, 56, 57), 31, 57, (60, 55, 56, 55)),
    (partial(rising_logit, bound=8.5, rises=1), "logit", (4, 8.6), 11, 8.6, (4, 8.5)),
    (collapsed_entropy, "entropy", (0.5, 0.2, 0.049), 21, 0.049, (0.5, 0.2, 0.05)),
    (collapsed_entropy, "entropy", (0.5, 0.01), 11, 0.01, (0.49, 0.01)),
    (sink_head, "sink", (0.5, 0.7, 0.91), 21, 0.91, (0.5, 0.7, 0.9)),
    (sink_head, "sink", (0.4, 0.95), 11, 0.95, (0.51, 0.95)),
    (dead_head, "logit", (3.0, 0.5, -0.009), 21, -0.009, (3.0, 0.5, -0.01)),
    (dead_head, "logit", (0.1, 0.009), 11, 0.009, (0.09, 0.009)),
]


@pytest.mark.parametrize(("rule", "measure", "fires", "step", "value", "below"), CASES)
def test_a_rule_fires_at_its_step_and_not_below_its_threshold(rule, measure, fires, step, value, below):
    (event,) = rule(history(measure, *fires))
    assert (event.step, event.layer, event.head) == (step, "layers.0", 0)
    assert event.value == pytest.approx(value)
    assert rule(history(measure, *below)) == []
    assert rule(history("max", *fires)) == []
    assert str(event).startswith(f"step {step} · {event.kind} · layers.0, head 0: ")


def test_heads_that_became_one_are_an_event_of_their_layer():
    found = HeadHistory(("logit", "entropy"))
    for step, gap in ((1, 0.1), (2, 0.0011), (3, 0.0009)):
        numbers = torch.tensor([2.0, 2.0 * (1 - gap)])
        found.add(step, {"a": {"logit": numbers, "entropy": torch.tensor([1.0, 1.0])}, "b": {"logit": numbers[:1]}})
    (event,) = equal_heads(found)
    assert (event.step, event.layer, event.head) == (3, "a", None)
    assert event.text.startswith("its 2 heads differ by 0.0009")
    assert [event.step for event in equal_heads(found, within=0.002)] == [2]


def test_an_event_comes_again_only_after_the_head_has_recovered():
    rows = (1, 60, 70, 80, 70, 80, 90, 10, 60, 70)
    assert [event.step for event in rising_logit(history("logit", *rows))] == [21, 91]
    rows = (1.0, 0.04, 0.06, 0.04, 0.1, 0.04)
    assert [event.step for event in collapsed_entropy(history("entropy", *rows))] == [11, 51]
    for rule in RULES:  # what is found up to a step does not depend on later ones
        whole = history("logit", *rows)
        assert [rule(whole.upto(step)) for step in whole.steps][-1] == rule(whole)


def test_steps_without_numbers_fire_nothing():
    assert all(rule(history("logit", math.nan, math.nan)) == [] for rule in RULES)
    assert all(rule(HeadHistory(("logit", "entropy", "sink"))) == [] for rule in RULES)
