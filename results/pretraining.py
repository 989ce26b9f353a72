"""Pretrain a small BERT on masked words and next sentences, and leave it as a Hugging Face folder.

    python -m results.pretraining --text train.txt --valid-text valid.txt --questions train-v1.1.json --out runs/bert

Rows are two stretches of running text side by side, the second in half of them from elsewhere; none is padded. Most
batches are of short rows, where a word has fewer others to find the right ones among; the rest, with as many tokens,
are of long ones, for the positions (nine in ten were short in Devlin et al. 2019, one kind after the other).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from regard.data import Lines, Tokenizer, ids_of, questions
from regard.models import Bert, BertConfig, BertPretraining, mask_words, pretrained
from regard.tasks.image_inputs import MappedBatches
from regard.train import Shuffled, Stopped, find, load, own_device

from .script import falling, parser, train

SHORT, LONG = 62, 180  # tokens of each stretch
EACH = 9  # batches of short rows for one of long ones
MASK = "<mask>"


class Rows:
    """Batches of masked rows over the tokens of texts, as many long ones in each as `rows` says."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, *, rows: int) -> None:
        self.tokenizer = tokenizer
        ids = torch.from_numpy(ids_of(texts, tokenizer).astype("int64"))
        self.long = _cut(ids, LONG, rows)
        self.short = _cut(ids, SHORT, rows * LONG // SHORT)

    def masked(self, pairs: Tensor) -> dict[str, Tensor]:
        """A batch for `BertPretraining`: every other row has a second stretch from the row before."""
        first, second = pairs.unbind(1)
        elsewhere = torch.rand(len(pairs)) < 0.5
        second = torch.where(elsewhere[:, None], second.roll(1, 0), second)
        start, end = (torch.full((len(pairs), 1), one) for one in (self.tokenizer.bos, self.tokenizer.eos))
        ids = torch.cat((start, first, end, second, end), 1)
        types = (torch.arange(ids.shape[1]) >= 2 + first.shape[1]).long().expand_as(ids)
        mask = self.tokenizer.id(MASK)
        assert mask is not None
        read, targets = mask_words(ids, mask=mask, vocabulary=len(self.tokenizer), special=range(mask + 1))
        return {"ids": read, "types": types, "targets": targets, "next": elsewhere.long()}


def _cut(ids: Tensor, half: int, rows: int) -> list[Tensor]:
    """Batches of so many rows, each two stretches one after the other; of shorter ones if there is too little text."""
    half = min(half, len(ids) // (2 * rows))
    if not half:
        raise ValueError(f"{len(ids)} tokens are too few for {rows} rows; give more text, or fewer --rows")
    pairs = ids[: len(ids) // (2 * half) * 2 * half].view(-1, 2, half)
    return [pairs[first : first + rows] for first in range(0, len(pairs) - rows + 1, rows)]


def main() -> None:
    """Train, then write the folder `huggingface` into that of the run, also where training was asked to stop."""
    flags = parser(__doc__, steps=5000)
    flags.add_argument("--text", type=Path, required=True)
    flags.add_argument("--valid-text", type=Path, required=True)
    flags.add_argument("--questions", type=Path, help="a file in the format of SQuAD, whose documents are read too")
    flags.add_argument("--vocabulary", type=int, default=12_000)
    flags.add_argument("--dim", type=int, default=256)
    flags.add_argument("--depth", type=int, default=6)
    flags.add_argument("--rows", type=int, default=48)
    given = flags.parse_args()
    asked = [] if given.questions is None else questions(given.questions)
    texts = [line for line in Lines(given.text) if line.strip()] + [*dict.fromkeys(one.context for one in asked)]
    texts = [texts[n] for n in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()]
    tokenizer = Tokenizer.wordpiece(texts, size=given.vocabulary, lower=True, specials=(MASK,))
    torch.manual_seed(given.seed)
    size = {"dim": given.dim, "depth": given.depth, "heads": 4, "hidden": 4 * given.dim}
    config = BertConfig(vocabulary=len(tokenizer), padding=tokenizer.pad, attention_dropout=0.0, **size)
    model, rows = BertPretraining(Bert(config)), Rows(texts, tokenizer, rows=given.rows)
    held = Rows((line for line in Lines(given.valid_text) if line.strip()), tokenizer, rows=given.rows)
    kept = [held.masked(pairs) for pairs in held.long[:20]]

    def evaluate(model: BertPretraining) -> dict[str, float]:
        losses = [model.loss({name: x.to(own_device()) for name, x in batch.items()}) for batch in kept]
        return {"loss": sum(float(one.sum) for one in losses) / sum(float(one.count) for one in losses)}

    batches = MappedBatches(Shuffled(rows.short + rows.long[::EACH]), rows.masked)
    rate = falling(given, 5e-4)
    try:
        train(given, model, batches, evaluate, rate=rate, evaluate_every=1000)
    except Stopped:
        leave(model, tokenizer, given.out)
        raise
    leave(model, tokenizer, given.out)


def leave(model: BertPretraining, tokenizer: Tokenizer, run: Path) -> None:
    """Write the best weights of a run and the tokenizer, as the folder `huggingface` in it."""
    load(find(run), model.cpu())
    pretrained.save(model, run / "huggingface")
    tokenizer.save(run / "huggingface" / "tokenizer.json")


if __name__ == "__main__":
    main()
