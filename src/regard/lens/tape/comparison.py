"""Compare two tapes head by head: how far apart the weights of tokens are that both texts have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...ops.blocks.divergences import KINDS, Kind, log_weights, row_divergence
from ...ops.weights import Weights
from ..layer_names import shown_calls, shown_name
from ..real_tokens import RealTokens
from ..recording.recorder import Key
from .edit_script import align_tokens
from .overview import as_table

CHUNK_ENTRIES = 2**21  # matrix elements in memory at a time
Text = Sequence[str] | None
By = Kind | Literal["difference"]  # the mean absolute difference, or a divergence


@dataclass(frozen=True, eq=False)
class ComparedLayer:
    """A layer of one of two tapes: its weights, real tokens, and the tokens of each batch row's queries and keys."""

    A: Weights
    real: RealTokens
    texts: Sequence[tuple[Text, Text]]


@dataclass(frozen=True, eq=False)
class AlignedAxis:
    """The aligned positions of queries or of keys in both tapes, and a label for each pair."""

    ours: Tensor
    theirs: Tensor
    labels: Sequence[str] | None


def compare(pairs: Iterable[tuple[Key, ComparedLayer, ComparedLayer]], by: By = "difference") -> Any:
    """Return a table with a row for each layer, call, batch row and head, those first that differ most."""
    return as_table(by_difference((row for rows in compare_layers(pairs, [by]) for row in rows), by))


def compare_layers(
    pairs: Iterable[tuple[Key, ComparedLayer, ComparedLayer]], measures: Sequence[By]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each layer: one for each batch row and head, with these differences."""
    known: dict[Any, tuple[Tensor, Tensor]] = {}
    for (name, call), ours, theirs in pairs:
        rows: list[dict[str, Any]] = []
        for batch in range(len(ours.real.queries)):
            axes = align_axes(ours, theirs, batch, (name, call), known)
            A, B = (layer.A.select(batch=batch) for layer in (ours, theirs))
            found = {"layer": shown_name(name), "call": call, "batch": batch}
            rows += [found | numbers for numbers in _differences(A, B, *axes, measures)]
        yield rows


def by_difference(rows: Iterable[dict[str, Any]], by: By = "difference") -> list[dict[str, Any]]:
    """Sort rows by how much they differ, the largest first, of the overlap "dot" the smallest, and NaN last."""
    sign = -1 if by == "dot" else 1
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row[by]) else sign * row[by], reverse=True)


def check_by(by: object) -> None:
    """Raise unless this names a difference of two tapes."""
    if by not in ("difference", *KINDS):
        raise ValueError(f"by must be 'difference', 'kl', 'js', 'mse' or 'dot', got {by!r}")


def align_axes(
    ours: ComparedLayer, theirs: ComparedLayer, batch: int, key: Key, known: dict[Any, tuple[Tensor, Tensor]]
) -> tuple[AlignedAxis, AlignedAxis]:
    """Return the aligned queries and keys of a batch row; `known` holds the alignments so far."""
    queries, keys = (_align_axis(ours, theirs, batch, axis, key, known) for axis in (0, 1))
    return queries, keys


def check_comparable(ours: Collection[Key], theirs: Collection[Key], shapes: Callable[[Key], tuple[Any, Any]]) -> None:
    """Raise unless two tapes have the same layers, calls, batch rows and heads."""
    for one, other, which in ((ours, theirs, "this tape"), (theirs, ours, "the other")):
        if alone := [name for key, name in zip(one, shown_calls(one), strict=True) if key not in other]:
            raise ValueError(
                f"tapes must have the same layers to compare them, got {'; '.join(alone)} on {which} alone; compare "
                "parts with tape.select(pattern)"
            )
    for key in ours:
        (*lead, h, _, _), (*lead2, h2, _, _) = shapes(key)
        if (math.prod(lead), h) != (math.prod(lead2), h2):
            raise ValueError(
                f"{shown_name(key[0])} has {math.prod(lead)} batch rows and {h} heads on this tape, and "
                f"{math.prod(lead2)} and {h2} on the other; compare captures of one model, a text with a text"
            )


def _align_axis(
    ours: ComparedLayer, theirs: ComparedLayer, batch: int, axis: int, key: Key, known: dict[Any, tuple[Tensor, Tensor]]
) -> AlignedAxis:
    """Return the aligned queries (axis 0) or keys (axis 1) of a batch row; `known` are the alignments so far."""
    real = [layer.real.queries if axis == 0 else layer.real.keys for layer in (ours, theirs)]
    positions = [x[batch].cpu().nonzero().squeeze(1) for x in real]
    given = [layer.texts[batch][axis] for layer in (ours, theirs)]
    if any(text is None for text in given):
        if len(positions[0]) != len(positions[1]):
            raise ValueError(
                f"{shown_name(key[0])} has {len(positions[0])} {'queries' if axis == 0 else 'keys'} on this tape and "
                f"{len(positions[1])} on the other; set tape.tokens of both, which align them"
            )
        return AlignedAxis(positions[0], positions[1], None)
    texts = [[text[n] for n in at.tolist()] for text, at in zip(given, positions, strict=True) if text is not None]
    pair = tuple(map(tuple, texts))
    if pair not in known:
        known[pair] = align_tokens(*texts)
    chosen = known[pair]
    tokens = zip(*([text[n] for n in at.tolist()] for text, at in zip(texts, chosen, strict=True)), strict=True)
    labels = [x if x == y else f"{x} / {y}" for x, y in tokens]
    return AlignedAxis(positions[0][chosen[0]], positions[1][chosen[1]], labels)


def _differences(
    A: Weights, B: Weights, queries: AlignedAxis, keys: AlignedAxis, measures: Sequence[By]
) -> list[dict[str, Any]]:
    """Return the numbers of each head of one batch row, a few queries at a time, in float64."""
    h, device = A.shape[-3], A.device
    ours_alone, theirs_alone = (torch.zeros(h, dtype=torch.float64, device=device) for _ in range(2))
    totals = {name: torch.zeros_like(ours_alone) for name in measures}
    largest, place = ours_alone - 1, torch.zeros(h, dtype=torch.long, device=device)
    cols, n = [x.to(device) for x in (keys.ours, keys.theirs)], len(keys.ours)
    step = max(1, CHUNK_ENTRIES // max(1, h * max(A.shape[-1], B.shape[-1])))
    for start in range(0, len(queries.ours) if n else 0, step):
        chosen = slice(start, start + step)
        parts = [_rows(A, queries.ours[chosen]), _rows(B, queries.theirs[chosen]).to(device)]
        a, b = (part[..., col] for part, col in zip(parts, cols, strict=True))
        ours_alone += parts[0].sum((1, 2)) - a.sum((1, 2))
        theirs_alone += parts[1].sum((1, 2)) - b.sum((1, 2))
        difference = (a - b).flatten(1)
        logs = [log_weights(x) for x in (a, b)] if {"kl", "js"} & totals.keys() else [a, b]
        for name in totals:
            if name == "difference":
                totals[name] += difference.abs().sum(1) / n
            else:
                totals[name] += row_divergence(name, n, a, logs[0], b, logs[1]).sum(1)
        found, where = difference.abs().max(1)
        is_larger = found > largest.abs() if start else found >= 0
        place = torch.where(is_larger, where + start * n, place)
        largest = torch.where(is_larger, difference.gather(1, where[:, None]).squeeze(1), largest)
    i = len(queries.ours)
    if not i or not n:
        return [{"head": head, **dict.fromkeys(measures, math.nan)} for head in range(h)]
    return [
        {
            "head": head,
            **{name: float(total[head]) / i for name, total in totals.items()},
            "largest": float(largest[head]),
            **_place(queries, keys, int(place[head]) // n, int(place[head]) % n),
            "unaligned": float(ours_alone[head]) / i,
            "other_unaligned": float(theirs_alone[head]) / i,
        }
        for head in range(h)
    ]


def _rows(A: Weights, ids: Tensor) -> Tensor:
    """Return some rows of the weights of one text in float64, `h i j`."""
    with torch.no_grad():
        return A[..., ids.to(A.device), :].reshape(A.shape[-3], len(ids), A.shape[-1]).double()


def _place(queries: AlignedAxis, keys: AlignedAxis, row: int, col: int) -> dict[str, Any]:
    return {
        "query": int(queries.ours[row]),
        "key": int(keys.ours[col]),
        "other_query": int(queries.theirs[row]),
        "other_key": int(keys.theirs[col]),
        "query_token": "" if queries.labels is None else queries.labels[row],
        "key_token": "" if keys.labels is None else keys.labels[col],
    }
