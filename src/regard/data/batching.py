"""Batches of padded tensors, epoch after epoch, in an order that depends only on seed and epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data_fingerprint import data_fingerprint
from .buckets import Bucket, buckets, share_evenly
from .errors import DataError
from .loading import Chunk, Chunks, load_chunks
from .padding import Example, collate, round_up, sequences

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
DEFAULT_POOL = 16_384
PIECES_PER_CHUNK = 16
RESTARTING_SETTINGS = (
    "tokens",
    "rows",
    "pool",
    "multiple",
    "ranks",
)  # after a change of these, `restore` restarts the epoch


LONG_CHOICES = ("error", "drop", "truncate")


class Indexed(Protocol[T_co]):
    """Examples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> T_co: ...


class Batches:
    """Batches of padded tensors; each `for` loop is an epoch.

    >>> from regard.data import Copy, Generated, Tokenizer
    >>> toys = Generated(Copy(), size=1000)
    >>> tokenizer = Tokenizer.characters(toy.source for toy in toys)
    >>> def encode(toy):
    ...     return {"source": tokenizer.encode(toy.source), "target": tokenizer.encode(toy.target, eos=True)}
    >>> batches = Batches(toys, encode, tokens=1024)
    >>> for batch in batches:
    ...     pass
    >>> batch["source"].shape[0] == batch["source_lengths"].shape[0] == batch["index"].shape[0]
    True
    >>> print(batches.report())
    1,000 examples, 24,668 tokens, 5.8% padding

    `encode` turns an example into named fields; without it, examples must be mappings of fields. A sequence of ids is
    padded and comes with `name_lengths`, numbers and arrays are stacked, and `index` holds the numbers of the examples.

    Give one size: `tokens`, the limit of rows times longest sequence, or `rows`. Examples are sorted by length within a
    `pool`, by default of 16,384; an indexed source with `rows` and neither `limit` nor `pool` is not sorted, as for
    images.

    A source with `len` and index is shuffled as a whole; a source that can only be iterated is streamed, so it may be
    larger than memory, and shuffled within its pools. `seed=None` shuffles nothing.

    Sequences are padded to the longest of their batch, rounded up to a `multiple`, so that few shapes occur.

    `long` decides about sequences longer than `limit` (a number, or one for each field): "error", "drop", or
    "truncate" at the end (which cuts `eos` off). `report()` counts them.

    `shard=(rank, ranks)` gives each process its own batches, the same number to each; `report()` counts the examples
    that cannot be shared evenly, fewer than `ranks` per pool. Every process encodes whole pools, because the shares
    depend on all lengths. `workers` processes read and encode; the order does not depend on their number.

    `state()` after any batch and `restore` in a new process continue the epoch exactly. If the batch size or the number
    of processes has changed, the epoch restarts with a warning. Leaving a loop early does not end the epoch: the next
    `for` continues there.
    """

    def __init__(
        self,
        source: Indexed[T] | Iterable[T],
        encode: Callable[[T], Mapping[str, Any]] | None = None,
        *,
        tokens: int | None = None,
        rows: int | None = None,
        pool: int | None = None,
        limit: int | Mapping[str, int] | None = None,
        long: str = "error",
        pad: int | Mapping[str, int] = 0,
        multiple: int = 1,
        seed: int | None = 0,
        shard: tuple[int, int] = (0, 1),
        workers: int = 0,
    ) -> None:
        if (tokens is None) == (rows is None):
            raise ValueError(f"give the batch size as either tokens or rows, got tokens={tokens} and rows={rows}")
        for name, value in (("tokens", tokens), ("rows", rows), ("pool", pool), ("multiple", multiple)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        self._rank, self._ranks = shard
        if not 0 <= self._rank < self._ranks:
            raise ValueError(f"shard must be (rank, ranks) with 0 <= rank < ranks, got {shard}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed must be a whole number, at least 0, or None for no shuffling, got {seed!r}")
        if workers < 0:
            raise ValueError(f"workers must be 0 or more processes, got {workers}")
        self._source: Any = source
        self._encode = encode
        self._tokens, self._rows = tokens, rows
        self._limit, self._pad, self._multiple = Limit(limit, long), pad, multiple
        self._seed, self._workers = seed, workers
        size = getattr(source, "__len__", None) if hasattr(source, "__getitem__") else None
        self._size: int | None = None if size is None else size()
        if self._size is None and iter(self._source) is self._source:
            raise TypeError(
                f"source must return a new iterator for each epoch, got {type(source).__name__}; pass a list"
            )
        pooled = tokens is not None or limit is not None or self._size is None
        self._pool = DEFAULT_POOL if pooled and pool is None else pool
        if self._size == 0:
            raise ValueError("the source has no examples; pass at least one")
        if self._size is not None and self._size < self._ranks:
            raise ValueError(f"the source has {self._size} examples, fewer than ranks={self._ranks}")
        self.epoch = 0
        self._chunk, self._batch = 0, 0
        self._report = Report()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the rest of the epoch."""
        if self._chunk == self._batch == 0:
            self._report = Report()
        for chunk in load_chunks(self._chunks(), self._workers):
            if chunk.number > self._chunk:
                self._chunk, self._batch = chunk.number, 0
            yield from self._batches_of(chunk)
        if not self._report.examples:
            raise DataError(
                f"the epoch has no batch: {self._report.dropped:,} examples are longer than limit={self._limit.most}"
                if self._report.dropped
                else f"the source has fewer examples than ranks={self._ranks}",
                hint="raise the limit" if self._report.dropped else "expected at least one for each rank",
            )
        self.epoch, self._chunk, self._batch = self.epoch + 1, 0, 0

    def report(self) -> Report:
        """Return the counts of the current epoch, or between epochs of the last one."""
        return replace(self._report)

    def progress(self) -> float | None:
        """Return the approximate share of the epoch that is done, None if the source has no length."""
        if self._size is None:
            return None
        done = self._report.examples * self._ranks + self._report.dropped + self._report.uneven
        return min(1.0, done / self._size)

    def fingerprint(self) -> str | None:
        """Return a fingerprint of the source if it is a list or has one itself, else None."""
        own = getattr(self._source, "fingerprint", None)
        return own() if own is not None else data_fingerprint(self._source)

    def state(self) -> dict[str, Any]:
        """Return the position as plain numbers; the same on every rank except for the counts."""
        return {
            "epoch": self.epoch,
            "chunk": self._chunk,
            "batch": self._batch,
            "settings": self._settings(),
            "report": asdict(self._report),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`: with the same source and settings, the same batches follow."""
        try:
            epoch, chunk, batch = (int(state[key]) for key in ("epoch", "chunk", "batch"))
            counts, settings = {f.name: int(state["report"][f.name]) for f in fields(Report)}, dict(state["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state must be a result of state(), got {state!r}") from error
        for name, value in self._settings().items():
            if settings.get(name) == value:
                continue
            changed = f"the state was saved with {name}={settings.get(name)!r}, got {name}={value!r}"
            if name not in RESTARTING_SETTINGS:
                raise ValueError(f"{changed}; use the same")
            warnings.warn(f"{changed}; the epoch restarts", stacklevel=2)
            chunk, batch, counts = 0, 0, {}
        self.epoch, self._chunk, self._batch, self._report = epoch, chunk, batch, Report(**counts)

    def _settings(self) -> dict[str, Any]:
        most = self._limit.most
        return {
            "examples": self._size,
            "tokens": self._tokens,
            "rows": self._rows,
            "pool": self._pool,
            "limit": dict(most) if isinstance(most, Mapping) else most,
            "long": self._limit.long,
            "multiple": self._multiple,
            "seed": self._seed,
            "ranks": self._ranks,
        }

    @property
    def _chunk_size(self) -> int:
        """The number of examples in a chunk: a pool, or a batch for every rank."""
        return self._pool if self._pool is not None else (self._rows or 1) * self._ranks

    def _chunks(self) -> Chunks:
        order = None
        if self._size is not None:
            order = np.arange(self._size) if self._seed is None else self._random(0).permutation(self._size)
        # Shares of a pool depend on all lengths, so every rank encodes all of it; without one, only its own examples.
        share, pieces = ((self._rank, self._ranks), 1) if self._pool is None else ((0, 1), PIECES_PER_CHUNK)
        return Chunks(
            source=self._source,
            encode=self._encode,
            order=order,
            size=self._chunk_size,
            pieces=pieces,
            first=self._chunk,
            share=share,
        )

    def _random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng([self._seed or 0, self.epoch, *what])

    def _batches_of(self, chunk: Chunk) -> Iterator[dict[str, Tensor]]:
        examples, long = self._apply_limit(chunk)
        if self._size is None and self._seed is not None:
            examples = [examples[n] for n in self._random(1, chunk.number).permutation(len(examples))]
        cut, spare = self._cut(chunk, [example for _, example in examples])
        if self._batch == 0:
            self._report.dropped += long if self._limit.long == "drop" else 0
            self._report.truncated += long if self._limit.long == "truncate" else 0
            self._report.uneven += spare
        while self._batch < len(cut):
            bucket = cut[self._batch]
            self._batch += 1
            yield self._collate([examples[n] for n in bucket])

    def _apply_limit(self, chunk: Chunk) -> tuple[list[tuple[int, Example]], int]:
        """Return the examples that fit the limit or were truncated to it, and the number of longer ones."""
        kept, long = [], 0
        for index, example in chunk.examples:
            if not self._limit.holds(example):
                long += 1
                if self._limit.long == "error":
                    raise self._too_long(index, example, f"limit={self._limit.most}")
                if self._limit.long == "drop":
                    continue
                example = self._limit.cut(example)
            if self._tokens is not None and self._cost(example) > self._tokens:
                raise self._too_long(index, example, f"tokens={self._tokens} per batch")
            kept.append((index, example))
        return kept, long

    def _cost(self, example: Example) -> int:
        """Return the padded length of the longest sequence of an example."""
        return round_up(max((len(value) for value in example.values() if value.ndim == 1), default=0), self._multiple)

    def _too_long(self, index: int, example: Example, most: str) -> DataError:
        where = getattr(self._source, "where", "example {}".format)(index)
        lengths = ", ".join(f"{name} {len(value)}" for name, value in sequences(example).items())
        problem = f"{where}: the example exceeds {most}: {lengths}"
        return DataError(problem, hint="raise it, or pass a limit with long='drop' or long='truncate'")

    def _cut(self, chunk: Chunk, examples: list[Example]) -> tuple[list[Bucket], int]:
        """Return this rank's batches of a chunk, and the number of examples left out on all ranks."""
        if self._pool is None:
            return ([list(range(len(examples)))], 0) if chunk.count >= self._ranks else ([], chunk.count)
        lengths = [tuple(len(value) for value in example.values() if value.ndim == 1) for example in examples]
        cut = buckets(lengths, tokens=self._tokens, rows=self._rows, multiple=self._multiple)
        if self._seed is not None:
            cut = [cut[n] for n in self._random(2, chunk.number).permutation(len(cut))]
        cut, spare = share_evenly(cut, self._ranks)
        return cut[self._rank :: self._ranks], len(spare)

    def _collate(self, examples: list[tuple[int, Example]]) -> dict[str, Tensor]:
        names, dims = examples[0][1].keys(), {name: value.ndim for name, value in examples[0][1].items()}
        for _, example in examples:
            if example.keys() != names:
                raise ValueError(
                    f"encode must return the same fields for every example, got {[*names]} and {[*example]}"
                )
            for name, value in example.items():
                if value.ndim != dims[name]:
                    raise ValueError(
                        f"the field {name!r} must have the same number of dims in every example, got {dims[name]} and "
                        f"{value.ndim}"
                    )
        batch = collate([example for _, example in examples], self._padding(names), multiple=self._multiple)
        batch["index"] = torch.tensor([index for index, _ in examples])
        self._report.examples += len(examples)
        for name in sequences(examples[0][1]):
            self._report.tokens += int(batch[f"{name}_lengths"].sum())
            self._report.cells += batch[name].numel()
        return batch

    def _padding(self, names: Iterable[str]) -> Mapping[str, int]:
        return self._pad if isinstance(self._pad, Mapping) else dict.fromkeys(names, self._pad)


@dataclass(kw_only=True)
class Report:
    """Counts of an epoch so far: nothing is cut or left out without being counted here.

    >>> print(Report(examples=1000, dropped=3, tokens=19_500, cells=20_000))
    1,000 examples, 19,500 tokens, 2.5% padding, 3 dropped as too long

    Examples, tokens and cells are those of this rank's batches; the others count what happened on all.
    """

    examples: int = 0
    dropped: int = 0
    truncated: int = 0
    uneven: int = 0
    tokens: int = 0
    cells: int = 0

    @property
    def padding(self) -> float:
        """The share of the batches that is padding."""
        return 1 - self.tokens / self.cells if self.cells else 0.0

    def __str__(self) -> str:
        parts = [f"{self.examples:,} examples, {self.tokens:,} tokens, {self.padding:.1%} padding"]
        parts += [f"{self.dropped:,} dropped as too long"] * (self.dropped > 0)
        parts += [f"{self.truncated:,} truncated"] * (self.truncated > 0)
        parts += [f"{self.uneven:,} left out to share evenly"] * (self.uneven > 0)
        return ", ".join(parts)


@dataclass(frozen=True)
class Limit:
    """The maximum length of sequences (a number, or one for each field), and what to do with longer ones."""

    most: int | Mapping[str, int] | None
    long: str

    def __post_init__(self) -> None:
        if self.long not in LONG_CHOICES:
            raise ValueError(f"long must be one of {', '.join(LONG_CHOICES)}, got {self.long!r}")
        for most in self.most.values() if isinstance(self.most, Mapping) else [self.most]:
            if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
                raise ValueError(f"limit must be a whole number, at least 1, or one for each field, got {self.most!r}")

    def holds(self, example: Example) -> bool:
        """Whether every sequence is within the limit."""
        if self.most is None:
            return True
        if isinstance(self.most, int):
            return all(len(value) <= self.most for value in example.values() if value.ndim == 1)
        return all(len(value) <= len(value[: self.of(name)]) for name, value in sequences(example).items())

    def cut(self, example: Example) -> Example:
        """Truncate the sequences of an example at the end."""
        return {**example, **{name: value[: self.of(name)] for name, value in sequences(example).items()}}

    def of(self, name: str) -> int | None:
        """Return the maximum length of one field."""
        return self.most.get(name) if isinstance(self.most, Mapping) else self.most
