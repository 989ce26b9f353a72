"""sweep: run a model under one set of edits after the other, and tabulate what each does to a metric."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import tree_leaves
from ..capture_warning import CaptureWarning
from ..interception.intercept import intercept
from ..layer_names import shown_name
from ..tape.annotations import Tokens, TokensByLayer
from ..tape.groups import Groups
from ..tape.overview import as_table
from ..tape.tape import Tape
from .edit import check_edits, edit, is_meant
from .edit_values import Cut, Edit, Scale
from .replayed_prefix import FinishedCall, PrefixRecorder, replay_outputs
from .token_selection import Selection

Edits = Mapping[str, Edit | Sequence[Edit]]
AXES = ("layer", "head", "keys")


def sweep(
    model: nn.Module,
    inputs: Any,
    edits: Mapping[Any, Edits],
    metric: Callable[[Any], float | Tensor],
    tokens: Tokens | TokensByLayer | None = None,
    *,
    layout: str | Mapping[str, str] | None = None,
) -> Sweep:
    """Return what each set of edits does to a metric of the model's output.

    Switch off each head of two layers, one after the other:

    >>> from regard.lens import knockouts, sweep
    >>> from regard.nn import Attention
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4)), torch.randn(1, 5, 16)
    >>> found = sweep(model.eval(), x, knockouts({"0": 4, "1": 4}), lambda out: out.square().mean())
    >>> found.effects.shape
    torch.Size([8])
    >>> found.grid().shape
    torch.Size([2, 4])

    The model runs once as it is. For each set of edits it goes on from the first layer that has edits: what it computed
    before is replayed, so that edits of the last layers cost little. That is verified once, by a pass that replays and
    edits nothing; a model that depends on more than its inputs warns, and runs from the start each time.

    Args:
        model: the model, in evaluation; the passes run without gradients.
        inputs: its arguments: a dict by name, a tuple, or the one argument.
        edits: from a label to edits as `edit` takes them. `knockouts` makes those of layers, heads and tokens.
        metric: from the output of the model to a number.
        tokens: the tokens of the text, as for `edit`.
        layout: the dims of the batch and the heads, as for `capture`.
    """
    if model.training:
        raise ValueError("sweep compares passes of one model, and in training they may differ; write model.eval()")
    checked = {label: check_edits(model, each) for label, each in edits.items()}
    if not checked:
        raise ValueError("edits is empty; write knockouts(tape), or {label: {layer: Scale(0, 0)}}")
    for label, each in checked.items():
        if any(one.is_frozen for found in each.values() for one in found):
            raise ValueError(f"Freeze runs the model once more for each of the edits {label!r}; write From(tape)")
    run = _Run(model, inputs)
    with torch.inference_mode(False), torch.no_grad():
        recorder = PrefixRecorder(
            lambda layer: any(is_meant(layer, each) for given in checked.values() for each in given)
        )
        with intercept(model, recorder, layout=layout), recorder.watch(model):
            output = run()
        plain = _number(metric(output))
        replays = _is_replayable(run, recorder, output)
        values = []
        for each in checked.values():
            prefix = _prefix(recorder, each) if replays else None
            with edit(model, each, tokens, layout=layout), nullcontext() if prefix is None else replay_outputs(prefix):
                values.append(_number(metric(run())))
    return Sweep(plain, tuple(checked), torch.tensor(values, dtype=torch.float64))


def knockouts(
    layers: Tape | Mapping[str, int] | Sequence[str],
    *,
    keys: Mapping[str, Selection] | Groups | None = None,
    queries: Selection | None = None,
) -> dict[tuple[str, int | None, str | None], Edits]:
    """Return the edits that switch off one head after the other, or hide one group of keys after the other from it.

    >>> list(knockouts({"0": 2}))
    [('0', 0, None), ('0', 1, None)]
    >>> knockouts(["0"], keys={"subject": slice(1, 3)}, queries=-1)
    {('0', None, 'subject'): {'0': Cut(queries=-1, keys=slice(1, 3))}}

    Args:
        layers: a tape, whose layers and heads all are taken; a dict from layers to numbers of heads; or a list of
            layers, whose heads are switched off together.
        keys: groups of tokens, as `words(tokens)`, or a dict from names to tokens. Without it, whole heads are switched
            off.
        queries: the queries that do not see the keys, all unless given.
    """
    if isinstance(layers, Tape):
        counts: dict[str, int | None] = {layer: A.shape[-3] for (layer, _), A in layers.items()}
    else:
        counts = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers)
    if isinstance(keys, Groups):
        keys = {label: keys[label] for label in keys.labels}
    if keys is None and queries is not None:
        raise ValueError("queries are those that do not see the keys; pass keys too, as in keys=words(tokens)")
    found: dict[tuple[str, int | None, str | None], Edits] = {}
    for layer, n in counts.items():
        heads = [None] if n is None else range(n)
        for head, name in itertools.product(heads, [None] if keys is None else keys):
            one = Scale(head, 0) if keys is None else Cut(queries=queries, keys=keys[name], heads=head)  # type: ignore[index]
            found[layer, head, name] = {layer: one}
    return found


@dataclass(frozen=True, eq=False)
class Sweep:
    """A metric of the model as it is, and under each of several sets of edits."""

    plain: float
    labels: tuple[Hashable, ...]
    values: Tensor  # one for each label

    @property
    def effects(self) -> Tensor:
        """The metric under each set of edits less that of the model as it is."""
        return self.values - self.plain

    def __repr__(self) -> str:
        most = int(self.effects.abs().argmax())
        return (
            f"Sweep({len(self.labels)} edits; plain {self.plain:.4g}, largest effect {float(self.effects[most]):+.4g} "
            f"of {self.labels[most]})"
        )

    def axes(self) -> tuple[list[Any], list[Any]]:
        """Return the names of the rows and of the columns of `grid`."""
        rows, columns = (list(dict.fromkeys(each)) for each in zip(*map(_row_and_column, self.labels), strict=True))
        return rows, columns

    def grid(self) -> Tensor:
        """Return the effects as a matrix: a row for each layer, a column for each head and group of keys.

        Entries without edits are NaN. Labels that are no tuples give one column.
        """
        rows, columns = self.axes()
        found = torch.full((len(rows), len(columns)), torch.nan, dtype=torch.float64)
        for label, effect in zip(self.labels, self.effects.tolist(), strict=True):
            row, column = _row_and_column(label)
            found[rows.index(row), columns.index(column)] = effect
        return found

    def table(self) -> Any:
        """Return a data frame of pandas if it is installed, else a dict of columns: label, value and effect."""
        parts = [label if isinstance(label, tuple) else (label,) for label in self.labels]
        width = max(map(len, parts))
        names = AXES if width == len(AXES) else ("label",) if width == 1 else tuple(f"label {n}" for n in range(width))
        numbers = zip(parts, self.values.tolist(), self.effects.tolist(), strict=True)
        return as_table(
            [
                {name: x for name, x in zip(names, part, strict=False) if x is not None}
                | {"value": value, "effect": effect}
                for part, value, effect in numbers
            ]
        )


class _Run:
    """The model with its arguments."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.kwargs = dict(inputs)
            # A cache would have no entries of the layers that are replayed.
            if "use_cache" in inspect.signature(model.forward).parameters:
                self.kwargs.setdefault("use_cache", False)
        elif not isinstance(inputs, tuple):
            self.args = (inputs,)

    def __call__(self) -> Any:
        return self.model(*self.args, **self.kwargs)


def _prefix(recorder: PrefixRecorder, edits: Mapping[str, Any]) -> list[FinishedCall]:
    """Return the calls before the first layer that has edits."""
    meant = (calls for layer, calls in recorder.before.items() if any(is_meant(layer, each) for each in edits))
    return next(meant, [])


def _is_replayable(run: _Run, recorder: PrefixRecorder, output: Any) -> bool:
    """Whether a pass that replays the longest prefix gives the output of the model; warn if not."""
    if not recorder.before:
        return False
    layer, calls = next(reversed(recorder.before.items()))
    with replay_outputs(calls):
        again = run()
    same = all(map(_is_equal, tree_leaves(output), tree_leaves(again)))
    if not same:
        warnings.warn(
            f"the model gives another output if what it computed before {shown_name(layer)} is replayed, so each pass "
            "of the sweep runs the whole model",
            CaptureWarning,
            stacklevel=3,
        )
    return same


def _is_equal(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return True
    return isinstance(y, Tensor) and torch.allclose(x, y, rtol=1e-6, atol=1e-7, equal_nan=True)


def _number(value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"metric must return a number, got shape {tuple(value.shape)}; write value.mean()")
    return float(value)


def _row_and_column(label: Any) -> tuple[Any, Any]:
    """Return the names of the row and the column of a label."""
    if not isinstance(label, tuple):
        return label, ""
    row, *rest = label
    return row, " ".join(str(x) for x in rest if x is not None)
