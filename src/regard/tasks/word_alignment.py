"""Word alignment between a translation and its source, by cross-attention."""

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
    """Return the attention between words in a layer, `target source` for each pair, of a head or averaged over heads.

    Words are separated by spaces, whatever the tokens: attention is summed over the tokens of a source word, and
    averaged over those of a target word. `when` is "written" for the step that writes a target word, or "read" for the
    next, which reads it (Chen et al. 2020, section 3).
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
    heads = A.mass(of_targets.to(A.device), of_sources.to(A.device)).cpu()  # b h t s
    maps = heads.mean(1) if head is None else heads[:, head]
    return [one[:t, :s] for one, (t, s) in zip(maps, counts, strict=True)]


def tape_of(model: nn.Module, tokenizers: Tokenizers, pairs: Sequence[TextPair], batch: Batch) -> Tape:
    """Capture all attention while the model reads sources and writes their given targets, labelled with tokens."""
    texts = [pair.source for pair in pairs]
    source = [tokenizers.source_labels(row, text) for row, text in zip(_source_ids(batch).tolist(), texts, strict=True)]
    input_labels, target_labels = (
        [tokenizers.target_labels(row, text) for row, text in zip(ids.tolist(), texts, strict=True)]
        for ids in (_inputs(model, batch), batch["target"])
    )
    crossing = dict.fromkeys(cross_layers(model), (target_labels, source))
    with capture(model, {"encoder.*": source, "decoder.*": input_labels, **crossing}) as tape:
        run_forced(model, batch)
    return tape


def cross_layers(model: nn.Module) -> list[str]:
    """Return the names of the cross-attention layers."""
    found = [
        name
        for name, _ in model.named_modules()
        if name == "decoder.attention" or (name.startswith("decoder.blocks.") and name.endswith(".cross"))
    ]
    if not found:
        raise ValueError("the model has no attention to its source, so words cannot be aligned")
    return found


def layer_of(model: nn.Module, layer: int | None = None) -> str:
    """Return the name of a cross-attention layer by its number, by default the one above the middle."""
    names = cross_layers(model)
    if layer is not None and not 0 <= layer < len(names):
        raise ValueError(f"layer must be between 0 and {len(names) - 1}, got {layer}")
    return names[len(names) // 2 if layer is None else layer]


def check_head(model: nn.Module, layer: str, head: int | None) -> None:
    """Raise unless the layer has a head of this number; None stands for all heads."""
    heads = getattr(model.get_submodule(layer), "heads", 1)
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head must be between 0 and {heads - 1}, got {head}")


def run_forced(model: nn.Module, batch: Batch) -> None:
    """Run the model on the sources with the targets as decoder input (teacher forcing)."""
    with torch.no_grad():
        copies = (batch["copies"],) if "copies" in batch else ()
        model(batch["source"], _inputs(model, batch), *copies, source_lengths=batch["source_lengths"])


def word_per_token(tokenizer: Tokenizer, text: str) -> list[int | None]:
    """Return the number of the word of each token, None for a token between words; words are separated by spaces.

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
    """Return the number of the word of each token of a draft, None for a token between words and for the end.

    >>> one = Tokenizer.words(["ein Haus"])
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
    """Return the source ids, in which each word that can be copied has its own id if the model copies."""
    return batch.get("copies", batch["source"])


def _pad_word_ids(rows: Sequence[Sequence[int | None]], n: int, *, rest: int) -> Tensor:
    """Pad rows of word numbers to n tokens; `rest` stands for tokens without a word: ends, padding, spaces."""
    ids = torch.full((len(rows), n), rest)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor([rest if word is None else word for word in row], dtype=torch.long)[:n]
    return ids
