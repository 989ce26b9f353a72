"""Writer: encoder-decoders with their tokenizers, which read lines and write lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .. import decode
from ..checks import check_int
from ..data import Pair
from ..data.text import check_not_a_string, check_text
from ..decode import Ensemble, Gnmt, Hypothesis
from ..lens import Tape
from ..models import Pointer, PointerConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from ..train import own_device
from . import run_folder, word_alignment
from .copy_vocabulary import CopyTokenizers
from .encoded_dataset import EncodedExamples, in_batches
from .metrics import MetricValue
from .pairs import Draft, TextPair, Tokenizers, check_pairs

TOKENS_PER_BATCH = 4096  # of a batch
MAX_CAPTURED_PAIRS = 500  # pairs on one tape
Network = Seq2SeqConfig | PointerConfig | TransformerConfig
ShowProgress = Callable[[int, int], None]  # is told how many are done, and of how many


@dataclass(frozen=True, kw_only=True)
class Seq2SeqTaskConfig:
    """What `config.json` says: the model, the longest target of its training, and how much it reads of a source.

    Lengths are in tokens; without a limit sources are read whole.
    """

    model: Network
    longest: int
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A line that was written, and what the writer thought of it; `finished` is False where it was cut off.

    `score` is the log-probability divided by the length penalty, whatever the beam. `tokens` are those it was written
    in, the end among them if it came; `pairs.Draft` takes them.
    """

    text: str
    score: float
    log_probability: float
    finished: bool
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, found: Hypothesis, text: str) -> GeneratedText:
        """What a search has found, and how it reads."""
        return cls(
            text=text,
            score=found.score,
            log_probability=found.log_probability,
            finished=found.finished,
            tokens=found.tokens,
        )


EMPTY_TEXT = GeneratedText(text="", score=0.0, log_probability=0.0, finished=True)  # what becomes of a blank line


class Writer:
    """One encoder-decoder, or several over the same vocabularies that decode as one.

    `longest` is the longest target of the training, in tokens: what is written is about half as long again at most,
    see `at_most`. Of a source it reads as many tokens as its training has read, `limit`; `too_long` says where that is
    not all. Lines are read in batches of like length, and each is written as if it were alone. `show(done, all)` hears
    of progress.
    """

    task: ClassVar[str]

    def __init__(
        self, models: Sequence[nn.Module], tokenizers: Tokenizers, *, longest: int, limit: int | None = None
    ) -> None:
        self.models, self.tokenizers, self.longest, self.limit = list(models), tokenizers, longest, limit
        self.device = next(models[0].parameters()).device
        steppers: Any = self.models
        self._stepper = steppers[0] if len(steppers) == 1 else Ensemble(steppers)

    @classmethod
    def load(cls, *folders: str | Path, device: torch.device | str | None = None) -> Self:
        """The writer of a run, or the ensemble of several that share their vocabularies, and whether they copy."""
        if not folders:
            raise ValueError("folders must name at least one run, got none")
        place = own_device(device)
        opened = [run_folder.open_run(folder) for folder in folders]
        configs = [run_folder.config_of(path, cls.task, Seq2SeqTaskConfig) for path in opened]
        tokenizers = [tokenizers_class(config.model).load(path) for config, path in zip(configs, opened, strict=True)]
        for path, other in zip(opened[1:], tokenizers[1:], strict=True):
            if type(other) is not type(tokenizers[0]):
                raise ValueError(f"all of an ensemble copy words or none does, and {path} and {opened[0]} differ")
            if tuple(other) != tuple(tokenizers[0]):
                raise ValueError(f"an ensemble shares its vocabularies, and those of {path} and {opened[0]} differ")
        models = [build_model(config.model) for config in configs]
        for model, path in zip(models, opened, strict=True):
            run_folder.load_weights(model, path)
        limits = [config.limit for config in configs if config.limit is not None]
        return cls(
            [model.to(place) for model in models],
            tokenizers[0],
            longest=max(config.longest for config in configs),
            limit=max(limits) if len(limits) == len(configs) else None,
        )

    def write(
        self,
        lines: Sequence[str],
        *,
        beam: int = 5,
        alpha: float = 0.6,
        min_length: int = 0,
        max_length: int | None = None,
        no_repeat: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """The best that beam search finds for each line; a beam of 1 is greedy."""
        found = self.n_best(
            lines,
            n=1,
            beam=beam,
            alpha=alpha,
            min_length=min_length,
            max_length=max_length,
            no_repeat=no_repeat,
            show=show,
        )
        return [best[0] for best in found]

    def n_best(
        self,
        lines: Sequence[str],
        *,
        n: int,
        beam: int = 5,
        alpha: float = 0.6,
        min_length: int = 0,
        max_length: int | None = None,
        no_repeat: int | None = None,
        show: ShowProgress | None = None,
    ) -> list[list[GeneratedText]]:
        """The n best for each line, best first; `alpha` is that of the length penalty of Wu et al. 2016.

        None is longer than `max_length` tokens, which is `at_most` unless given, and none has the same `no_repeat`
        tokens in a row twice. None is shorter than `min_length`, unless `no_repeat` leaves nothing but the end. Of a
        blank line comes an empty one, and no model is asked.
        """
        check_not_a_string(lines, "lines")
        check_beam(beam, n)
        for line in (lines := list(lines)):
            check_text(line, "a line")
        places = [place for place, line in enumerate(lines) if line.strip()]
        texts = [self.read(lines[place]) for place in places]
        found = [[EMPTY_TEXT] for _ in lines]
        limits: dict[str, Any] = {
            "end": self.tokenizers.target.eos,
            "max_length": length_limit(self.longest, min_length=min_length, max_length=max_length),
            "min_length": min_length,
            "no_repeat": no_repeat,
            "forbid": self.tokenizers.target.unwritten,
        }
        for rows, batch in self._batches(self.tokenizers.sources(texts), show):
            best = search_n_best(self._stepper, batch, self._starts(len(rows)), n=n, beam=beam, alpha=alpha, **limits)
            for row, hypotheses in zip(rows, best, strict=True):
                found[places[row]] = [self._written(one, texts[row]) for one in hypotheses]
        return found

    def score(self, pairs: Sequence[TextPair], *, show: ShowProgress | None = None) -> list[float]:
        """log p(target | source) of each pair, the end included."""
        found = [0.0] * len(pairs)
        examples = self.tokenizers.encode(self._cut(pairs))
        for rows, batch in self._batches(examples, show):
            targets = [[examples[row]["target"].tolist()] for row in rows]
            scored = decode.score(self._stepper, batch, self._starts(len(rows)), targets)
            for row, [one] in zip(rows, scored, strict=True):
                found[row] = one.log_probability
        return found

    def loss(self, pairs: Sequence[TextPair]) -> MetricValue:
        """What the targets cost a token."""
        if not pairs:
            raise ValueError("loss is that of at least one pair, got none")
        tokens = int(self.tokenizers.encode(pairs).lengths["target"].sum())
        return MetricValue(-sum(self.score(pairs)) / tokens, f"nats a token, {tokens:,} tokens")

    def tape(self, pairs: Sequence[TextPair]) -> Tape:
        """Every attention of the model over these pairs, a batch row each, to be measured, saved and viewed."""
        if len(self.models) > 1:
            raise ValueError(f"a tape is of one model, got {len(self.models)}; load one of them")
        if not 0 < len(pairs) <= MAX_CAPTURED_PAIRS:
            raise ValueError(f"a tape holds the attention of 1 to {MAX_CAPTURED_PAIRS} pairs, got {len(pairs)}")
        pairs = self._cut(pairs)
        batch = self.tokenizers.encode(pairs).batch(range(len(pairs)), pad=self.tokenizers.pad, device=self.device)
        return word_alignment.tape_of(self.models[0], self.tokenizers, pairs, batch)

    def read(self, source: str) -> str:
        """What is read of a source: its text up to the limit, which the end counts to."""
        if self.limit is None or len(spans := self.tokenizers.source.spans(source)) < self.limit:
            return source
        return source[: spans[self.limit - 2].end] if self.limit > 1 else ""

    def too_long(self, sources: Sequence[str]) -> list[bool]:
        """Of each source, whether its end is not read."""
        check_not_a_string(sources, "sources")
        return [self.read(source) != source for source in sources]

    def _cut(self, pairs: Sequence[TextPair]) -> Sequence[TextPair]:
        check_pairs(pairs)
        return [
            pair._replace(source=self.read(pair.source))
            if isinstance(pair, Draft)
            else Pair(self.read(pair.source), pair.target)
            for pair in pairs
        ]

    def _batches(
        self, examples: EncodedExamples, show: ShowProgress | None
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        done = 0
        for rows, batch in in_batches(examples, tokens=TOKENS_PER_BATCH, pad=self.tokenizers.pad, device=self.device):
            yield rows, batch
            done += len(rows)
            if show is not None:
                show(done, len(examples))

    def _starts(self, rows: int) -> Tensor:
        return torch.full((rows, 1), self.tokenizers.target.bos, device=self.device)

    def _written(self, one: Hypothesis, line: str) -> GeneratedText:
        return GeneratedText.of(one, self.tokenizers.text(one.tokens, line))


def search_n_best(
    stepper: Any, source: Any, prefix: Tensor, *, n: int, beam: int, alpha: float, **limits: Any
) -> list[list[Hypothesis]]:
    """The n best of each row of the source; those of a beam of 1, which is greedy, score as all others do."""
    length = Gnmt(alpha)
    if beam > 1:
        return decode.beam(stepper, source, prefix, width=beam, n_best=n, length=length, **limits)
    found = decode.greedy(stepper, source, prefix, **limits)
    return [[replace(one, score=one.log_probability / length(len(one.tokens)))] for one in found]


def length_limit(longest: int, *, min_length: int = 0, max_length: int | None = None) -> int:
    """The most tokens to write: `max_length`, else half as many again as the longest target of the training, and ten.

    >>> at_most(40), at_most(40, max_length=500)
    (70, 500)
    """
    return max(longest * 3 // 2 + 10, min_length) if max_length is None else max_length


def check_beam(beam: int, n: int) -> None:
    """Raise unless a beam can find the n best."""
    check_int("beam", beam, least=1)
    check_int("n", n, least=1)
    if n > beam:
        raise ValueError(f"n must be at most beam, got n={n} and beam={beam}; pass beam={n} or more")


def build_model(network: Network) -> nn.Module:
    """The model of a config."""
    match network:
        case PointerConfig():
            return Pointer(network)
        case Seq2SeqConfig():
            return Seq2Seq(network)
        case TransformerConfig():
            return Transformer(network)


def tokenizers_class(network: Network) -> type[Tokenizers]:
    """How a model reads pairs: one that copies numbers the words it does not know."""
    return CopyTokenizers if isinstance(network, PointerConfig) else Tokenizers
