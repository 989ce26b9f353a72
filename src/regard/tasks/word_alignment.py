"""Aligning: which words of a translation come from which words of its source, by cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data import Tokenizer
from ..lens import Tape, capture
from ..nn.losses import shift_right
from ..ops.weights import Weights
from .pairs import Draft, TextPair, Tokenizers

Batch = Mapping[str, Tensor]  # source, target, and their lengths
When = Literal["written", "read"]


def word_maps(
    model: nn.Module,
    tokenizers: Tokenizers,
    pairs: Sequence[TextPair],
    batch: Batch,
    *,
    layer: str,
    head: int | None,
    when: When,
) -> list[Tensor]:
    """Attention between the words of each pair in a layer, `target source`, of one head or of all averaged.

    Words are what spaces separate, whatever the tokens: a source word receives the sum over its tokens, a target word
    gives the mean. It asks `when` it is written, or one step later, when it is read (Chen et al. 2020, section 3).
    """
    with capture(model, layers=layer) as tape:
        run_forced(model, batch)
    A = tape[layer]
    assert isinstance(A, Weights)
    before = [None] if when == "read" else []
    targets = [[*before, *_word_per_target_token(tokenizers, pair)] for pair in pairs]
    sources = [word_per_token(tokenizers.source, pair.source) for pair in pairs]
    counts = [(len(pair.target.split()), len(pair.source.split())) for pair in pairs]
    t, s = (max(side) for side in zip(*counts, strict=True))
    of_targets, of_sources = _pad_word_ids(targets, A.shape[-2], rest=t), _pad_word_ids(sources, A.shape[-1], rest=s)
    every = A.mass(of_targets.to(A.device), of_sources.to(A.device)).cpu()  # b h t s
    maps = every.mean(1) if head is None else every[:, head]
    return [one[:t, :s] for one, (t, s) in zip(maps, counts, strict=True)]


def tape_of(model: nn.Module, tokenizers: Tokenizers, pairs: Sequence[TextPair], batch: Batch) -> Tape:
    """Every attention of the model while it reads sources and writes their targets, with the tokens of each."""
    texts = [pair.source for pair in pairs]
    source = [tokenizers.source_labels(row, text) for row, text in zip(_source_ids(batch).tolist(), texts, strict=True)]
    heard, written = (
        [tokenizers.target_labels(row, text) for row, text in zip(ids.tolist(), texts, strict=True)]
        for ids in (_inputs(model, batch), batch["target"])
    )
    crossing = dict.fromkeys(cross_layers(model), (written, source))
    with capture(model, {"encoder.*": source, "decoder.*": heard, **crossing}) as tape:
        run_forced(model, batch)
    return tape


def cross_layers(model: nn.Module) -> list[str]:
    """The names of the layers that attend to the source."""
    found = [
        name
        for name, _ in model.named_modules()
        if name == "decoder.attention" or (name.startswith("decoder.blocks.") and name.endswith(".cross"))
    ]
    if not found:
        raise ValueError("the model has no attention to its source, and nothing else shows which words come from which")
    return found


def layer_of(model: nn.Module, layer: int | None = None) -> str:
    """The name of a layer that attends to the source by its number, the one above the middle unless given."""
    names = cross_layers(model)
    if layer is not None and not 0 <= layer < len(names):
        raise ValueError(f"layer must be from 0 to {len(names) - 1}, got {layer}")
    return names[len(names) // 2 if layer is None else layer]


def check_head(model: nn.Module, layer: str, head: int | None) -> None:
    """Raise unless the layer has a head of that number; None is all of them."""
    heads = getattr(model.get_submodule(layer), "heads", 1)
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1}, got {head}")


def run_forced(model: nn.Module, batch: Batch) -> None:
    """Let the model read the sources, and write the targets."""
    with torch.no_grad():
        copies = (batch["copies"],) if "copies" in batch else ()
        model(batch["source"], _inputs(model, batch), *copies, source_lengths=batch["source_lengths"])


def word_per_token(tokenizer: Tokenizer, text: str) -> list[int | None]:
    """Which word of the text each token belongs to, None for a token between words; spaces separate words.

    >>> tokenizer = Tokenizer.characters(["ein Haus"])
    >>> word_per_token(tokenizer, "ei Ha")
    [0, 0, None, 1, 1]
    """
    word, places = -1, []
    for before, letter in zip(f" {text}", text, strict=False):
        word += before.isspace() and not letter.isspace()
        places.append(None if letter.isspace() else word)
    return [next((at for at in places[one.start : one.end] if at is not None), None) for one in tokenizer.spans(text)]


def word_per_draft_token(tokenizers: Tokenizers, draft: Draft) -> list[int | None]:
    """Which word of a draft each of its tokens belongs to, None for a token between words, and for the end.

    >>> one = Tokenizer.word_per_token(["ein Haus"])
    >>> word_per_draft_token(Tokenizers(one, one), Draft("", "ein <unk> Haus", (4, 1, 5, 3)))
    [0, 1, 2, None]
    """
    last = len(draft.target.split()) - 1
    found: list[int | None] = []
    before: list[str] = []
    for n in range(1, len(draft.tokens) + 1):
        now = tokenizers.text(draft.tokens[:n], draft.source).split()
        found.append(min(len(now) - 1, last) if now != before else None)
        before = now
    return found


def _word_per_target_token(tokenizers: Tokenizers, pair: TextPair) -> list[int | None]:
    return (
        word_per_draft_token(tokenizers, pair)
        if isinstance(pair, Draft)
        else word_per_token(tokenizers.target, pair.target)
    )


def _inputs(model: Any, batch: Batch) -> Tensor:
    return shift_right(batch["target"], start=model.config.start)


def _source_ids(batch: Batch) -> Tensor:
    """What stands in the sources, words that can be copied told apart."""
    return batch.get("copies", batch["source"])


def _pad_word_ids(rows: Sequence[Sequence[int | None]], n: int, *, rest: int) -> Tensor:
    """The word of each of n tokens, `rest` for those of none: ends, padding, spaces."""
    ids = torch.full((len(rows), n), rest)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor([rest if word is None else word for word in row], dtype=torch.long)[:n]
    return ids
