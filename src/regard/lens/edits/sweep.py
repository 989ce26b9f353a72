"""sweep: run a model under one set of edits after the other, and tabulate what each does to a metric."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_int
from ...torch_internals import tree_leaves
from ..capture_warning import CaptureWarning
from ..interception.compiled_models import only_as_written
from ..interception.intercept import intercept
from ..layer_names import shown_name
from ..tape.annotations import Tokens, TokensByLayer
from ..tape.groups import Groups
from ..tape.overview import as_table
from ..tape.tape import Tape
from .edit import check_edits, edit, is_meant
from .edit_values import Cut, Edit, Scale
from .replayed_prefix import FinishedCall, PrefixRecorder, replay_outputs
from .stacked_runs import NotStackable, edit_copies, stack, unstack
from .token_selection import Selection

Edits = Mapping[str, Edit | Sequence[Edit]]
AXES = ("layer", "head", "keys")
MAX_TOKENS, MAX_GPU_TOKENS = 2**12, 2**14  # tokens of all copies in one pass
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest entry
MAX_HALF_ERROR = 0.05


def sweep(
    model: nn.Module,
    inputs: Any,
    edits: Mapping[Any, Edits],
    metric: Callable[[Any], float | Tensor],
    tokens: Tokens | TokensByLayer | None = None,
    *,
    layout: str | Mapping[str, str] | None = None,
    copies: int | None = None,
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

    Several sets run in one pass: copies of the inputs lie behind each other in the batch, and each has edits of its
    own. That is verified by one more pass; a model whose batch rows depend on each other runs one set after the other.

    Args:
        model: the model, in evaluation; the passes run without gradients.
        inputs: its arguments: a dict by name, a tuple, or the one argument.
        edits: from a label to edits as `edit` takes them. `knockouts` makes those of layers, heads and tokens.
        metric: from the output of the model to a number.
        tokens: the tokens of the text, as for `edit`.
        layout: the dims of the batch and the heads, as for `capture`.
        copies: the largest number of sets that run in one pass. By default up to 4,096 tokens on a CPU, and 16,384 on a
            GPU, within half of its free memory; the metric is called on the output of each set.
    """
    if copies is not None:
        check_int("copies", copies, least=1)
    if model.training:
        raise ValueError("sweep compares passes of one model, and in training they may differ; write model.eval()")
    checked = {label: check_edits(model, each) for label, each in edits.items()}
    if not checked:
        raise ValueError("edits is empty; write knockouts(tape), or {label: {layer: Scale(0, 0)}}")
    for label, each in checked.items():
        if any(one.is_frozen for found in each.values() for one in found):
            raise ValueError(f"Freeze runs the model once more for each of the edits {label!r}; write From(tape)")
    run = _Run(model, inputs)
    with torch.inference_mode(False), torch.no_grad(), only_as_written():
        recorder = PrefixRecorder(
            lambda layer: any(is_meant(layer, each) for given in checked.values() for each in given)
        )
        with intercept(model, recorder, layout=layout), recorder.watch(model), peak_memory(model) as peak:
            output = run()
        passes = _Passes(run, recorder, output, metric, tokens, layout)
        plain = _number(metric(output))
        prefixes = [passes.prefix(each) for each in checked.values()]
        most = copies or passes.default_copies(peak())
        values = [0.0] * len(checked)
        for prefix, group in _by_prefix(prefixes, list(checked.values())):
            while group:
                size = passes.chunk_size(min(most, len(group)))
                chunk, group = group[:size], group[size:]
                for (n, _), value in zip(chunk, passes.values([each for _, each in chunk], prefix), strict=True):
                    values[n] = value
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

    @property
    def rows(self) -> int:
        """The number of batch rows: the first dim of the first tensor; 0 if there is none."""
        found = (x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor) and x.ndim)
        first = next(found, None)
        return 0 if first is None else len(first)

    def __call__(self, change: Callable[[Any], Any] = lambda inputs: inputs) -> Any:
        """Run the model on what `change` makes of its arguments."""
        args, kwargs = change((self.args, self.kwargs))
        return self.model(*args, **kwargs)


class _Passes:
    """The passes of a sweep: each goes on from the first layer with edits, and may hold several sets of edits."""

    def __init__(
        self,
        run: _Run,
        recorder: PrefixRecorder,
        output: Any,
        metric: Callable[[Any], float | Tensor],
        tokens: Tokens | TokensByLayer | None,
        layout: str | Mapping[str, str] | None,
    ) -> None:
        self._run, self._recorder, self._output, self._metric = run, recorder, output, metric
        self._tokens, self._layout = tokens, layout
        self._replays = _is_replayable(run, recorder, output)
        self._nothing: list[FinishedCall] = []
        self._stacks: bool | None = None if self._replays and run.rows else False  # None: not verified yet
        self._sizes = {n for shape in recorder.shapes.values() for n in shape[1:]}

    def prefix(self, edits: Mapping[str, Any]) -> list[FinishedCall] | None:
        """Return the calls before the first layer that has edits; None if they cannot be replayed."""
        if not self._replays:
            return None
        before = self._recorder.before.items()
        meant = (calls for layer, calls in before if any(is_meant(layer, each) for each in edits))
        return next(meant, self._nothing)

    def default_copies(self, peak: int) -> int:
        """Return how many sets of edits run in one pass; `peak` is the memory in bytes that a pass takes on a GPU."""
        tokens = max((b * i for b, _, i, _ in self._recorder.shapes.values()), default=1)
        if not peak:
            return max(1, MAX_TOKENS // tokens)
        free, _ = torch.cuda.mem_get_info()
        return max(1, min(MAX_GPU_TOKENS // tokens, free // 2 // peak))

    def chunk_size(self, most: int) -> int:
        """Return the largest number of copies whose batch is of another size than all other dims."""
        rows = self._run.rows or 1
        return next((n for n in range(most, 1, -1) if n * rows not in self._sizes), 1)

    def values(self, sets: Sequence[Any], prefix: list[FinishedCall] | None) -> list[float]:
        """Return the metric under each set of edits, from one pass if there are several."""
        outputs = self._outputs_of_copies(sets, prefix or []) if len(sets) > 1 and self._stacks is not False else None
        if outputs is None:
            outputs = [self._run_one(each, prefix) for each in sets]
        return [_number(self._metric(each)) for each in outputs]

    def _outputs_of_copies(self, sets: Sequence[Any], prefix: list[FinishedCall]) -> list[Any] | None:
        """Return the outputs of one pass over copies of the inputs; None if they are not those of single passes."""
        try:
            outputs = self._run_copies(sets, prefix)
        except NotStackable:
            return None
        except Exception:
            if self._stacks:
                raise
            self._stacks = False  # single passes raise it again, unless it comes from the copies
            return None
        if self._stacks is None:
            self._stacks = _are_close(outputs[-1], self._run_one(sets[-1], prefix))
        return outputs if self._stacks else None

    def _run_one(self, edits: Any, prefix: list[FinishedCall] | None) -> Any:
        replay = nullcontext() if prefix is None else replay_outputs(prefix)
        with edit(self._run.model, edits, self._tokens, layout=self._layout), replay:
            return self._run()

    def _run_copies(self, sets: Sequence[Any], prefix: list[FinishedCall]) -> list[Any]:
        copies = partial(stack, b=self._run.rows, copies=len(sets))
        with edit_copies(self._run.model, sets, self._tokens, self._layout), replay_outputs(prefix, copies):
            output = self._run(copies)
        return unstack(output, self._output, len(sets))


def _by_prefix(
    prefixes: Sequence[list[FinishedCall] | None], sets: Sequence[Any]
) -> Iterator[tuple[list[FinishedCall] | None, list[tuple[int, Any]]]]:
    """Yield each prefix with the numbered sets that follow it; the shortest first, whose passes verify the most."""
    groups: dict[int, list[tuple[int, Any]]] = {}
    for n, (prefix, each) in enumerate(zip(prefixes, sets, strict=True)):
        groups.setdefault(id(prefix), []).append((n, each))
    for prefix in sorted({id(x): x for x in prefixes}.values(), key=lambda x: 0 if x is None else len(x)):
        yield prefix, groups[id(prefix)]


@contextmanager
def peak_memory(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Give the bytes that the block allocates at most on the GPU of a model; 0 on a CPU."""
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        yield lambda: 0
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


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
            stacklevel=4,
        )
    return same


def _are_close(outputs: Any, others: Any) -> bool:
    """Whether two outputs are equal up to what the size of a batch changes."""
    for x, y in zip(tree_leaves(outputs), tree_leaves(others), strict=True):
        if isinstance(x, Tensor) and x.is_floating_point():
            tolerance = TOLERANCES.get(x.dtype, MAX_HALF_ERROR) * float(y.abs().nan_to_num(posinf=0.0).max())
            if not torch.allclose(x, y, rtol=0.0, atol=tolerance, equal_nan=True):
                return False
        elif isinstance(x, Tensor) and not torch.equal(x, y):
            return False
    return True


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
