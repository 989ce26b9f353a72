"""check: run attention code on made-up tokens and report the bugs that its outputs and weights show."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...ops.terms.masks.mask_algebra import Mask
from .cache_steps import full_positions, has_cache, positions_of_pass, run_cached
from .call_adapter import CONTEXT_LENGTH, CallAdapter
from .findings import CHECKS, CheckReport, Finding
from .mask_forms import MaskReading, expected_meaning, read_mask
from .token_reach import (
    LEAK,
    MEETS,
    ReachPattern,
    TokenReach,
    change_of,
    gaps,
    guess_causal,
    is_regular,
    measure_context_reach,
    measure_reach,
    prefix_of,
    read_causal,
    texts_that_change,
)
from .weights_evidence import (
    Evidence,
    heads_to_heads,
    heads_without_their_token,
    look_back_only,
    observe,
    wrong_scale,
    wrong_softmax_axis,
)

USUAL_MASK = re.compile(
    r"((\w+_)?(attention|attn|padding|pad|src|tgt|causal|self|memory)_)?mask|keep|valid_lens?|(\w+_)?lengths",
    re.IGNORECASE,
)
OF_CONTEXT = re.compile(r"encoder_|cross_|memory_|context_", re.IGNORECASE)
OF_OTHERS = re.compile(r"pixel|image|video|audio|feature|head_mask", re.IGNORECASE)
LIBRARIES = ("torch", "transformers")  # what their layers do with rows that see nothing is known, and no news
FOLLOWS = "a finding above changes what this check compares; fix that first, then check again"


def check(
    module: nn.Module | Callable[..., Any],
    *inputs: Tensor,
    dim: int | None = None,
    heads: int | None = None,
    causal: bool | None = None,
    batch_first: bool | None = None,
    true_means: Literal["attend", "hide"] | None = None,
    ignore: Collection[str] = (),
) -> CheckReport:
    """Look for eleven common bugs in a layer, a model or a function that attends, by running a copy of it.

    Check a layer. The report is True if nothing was found:

    >>> import regard
    >>> from torch import nn
    >>> report = regard.check(nn.MultiheadAttention(32, 4, batch_first=True))
    >>> bool(report), report.findings
    (True, ())

    Check a function of queries, keys and values. This one forgets to move the heads before the tokens:

    >>> def attention(x):
    ...     q = k = v = x.view(*x.shape[:2], 4, 8)
    ...     return ((q @ k.mT / 8**0.5).softmax(-1) @ v).flatten(2)
    >>> report = regard.check(attention, dim=32, heads=4)
    >>> [finding.name for finding in report.findings]
    ['heads-to-heads']

    In a test, end with `regard.check(layer).raise_if_any()`. `print(report)` shows, for each finding, the test, its
    result and the likely cause; then the checks that passed, and those that could not run, with the reason. The checks:

    - "future-leak": a token changes an earlier output of a causal module.
    - "unmet-tokens": a token changes no output of another, and no mask, window or chunk explains it.
    - "heads-to-heads": the weights are h x h for each token, not n x n for each head.
    - "padding": a text has other results beside longer texts than alone.
    - "empty-rows": a row with nothing to attend to gives NaN, or the mean of all values.
    - "softmax-axis": weights sum to one over queries, heads or texts.
    - "scale": scores are scaled by another width than the head's.
    - "reversed-mask": True hides where it should let attend, or the other way round.
    - "positions": a causal mask one off the diagonal, or cached steps at other positions than the full pass.
    - "cache": reading token by token through the cache gives other results than one pass.
    - "dropout": two runs in evaluation differ.

    The module itself is not changed: a copy runs in evaluation, on made-up tokens, in float64 if it runs so. Trained
    and random weights both do. A check costs about 50 forward passes on texts of 7 tokens.

    Args:
        module: a layer called as layer(x) or layer(q, k, v), a model called with token ids, or a function.
        *inputs: an example of its first arguments, if the width or the kind of the input cannot be found.
        dim: width of the input vectors. Default: from the module's attributes or its first linear layer.
        heads: number of heads. Default: from the module's attributes; 4 for a function.
        causal: whether a token must not reach earlier outputs. Default: as the module's `causal` or `is_causal` says,
            else by what its tokens reach; `report.assumed` has the decision.
        batch_first: whether vectors are b n d. Default: as the module's `batch_first` says, else True.
        true_means: what True means in the mask arguments. Default: by their names: "hide" in key_padding_mask,
            "attend" in attention_mask and keep; under other names both pass.
        ignore: names of checks to leave out.
    """
    if unknown := [name for name in ignore if name not in CHECKS]:
        raise ValueError(f"ignore must hold names of checks, got {unknown[0]!r}; choose from {', '.join(CHECKS)}")
    if true_means not in (None, "attend", "hide"):
        raise ValueError(f"true_means must be 'attend' or 'hide', got {true_means!r}")
    adapter = CallAdapter(module, inputs, dim=dim, heads=heads, batch_first=batch_first)
    return _Check(adapter, causal, true_means).run(ignore)


class _Check:
    """The state of one check: the call and the results so far."""

    def __init__(self, adapter: CallAdapter, causal: bool | None, true_means: str | None) -> None:
        self.adapter, self.causal, self.true_means = adapter, causal, true_means
        self.may_have_prefix = causal is None
        self.n = adapter.lengths[0]
        self.found: dict[str, Finding] = {}
        self.passed: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.assumed: list[str] = []
        self.notes: list[str] = []

    def run(self, ignore: Collection[str]) -> CheckReport:
        """Run all checks, those of weights first: a wrong axis explains what tokens reach."""
        evidence = observe(self.adapter, self.adapter.tokens(self.n))
        self._check_dropout(evidence)
        reach = None if self.adapter.kind == "images" else measure_reach(self.adapter, self.n)
        if reach is None or not reach.meets.any() or reach.effects.shape[0] not in (1, self.n):
            self._check_weights(evidence, has_gaps=False, texts_meet=False)
            self._note_dropped_tokens(reach)
        else:
            has_gaps = bool(gaps(reach, causal=reach.is_square and not reach.leaks.triu(1).any()).any())
            self._check_weights(evidence, has_gaps=has_gaps, texts_meet=texts_that_change(self.adapter, self.n))
            self._check_reach(reach, evidence)
            readings = self._check_masks()
            self._check_padding(readings, reach)
            self._check_empty_rows(readings, evidence)
            self._check_cache(reach)
        for name in CHECKS:
            if name not in self.found and name not in self.passed and name not in self.skipped:
                self.skipped[name] = "no call of this module tests it"
        kept = [name for name in CHECKS if name not in ignore]
        return CheckReport(
            subject=self._subject(),
            findings=tuple(self.found[name] for name in kept if name in self.found),
            passed=tuple(name for name in kept if name in self.passed and name not in self.found),
            not_checked={name: self.skipped[name] for name in kept if name in self.skipped and name not in self.passed},
            assumed=tuple(self.assumed),
            notes=tuple(self.notes),
        )

    def _subject(self) -> str:
        adapter = self.adapter
        dtype = str(adapter.dtype).removeprefix("torch.")
        if adapter.kind == "images":
            return f"{adapter.name}, {adapter.batch} {'recordings' if adapter.signal == 'audio' else 'images'}, {dtype}"
        tokens = "token ids" if adapter.kind == "ids" else f"vectors {adapter.dim} wide"
        return f"{adapter.name}, {adapter.batch} texts of {self.n} tokens, {tokens}, {dtype}"

    def _find(self, name: str, tried: str, result: str, cause: str, layer: str = "") -> None:
        self.found.setdefault(name, Finding(name, tried, result, cause, layer))

    # Evaluation is deterministic.

    def _check_dropout(self, evidence: Evidence) -> None:
        adapter, x = self.adapter, self.adapter.tokens(self.n)
        first = adapter.run(x)
        adapter.random_state = 1
        second = adapter.run(x)
        adapter.random_state = 0
        difference = change_of(first, second).amax()
        if difference <= MEETS.get(adapter.dtype, 1e-6):
            self.passed.add("dropout")
            return
        dropped = ", ".join(dict.fromkeys(evidence.dropouts))
        cause = (
            f"{dropped} ran while training was False; pass training=self.training to F.dropout, and "
            "dropout_p=self.p if self.training else 0.0 to scaled_dot_product_attention"
            if dropped
            else "random numbers are drawn in the forward pass whatever self.training is"
        )
        result = f"the outputs differ by up to {float(difference):.1%} of the largest one"
        self._find("dropout", "ran the same input twice after eval(), with two random states", result, cause)

    # Weights

    def _check_weights(self, evidence: Evidence, *, has_gaps: bool, texts_meet: bool) -> None:
        adapter, n = self.adapter, self.n
        if adapter.kind == "images":
            n = max((A.shape[-1] for _, A in evidence.entries), default=n)
        results = {
            "softmax-axis": wrong_softmax_axis(adapter, evidence, n, texts_meet=texts_meet),
            "heads-to-heads": heads_to_heads(adapter, evidence, n, has_gaps=has_gaps),
            "scale": wrong_scale(adapter, evidence, n),
        }
        for name, finding in results.items():
            if finding is not None:
                self.found[name] = finding
            elif evidence.entries:
                self.passed.add(name)
            else:
                self.skipped[name] = f"no weights were recorded: {evidence.reason}"

    @property
    def _has_wrong_weights(self) -> bool:
        return "heads-to-heads" in self.found or "softmax-axis" in self.found

    # What reaches what

    def _note_dropped_tokens(self, reach: TokenReach | None) -> None:
        """Report outputs that are fewer than the tokens; leave the checks of single tokens out."""
        n, h = self.n, self.adapter.heads
        names = [name for name in CHECKS if name not in self.passed and name not in self.skipped]
        if reach is None:
            reason = f"the module reads {self.adapter.signal}, whose tokens cannot be changed one at a time"
        elif not reach.meets.any():
            nan = self.adapter.run(self.adapter.tokens(n)).isnan().all()
            reason = "every output is NaN" if nan else "no token changes any output; check a module with other weights"
        else:
            count = reach.effects.shape[0]
            reason = f"it returns {count} outputs for {n} tokens"
            if h is not None and h > 1 and count == n - n % h:
                self._find(
                    "unmet-tokens",
                    f"ran a text of {n} tokens with {h} heads",
                    f"{count} outputs came back: the last {n % h} tokens are dropped",
                    "heads are cut from the tokens, n // heads each, and the rest is lost; cut them from the features",
                )
        self.skipped |= dict.fromkeys((name for name in names if name not in self.found), reason)

    def _check_reach(self, reach: TokenReach, evidence: Evidence) -> None:
        adapter, n = self.adapter, self.n
        causal = self._is_causal(reach, evidence)
        followed = ("future-leak", "unmet-tokens", "empty-rows", "reversed-mask", "positions")
        if self._has_wrong_weights:
            self.skipped |= dict.fromkeys(followed, FOLLOWS)
            return
        tried = f"changed each of {n} tokens and compared all outputs"
        if causal:
            pattern = read_causal(reach)
            prefix = prefix_of(reach) if self.may_have_prefix else None
            if prefix is not None:
                pattern = ReachPattern(None, "")
                self.assumed.append(f"intended: a prefix of {prefix} tokens that every token sees")
            if pattern.bug in (None, "empty-rows"):
                self._check_diagonal(evidence)
            if pattern.bug is None or "positions" in self.found:
                self.passed.add("future-leak")
            else:
                self._find(pattern.bug, tried, pattern.result, CAUSES[pattern.bug])
        else:
            self.skipped["future-leak"] = "it is not causal"
            self.skipped["positions"] = "it is not causal, so there is no diagonal and no cache to compare with"
        nan = adapter.run(adapter.tokens(n)).isnan().any(-1)
        if nan.any() and not {"reversed-mask", "positions"} & self.found.keys():
            rows = nan.reshape(adapter.batch, -1).any(0).nonzero().flatten().tolist()
            self._find(
                "empty-rows",
                "ran texts without padding",
                f"the outputs at {rows} are NaN",
                "a mask of the module hides every key from these rows, and softmax over -inf alone is 0 / 0; keep the "
                "diagonal visible",
            )
        if "reversed-mask" not in self.found:
            self._check_gaps(reach, evidence, causal=causal)
        if adapter.context:
            self._check_context()

    def _is_causal(self, reach: TokenReach, evidence: Evidence) -> bool:
        if self.causal is not None:
            return self.causal and reach.is_square
        if not reach.is_square:
            self.causal = False
            return False
        declared = next(
            (
                value
                for module in self.adapter.module.modules()
                for name in ("causal", "is_causal")
                if type(value := getattr(module, name, None)) is bool
            ),
            None,
        )
        if declared and type(self.adapter.module).__module__.partition(".")[0] != "transformers":
            self.causal, reason = True, "causal, as its attribute says"
        else:
            self.causal, reason = guess_causal(reach)
            if not self.causal and look_back_only(evidence, self.n):
                self.causal, reason = True, "causal, since the weights of every layer look back only"
        self.assumed.append(reason)
        return self.causal

    def _check_diagonal(self, evidence: Evidence) -> None:
        """Find a causal mask that hides each token from itself."""
        if any(isinstance(getattr(module, "mask", None), Mask) for module in self.adapter.module.modules()):
            self.passed.add("positions")
            return
        matrices = [A.dense() for _, A in evidence.entries if A.shape[-2:] == (self.n, self.n)]
        if not matrices and evidence.entries:
            self.skipped["positions"] = "no weights between tokens were recorded"
            return
        for dense in matrices:
            below, diagonal = dense.tril(-1), dense.diagonal(dim1=-2, dim2=-1)
            if bool((diagonal[..., 1:] == 0).all()) and bool((below.sum(-1)[..., 1:] > 0).all()):
                self._find(
                    "positions",
                    f"recorded the weights for {self.n} tokens",
                    "each token attends to the tokens before it and never to itself; the first has nothing to see",
                    "the causal mask is one off: tril(-1) or triu(0) where tril(0) or triu(1) is meant",
                )
                return
        if matrices:
            self.passed.add("positions")
        elif "positions" not in self.skipped:
            self.skipped["positions"] = f"no weights were recorded: {evidence.reason}"

    def _check_gaps(self, reach: TokenReach, evidence: Evidence, *, causal: bool) -> None:
        missing = gaps(reach, causal=causal)
        keys = {A.shape[-1] for _, A in evidence.entries}
        if self.adapter.context and CONTEXT_LENGTH in keys and self.n not in keys:
            self.adapter.reads_context_only = True
            self.assumed.append(f"attention to {self.adapter.context[0]} only, so tokens need not meet each other")
            self.passed.add("unmet-tokens")
            return
        if (finding := heads_without_their_token(self.adapter, self.n)) is not None:
            self.found["unmet-tokens"] = finding
            return
        if not missing.any():
            self.passed.add("unmet-tokens")
            return
        long = None
        try:
            long = measure_reach(self.adapter, self.adapter.lengths[1])
        except Exception:  # the module may take one length only
            self.notes.append(f"texts of {self.adapter.lengths[1]} tokens could not be read")
        if (reason := is_regular(reach, long, causal=causal)) is None and self._is_hidden(missing, evidence):
            reason = "the weights of the layers are zero between tokens that do not meet"
        if reason is not None:
            self.assumed.append(f"intended: {reason}")
            self.passed.add("unmet-tokens")
            return
        i, j = missing.nonzero()[0].tolist()
        pairs = int(missing.numel() if not causal else missing.numel() // 2 + self.n // 2 + 1)
        alone = reach.is_square and not (reach.meets & ~torch.eye(self.n, dtype=torch.bool)).any()
        result = f"{int(missing.sum())} of {pairs} pairs never meet; for example token {j} never changes output {i}"
        self._find(
            "unmet-tokens",
            f"changed each of {self.n} tokens and compared all outputs",
            "no token changes the output of another" if alone else result,
            "tokens were mixed up with heads or texts: view(b, h, n, d) in place of view(b, n, h, d).transpose(1, 2), "
            "heads cut from tokens, or attention within each token alone",
        )

    def _is_hidden(self, missing: Tensor, evidence: Evidence) -> bool:
        """Return whether the recorded weights are zero wherever tokens do not meet."""
        matrices = [A.dense().flatten(0, 1) for _, A in evidence.entries if A.shape[-2:] == missing.shape]
        if not matrices:
            return False
        return bool((torch.cat(matrices).amax(0)[missing.to(matrices[0].device)] == 0).all())

    def _check_context(self) -> None:
        reach = measure_context_reach(self.adapter, self.n)
        if not reach.meets.any(0).all() and "unmet-tokens" not in self.found:
            lost = (~reach.meets.any(0)).nonzero().flatten().tolist()
            self._find(
                "unmet-tokens",
                f"changed each of {reach.n} tokens of the other sequence, {self.adapter.context[0]}",
                f"tokens {lost} change no output",
                "the other sequence is cut or masked before the queries see it",
            )

    # Masks

    def _check_masks(self) -> list[MaskReading]:
        """Find out how each mask argument is read; return the forms that hide tokens."""
        adapter = self.adapter
        names = [name for name in adapter.masks if USUAL_MASK.fullmatch(name) and not OF_OTHERS.search(name)]
        if not adapter.context:  # masks of another sequence, which is not passed
            names = [name for name in names if not OF_CONTEXT.match(name)]
        if self._has_wrong_weights or "unmet-tokens" in self.found:
            self.skipped |= dict.fromkeys(("padding", "empty-rows", "reversed-mask"), FOLLOWS)
            return []
        working: list[MaskReading] = []
        for name in names:
            readings = read_mask(adapter, name, n=self.n)
            honored = [reading for reading in readings if reading.means is not None]
            working += honored
            expected = self.true_means or expected_meaning(name)
            polar = next((reading for reading in honored if reading.form.has_polarity), None)
            if polar is not None and expected is not None and polar.means != expected:
                self._find(
                    "reversed-mask",
                    f"passed {name}, {polar.form.name}, with one token hidden, and changed that token and others",
                    f"True means {polar.means} here, and the tokens that should be seen change nothing",
                    f"in {name} True means {expected} everywhere else; write ~{name} where the module passes it on "
                    "(scaled_dot_product_attention: True = may attend; nn.MultiheadAttention: True = hidden)",
                )
            elif polar is not None and expected is None:
                self.assumed.append(f"{name}: True means {polar.means}, found by trying; true_means= says otherwise")
            # What hides tokens from an encoder need not hide them from the decoder that reads its output.
            if readings and not honored and not readings[0].form.on_context:
                forms = ", ".join(reading.form.name for reading in readings[:3])
                self._find(
                    "padding",
                    f"passed {name} ({forms}) with one token hidden, and changed that token",
                    "other outputs change with it, so the mask does not hide it from them",
                    f"{name} is not passed on to the attention, or is applied after the softmax or to another axis, or "
                    "another part of the module, such as a convolution, reads hidden tokens",
                )
        if any(reading.form.has_polarity for reading in working) or "reversed-mask" in self.found or self.causal:
            self.passed.add("reversed-mask")
        else:
            self.skipped["reversed-mask"] = "it has no mask of its own, and no boolean mask as an argument"
        return working

    def _check_padding(self, readings: list[MaskReading], reach: TokenReach) -> None:
        adapter = self.adapter
        if "padding" in self.found or "padding" in self.skipped:
            return
        if "reversed-mask" in self.found or "dropout" in self.found:
            self.skipped["padding"] = FOLLOWS
            return
        reading = next((each for each in readings if each.form.is_per_text), readings[0] if readings else None)
        if reading is None:
            if self._check_padding_id(reach):
                return
            self.skipped["padding"] = "forward has no mask argument that hides tokens"
            return
        on_context = reading.form.on_context
        context = adapter.context_tokens(adapter.batch) if adapter.context else None
        x = adapter.tokens(self.n)
        full = context.shape[1] if on_context and context is not None else self.n
        spread = range(adapter.batch) if reading.form.is_per_text else [1] * adapter.batch
        lengths = torch.tensor([full - 2 * r for r in spread], device=adapter.device).clamp(min=2)
        keep = torch.arange(full, device=adapter.device) < lengths[:, None]
        together = adapter.run(x, context, **reading(keep))
        for r, length in enumerate(lengths.tolist()):
            own, own_context = x[r : r + 1], None if context is None else context[r : r + 1]
            if on_context and own_context is not None:
                own_context = own_context[:, :length]
            else:
                own = own[:, :length]
            alone = adapter.run(own, own_context)
            beside = together[r : r + 1, : alone.shape[1]] if together.ndim > 2 else together[r : r + 1]
            if alone.shape != beside.shape:
                self.skipped["padding"] = f"it returns {tuple(alone.shape)} for a text alone"
                return
            if bool(alone.isnan().any()):
                continue
            if (change := change_of(alone, beside).amax()) > 10 * LEAK.get(adapter.dtype, 1e-2):
                self._find(
                    "padding",
                    f"ran texts of {', '.join(map(str, lengths.tolist()))} tokens together with {reading.form.argument}"
                    f", {reading.form.name}, and each alone",
                    f"text {r} differs by {float(change):.1%} of its largest output",
                    "padding takes part after all: in a mean over tokens, in a norm, or because the mask of another "
                    "text is used, as when it is repeated in the order (h, b) for scores in the order (b, h)",
                )
                return
        self.passed.add("padding")

    def _check_padding_id(self, reach: TokenReach) -> bool:
        """Pad with the padding id of an embedding, for models that find their padding themselves."""
        adapter = self.adapter
        pads = [m.padding_idx for m in adapter.module.modules() if isinstance(m, nn.Embedding)]
        pad = next((each for each in pads if each is not None), None)
        if adapter.kind != "ids" or pad is None or (reach.is_square and self.causal) or adapter.context:
            return False
        x = adapter.tokens(self.n)[:1]
        padded = torch.cat([x, torch.full_like(x[:, :3], pad)], 1)
        alone, beside = adapter.run(x), adapter.run(padded)
        beside = beside[:, : self.n] if beside.ndim > 2 else beside
        if (change := change_of(alone, beside).amax()) > 10 * LEAK.get(adapter.dtype, 1e-2):
            self._find(
                "padding",
                f"ran a text alone, and with three tokens of padding (id {pad}, the padding_idx of its embedding)",
                f"its outputs differ by {float(change):.1%} of the largest one",
                "padding is embedded as zeros and attended to all the same; hide its keys with a mask made of the ids",
            )
        else:
            self.passed.add("padding")
        return True

    def _check_empty_rows(self, readings: list[MaskReading], evidence: Evidence) -> None:
        adapter = self.adapter
        if "empty-rows" in self.found or "empty-rows" in self.skipped:
            return
        reading = next((each for each in readings if not each.form.on_context), None)
        if reading is None or "reversed-mask" in self.found:
            if self.causal:
                self.passed.add("empty-rows")
            else:
                self.skipped["empty-rows"] = "no mask argument can hide all keys of a row"
            return
        x = adapter.tokens(self.n)
        keep = torch.ones(adapter.batch, self.n, dtype=torch.bool, device=adapter.device)
        keep[1 if reading.form.is_per_text else slice(None)] = False
        try:
            out = adapter.run(x, **reading(keep))
            other = adapter.run(adapter.change(x, 0, text=slice(1, 2)), **reading(keep))
        except Exception as error:  # a module may refuse such rows
            self.notes.append(f"a text whose keys are all hidden is refused: {type(error).__name__}")
            self.passed.add("empty-rows")
            return
        rows = slice(1, None) if out.ndim > 2 else slice(None)
        change = change_of(out[1:2, rows], other[1:2, rows]).amax()
        if bool(out[1].isnan().any()):
            self.notes.append("a text whose keys are all hidden gives NaN, as nn.MultiheadAttention does")
            self.passed.add("empty-rows")
            return
        if change > LEAK.get(adapter.dtype, 1e-2):
            result = "its outputs change with tokens that are hidden: it gets the mean of all values"
            cause = (
                "hidden scores are filled with -1e9 or another finite number, so a row of nothing else is uniform; "
                "fill with -inf and set rows that see nothing to zero"
            )
        else:
            self.passed.add("empty-rows")
            return
        owner = self._library_of(evidence)
        if owner is not None:
            self.notes.append(f"a text whose keys are all hidden gets the mean of all values, as {owner} computes it")
            self.passed.add("empty-rows")
            return
        self._find("empty-rows", f"hid all keys of one text by {reading.form.argument}", result, cause)

    def _library_of(self, evidence: Evidence) -> str | None:
        """Return the class of the first layer that attends if it is a library's, whose empty rows are known."""
        modules = dict(self.adapter.module.named_modules())
        name = evidence.entries[0][0] if evidence.entries else ""
        kind = type(modules.get("" if name == "(model)" else name, self.adapter.module))
        return kind.__name__ if kind.__module__.partition(".")[0] in LIBRARIES else None

    # Cache

    def _check_cache(self, reach: TokenReach) -> None:
        adapter, n = self.adapter, self.n
        if not has_cache(adapter):
            self.skipped["cache"] = "forward has no cache argument"
            return
        if not (self.causal and reach.is_square):
            self.skipped["cache"] = "it is not causal, so steps cannot equal one pass"
            return
        if {"future-leak", "dropout"} & self.found.keys() or self._has_wrong_weights:
            self.skipped["cache"] = FOLLOWS
            return
        x = adapter.tokens(n)
        cached = run_cached(adapter, x, [n - 3, 1, 1, 1])
        if isinstance(cached, str):
            self.skipped["cache"] = cached
            return
        full = adapter.run(x)
        if full.shape != cached.outputs.shape:
            self.skipped["cache"] = f"cached steps return {tuple(cached.outputs.shape)}, one pass {tuple(full.shape)}"
            return
        change = change_of(full, cached.outputs)
        if bool((change <= 10 * LEAK.get(adapter.dtype, 1e-2)).all()):
            self.passed.add("cache")
            return
        row = int((change > 10 * LEAK.get(adapter.dtype, 1e-2)).nonzero()[0])
        whole, steps = positions_of_pass(full_positions(adapter, x)), positions_of_pass(cached.positions)
        for name in whole:
            if name in steps and steps[name] != whole[name]:
                self._find(
                    "positions",
                    f"read {n - 3} tokens at once and 3 more one by one through the cache, and recorded the positions",
                    f"{name} looks up positions {steps[name]} where one pass looks up {whole[name]}",
                    "the position of a cached step is not the length of the cache; write "
                    "torch.arange(past, past + n) with past = number of cached tokens",
                )
                self.skipped["cache"] = FOLLOWS
                return
        self._find(
            "cache",
            f"read {n - 3} tokens at once and 3 more one by one through the cache, and all {n} in one pass",
            f"output {row} is the first that differs, by {float(change[row]):.1%} of the largest one",
            "keys and values are joined in the wrong order or along another dim, positions start again at 0, or "
            "is_causal=True aligns the mask to the first key when there are fewer queries than keys",
        )


CAUSES = {
    "future-leak": "the mask is missing, transposed or not applied in some heads, or tokens and heads were mixed up by "
    "view() without transpose()",
    "reversed-mask": "the causal mask hides what it should show; masked_fill(mask, -inf) takes True = hidden, "
    "scaled_dot_product_attention takes True = may attend",
    "positions": "the causal mask is one off: tril(1) or triu(2) where tril(0) or triu(1) is meant",
    "empty-rows": "the first row has nothing to see, and a softmax over equal, finite fillers is uniform over all "
    "tokens, the hidden ones too; keep the diagonal visible, or fill with -inf and set such rows to zero",
}
