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
    for place, logit in _all_heads(history, "logit"):
        rising = torch.ones_like(logit, dtype=torch.bool)
        for back in range(rises):
            rising[: back + 1] = False
            rising[back + 1 :] &= (logit.diff(dim=0) > 0)[: len(logit) - back - 1]
        for n, at in _begins((logit > bound) & rising, logit <= bound):
            value = logit[n, at].item()
            text = f"largest logit {value:.4g}, above {bound:g} and rising"
            found.append(HeadEvent(history.steps[n], "logit", *place[at], value, text))
    return found


def collapsed_entropy(history: HeadHistory, *, below: float = 0.05, drop: float = 10.0) -> list[HeadEvent]:
    """Find heads whose mean entropy fell below `below` nats and was at least `drop` times higher at an earlier step.

    Queries of such a head attend to one key each (entropy collapse, Zhai et al. 2023). It has recovered at twice
    `below`.
    """
    found = []
    for place, entropy in _all_heads(history, "entropy"):
        before = _largest_so_far(entropy)
        for n, at in _begins((entropy < below) & (before >= drop * below), entropy >= 2 * below):
            value = entropy[n, at].item()
            text = f"entropy {value:.3g} nats, after {before[n, at].item():.3g} before"
            found.append(HeadEvent(history.steps[n], "collapse", *place[at], value, text))
    return found


def sink_head(history: HeadHistory, *, above: float = 0.9, before: float = 0.5) -> list[HeadEvent]:
    """Find heads that became sinks: sinks receive more than `above` of the attention, after `before` or less.

    A sink is a key that receives more than 0.3 of the mean query's attention, as in `regard.lens.sinks`. A head has
    recovered at `before` or less.
    """
    found = []
    for place, share in _all_heads(history, "sink"):
        least = -_largest_so_far(-share)
        for n, at in _begins((share > above) & (least <= before), share <= before):
            value = share[n, at].item()
            text = f"{value:.0%} of its attention goes to sinks, after {least[n, at].item():.0%} before"
            found.append(HeadEvent(history.steps[n], "sink", *place[at], value, text))
    return found


def dead_head(history: HeadHistory, *, below: float = 0.01, drop: float = 10.0) -> list[HeadEvent]:
    """Find heads that died: their largest logit came within `below` of 0, from `drop` times as far or more before.

    The scores of such a head are all equal, so every query spreads evenly over the keys it sees. It has recovered when
    its logit is as far from 0 again.
    """
    found = []
    for place, logit in _all_heads(history, "logit"):
        size = logit.abs()
        before = _largest_so_far(size)
        for n, at in _begins((size < below) & (before >= drop * below), size >= drop * below):
            value = logit[n, at].item()
            text = f"largest logit {value:.3g}, after {before[n, at].item():.3g} before: it attends evenly"
            found.append(HeadEvent(history.steps[n], "dead", *place[at], value, text))
    return found


def equal_heads(history: HeadHistory, *, within: float = 0.001) -> list[HeadEvent]:
    """Find layers whose heads became one: they differ in no watched measure by more than `within`, relatively.

    `value` is the largest relative difference; above twice `within` the layer has recovered. The rule compares the
    numbers of the heads, not their matrices: on a text `regard.lens.similarity` does that.
    """
    found = []
    names = ", ".join(history.measures)
    for heads in sorted({history.heads(layer) for layer in history.layers} - {1}):
        layers = [layer for layer in history.layers if history.heads(layer) == heads]
        numbers = torch.stack([history.numbers(layer) for layer in layers], 1)  # steps layers measures heads
        spreads = _relative_spread(numbers).amax(2)
        for n, at in _begins(spreads <= within, spreads > 2 * within):
            value = spreads[n, at].item()
            text = f"its {heads} heads differ by {value:.2g} at most in {names}"
            found.append(HeadEvent(history.steps[n], "equal heads", layers[at], None, value, text))
    return found


RULES: tuple[Rule, ...] = (rising_logit, collapsed_entropy, sink_head, dead_head, equal_heads)


def _all_heads(history: HeadHistory, measure: str) -> Iterator[tuple[list[tuple[str, int]], Tensor]]:
    """Yield the layer and head of each column, and the measure, `steps columns`; nothing if it was not watched."""
    if measure in history.measures and history.layers:
        place = [(layer, head) for layer in history.layers for head in range(history.heads(layer))]
        yield place, history.all_heads(measure)


def _begins(holds: Tensor, recovers: Tensor) -> list[tuple[int, int]]:
    """Return the step indices and columns at which a condition becomes true, in order of steps.

    Both tensors are `steps columns`. A column counts again once it has recovered.
    """
    if not holds.any():
        return []
    waits = _last_before(holds & ~recovers) > _last_before(recovers)
    return [(n, at) for n, at in (holds & ~waits).nonzero().tolist()]


def _last_before(x: Tensor) -> Tensor:
    """Return for each step and column the last earlier step index at which x is True, -1 for none."""
    if not len(x):
        return x.long()
    index = torch.where(x, torch.arange(len(x))[:, None], -1).cummax(0).values
    return torch.cat([torch.full_like(index[:1], -1), index[:-1]])


def _largest_so_far(x: Tensor) -> Tensor:
    """Return the largest of `steps columns` up to each step; NaN counts as -inf."""
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf).cummax(0).values if len(x) else x


def _relative_spread(x: Tensor) -> Tensor:
    """Return how far the heads, the last dim, are apart, relative to the largest of them in size."""
    return (x.amax(-1) - x.amin(-1)) / x.abs().amax(-1).clamp(min=torch.finfo(x.dtype).tiny)
