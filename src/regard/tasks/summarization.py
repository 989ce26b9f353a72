"""Summarization: from documents to what matters in them, with rare words copied as they stand there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from ..data import Pair, Tokenizer
from ..lens import Tape
from ..models import Pointer, PointerConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from ..train import InverseSquareRoot, Outcome, Progress, Recipe, own_device
from ..train.schema import check_types
from . import metrics, runs
from .batching import Batching, Long
from .copying import Copying
from .encoded import Encoded
from .metrics import Measured, Words
from .pairs import Paired, Tokenizers
from .training import Setup, Start, run
from .vocabulary import Vocabulary, WordVocabulary
from .writer import Shown, Writer, Written

TASK = "summarization"
Network = Seq2SeqConfig | PointerConfig | TransformerConfig
Sketch = Callable[[Tokenizer], Network]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A summarization model in a few words: called with the tokenizer, it gives the model's config.

    `pointer` is recurrent, and copies words of the document, those it does not know among them (See et al. 2017);
    `rnn` is the same without copying.
    """

    kind: Annotated[Literal["pointer", "rnn", "transformer"], "what it is made of", "--model"] = "pointer"
    dim: Annotated[int, "the width of embeddings, and of a Transformer's states"] = 128
    hidden: Annotated[int | None, "the width of feed-forwards (4 dim), or of recurrent states (2 dim)"] = None
    depth: Annotated[int | None, "the layers of encoder and decoder each (Transformer 3, recurrent 1)"] = None
    heads: Annotated[int, "the attention heads of a Transformer"] = 4
    cell: Annotated[Literal["gru", "lstm"], "the cell of a recurrent model"] = "lstm"
    coverage: Annotated[float | None, "the price of looking twice at a word, against repetitions (recurrent)"] = None
    encoder_mask: Annotated[
        str | None, "what a Transformer's encoder sees of a long document, as 'Window(128) | Global(4)'"
    ] = None
    segment: Annotated[int | None, "a Transformer's encoder reads so many tokens at a time"] = None
    memory: Annotated[int, "and sees so many states of what it read before"] = 0
    dropout: Annotated[float, "the share of activations left out while training"] = 0.1
    smoothing: Annotated[float | None, "label smoothing (0.1, and 0 with a pointer, which takes none)"] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "transformer" and self.coverage is not None:
            raise ValueError("coverage is of recurrent models, got a Transformer; leave it out")
        if self.kind != "transformer" and (self.encoder_mask, self.segment, self.memory) != (None, None, 0):
            raise ValueError(
                f"encoder_mask, segment and memory are of a Transformer's encoder, got kind={self.kind!r}; leave them "
                "out, or choose kind='transformer'"
            )

    def __call__(self, tokenizer: Tokenizer) -> Network:
        """The config for this vocabulary."""
        smoothing = self.smoothing if self.smoothing is not None else 0.0 if self.kind == "pointer" else 0.1
        common: dict[str, Any] = {
            "source_vocabulary": len(tokenizer),
            "target_vocabulary": len(tokenizer),
            "start": tokenizer.bos,
            "dim": self.dim,
            "tied": "all",
            "dropout": self.dropout,
            "smoothing": smoothing,
        }
        if self.kind == "transformer":
            return TransformerConfig(
                **common,
                heads=self.heads,
                hidden=self.hidden or 4 * self.dim,
                encoder_layers=3 if self.depth is None else self.depth,
                decoder_layers=3 if self.depth is None else self.depth,
                encoder_mask=self.encoder_mask,
                segment=self.segment,
                memory=self.memory,
            )
        common |= {
            "hidden": self.hidden or 2 * self.dim,
            "layers": 1 if self.depth is None else self.depth,
            "cell": self.cell,
            "coverage": self.coverage,
        }
        if self.kind == "rnn":
            return Seq2SeqConfig(**common)
        # A vocabulary without a token for the unknown has no word outside of it.
        return PointerConfig(**common, unknown=tokenizer.pad if tokenizer.unk is None else tokenizer.unk)


@dataclass(frozen=True, kw_only=True)
class LongBatching(Batching):
    """Batches of documents, of which the first 400 tokens are read, as by See et al. 2017, unless told otherwise."""

    tokens: Annotated[int, "the most tokens of a batch: rows times longest row, padding included", "--batch-tokens"] = (
        8192
    )
    limit: Annotated[int, "the most tokens a document or a summary may have"] = 400
    long: Annotated[Long, "what becomes of longer ones; how many there are is said"] = "truncate"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `config.json` says: the model, the longest summary of its training, and how much it reads of a document."""

    model: Network
    longest: int
    limit: int | None


SMALL, LEARNED, SIZES = Model(), WordVocabulary(), LongBatching()
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="rougeL",
    better="higher",
)


def train(
    pairs: Iterable[Paired],
    *,
    out: str | Path,
    valid: Iterable[Paired] | None = None,
    recipe: Recipe = RECIPE,
    model: Sketch = SMALL,
    vocabulary: Vocabulary = LEARNED,
    batching: Batching = SIZES,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    show: Progress | None = None,
) -> Outcome:
    """Train a summarizer on documents, the sources, and their summaries, into the folder `out`.

        train(parallel("a.txt", "a.summary"), valid=parallel("b.txt", "b.summary"), out="runs/news")
        Summarizer.load("runs/news").summarize([document])

    Both sides share one vocabulary. A model that is trained on documents cut at a limit (`batching.long="truncate"`)
    reads as much of every document later. An evaluation gives `rouge1`, `rouge2`, `rougeL` and `loss`, of greedy
    summaries. The rest is as in `translation.train`.
    """

    def prepare(start: Start) -> Setup:
        begun = start.checkpoint
        if begun is None:
            one = vocabulary.learn(text for pair in pairs for text in (pair.source, pair.target))
            network = model(one)
            tokenizers = _tokenizers(network)(one, one)
        else:
            network = _config_of(begun).model
            tokenizers = _tokenizers(network).load(begun)
        examples = tokenizers.encode(pairs)
        batches = batching.over(examples, pad=tokenizers.pad, seed=recipe.seed, group=start.group, say=start.say)
        config = _config(network, examples, batching) if begun is None else _config_of(begun)
        if recipe.forcing is not None and isinstance(network, TransformerConfig):
            raise ValueError("forcing feeds a recurrent decoder its own words, got a Transformer; leave it out")
        return Setup(
            model=_built(network),
            batches=batches,
            evaluate=None if valid is None else _judge(list(valid), tokenizers, config),
            files={runs.CONFIG: runs.described(TASK, config), **tokenizers.files()},
        )

    return run(prepare, recipe, out=out, resume=resume, files=files, show=show)


class Summarizer(Writer):
    """A trained summarizer, or several that decode as one.

        summarizer = Summarizer.load("runs/news")
        [best] = summarizer.summarize([document])

    Of a document it reads as many tokens as its training has read, `limit`; `too_long` says where that is not all.
    """

    def __init__(
        self, models: Sequence[nn.Module], tokenizers: Tokenizers, *, longest: int, limit: int | None = None
    ) -> None:
        super().__init__(models, tokenizers, longest=longest)
        self.limit = limit

    @classmethod
    def load(cls, *folders: str | Path, device: torch.device | str | None = None) -> Summarizer:
        """The summarizer of a run, or the ensemble of several that share their vocabulary, and whether they copy."""
        if not folders:
            raise ValueError("folders must name at least one run, got none")
        place = own_device() if device is None else torch.device(device)
        opened = [runs.opened(folder) for folder in folders]
        configs = [_config_of(path) for path in opened]
        tokenizers = [_tokenizers(config.model).load(path) for config, path in zip(configs, opened, strict=True)]
        for path, other in zip(opened[1:], tokenizers[1:], strict=True):
            if type(other) is not type(tokenizers[0]):
                raise ValueError(f"all of an ensemble copy words or none does, and {path} and {opened[0]} differ")
            if other.source != tokenizers[0].source:
                raise ValueError(f"an ensemble shares its vocabulary, and those of {path} and {opened[0]} differ")
        models = [_built(config.model) for config in configs]
        for model, path in zip(models, opened, strict=True):
            runs.fill(model, path)
        limits = [config.limit for config in configs if config.limit is not None]
        longest = max(config.longest for config in configs)
        limit = max(limits) if len(limits) == len(configs) else None
        return cls([model.to(place) for model in models], tokenizers[0], longest=longest, limit=limit)

    def summarize(
        self,
        documents: Sequence[str],
        *,
        beam: int = 4,
        alpha: float = 0.6,
        min_length: int = 0,
        no_repeat: int | None = None,
        show: Shown | None = None,
    ) -> list[Written]:
        """The best summary of each document, as `write` has it; `n_best` has more of them."""
        return self.write(documents, beam=beam, alpha=alpha, min_length=min_length, no_repeat=no_repeat, show=show)

    def n_best(
        self,
        lines: Sequence[str],
        *,
        n: int,
        beam: int = 4,
        alpha: float = 0.6,
        min_length: int = 0,
        no_repeat: int | None = None,
        show: Shown | None = None,
    ) -> list[list[Written]]:
        """The n best summaries of each document, as `Writer.n_best` has them."""
        read = [self.read(line) for line in lines]
        return super().n_best(read, n=n, beam=beam, alpha=alpha, min_length=min_length, no_repeat=no_repeat, show=show)

    def score(self, pairs: Sequence[Paired], *, show: Shown | None = None) -> list[float]:
        """log p(summary | document) of each pair, the end included."""
        return super().score([Pair(self.read(pair.source), pair.target) for pair in pairs], show=show)

    def tape(self, pairs: Sequence[Paired]) -> Tape:
        """Every attention of the model over these documents and summaries, a batch row each."""
        return super().tape([Pair(self.read(pair.source), pair.target) for pair in pairs])

    def evaluate(
        self,
        pairs: Sequence[Paired],
        *,
        beam: int = 4,
        no_repeat: int | None = None,
        words: Words = "english",
        show: Shown | None = None,
    ) -> dict[str, Measured]:
        """`rouge1`, `rouge2` and `rougeL` of summaries against the targets, and the `loss` of those a token."""
        tokens = int(self.tokenizers.encode(pairs).lengths["target"].sum())
        documents, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        written = [one.text for one in self.summarize(documents, beam=beam, no_repeat=no_repeat, show=show)]
        return {
            **metrics.rouge(written, targets, words=words),
            "loss": Measured(-sum(self.score(pairs)) / tokens, f"nats a token, {tokens:,} tokens"),
        }

    def read(self, document: str) -> str:
        """What is read of a document: its text up to the limit, which the end counts to."""
        if self.limit is None or len(spans := self.tokenizers.source.spans(document)) < self.limit:
            return document
        return document[: spans[self.limit - 2].end] if self.limit > 1 else ""

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """Of each document, whether its end is not read."""
        return [self.read(document) != document for document in documents]


def _tokenizers(network: Network) -> type[Tokenizers]:
    return Copying if isinstance(network, PointerConfig) else Tokenizers


def _config(network: Network, examples: Encoded, batching: Batching) -> Config:
    longest = min(batching.limit, int(examples.lengths["target"].max()))
    return Config(model=network, longest=longest, limit=batching.limit if batching.long == "truncate" else None)


def _config_of(checkpoint: Path) -> Config:
    return runs.config_of(checkpoint, TASK, Config)


def _built(network: Network) -> nn.Module:
    match network:
        case PointerConfig():
            return Pointer(network)
        case Seq2SeqConfig():
            return Seq2Seq(network)
        case TransformerConfig():
            return Transformer(network)


def _judge(valid: list[Paired], tokenizers: Tokenizers, config: Config) -> Callable[[nn.Module], dict[str, float]]:
    if not valid:
        raise ValueError("valid must hold at least one pair, got none; leave it out to train without validation")

    def evaluate(model: nn.Module) -> dict[str, float]:
        summarizer = Summarizer([model], tokenizers, longest=config.longest, limit=config.limit)
        found = summarizer.evaluate(valid, beam=1)
        return {name: measured.value for name, measured in found.items()}

    return evaluate
