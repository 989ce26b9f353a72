"""Rules that find events in the history of heads: a logit that grows, a collapse, a new sink, a dead head, equal heads.

A rule is a function from a `HeadHistory` to `HeadEvent`s. An event belongs to the step at which its condition becomes
true, from the steps up to there alone; it comes again only after the head has recovered. Thresholds are
arguments: pass `Monitor(model, rules=[partial(rising_logit, bound=30.0), sink_head])` for others. A rule whose measure
is not watched finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .head_history import HeadEvent, HeadHistory

Rule = Callable[[HeadHistory], list[HeadEvent]]


def rising_logit(history: HeadHistory, *, bound: float = 50.0, rises: int = 2) -> list[HeadEvent]:
    """Find heads whose largest logit is above `bound` and has risen at each of the last `rises` watched steps.

    A head has recovered when its logit is at most `bound`.

    Large logits make the softmax one-hot and its gradient zero; where they go on growing, training diverges (Dehghani
    et al. 2023, section 2; Wortsman et al. 2023).
    """
    found = []
    for layer, logit in _layers(history, "logit"):
        rising = torch.ones_like(logit, dtype=torch.bool)
        for back in range(rises):
            rising[: back + 1] = False
            rising[back + 1 :] &= (logit.diff(dim=0) > 0)[: len(logit) - back - 1]
        for n, head in _begins((logit > bound) & rising, logit <= bound):
            value = logit[n, head].item()
            text = f"largest logit {value:.4g}, above {bound:g} and rising"
            found.append(HeadEvent(history.steps[n], "logit", layer, head, value, text))
    return found


def collapsed_entropy(history: HeadHistory, *, below: float = 0.05, drop: float = 10.0) -> list[HeadEvent]:
    """Find heads whose mean entropy fell below `below` nats and was at least `drop` times higher at an earlier step.

    Queries of such a head attend to one key each (entropy collapse, Zhai et al. 2023). It has recovered at twice
    `below`.
    """
    found = []
    for layer, entropy in _layers(history, "entropy"):
        before = _largest_so_far(entropy)
        for n, head in _begins((entropy < below) & (before >= drop * below), entropy >= 2 * below):
            value = entropy[n, head].item()
            text = f"entropy {value:.3g} nats, after {before[n, head].item():.3g} before"
            found.append(HeadEvent(history.steps[n], "collapse", layer, head, value, text))
    return found


def sink_head(history: HeadHistory, *, above: float = 0.9, before: float = 0.5) -> list[HeadEvent]:
    """Find heads that became sinks: sinks receive more than `above` of the attention, after `before` or less.

    A sink is a key that receives more than 0.3 of the mean query's attention, as in `regard.lens.sinks`. A head has
    recovered at `before` or less.
    """
    found = []
    for layer, share in _layers(history, "sink"):
        least = -_largest_so_far(-share)
        for n, head in _begins((share > above) & (least <= before), share <= before):
            value = share[n, head].item()
            text = f"{value:.0%} of its attention goes to sinks, after {least[n, head].item():.0%} before"
            found.append(HeadEvent(history.steps[n], "sink", layer, head, value, text))
    return found


def dead_head(history: HeadHistory, *, below: float = 0.01, drop: float = 10.0) -> list[HeadEvent]:
    """Find heads that died: their largest logit came within `below` of 0, from `drop` times as far or more before.

    The scores of such a head are all equal, so every query spreads evenly over the keys it sees. It has recovered when
    its logit is as far from 0 again.
    """
    found = []
    for layer, logit in _layers(history, "logit"):
        before = _largest_so_far(logit.abs())
        for n, head in _begins((logit.abs() < below) & (before >= drop * below), logit.abs() >= drop * below):
            value = logit[n, head].item()
            text = f"largest logit {value:.3g}, after {before[n, head].item():.3g} before: it attends evenly"
            found.append(HeadEvent(history.steps[n], "dead", layer, head, value, text))
    return found


def equal_heads(history: HeadHistory, *, within: float = 0.001) -> list[HeadEvent]:
    """Find layers whose heads became one: they differ in no watched measure by more than `within`, relatively.

    `value` is the largest relative difference; above twice `within` the layer has recovered. The rule compares the
    numbers of the heads, not their matrices: on a text `regard.lens.similarity` does that.
    """
    found = []
    for layer in history.layers:
        measures = [history[name][layer] for name in history.measures]
        if not measures or measures[0].shape[1] < 2:
            continue
        spreads = torch.stack([_relative_spread(x) for x in measures]).amax(0)[:, None]
        for n, _ in _begins(spreads <= within, spreads > 2 * within):
            value = spreads[n, 0].item()
            text = f"its {measures[0].shape[1]} heads differ by {value:.2g} at most in {', '.join(history.measures)}"
            found.append(HeadEvent(history.steps[n], "equal heads", layer, None, value, text))
    return found


RULES: tuple[Rule, ...] = (rising_logit, collapsed_entropy, sink_head, dead_head, equal_heads)


def _layers(history: HeadHistory, measure: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each layer and its measure, `steps heads`; nothing if the measure was not watched."""
    if measure in history.measures:
        yield from history[measure].items()


def _begins(holds: Tensor, recovers: Tensor) -> list[tuple[int, int]]:
    """Return the step indices and heads at which a condition becomes true, in order of steps.

    Both tensors are `steps heads`. A head counts again once it has recovered.
    """
    waits = _last_before(holds & ~recovers) > _last_before(recovers)
    return [(n, head) for n, head in (holds & ~waits).nonzero().tolist()]


def _last_before(x: Tensor) -> Tensor:
    """Return for each step and head the last earlier step index at which x is True, -1 for none."""
    if not len(x):
        return x.long()
    index = torch.where(x, torch.arange(len(x))[:, None], -1).cummax(0).values
    return torch.cat([torch.full_like(index[:1], -1), index[:-1]])


def _largest_so_far(x: Tensor) -> Tensor:
    """Return the largest of `steps heads` up to each step; NaN counts as -inf."""
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf).cummax(0).values if len(x) else x


def _relative_spread(x: Tensor) -> Tensor:
    """Return how far the heads of each step are apart, relative to the largest of them in size."""
    return (x.amax(1) - x.amin(1)) / x.abs().amax(1).clamp(min=torch.finfo(x.dtype).tiny)
