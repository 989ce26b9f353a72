"""Tape: the attention weights of a model's layers, to index, measure, annotate, save and view.

What it holds
    An entry for each (layer, call): lazy `Weights` (queries, keys and terms, never the matrix), or `Reduced` measures
    after `capture(keep=[...])`, the `EdgeWeights` of a graph, or the `SampledWeights` of deformable attention. Beside
    the entries: `Annotations` (tokens, groups, images), `Extras` (values, output projection, gradient), computed
    summaries, `facts` such as the model's class, and `unseen`, the layers that could not be recorded.

How it flows
    `capture` builds a tape on its `Recorder`. Each `__getitem__` asks the layer's `Record` for the `Weights` of the
    rows recorded so far. `save` writes everything through `archive`; `load` and `open` read it back.

Lifetimes
    The entries of a captured tape belong to its recorder and grow while the model runs; a tape that was loaded or
    selected owns its entries. `Weights` are cached until their record gains rows. A tensor that the model changes in
    place after it attended raises when it is read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import regard

from ...ops.weights import Summary, Weights
from ..capture_warning import CaptureWarning
from ..layer_names import list_names, matches, own_name, shown_calls, shown_name
from ..real_tokens import RealTokens, SharedRealTokens, says_self, with_own_queries
from ..recording.record import Extras, Record
from ..recording.recorder import Key, Recorder
from ..recording.reduced import Reduced
from ..recording.sampled_weights import SparseWeights
from ..recording.unseen import Unseen
from . import archive
from .annotations import (
    Annotations,
    GroupsByRow,
    Labels,
    Shape,
    Tokens,
    TokensByLayer,
    no_layer_matches,
    unmatched_tokens,
)
from .comparison import AlignedAxis, By, ComparedLayer, align_axes, check_by, check_comparable, compare, compare_layers
from .groups import Groups, group_mismatch, mass_between
from .head_effects import Effects, checked_effects, effect_mismatch, effects_of_heads
from .hidden_keys import KINDS, padding, punctuation, without_keys
from .image_patches import Image, PatchedImage, image_mismatch
from .overview import SINK_SHARE, Overview, concatenate_heads, summary_of_heads, summary_over, table
from .predictions import Predictions, TokenNames, prediction_mismatch
from .stacked_layers import Layer, split_summary, stack, stacks

CHUNK_ENTRIES = 2**24  # matrix elements that `summarizing` measures at a time on the CPU


class TapeValues(ValuesView[Weights | Reduced | SparseWeights]):
    """The weights of a tape in order, with the tape, so that a function of the stack can warn of unseen layers."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.tape = tape


class Tape(Mapping[Key, Weights | Reduced | SparseWeights]):
    """Ordered map from (layer, call) to the attention weights of that layer.

    >>> # Record every attention of a model, with the tokens of the text:
    >>> from regard.lens import Tape, capture, words
    >>> from regard.nn import Attention
    >>> model = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4))
    >>> tokens = ["atten", "##tion", "is", "a", "map"]
    >>> with torch.no_grad(), capture(model, tokens) as tape:
    ...     out = model(torch.randn(1, 5, 16))
    >>> tape
    Tape(2 layers)
    0  Weights(1 x 4 x 5 x 5)
    1  Weights(1 x 4 x 5 x 5)

    >>> # Index by layer name, by (name, call), or by number in the order of the calls:
    >>> tape["0"] is tape["0", 0] is tape[0]
    True

    >>> # Measure a layer without storing its matrix:
    >>> tape["0"].entropy().shape  # b h i
    torch.Size([1, 4, 5])

    >>> # Follow attention through all layers: `values()` are the stack, the bottom layer first:
    >>> from regard.lens import rollout
    >>> rollout(tape.values(), token=-1).shape
    torch.Size([1, 5])

    >>> # Select layers by a name pattern, as file names are matched:
    >>> tape.select("1*").layers
    ['1']

    >>> # Sum attention over groups of tokens, here the pieces of words:
    >>> tape.group("words", words(tokens))
    >>> tape.mass("0", "words").shape  # b h query-words key-words
    torch.Size([1, 4, 4, 4])

    >>> # Save to one file, and load it again:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "tape.safetensors"
    >>> tape.save(path)
    >>> Tape.load(path).tokens_of("0")[0][:2]
    ['atten', '##tion']

    `tape.view()` opens the zoomable map in a browser, and `tape.table()` is one row of numbers for each head.
    """

    def __init__(
        self,
        entries: Mapping[Key, Weights | Reduced | SparseWeights],
        *,
        extras: Mapping[Key, Extras] | None = None,
        tokens: Sequence[Labels] = (),
        groups: Mapping[str, Sequence[Labels]] | None = None,
        pictures: Sequence[Labels] = (),
        facts: Mapping[str, str] | None = None,
        summaries: Mapping[Key, tuple[Summary, Overview]] | None = None,
        unseen: Sequence[Unseen] = (),
        changed: Mapping[str, str] | None = None,
        real: Mapping[Key, RealTokens] | None = None,
        guessed: Mapping[str, str] | None = None,
        effects: Effects | None = None,
        predictions: Sequence[tuple[str, Predictions]] = (),
    ) -> None:
        self._stored: Mapping[Key, Weights | Reduced | SparseWeights] = dict(entries)
        self._extras = dict(extras or {})
        self._annotations = Annotations(tokens, groups, pictures)
        self.facts = dict(facts or {})
        self._changed = dict(changed or {})
        self._summaries = {key: summary for key, (summary, _) in (summaries or {}).items()}
        self._overviews = {key: overview for key, (_, overview) in (summaries or {}).items()}
        self._unseen = list(unseen)
        self._real = dict(real or {})
        self._real_by_mask: dict[Key, RealTokens] = {}
        self._padding = -1, False  # entries then, and whether a mask shows padding
        self._real_of_mask = SharedRealTokens()
        self._real_among: dict[Key, tuple[int, RealTokens, RealTokens]] = {}  # entries then, by its mask, among them
        self._guessed = dict(guessed or {})
        self._effects = dict(effects or {})
        self._predictions = list(predictions)
        self._recorder: Recorder | None = None
        self._cache: dict[Key, tuple[int, Weights]] = {}  # rows recorded when the weights were built, and the weights

    @classmethod
    def live(cls, recorder: Recorder, tokens: Tokens | TokensByLayer | None, model: nn.Module) -> Self:
        """Build the tape of a capture that is running."""
        kind = type(model)
        tape = cls({}, facts={"model": f"{kind.__module__}.{kind.__qualname__}", "torch": str(torch.__version__)})
        tape._recorder = recorder
        if tokens is not None:
            tape.tokens = tokens
        return tape

    def __getitem__(self, key: str | int | Key) -> Weights | Reduced | SparseWeights:
        key = self._resolve_key(key)
        entry = self._entries[key]
        if not isinstance(entry, Record):
            return entry
        assert self._recorder is not None
        rows, A = self._cache.get(key, (0, None))
        if A is None or rows != entry.rows:
            A = self._with_statistic(key, entry.weights(self._recorder.memo))
            self._replace(key, A)
        return A

    def __contains__(self, key: object) -> bool:
        with suppress(LookupError):
            return self._resolve_key(key) in self._entries  # type: ignore[arg-type]
        return False

    def get(self, key: str | int | Key, default: Any = None) -> Any:
        """Return the weights of a layer, or the default if it is not on the tape."""
        return self[key] if self.__contains__(key) else default

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shown, layers = shown_calls(self), len(self.layers)
        width = max(map(len, shown), default=0)
        counts = f"{layers} layer{'s' * (layers != 1)}" + (f", {len(self)} calls" if len(self) > layers else "")
        share = f"{self.coverage}: " if self.is_partial else ""
        counts += f", {share}see tape.unseen" if self.unseen else ""
        lines = (f"{name:{width}}  {A!r}" for name, A in zip(shown, self.values(), strict=True))
        changed = [f"changed after the softmax: {shown_name(layer)} ({how})" for layer, how in self.changed.items()]
        guesses = (f"{shown_name(layer)}: batch and heads guessed, {why}" for layer, why in self.guessed.items())
        return "\n".join([f"Tape({counts})", *lines, *changed, *guesses])

    @property
    def layers(self) -> list[str]:
        """The names of the layers, each once."""
        if self._recorder is not None:
            return self._recorder.recorded_layers
        return list(dict.fromkeys(name for name, _ in self))

    @property
    def unseen(self) -> list[Unseen]:
        """Layers that are not on this tape, as (layer, kind, reason) in the order of the model.

        Listed are the layers that mix positions and could not be recorded, and softmaxes that are no attention, such
        as those of linear attention, of soft-argmax, and of the gates of experts. The list is empty if every layer that
        `capture` knows of was recorded. Else measures over all layers, such as `rollout`, speak of the recorded ones.
        """
        return list(self._unseen) if self._recorder is None else self._recorder.unseen

    @property
    def changed(self) -> dict[str, str]:
        """How the model changed the weights after the softmax, for each layer that does: "scaled", "heads mixed", ...

        For such layers the tape holds the final weights, which multiply the values. Their rows need not sum to 1.
        """
        return dict(self._changed if self._recorder is None else self._recorder.changed)

    @property
    def coverage(self) -> str:
        """The share of the mixing layers that are on the tape, as text: "3 of 4 mixing layers".

        Gates of experts in `unseen` do not count: they mix no positions.
        """
        recorded = set(self.layers)
        mixers = recorded | {each.layer for each in self.unseen if each.mixes_positions}
        return f"{len(recorded)} of {len(mixers)} mixing layers"

    @property
    def is_partial(self) -> bool:
        """Whether `unseen` lists a layer that mixes positions."""
        return any(each.mixes_positions for each in self.unseen)

    def values(self) -> TapeValues:
        """Return the weights in order, as the stack that `rollout` and its kin take; they warn of unseen layers."""
        return TapeValues(self)

    def warn_partial(self, what: str, *, stacklevel: int = 3) -> None:
        """Warn that a result speaks of a part of the mixing layers, if the tape is partial."""
        if self.is_partial:
            message = f"{what} speaks of {self.coverage}; tape.unseen lists those that were not recorded"
            warnings.warn(message, CaptureWarning, stacklevel=stacklevel)

    @property
    def guessed(self) -> dict[str, str]:
        """The reason for each layer whose split into batch and heads is a guess.

        Pass `capture(..., layout="(b h) i j")`, or a dict by layer pattern, to say what they are.
        """
        return dict(self._guessed if self._recorder is None else self._recorder.guessed)

    def calls(self, layer: str) -> list[Weights | Reduced | SparseWeights]:
        """Return the weights of every call of a layer, in order."""
        return [self[key] for key in self if key[0] == own_name(layer)]

    def select(self, pattern: str | Sequence[int], *, heads: Sequence[int] | None = None) -> Tape:
        """Return the tape of the layers whose names match, as file names do: `tape.select("decoder.*.self_attn")`.

        Layers may also be given by number, `tape.select([0, 5])`. With `heads` the tape holds these heads of each
        layer, without its values, projections and gradients; a layer that has none of them is left out.
        """
        if isinstance(pattern, str):
            chosen = [key for key in self if matches(key[0], pattern)]
        else:
            chosen = sorted({self._resolve_key(number) for number in pattern}, key=list(self).index)
        if not chosen:
            raise KeyError(f"no layer matches {pattern!r}; there are {list_names(self.layers)}")

        def is_chosen(layer: str) -> bool:
            return matches(layer, pattern) if isinstance(pattern, str) else layer in {key[0] for key in chosen}

        tape = Tape(
            {key: self[key] for key in chosen},
            extras={key: self.extras(key) for key in chosen},
            tokens=self._annotations.tokens,
            groups=self._annotations.groups,
            pictures=self._annotations.images,
            facts=self.facts,
            unseen=[each for each in self.unseen if is_chosen(each.layer)],
            changed={layer: how for layer, how in self.changed.items() if is_chosen(layer)},
            real=self._real if len(chosen) == len(self) else self._real_by_other_layers(chosen),
            guessed={layer: why for layer, why in self.guessed.items() if is_chosen(layer)},
            effects=self._effects,
            predictions=self._predictions,
        )
        # Overviews are left lazy: a summary may not have one yet.
        tape._summaries = {key: x for key, x in self._summaries.items() if key in chosen}
        tape._overviews = {key: x for key, x in self._overviews.items() if key in chosen}
        return tape if heads is None else tape._with_heads(heads)

    def _with_heads(self, heads: Sequence[int]) -> Tape:
        """Keep these heads of each layer; what a summary knows of them stays known."""
        most = max(self[key].shape[-3] for key in self)
        if not heads or not all(0 <= head < most for head in heads):
            raise ValueError(f"heads must be numbers from 0 to {most - 1}, got {list(heads)}")
        known = {key: self._summaries[key] for key in self if self.summarized(key)}
        kept = {key: [head for head in heads if head < self[key].shape[-3]] for key in self}
        entries = {
            key: _with_matrix("select(heads=...)", A).select(heads=kept[key]) for key, A in self.items() if kept[key]
        }
        tape = self.select("*")
        tape._stored, tape._extras, tape._overviews = entries, {}, {}
        tape._summaries = {key: summary_of_heads(known[key], kept[key]) for key in entries if key in known}
        return tape

    def without(self, *keys: str | int) -> Tape:
        """Return the tape with some keys hidden in every layer, and the rest of each row renormalized to sum to 1.

        Keys are numbers, or names of kinds: "sinks" are those that receive more than 0.3 of the mean query's attention
        in a head of the layer (see `sinks`), "padding" and "punctuation" go by the mask and the tokens. A row that sees
        no other key becomes zeros.

        >>> from regard import Causal, weights
        >>> q, k = torch.ones(2, 1, 1, 6, 4)
        >>> k[..., 0, :] = 4  # every query attends to the first token
        >>> tape = Tape({("layer", 0): weights(q, k, mask=Causal())})
        >>> tape.without("sinks")["layer"][0, 0, -1]
        tensor([0.0000, 0.2000, 0.2000, 0.2000, 0.2000, 0.2000])

        Each weight is divided by 1 less the weight of the hidden keys in its row. Figures, tables and pages of the
        result are those of the rest: `tape.without("sinks").page()`.
        """
        if not keys:
            raise ValueError(f"name the keys to hide: {', '.join(map(repr, KINDS))}, or their numbers")
        tape = self.select("*")
        tape._stored = {
            key: without_keys(_with_matrix("without()", A), self.hidden_keys(key, *keys)) for key, A in self.items()
        }
        tape._real = {key: self._real_tokens(key) for key in self}
        tape._summaries, tape._overviews = {}, {}
        return tape

    def hidden_keys(self, key: str | int | Key, *keys: str | int) -> Tensor:
        """Return `b j`: True for each key of a layer that `without` hides."""
        key = self._resolve_key(key)
        (b, _, n), real = self._shape_of(key), self._real_tokens(key)
        hidden = torch.zeros(b, n, dtype=torch.bool)
        for what in keys:
            if what == "sinks":
                counts = real.queries.sum(-1).clamp(min=1)[:, None, None]
                received = self.summary(key).received.flatten(0, -3)
                hidden |= (received / counts.to(received.device) > SINK_SHARE).any(1).cpu()
            elif what == "padding":
                hidden |= padding([self.tokens_of(key, batch=row)[1] for row in range(b)], real.keys)
            elif what == "punctuation":
                hidden |= punctuation([self.tokens_of(key, batch=row)[1] for row in range(b)], n)
            elif isinstance(what, Integral) and not isinstance(what, bool):
                if not 0 <= what < n:
                    raise IndexError(f"keys of {shown_name(key[0])!r} must be from 0 to {n - 1}, got {what}")
                hidden[:, int(what)] = True
            else:
                raise ValueError(f"keys must be {', '.join(map(repr, KINDS))} or numbers, got {what!r}")
        return hidden

    def extras(self, key: str | int | Key) -> Extras:
        """Return the values, output projection and gradient of a layer; None for each that was not kept."""
        key = self._resolve_key(key)
        entry = self._entries[key]
        return entry.extras() if isinstance(entry, Record) else self._extras.get(key, Extras())

    def real_queries(self, key: str | int | Key) -> Tensor:
        """Return `b i`: True for each query of a layer that is a real token, False for padding.

        `A.entropy()[batch, head, tape.real_queries(layer)[batch]]` are the entropies of a text alone. Measures of the
        tape (`table`, `summary`, `overview`, `mass`, the viewer) count real queries only. Padding is read from the mask
        of the layer: a key that no query of its batch row may see is padding, and in self-attention so is its query.
        The queries of a cross-attention are those of the self-attention in its block, if that is on the tape; else all
        are real. A padding query that the mask hides from every key by finite numbers spreads evenly over the keys in
        the model, and has weights 0 here; neither counts.
        """
        return self._real_tokens(self._resolve_key(key)).queries

    def real_keys(self, key: str | int | Key) -> Tensor:
        """Return `b j`: True for each key of a layer that is a real token, False for padding."""
        return self._real_tokens(self._resolve_key(key)).keys

    @property
    def tokens(self) -> list[Labels]:
        """The tokens of the layers, as `Labels`; assign the tokens of one text, a list per batch row, or a map.

        The map goes from layer patterns to tokens, or to a pair if queries and keys come from different texts:
        `tape.tokens = {"encoder.*": source, "decoder.*": target, "*.cross": (target, source)}`. The last pattern that
        matches a layer applies to it.
        """
        return list(self._annotations.tokens)

    @tokens.setter
    def tokens(self, tokens: Tokens | TokensByLayer | None) -> None:
        self._annotations.set_tokens(tokens)
        if self._recorder is None or not self._recorder.is_open:
            self._warn_unmatched_tokens(stacklevel=3)

    def tokens_of(self, key: str | int | Key, *, batch: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """Return the tokens of a layer's queries and keys in one batch row; None for an axis of another length."""
        key = self._resolve_key(key)
        return self._annotations.tokens_of(key[0], self._real_tokens(key), batch)

    def group(self, name: str, queries: GroupsByRow, keys: GroupsByRow | None = None, *, layers: str = "*") -> None:
        """Give the layers that match groups of tokens: `tape.group("words", words(tokens))`.

        For a batch of different texts pass groups of each batch row, `[words(tokens) for tokens in texts]`, of all its
        tokens or of the real ones; or their numbers, a tensor `b n`.
        """
        labels = self._annotations.add_groups(name, queries, keys, layers)
        self._warn_if_mismatched(
            "groups", layers, lambda shapes: group_mismatch(name, labels.queries, labels.keys, shapes)
        )
        for key in self:
            if matches(key[0], layers) and self._warn_of_one_grouping(key, name):
                break

    def group_names(self, key: str | int | Key) -> list[str]:
        """Return the names of the groups that a layer has."""
        return self._annotations.group_names(self._resolve_key(key)[0])

    def groups_of(self, key: str | int | Key, name: str, *, batch: int = 0) -> tuple[Groups, Groups]:
        """Return the groups of a layer's queries and of its keys in one batch row."""
        key = self._resolve_key(key)
        queries, keys = self._annotations.groups_of(key[0], name, self._real_tokens(key))
        return queries[batch], keys[batch]

    def mass(self, key: str | int | Key, name: str) -> Tensor:
        """Return attention between groups, summed over keys, averaged over queries: b h query-groups key-groups.

        Queries that are padding do not count. If each batch row has its own groups, rows with fewer end with zeros.
        """
        key = self._resolve_key(key)
        real = self._real_tokens(key)
        queries, keys = self._annotations.groups_of(key[0], name, real)
        A = _with_matrix("mass()", self[key])
        self._warn_of_one_grouping(key, name)
        return mass_between(A, queries, keys, real.queries, real.keys)

    def picture(
        self, images: Image | Sequence[Image], *, patches: tuple[int, int], special: int = 1, layers: str = "*"
    ) -> None:
        """Attach the image (or one image per batch row) that was cut into (rows, columns) of patches.

        `special` tokens stand before the patches. In the layers that match, an axis with this number of tokens is shown
        on the image: `tape.picture(pixels, patches=(14, 14))`.
        """
        patched = self._annotations.add_images(images, patches, special, layers)
        self._warn_if_mismatched("pictures", layers, lambda shapes: image_mismatch(patched, shapes))

    def pictures_of(self, key: str | int | Key, *, batch: int = 0) -> tuple[PatchedImage | None, PatchedImage | None]:
        """Return the images whose patches a layer's queries and keys are; None for an axis without one."""
        key = self._resolve_key(key)
        return self._annotations.images_of(key[0], self._shape_of(key), batch)

    def predict(
        self, logits: Tensor, ids: Tensor, names: TokenNames | None = None, *, top: int = 5, layers: str = "*"
    ) -> None:
        """Keep what a language model expected at each position: the viewer shows it beside the text.

        `logits`, `b n vocabulary`, at position t are those for the token at t + 1 of `ids`, `b n`. `names` turns ids
        into tokens: a tokenizer of transformers, a function of a list of ids, or the vocabulary as a list. The layers
        that match `layers` and have n queries get the predictions.

        >>> from regard.lens import capture
        >>> from regard.models import Gpt, GptConfig
        >>> model = Gpt(GptConfig(vocabulary=10, dim=16, depth=1, heads=2, length=8)).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> with torch.no_grad(), capture(model, list("abcd")) as tape:
        ...     logits = model(ids)
        >>> tape.predict(logits, ids, list("_abcdefghi"))
        >>> tape.predictions_of(0).log_probability.shape  # one position more: that of the token which is not known
        torch.Size([1, 5])
        """
        predictions = Predictions.of(logits, ids, names, top=top)
        self._predictions.append((layers, predictions))
        self._warn_if_mismatched("predictions", layers, lambda shapes: prediction_mismatch(predictions, shapes))

    def predictions_of(self, key: str | int | Key) -> Predictions | None:
        """Return the predictions of a layer's queries, those of padding left out; None if there are none."""
        key = self._resolve_key(key)
        real = self._real_tokens(key).queries
        for pattern, found in reversed(self._predictions):
            if matches(key[0], pattern) and found.log_probability[:, 1:].shape == real.shape:
                return found if bool(real.all()) else found.without_padding(real)
        return None

    def effect(self, name: str, scores: Mapping[str, Any]) -> None:
        """Keep a number for each head, such as the loss without it: the viewer shows it with the head.

        `scores` has a tensor `h` for each layer, as `importance` and `ablation_importance` return it:
        `tape.effect("loss without the head - loss", ablation_importance(model, loss))`.
        """
        found = checked_effects(name, scores)
        heads = {key[0]: _head_numbers(self[key]) for key in self}
        if message := effect_mismatch(name, found, heads):
            warnings.warn(message, CaptureWarning, stacklevel=2)
        self._effects[name] = found

    def effects_of(self, key: str | int | Key) -> dict[str, list[float]]:
        """Return the effects of a layer: a number for each of its heads on the tape, by the name of the effect."""
        key = self._resolve_key(key)
        return effects_of_heads(self._effects, key[0], _head_numbers(self[key]))

    def summarize(self) -> None:
        """Measure every layer once, so that `save` writes the measures and the file opens with all maps drawn.

        Call it for long inputs: the viewer draws the map of the whole matrix from these measures.
        """
        layers = (
            Layer(key, A, self._real_tokens(key))
            for key, A in self.items()
            if isinstance(A, Weights) and not self.summarized(key)
        )
        for stacked in stacks(layers):
            if len(stacked) == 1:
                self.summary(stacked[0].key)
                continue
            whole = summary_over(*stack(stacked), peaks=True, layers=len(stacked))
            for layer, summary in zip(stacked, split_summary(whole, len(stacked)), strict=True):
                self.keep_summary(layer.key, summary)

    def summary(self, key: str | int | Key) -> Summary:
        """Return entropy, received mass, maximum, distance and map of a layer; measured once, then cached.

        Received mass and map come from the queries that are real tokens, and distance is the one without padding.
        `peaks` holds the largest weight of each cell of the map.
        """
        key = self._resolve_key(key)
        for _ in self.summarizing(key):
            pass
        return self._summaries[key]

    def summarizing(self, key: str | int | Key) -> Iterator[float]:
        """Measure a layer a few heads at a time; yields the fraction that is done."""
        key = self._resolve_key(key)
        A = _with_matrix("summary()", self[key])
        if self.summarized(key):
            return
        heads, real = A.shape[-3], self._real_tokens(key)
        # A GPU measures all heads in one kernel launch if there is a kernel for the terms.
        step = max(1, CHUNK_ENTRIES * heads // max(A.shape.numel(), 1)) if A.device.type == "cpu" else heads
        parts = []
        for first in range(0, heads, step):
            chunk = A if step >= heads else A.select(heads=slice(first, first + step))
            parts.append(summary_over(chunk, real, peaks=True))
            yield min(first + step, heads) / heads
        self.keep_summary(key, parts[0] if len(parts) == 1 else concatenate_heads(parts, A.shape))

    def keep_summary(self, key: str | int | Key, summary: Summary, overview: Overview | None = None) -> None:
        """Keep the summary of a layer, and the row statistic that it found."""
        key = self._resolve_key(key)
        A = _with_matrix("keep_summary()", self[key])
        self._summaries[key] = summary
        self._overviews.pop(key, None)
        if overview is not None:
            self._overviews[key] = overview
        if A.known_statistic is None and summary.statistic is not None:
            self._replace(key, Weights(A.call, summary.statistic.flatten(0, -3).unsqueeze(-1)))

    def overview(self, key: str | int | Key) -> Overview:
        """Return summary numbers and a thumbnail for each head of a layer."""
        key = self._resolve_key(key)
        A = self[key]
        if not isinstance(A, Weights):
            return Overview.of(A, self.real_queries(key))
        if not self.summarized(key) or key not in self._overviews:
            self._overviews[key] = Overview.of(self.summary(key), self.real_queries(key))
        return self._overviews[key]

    def summarized(self, key: str | int | Key) -> bool:
        """Return whether a summary of the layer is cached for the rows and keys that it has now."""
        key = self._resolve_key(key)
        summary = self._summaries.get(key)
        return summary is not None and (*summary.entropy.shape, summary.received.shape[-1]) == tuple(self[key].shape)

    def table(self) -> Any:
        """Return one row for each layer, call, batch row and head, and one column for each measure.

        Entropy, largest weight and distance are means over the queries that are real tokens and see a key; received is
        the largest share of their attention that one key gets, and logit the largest score of any of them. A text has
        the same numbers alone and in a padded batch.

        The result is a pandas data frame if pandas is installed, else a dictionary of columns that prints as a table.
        It warns if the tape is partial, and then the data frame has the share of the layers that it holds in
        `attrs["coverage"]`.
        """
        self.warn_partial("the table")
        found = table((key, A, self._real_tokens(key)) for key, A in self.items())
        if self.is_partial and hasattr(found, "attrs"):
            found.attrs["coverage"] = self.coverage
        return found

    def compare(self, other: Tape, *, by: By = "difference") -> Any:
        """Return a table of heads, those first that changed most between this tape and another.

        The tokens of the two texts are aligned by a minimal edit script: kept and replaced tokens are pairs, inserted
        and deleted ones have no pair. `difference` is the mean of abs(A_ij - B_ij) over all pairs of an aligned query
        and an aligned key, `largest` the difference A_ij - B_ij that is largest in size; `query` and `key` say where,
        `other_query` and `other_key` where on the other tape, and `query_token` and `key_token` name the tokens, as
        "big / small" if they were replaced. `unaligned` and `other_unaligned` are the attention of a mean aligned query
        to keys without a pair. Padding has no pair.

        `by` is "difference", or a divergence of the rows of this tape from those of the other, as in `A.kl(B)`: "kl",
        "js", "mse", or the overlap "dot", ranked from the smallest. Then a column of that name takes the place of
        `difference`: the mean over aligned queries, of their weights on aligned keys as they are. "kl" is infinite if
        the other tape has a weight of 0, in its dtype, at a key that this one looks at; "js" is not.

        >>> from regard import weights
        >>> q, k = torch.randn(2, 1, 4, 5, 8)
        >>> before, after = Tape({("layer", 0): weights(q, k)}), Tape({("layer", 0): weights(q[:, :, 1:], k[:, :, 1:])})
        >>> before.tokens, after.tokens = "So the cup fell .".split(), "the glass fell .".split()
        >>> [round(x, 6) for x in before.compare(after)["other_unaligned"]]  # all tokens of the other have a pair here
        [0.0, 0.0, 0.0, 0.0]

        Weights are recomputed a few rows at a time, in memory linear in the texts. Without tokens, positions are
        aligned, if there are equally many. The tapes must have the same layers, calls, batch rows and heads.
        """
        if not isinstance(other, Tape):
            raise TypeError(f"other must be a Tape, got {type(other).__name__}")
        check_by(by)
        layers = self._layers_beside(other)
        for tape in (self, other):
            tape.warn_partial("the comparison")
        return compare(layers, by)

    def comparing(self, other: Tape, *, by: By | Sequence[By] = "difference") -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of `compare` layer by layer, not ranked; `by` may name several differences."""
        measures: Sequence[Any] = [by] if isinstance(by, str) else by
        for name in measures:
            check_by(name)
        return compare_layers(self._layers_beside(other), measures)

    def align_with(self, other: Tape, key: Any, *, batch: int = 0) -> tuple[AlignedAxis, AlignedAxis]:
        """Return which queries and which keys of a layer are the same in another tape, as `compare` aligns them."""
        key = self._resolve_key(key)
        return align_axes(self._layer(key), other._layer(key), batch, key, {})

    def _layers_beside(self, other: Tape) -> Iterator[tuple[Key, ComparedLayer, ComparedLayer]]:
        check_comparable(self, other, lambda key: (self[key].shape, other[key].shape))
        return ((key, self._layer(key), other._layer(key)) for key in self)

    def _layer(self, key: Key) -> ComparedLayer:
        """Return a layer to compare."""
        real = self._real_tokens(key)
        texts = [self.tokens_of(key, batch=row) for row in range(len(real.queries))]
        return ComparedLayer(_with_matrix("compare()", self[key]), real, texts)

    # The room `views` lies above this one, so it is reached through the package when a method is called.
    def view(
        self,
        other: Tape | None = None,
        *,
        name: str = "capture",
        port: int | None = None,
        allow_host: Sequence[str] = (),
        device: str | torch.device | None = None,
        open_browser: bool = True,
    ) -> Any:
        """Open the zoomable map of this tape, or of two side by side, in a browser until `.close()` of the result.

        A notebook shows it below the cell; a script keeps serving after its last line, until Ctrl-C. The port is 8765
        or the next free one, and `allow_host` are more names of this machine that a browser may use. On a `device`
        such as "cuda" every part of the map is computed exactly at once, at any length.
        """
        place: dict[str, Any] = {"port": port, "allow_host": allow_host, "device": device}
        return regard.views.view(self, other, name=name, open_browser=open_browser, **place)

    def page(
        self,
        other: Tape | None = None,
        *,
        name: str = "capture",
        megabytes: float = 4.7,
        layers: str | Sequence[int] = "*",
        heads: Sequence[int] | None = None,
    ) -> Any:
        """Return the map as one offline HTML file: `tape.page().save("page.html")`; notebooks show it inline.

        The page holds the finest cells that fit into the megabytes, up to every weight, of the chosen layers and heads
        (see `select`), and says what it holds.
        """
        return regard.views.page(self, other, name=name, megabytes=megabytes, layers=layers, heads=heads)

    def _repr_html_(self) -> str:
        """Return the tape for a notebook: its text, and its page or a small picture."""
        return str(regard.views.tape_html(self))

    def save(self, path: str | Path) -> None:
        """Write everything to one `.safetensors` file; an interrupted write leaves no partial file."""
        archive.save(
            Path(path),
            {key: (self[key], self.extras(key)) for key in self},
            tokens=self._annotations.tokens,
            groups=self._annotations.groups,
            pictures=self._annotations.images,
            facts=self.facts,
            changed=self.changed,
            summaries={key: (x, self.overview(key)) for key, x in self._summaries.items() if self.summarized(key)},
            unseen=self.unseen,
            real=self._real_by_other_layers(self),
            guessed=self.guessed,
            effects=self._effects,
            predictions=self._predictions,
        )

    @classmethod
    def load(cls, path: str | Path) -> Tape:
        """Read a tape that `save` wrote; `ValueError` if the file is corrupted or not a tape."""
        return cls._from_contents(archive.load(Path(path)))

    @classmethod
    def open(cls, path: str | Path) -> Tape:
        """Read a tape without reading or checking its tensors: each is read from the file when it is used.

        `archive.check(path)` reads all tensors and raises `ValueError` if a checksum differs.
        """
        return cls._from_contents(archive.load_unchecked(Path(path)))

    @classmethod
    def _from_contents(cls, contents: archive.TapeContents) -> Tape:
        return cls(
            contents.entries,
            extras=contents.extras,
            tokens=[Labels(*labels) for labels in contents.tokens],
            groups={name: [Labels(*x) for x in labels] for name, labels in contents.groups.items()},
            pictures=[Labels(layers, images, images) for layers, images in contents.pictures],
            facts=contents.facts,
            changed=contents.changed,
            summaries=contents.summaries,
            unseen=contents.unseen,
            real=contents.real,
            guessed=contents.guessed,
            effects=contents.effects,
            predictions=contents.predictions,
        )

    @property
    def _entries(self) -> Mapping[Key, Weights | Reduced | SparseWeights | Record]:
        return self._stored if self._recorder is None else self._recorder.entries

    def _real_tokens(self, key: Key) -> RealTokens:
        """Return the real queries and keys of a layer."""
        if key in self._real:
            return self._real[key]
        found = self._masked_tokens(key)
        if found.is_causal or isinstance(self._entries[key], Reduced | SparseWeights):  # they hold them
            return found
        if says_self(key[0], found) or (found.has_no_padding and not self._has_padding):
            return found
        entries, by_mask, among = self._real_among.get(key, (0, None, None))
        if among is None or entries != len(self) or by_mask is not found:
            among = with_own_queries(key, {other: self._masked_tokens(other) for other in self if other[1] == key[1]})
            self._real_among[key] = len(self), found, among
        return among

    @property
    def _has_padding(self) -> bool:
        """Whether the mask of any layer shows padding; remembered until there are more entries."""
        entries, has_padding = self._padding
        if entries != len(self):
            has_padding = not all(self._masked_tokens(key).has_no_padding for key in self)
            self._padding = len(self), has_padding
        return has_padding

    def _real_by_other_layers(self, keys: Iterable[Key]) -> dict[Key, RealTokens]:
        """Return the real tokens of the layers whose own masks do not show them: cross-attentions."""
        return {key: real for key in keys if (real := self._real_tokens(key)) is not self._masked_tokens(key)}

    def _masked_tokens(self, key: Key) -> RealTokens:
        """Return the real queries and keys of a layer as its own mask shows them."""
        shape, known = self._shape_of(key), self._real_by_mask.get(key)
        if known is None or (*known.queries.shape, known.keys.shape[1]) != shape:
            A = self[key]
            known = self._real_by_mask[key] = self._real_of_mask.of(A) if isinstance(A, Weights) else A.real
        return known

    def _replace(self, key: Key, A: Weights) -> None:
        """Return these weights for a layer from now on."""
        entry = self._entries[key]
        if not isinstance(entry, Record):
            self._stored = {**self._stored, key: A}
        elif entry.store.folder is None:  # tensors in files are read each time, not cached in memory
            self._cache[key] = entry.rows, A

    def _with_statistic(self, key: Key, A: Weights) -> Weights:
        """Add the row statistic that the layer's summary computed, if there is one for these rows."""
        summary = self._summaries.get(key)
        if A.known_statistic is not None or summary is None or summary.statistic is None:
            return A
        if summary.statistic.shape != A.shape[:-1]:
            return A
        return Weights(A.call, summary.statistic.flatten(0, -3).unsqueeze(-1))

    def _resolve_key(self, key: str | int | Key) -> Key:
        """Return the (layer, call) that a name, a (name, call) or a number stands for."""
        if isinstance(key, tuple) and key in self._entries:
            return key
        if isinstance(key, Integral):
            keys = list(self)
            if not -len(keys) <= key < len(keys):
                raise IndexError(f"the tape has {len(keys)} entries, got index {key}")
            return keys[int(key)]
        name, *call = key if isinstance(key, tuple) else (key,)
        calls = [known for known in self if name in (known[0], shown_name(known[0]))]
        if len(same := [known for known in calls if call in ([], [known[1]])]) == 1:
            return same[0]
        if calls:
            shown = ", ".join(f"tape[{shown_name(layer)!r}, {call}]" for layer, call in calls)
            times = "once" if len(calls) == 1 else f"{len(calls)} times"
            raise KeyError(f"{shown_name(calls[0][0])!r} was called {times}; write {shown}")
        raise KeyError(f"no layer {name!r} on the tape; there are {list_names(self.layers)}")

    def _warn_unmatched_tokens(self, *, stacklevel: int) -> None:
        """Warn about tokens that fit no layer."""
        if self._annotations.tokens:
            for message in unmatched_tokens(self._annotations.tokens, {key: key[0] for key in self}, self._real_tokens):
                warnings.warn(message, CaptureWarning, stacklevel=stacklevel)

    def _warn_of_one_grouping(self, key: Key, name: str) -> bool:
        """Warn if a layer has one grouping of this name for different texts; return whether it does."""
        message = self._annotations.one_grouping_of_different_texts(key[0], name, self._real_tokens(key))
        if message is not None:
            warnings.warn(message, CaptureWarning, stacklevel=3)
        return message is not None

    def _warn_if_mismatched(
        self, what: str, pattern: str, mismatch: Callable[[Mapping[str, Shape]], str | None]
    ) -> None:
        """Warn about groups or images that fit no layer, or whose pattern matches none."""
        shapes = {key[0]: self._shape_of(key) for key in self if matches(key[0], pattern)}
        message = mismatch(shapes) if shapes or not len(self) else no_layer_matches(what, [pattern], self.layers)
        if message is not None:
            warnings.warn(message, CaptureWarning, stacklevel=3)

    def _shape_of(self, key: Key) -> Shape:
        """Return the number of batch rows, queries and keys of a layer."""
        entry = self._entries[key]
        if isinstance(entry, Record):
            return entry.batch, entry.rows, entry.keys
        *lead, _, i, j = entry.shape
        return math.prod(lead), i, j


def _head_numbers(A: Weights | Reduced | SparseWeights) -> list[int]:
    """Return the numbers of a layer's heads in the model."""
    known = A.call.head_ids if isinstance(A, Weights) else None
    return list(range(A.shape[-3])) if known is None else known.tolist()


def _with_matrix(what: str, A: Weights | Reduced | SparseWeights) -> Weights:
    """Return the weights of a layer; raise unless they are of queries over keys."""
    if isinstance(A, Reduced):
        raise ValueError(f"{what} needs queries and keys; this capture kept only measures (keep=[...])")
    if isinstance(A, SparseWeights):
        raise ValueError(f"{what} needs queries and keys, and this layer keeps weights of edges or points alone: {A!r}")
    return A
