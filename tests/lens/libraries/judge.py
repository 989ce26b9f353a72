"""Compare a tape with the weights that the model used, and name the outcome of a case."""

from __future__ import annotations

import inspect
import itertools
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.lens import EdgeWeights, SampledWeights, capture

from .aten_truth import Softmax, aten_truth
from .case import Case, change_first_row, seed

AUDITS = "audit" in inspect.signature(capture).parameters
CLOSE = 2e-4
SUMS = "weights over edges: only the sums of their rows were compared"
POINTS = "sampled points: their weights were compared, their places were not"
LARGE = 60.0  # scores beyond it are compared at smaller weights: in float32 their weights differ by more than CLOSE
DEPENDS = 1e-6  # difference of a weight by which its row depends on a batch row
NEIGHBOURS = 4  # on each side of a row, compared first
CHUNK = 2**23  # distances at a time
RIGHT, LISTED, REFUSED = "right", "listed in unseen", "refused with reason"
WRONG, SILENT, RAISED, FAILED = "wrong", "missed in silence", "raised", "does not run here"
# Classes with a softmax that is no attention of queries over keys: never an entry of a tape, and named if it ran.
NOT_ATTENTION = {
    "LinearAttention": "its softmax is over features or over all positions at once",
    "LinearSelfAttention": "one context score per position",
    "LambdaLayer": "its key softmax makes a context, not weights of queries",
    "FactorAttnConvRelPosEnc": "its key softmax makes a context, not weights of queries",
    "NystromAttention": "three factors, no weights of queries over keys",
    "TopNGating": "weights of experts",
    "SoftMoE": "weights of slots and experts",
}
NOT_INSTALLED = "not installed"
BAD = (WRONG, SILENT, RAISED)
OUTCOMES = (RIGHT, LISTED, REFUSED, *BAD, FAILED, NOT_INSTALLED)


@dataclass
class Row:
    """One line of the table."""

    library: str
    case: str
    outcome: str
    note: str = ""
    matrices: int = 0


@dataclass
class Pool:
    """All rows of weights that a run used, with the softmax each came from."""

    calls: list[Softmax]
    rows: Tensor = field(init=False)  # (rows, widest), zero beyond a call's own keys
    form: Tensor = field(init=False)  # index of the form of each row
    forms: list[tuple[int, Tensor]] = field(init=False)  # index of a softmax, and one form of its rows

    def __post_init__(self) -> None:
        self.forms = [(n, form) for n, each in enumerate(self.calls) for form in each.alternatives()]
        wide = max((form.shape[1] for _, form in self.forms), default=1)
        self.rows = torch.cat([torch.zeros(0, wide), *(widened(form, wide) for _, form in self.forms)]).float()
        self.form = torch.cat(
            [torch.zeros(0), *(torch.full((len(form),), m) for m, (_, form) in enumerate(self.forms))]
        )


def widened(rows: Tensor, width: int) -> Tensor:
    """Append keys of weight 0, or cut keys that nothing attends to."""
    if rows.shape[1] > width and rows[:, width:].abs().max() < CLOSE:
        rows = rows[:, :width]
    return torch.nn.functional.pad(rows, (0, max(width - rows.shape[1], 0)))


def nearest(rows: Tensor, pool: Tensor, *, whole: bool = True) -> tuple[Tensor, Tensor]:
    """Return for each row the distance to a row of the pool (largest difference of a key), and the index of that row.

    Rows are sorted by one random projection and compared with their neighbours; if `whole`, a row without a close
    neighbour is compared with the whole pool.
    """
    if len(pool) == 0:
        return torch.full((len(rows),), torch.inf), torch.zeros(len(rows)).long()
    line = torch.randn(pool.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys, order = (pool.double() @ line).sort()
    at = torch.searchsorted(keys, rows.double() @ line)
    best, places = torch.full((len(rows),), torch.inf), torch.zeros(len(rows)).long()
    for step in range(-NEIGHBOURS, NEIGHBOURS):
        found = order[(at + step).clamp(0, len(pool) - 1)]
        distance = (rows.float() - pool[found].float()).abs().amax(1)
        closer = distance < best
        best, places = torch.where(closer, distance, best), torch.where(closer, found, places)
    far = (best > CLOSE).nonzero()[:, 0] if whole else places[:0]
    for part in far.split(max(1, CHUNK // len(pool))):
        distance = torch.cdist(rows[part].float(), pool.float(), compute_mode="donot_use_mm_for_euclid_dist")
        places[part] = distance.argmin(1)
        best[part] = (rows[part].float() - pool[places[part]].float()).abs().amax(1)
    return best, places


def same_matrix(A: Tensor, calls: list[Softmax]) -> tuple[int, Tensor, Tensor] | None:
    """Return the softmax whose rows are all rows of A in order, that form of it, and where each row of A is in it."""
    for n, each in enumerate(calls):
        for form in each.alternatives():
            if form.numel() != A.numel() or form.shape[1] != A.shape[-1]:
                continue
            for order in itertools.permutations(range(3)):
                turned = A.permute(*order, 3)
                if torch.allclose(turned.reshape(form.shape), form.to(A.dtype), atol=CLOSE, rtol=0):
                    places = torch.arange(len(form)).view(turned.shape[:3])
                    return n, form, places.permute(*(order.index(dim) for dim in range(3)))
    return None


def compare(
    entries: dict[Any, Tensor], calls: list[Softmax], changed: list[Tensor] | None, batch: int
) -> tuple[list[str], set[int]]:
    """Return what is wrong with the entries of a tape, and the indices of the softmaxes that they hold.

    `changed[n]` says which rows of softmax n depend on batch row 0, of `batch` rows.
    """
    wrong: list[str] = []
    held: set[int] = set()
    loose = []
    for key, A in entries.items():
        if A.shape[-1] == 1:  # one key: every weight is 1, and says nothing of the layout
            continue
        found = same_matrix(A, [each if n not in held else Softmax("", A[:0], 0.0) for n, each in enumerate(calls)])
        found = found or same_matrix(A, calls)
        if found is None:
            loose.append((key, A))
            continue
        n, form, places = found
        held |= {n, *(m for m, each in enumerate(calls) if any(other is form for other in each.finals))}
        if changed is not None and len(changed[n]) > int(places.max()):
            wrong += [f"{shown(key)}: {reason}" for reason in mixed_batch(changed[n][places], batch)]
    if not loose:
        return wrong, held
    widths = {A.shape[-1] for _, A in loose}
    calls = [each if each.has_width(widths) else Softmax("", A[:0], 0.0) for each in calls]
    pool = Pool(calls)
    if not pool.forms:
        return wrong + [f"{shown(key)} {tuple(A.shape)}: no weights of the model" for key, A in loose], held
    covered = torch.zeros(len(pool.rows), dtype=torch.bool)
    for key, A in loose:
        width = max(A.shape[-1], pool.rows.shape[1])
        rows = torch.nn.functional.pad(A.reshape(-1, A.shape[-1]).float(), (0, width - A.shape[-1]))
        truth = torch.nn.functional.pad(pool.rows, (0, width - pool.rows.shape[1]))
        distance, places = nearest(rows, truth)
        off = (distance > CLOSE) & (rows.abs().amax(1) > 0)
        if off.any():
            wrong.append(f"{shown(key)} {tuple(A.shape)}: {int(off.sum())} of {len(off)} rows are not the model's")
        # Every row of the model that is near a row of the entry is held, duplicates too.
        mine = torch.isin(pool.form, pool.form[places[distance <= CLOSE]])
        back, _ = nearest(truth[mine], rows)
        covered[mine] |= back <= CLOSE
        if changed is not None:
            flags = torch.cat([changed[n] for n, _ in pool.forms])
            if len(flags) == len(pool.rows):
                # A row depends on batch row 0 if it is near a row that does, and near none that does not.
                other, _ = nearest(rows, truth[~flags], whole=False)
                seen = ((distance <= CLOSE) & (other > CLOSE)).view(A.shape[:3])
                wrong += [f"{shown(key)}: {reason}" for reason in mixed_batch(seen, batch)]
    for m, (n, _) in enumerate(pool.forms):
        if n not in held and not lost_rows(pool.rows[pool.form == m], covered[pool.form == m]):
            held.add(n)
    return wrong, held


def lost_rows(rows: Tensor, covered: Tensor) -> bool:
    """Whether a row is not covered, rows aside that say nothing: even ones and empty ones."""
    counts = (rows > 0).sum(1).clamp(min=1)
    even = (rows.amax(1) - 1 / counts).abs() < CLOSE
    return bool((~covered & ~even & (rows.abs().amax(1) > 0)).any())


def mixed_batch(flags: Tensor, batch: int) -> list[str]:
    """Return a reason if batch row 0 is in more entries of dim 0 than its share: flags are b h i, from `changed`."""
    depends = flags.any(-1)
    entries = int(depends.any(1).sum())
    if flags.shape[0] == 1:  # a call for one text, or for one head of all texts
        return ["batch rows are shown as heads: some depend on batch row 0"] if entries and not depends.all() else []
    if entries * batch > flags.shape[0]:
        return [f"batch rows are shown as heads: batch row 0 is in {entries} of {flags.shape[0]} batch entries"]
    return []


def batch_of(inputs: Any) -> int:
    """Return the number of batch rows of the first tensor."""
    return next((x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim > 1), 1)


def shown(key: Any) -> str:
    layer, call = key
    return f"{layer or '(model)'}{f' call {call}' if call else ''}"


def same_outputs(a: Any, b: Any) -> bool:
    """Whether all tensors of two outputs are equal to the bit."""
    xs, ys = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in (a, b))
    return len(xs) == len(ys) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(xs, ys, strict=True)
    )


def is_finite(output: Any) -> bool:
    return all(bool(x.isfinite().all()) for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point())


def short(text: object) -> str:
    """Return a message on one line of the table."""
    text = " ".join(str(text).split()).replace("|", "/")
    return text if len(text) <= 240 else text[:237] + "..."


def within(layer: str, part: str) -> bool:
    """Whether a part is the layer itself or inside it."""
    return not layer or part == layer or part.startswith(f"{layer}.")


def named(layer: str, unseen: list[str]) -> bool:
    """Whether a layer, a part of it or a part around it is named as unseen."""
    return any(
        layer == each or not each or layer.startswith(f"{each}.") or each.startswith(f"{layer}.") or not layer
        for each in unseen
    )


def judge(library: str, case: Case) -> Row:
    """Run a case with and without capture, and compare."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for factor in case.sharper:
                model = case.model(factor)
                with aten_truth(model) as truth:
                    output = case.run(model, case.make_inputs())
                if is_finite(output) and max((each.largest for each in truth.calls), default=0.0) < LARGE:
                    break
            plain = case.run(case.model(factor), case.make_inputs())
            if case.train:
                for each in truth.calls:  # a tape holds the weights before dropout
                    each.summed = each.is_used
            used = [n for n, each in enumerate(truth.calls) if each.is_used]
            # Weights without a softmax are operands of a product; they follow the softmaxes.
            calls = truth.calls + truth.products
            changed = changed_rows(case, factor, calls) if case.batched else None
    except Exception as error:
        traceback.print_exc()
        return Row(library, case.name, FAILED, short(f"{type(error).__name__}: {error}"))
    return judge_capture(library, case, case.model(factor), plain, calls, used, changed)


def judge_capture(
    library: str, case: Case, model: nn.Module, plain: Any, calls: list[Softmax], used: list[int], changed: Any
) -> Row:
    """Run a model under capture, and name the outcome."""
    output = tape = refusal = None
    ran = False
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            with capture(model, **({"audit": True} if case.audit and AUDITS else {})) as tape:
                output = case.run(model, case.make_inputs())
                ran = True
        except Exception as error:
            # capture refuses before the model runs or after it; whatever interrupts the model is an error of the lens.
            if not isinstance(error, (ValueError, TypeError)) or (tape is not None and not ran):
                traceback.print_exc()
                return Row(library, case.name, RAISED, short(f"{type(error).__name__}: {error}"))
            refusal = error
    if ran and not same_outputs(plain, output):
        return Row(library, case.name, WRONG, "the outputs differ under capture")
    if refusal is not None:
        return Row(library, case.name, REFUSED, short(refusal))
    assert tape is not None
    try:
        entries = {key: dense(tape[key]) for key in tape}
    except Exception as error:
        traceback.print_exc()
        return Row(library, case.name, RAISED, short(f"reading the tape: {type(error).__name__}: {error}"))
    wrong = [f"{shown(key)}: {reason}" for key in tape if (reason := no_attention(case, model, key[0]))]
    if wrong:
        return Row(library, case.name, WRONG, short("; ".join(wrong)), len(entries))
    # Graph libraries write their softmax out, so it is no operator to compare with: its sums are.
    graphs = {key: entries.pop(key) for key in tape if isinstance(tape[key], EdgeWeights)}
    wrong, held = compare(entries, calls, changed, batch_of(case.make_inputs()))
    wrong += [
        f"{shown(key)}: its weights do not sum to 1"
        for key, A in graphs.items()
        if not (key[0] in tape.changed or sums_to_1(A))
    ]
    if case.edge_weights is not None and not has_reported_weights(case, model, tape):
        wrong.append("the weights of edges are not those that the library reports")
    entries |= graphs
    attended = [layer for layer in case.attends if not any(within(layer, key[0]) for key in tape)]
    if wrong:
        return Row(library, case.name, WRONG, short("; ".join(wrong)), len(entries))
    missed = [calls[n].layer for n in used if n not in held] + attended
    messages = " ".join(str(each.message) for each in raised if each.category.__name__ == "CaptureWarning")
    unseen = [each.layer for each in tape.unseen]
    silent = [
        layer
        for layer in missed
        if not named(layer, unseen) and layer not in messages and not any(part in layer for part in case.excused)
    ]
    if silent:
        names = ", ".join(dict.fromkeys(layer or "(model)" for layer in silent))
        return Row(library, case.name, SILENT, short(names), len(entries))
    sampled = any(isinstance(A, SampledWeights) for A in tape.values())
    kinds = [SUMS] * (bool(graphs) and case.edge_weights is None) + [POINTS] * sampled
    if unseen or missed:
        notes = [*kinds, *map(str, tape.unseen)]
        note = "; ".join(notes) or messages or "a softmax over something else than positions"
        return Row(library, case.name, LISTED, short(note), len(entries))
    return Row(library, case.name, RIGHT, "; ".join(kinds), len(entries))


def has_reported_weights(case: Case, model: nn.Module, tape: Any) -> bool:
    """Whether the first graph layer has the edges and weights that its library reports."""
    assert case.edge_weights is not None
    seed(1)
    with torch.no_grad():
        edges, weights = case.edge_weights(model, *case.make_inputs())
    found = next((A for A in tape.values() if isinstance(A, EdgeWeights)), None)
    if found is None or not torch.equal(found.edge_index, edges):
        return False
    return bool((found.weights - weights.flatten(1)).abs().max() < CLOSE)


def sums_to_1(A: Tensor) -> bool:
    """Whether the weights of each row sum to 1, rows without weights aside."""
    sums = A.sum(-1)
    return bool(((sums - 1).abs() < CLOSE).logical_or(sums == 0).all())


def no_attention(case: Case, model: nn.Module, layer: str) -> str:
    """Return why a layer has no attention; empty if it is not of a class that is known to have none."""
    if any(layer == part or layer.startswith(f"{part}.") for part in case.no_entry):
        return "shown as attention, and is none"
    names = layer.split(".")
    for end in range(len(names) + 1):
        try:
            part = model.get_submodule(".".join(names[:end]))
        except AttributeError:
            return ""
        reason = NOT_ATTENTION.get(type(part).__name__)
        if reason and not any(isinstance(each, nn.MultiheadAttention) for each in part.children()):
            return f"shown as attention: {reason}"
    return ""


def dense(A: Any) -> Tensor:
    """Return the matrix of an entry as b h i j; of sampled points their weights, b h i p."""
    x = (A.weights if isinstance(A, SampledWeights) else A.dense()).double()
    return x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x


def changed_rows(case: Case, factor: float, calls: list[Softmax]) -> list[Tensor] | None:
    """Return for each softmax which rows depend on batch row 0; None if that cannot be compared."""
    model = case.model(factor)
    try:
        with aten_truth(model) as other:
            case.run(model, change_first_row(case.make_inputs(), batch_of(case.make_inputs())))
    except Exception:
        return None
    others = other.calls + other.products
    if len(others) != len(calls):
        return None
    changed = []
    for a, b in zip(calls, others, strict=True):
        forms = list(zip(a.alternatives(), b.alternatives(), strict=False))
        if not forms:
            changed.append(torch.zeros(0, dtype=torch.bool))
            continue
        if any(x.shape != y.shape for x, y in forms):
            return None
        changed.append((forms[0][0] - forms[0][1]).abs().amax(1) > DEPENDS)
    return changed
