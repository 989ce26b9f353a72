"""check_term: compare a term of the user's own with its definition, with plain PyTorch and with itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .operator import attend, weights
from .terms.biases import Bias
from .terms.mask_tiles import Grid
from .terms.masks import Causal, Padding
from .terms.masks.mask_algebra import Mask
from .terms.normalizers import Normalizer
from .terms.scores import Score
from .terms.term import Term

SLOTS = {Score: "score", Mask: "mask", Bias: "bias", Normalizer: "normalize"}
STEP = 1e-6  # slopes are compared with differences over this step
TILE_SIZES = [(2, 3), (3, 2), (1, 4), (16, 16)]
CHECKS = {
    "runs": "the weights are finite numbers of the right shape and dtype, and no input is changed",
    "expected": "the term has the values of the function `expected`",
    "value": "an equal term can be built from the fields, and it prints",
    "parts": "a part of the matrix has the values it has in the whole matrix",
    "tiles": "`tiles` calls no tile empty that has a visible entry, and no tile full that has a hidden one",
    "grouped-heads": "fewer heads of keys give the result of repeated keys",
    "one-query": "a query alone, as in decoding, has the weights it has among the others",
    "gradients": "gradients are the slopes of the output, blockwise too",
    "equal-vectors": "gradients are finite for a query that equals a key, and for zeros",
    "hidden-keys": "a hidden key weighs nothing, and its content changes nothing",
    "empty-rows": "a query that sees no key gets zeros, and finite gradients",
    "precision": "float32 gives the weights of float64",
}
CAUSES = {
    "runs": "return a tensor that broadcasts over b h i j, and write q * x rather than q.mul_(x)",
    "expected": "one of the two is wrong; print both for two queries and three keys",
    "value": "decorate the class with @term, and keep everything the term needs in its fields",
    "parts": "an entry depends on other keys or queries of the block; give it only its own query, key and coordinates",
    "tiles": "return some=True and full=False for tiles you cannot decide; sizes rarely divide the length",
    "grouped-heads": "in `tile` k may have fewer heads than q: k.repeat_interleave(q.shape[1] // k.shape[1], 1)",
    "one-query": "use at.i, the position, for distances; at.row counts the queries of this call from 0",
    "gradients": "do not detach, round or write in place; tensors must be fields, read by at.slice_of; for a term that "
    "has no slope pass smooth=False",
    "equal-vectors": "a square root, a norm or a logarithm at 0; write (x + eps).sqrt(), or torch.where around it",
    "hidden-keys": "hidden scores are -inf: a normalizer must map them to 0, and a score must not average over keys",
    "empty-rows": "all scores of the row are -inf; compute torch.where(top == -inf, 0, top) before subtracting it",
    "precision": "subtract the largest score before exp, and do not cast to half precision",
}


@dataclass(frozen=True)
class TermFinding:
    """One rule that a term breaks: the check, its result and the likely cause."""

    name: str  # a key of CHECKS
    result: str

    def __str__(self) -> str:
        rows = (("rule", CHECKS[self.name]), ("result", self.result), ("likely cause", CAUSES[self.name]))
        return "\n".join([self.name, *(f"  {word}: {text}" for word, text in rows)])


@dataclass(frozen=True)
class TermReport:
    """The result of `check_term`. It prints as text, and is True if there are no findings."""

    term: str
    findings: tuple[TermFinding, ...]
    passed: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.term}: {len(self.findings)} of {len(self.findings) + len(self.passed)} checks failed"
        if not self.findings:
            return f"{self.term}: {len(self.passed)} checks passed ({', '.join(self.passed)})"
        return "\n".join([head, *map(str, self.findings)])


def check_term(
    term: Term,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    expected: Callable[..., Tensor] | None = None,
    smooth: bool = True,
) -> TermReport:
    """Check that a score, mask, bias or normalizer of your own keeps the rules that the library counts on.

    >>> from regard import Score, check_term, term
    >>> @term
    ... class Distance(Score):
    ...     def tile(self, q, k):
    ...         k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    ...         return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    >>> report = check_term(Distance(), expected=lambda q, k: -torch.cdist(q, k).square())
    >>> bool(report), len(report.passed)
    (True, 11)

    A term that breaks a rule is named, with the likely cause. This one forgets grouped heads:

    >>> @term
    ... class Short(Score):
    ...     def tile(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> [finding.name for finding in check_term(Short()).findings]
    ['grouped-heads']

    In a test: `report = check_term(Distance()); assert report, report`.

    Args:
        term: the score, mask, bias or normalizer.
        q: queries, b h i d, for a term whose tensors fit some sizes only; by default 2 x 4 x 7 x 8.
        k: keys, b h j d, with as many heads as `q`; by default 2 x 4 x 11 x 8.
        expected: the definition in plain PyTorch, to compare with: for a score a function of q and k that returns
            b h i j, for a mask or a bias a function of the index tensors b, h, i and j, for a normalizer a function of
            the visible scores of one row.
        smooth: False for a term whose gradient is no slope, such as a straight-through estimator.
    """
    slot = next((name for kind, name in SLOTS.items() if isinstance(term, kind)), None)
    if slot is None:
        raise TypeError(f"check_term takes a Score, Mask, Bias or Normalizer, got {type(term).__name__}")
    given = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 8, generator=given) if q is None else q.detach().cpu()
    k = torch.randn(2, q.shape[1], 11, q.shape[-1], generator=given) if k is None else k.detach().cpu()
    if q.ndim != 4 or k.ndim != 4 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q and k must have dims b h i d and b h j d with equal heads, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    trial = _Trial(term, slot, q.double(), k.double(), expected, smooth)
    findings, passed = [], []
    for name in CHECKS:
        try:
            result = next(getattr(trial, f"check_{name.replace('-', '_')}")(), "")
        except Exception as error:  # whatever the term raises is its result
            result = f"raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        if result is None:
            continue
        if result:
            findings.append(TermFinding(name, result))
            if name == "runs":
                break
        else:
            passed.append(name)
    return TermReport(repr(term) if "value" in passed else type(term).__name__, tuple(findings), tuple(passed))


@dataclass
class _Trial:
    """A term and its inputs. A check yields its first result that is wrong, or None if it does not apply."""

    term: Any
    slot: str
    q: Tensor
    k: Tensor
    expected: Callable[..., Tensor] | None
    smooth: bool

    @property
    def v(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(*self.k.shape[:3], 5, dtype=torch.float64, generator=generator)

    def terms(self, mask: Mask | None = None, **other: Any) -> dict[str, Any]:
        """Return the arguments of a call with the term, and perhaps a mask beside it."""
        own = other.get("term", self.term)
        if mask is not None:
            return {"mask": own & mask} if self.slot == "mask" else {self.slot: own, "mask": mask}
        return {self.slot: own}

    def whole(self, **options: Any) -> Tensor:
        return weights(self.q, self.k, **self.terms(**options), backend="reference").dense()

    def check_runs(self) -> Iterator[str | None]:
        before = [x.clone() for x in (self.q, self.k, *self.term.tensors())]
        A = self.whole()
        self.call(attend, self.q, self.k, self.v)
        shape = (*self.q.shape[:3], self.k.shape[2])
        if tuple(A.shape) != shape:
            yield f"the weights have shape {tuple(A.shape)}, not {shape}"
        if not A.isfinite().all():
            yield f"{int((~A.isfinite()).sum())} of {A.numel()} weights are not finite"
        if A.dtype != torch.float64:
            yield f"the weights of float64 inputs have dtype {A.dtype}"
        if self.slot == "mask" and (kind := self._on_whole(self.term).dtype) != torch.bool:
            yield f"the mask has dtype {kind}, not torch.bool"
        after = (self.q, self.k, *self.term.tensors())
        if not all(torch.equal(x, y) for x, y in zip(before, after, strict=True)):
            for x, y in zip(before, after, strict=True):
                y.copy_(x)
            yield "q, k or a tensor of the term was changed in place"

    def check_expected(self) -> Iterator[str | None]:
        if self.expected is None:
            yield None
            return
        (b, h, i, _), j = self.q.shape, self.k.shape[2]
        if self.slot == "normalize":
            masked = Causal()
            A = self.whole(mask=masked)
            scores = weights(self.q, self.k, mask=masked, backend="reference").scores.dense()
            want = torch.zeros_like(A)
            for row, weights_of_row in zip(scores.flatten(0, 2), want.flatten(0, 2), strict=True):
                seen = row > -torch.inf
                weights_of_row[seen] = self.expected(row[seen]).double()
            yield from _difference("weights", A, want)
            return
        if self.slot == "score":
            found, want = self.call(weights, self.q, self.k).scores.dense(), self.expected(self.q, self.k)
        else:
            found = self._on_whole(self.term).expand(b, h, i, j)
            batch, heads, rows, keys = torch.meshgrid(*map(torch.arange, (b, h, i, j)), indexing="ij")
            want = self.expected(batch, heads, rows + j - i, keys)
        yield from _difference(f"values of the {self.slot}", found.double(), want.double().expand(b, h, i, j))

    def check_value(self) -> Iterator[str | None]:
        if not dataclasses.is_dataclass(self.term):
            yield "the class has no fields"
        again = dataclasses.replace(self.term)
        text = repr(self.term)
        if repr(again) != text:
            yield f"a copy prints as {again!r}, not as {text}"
        if not self.term.tensors() and (again != self.term or hash(again) != hash(self.term)):
            yield "a copy with the same fields is not equal to the term"

    def check_parts(self) -> Iterator[str | None]:
        A = self.whole()
        lazy = weights(self.q, self.k, **self.terms())
        i, j = self.q.shape[2], self.k.shape[2]
        rows, cols = slice(i // 3, max(i // 3 + 1, i - 1)), slice(j // 4, max(j // 4 + 1, j - 2))
        yield from _difference(f"rows {rows.start} to {rows.stop - 1} alone", lazy[:, :, rows], A[:, :, rows])
        yield from _difference("a block of the matrix alone", lazy[:, -1, rows, cols], A[:, -1, rows, cols])
        blockwise = attend(self.q, self.k, self.v, **self.terms(), backend="tiled")
        yield from _difference("the output computed block by block", blockwise, A @ self.v)
        yield from _difference("received(), computed block by block,", lazy.received(), A.sum(-2))
        if self.slot == "normalize":
            yield from self._check_map(cols)
        if not self.term.tensors():
            yield from self._check_long()

    def _check_map(self, cols: slice) -> Iterator[str | None]:
        """Compare the map of some keys of each row with that of the whole rows."""
        scores = weights(self.q, self.k, backend="reference").scores.dense()
        block = Call.of(self.q, self.k, normalize=self.term).whole()
        A, statistic = self.term.weigh(scores, block)
        part = self.term.map(scores[..., cols], statistic, dataclasses.replace(block, cols=cols))
        yield from _difference(f"map() of keys {cols.start} to {cols.stop - 1}, by the statistic", part, A[..., cols])

    def _check_long(self) -> Iterator[str | None]:
        """Compare on a matrix that is cut into blocks: 200 queries and 210 keys."""
        generator = torch.Generator().manual_seed(2)
        heads, d = self.q.shape[1], self.q.shape[-1]
        batch = self.q.shape[0]
        q = torch.randn(batch, heads, 200, d, dtype=torch.float64, generator=generator)
        k = torch.randn(batch, heads, 210, self.k.shape[-1], dtype=torch.float64, generator=generator)
        v = torch.randn(batch, heads, 210, 3, dtype=torch.float64, generator=generator)
        one, other = (attend(q, k, v, **self.terms(), backend=name) for name in ("tiled", "reference"))
        yield from _difference("the output for 200 queries, block by block,", one, other)

    def check_tiles(self) -> Iterator[str | None]:
        if self.slot != "mask":
            yield None
            return
        call = Call.of(self.q, self.k, mask=self.term)
        for offset in (call.offset, 0, -3) if not self.term.tensors() else (call.offset,):
            block = dataclasses.replace(call.whole(), offset=offset)
            seen = self.term.over(block).expand(call.shape)
            for rows, cols in TILE_SIZES:
                some, full = self.term.tiles(Grid(block, rows, cols))
                grid = (*call.shape[:2], -(-call.shape[2] // rows), -(-call.shape[3] // cols))
                some, full = some.expand(grid), full.expand(grid)
                for r, c in product(range(grid[2]), range(grid[3])):
                    part = seen[..., r * rows : (r + 1) * rows, c * cols : (c + 1) * cols].flatten(2)
                    place = f"tile ({r}, {c}) of {rows} x {cols} entries"
                    if (part.any(-1) & ~some[..., r, c]).any():
                        yield f"{place} has a visible entry, and `some` is False"
                    if (~part.all(-1) & full[..., r, c]).any():
                        yield f"{place} has a hidden entry, and `full` is True"

    def check_grouped_heads(self) -> Iterator[str | None]:
        heads = self.q.shape[1]
        groups = next((n for n in range(heads // 2, 0, -1) if heads % n == 0), 0)
        if not groups:
            yield None
            return
        few, v = self.k[:, :groups], self.v[:, :groups]
        many = [x.repeat_interleave(heads // groups, 1) for x in (few, v)]
        want = self.call(attend, self.q, *many)
        for backend in ("reference", "tiled"):
            found = self.call(attend, self.q, few, v, backend=backend)
            yield from _difference(f"{heads} query heads on {groups} key heads", found, want)

    def check_one_query(self) -> Iterator[str | None]:
        i, j = self.q.shape[2], self.k.shape[2]
        if any(i in x.shape for x in self.term.tensors()):
            yield None  # the rows of a tensor belong to the queries of this call
            return
        A = self.whole()
        for row in (0, i // 2, i - 1):
            alone = weights(self.q[:, :, row : row + 1], self.k, **self.terms(), offset=j - i + row)[...]
            yield from _difference(f"query {row} alone", alone, A[:, :, row : row + 1])

    def check_gradients(self) -> Iterator[str | None]:
        if not self.smooth:
            yield None
            return
        leaves = self._leaves()
        names = ("q", "k", "v", *(f"tensor {n} of the term" for n in range(len(leaves) - 3)))
        gradients = self._gradients("reference", leaves)
        for n, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            yield from _difference(f"the slope of the output along {name}", *self._slopes(leaves, n, gradient), 1e-5)
        for name, found, want in zip(names, self._gradients("tiled", leaves), gradients, strict=True):
            yield from _difference(f"the gradient of {name}, block by block,", found, want)

    def _slopes(self, leaves: list[Tensor], n: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slope along a random direction of one input, by its gradient and by differences."""
        direction = torch.randn(leaves[n].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            ends = []
            for step in (STEP, -STEP):
                moved = [x + step * direction if m == n else x for m, x in enumerate(leaves)]
                out = self._output("reference")(*moved)
                ends.append((out * self._cotangent(out)).sum())
        return (gradient * direction).sum(), (ends[0] - ends[1]) / (2 * STEP)

    def check_equal_vectors(self) -> Iterator[str | None]:
        n = min(self.q.shape[2], self.k.shape[2])
        if self.q.shape[-1] != self.k.shape[-1]:
            yield None
            return
        equal = self.k.clone()
        equal[:, :, :n] = self.q[:, :, :n]
        for words, q, k in (("a query equals a key", self.q, equal), ("all are 0", self.q * 0, self.k * 0)):
            leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), self.v, *self._own_tensors())]
            grads = self._gradients("reference", leaves)
            if not all(x.isfinite().all() for x in grads):
                yield f"a gradient is NaN or infinite where {words}"

    def check_hidden_keys(self) -> Iterator[str | None]:
        j = self.k.shape[2]
        if j < 3:
            yield None
            return
        hide = Padding((j - 2,) * self.q.shape[0])
        A = self.whole(mask=hide)
        if (A[..., j - 2 :] != 0).any():
            yield f"hidden keys have weights up to {A[..., j - 2 :].abs().max():.3g}"
        clean = attend(self.q, self.k, self.v, **self.terms(mask=hide), backend="reference")
        k, v = self.k.clone(), self.v
        k[:, :, j - 2 :], v[:, :, j - 2 :] = 1e3, -1e3
        for backend in ("reference", "tiled"):
            found = attend(self.q, k, v, **self.terms(mask=hide), backend=backend)
            yield from _difference("the output after a change of hidden keys", found, clean)

    def check_empty_rows(self) -> Iterator[str | None]:
        terms = self.terms(mask=Causal())
        for backend in ("reference", "tiled"):
            leaves = self._leaves()
            q, k, v, *rest = leaves
            own = self.terms(mask=Causal(), term=self._with(rest)) if rest else terms
            out = attend(q, k, v, **own, offset=-1, backend=backend)
            if (out[:, :, 0] != 0).any():
                yield "a query before all keys has an output that is not 0"
            grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
            if not all(x.isfinite().all() for x in grads):
                yield "a gradient is NaN or infinite if a row sees no key"

    def check_precision(self) -> Iterator[str | None]:
        large = 30 * self.q  # large scores: exp overflows if nothing is subtracted
        term = self.term.map_tensors(lambda x: x.float() if x.is_floating_point() else x)
        for words, q in (("", self.q), (" of large scores", large)):
            found = weights(q.float(), self.k.float(), **self.terms(term=term), backend="reference").dense()
            want = weights(q, self.k, **self.terms(), backend="reference").dense()
            if not self.smooth and words:
                continue
            yield from _difference(f"float32 weights{words}", found.double(), want, 1e-3)

    def call(self, fn: Callable[..., Any], *tensors: Tensor, backend: str = "reference") -> Any:
        return fn(*tensors, **self.terms(), backend=backend)

    def _on_whole(self, term: Any) -> Tensor:
        return term.over(Call.of(self.q, self.k, **{self.slot: term}).whole())

    def _own_tensors(self) -> list[Tensor]:
        return [x.detach().double().clone() for x in self.term.tensors() if x.is_floating_point()]

    def _leaves(self) -> list[Tensor]:
        return [x.requires_grad_() for x in (self.q.clone(), self.k.clone(), self.v, *self._own_tensors())]

    def _with(self, tensors: list[Tensor]) -> Any:
        """Return the term with other floating tensors."""
        left = iter(tensors)
        return self.term.map_tensors(lambda x: next(left) if x.is_floating_point() else x)

    def _output(self, backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, *rest: attend(q, k, v, **self.terms(term=self._with(list(rest))), backend=backend)

    def _gradients(self, backend: str, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = self._output(backend)(*leaves)
        return torch.autograd.grad(out, leaves, self._cotangent(out), allow_unused=True, materialize_grads=True)

    @staticmethod
    def _cotangent(out: Tensor) -> Tensor:
        return torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))


def _difference(what: str, found: Tensor, want: Tensor, within: float = 1e-9) -> Iterator[str]:
    """Yield a sentence if two tensors differ."""
    if found.shape != want.shape:
        yield f"{what}: shape {tuple(found.shape)}, not {tuple(want.shape)}"
        return
    both = (found == want) | (found.isnan() & want.isnan())
    error = torch.where(both, 0.0, (found - want).abs()).nan_to_num(nan=torch.inf)
    worst = error.max().item() if error.numel() else 0.0
    if worst > within * max(1.0, want.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if want.numel() else 0.0):
        yield f"{what}: differs by up to {worst:.3g}"
