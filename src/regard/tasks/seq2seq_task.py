"""Decoding and scoring with trained encoder-decoders, line by line."""

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
from ..decode.prefix import Tokens
from ..decode.sampling import SEEDS
from ..lens import Tape
from ..models import Pointer, PointerConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from ..train import own_device
from . import run_folder, word_alignment
from .copy_vocabulary import CopyTokenizers
from .encoded_dataset import EncodedExamples, in_batches
from .metrics import MetricValue
from .pairs import Draft, TextPair, Tokenizers, check_pairs

TOKENS_PER_BATCH = 4096
MAX_CAPTURED_PAIRS = 500
GREEDY_EVALUATIONS = (
    "evaluations in training use greedy search; regard evaluate uses beam search by default, and with --beam 1 greedy"
)
Network = Seq2SeqConfig | PointerConfig | TransformerConfig
ShowProgress = Callable[[int, int], None]  # called with the number of examples done, and of all


@dataclass(frozen=True, kw_only=True)
class Seq2SeqTaskConfig:
    """The content of `config.json`: the model, the longest target in training, and the limit of sources, in tokens.

    Without a limit, sources are read whole.
    """

    model: Network
    longest: int
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A generated line with its scores; `finished` is False if it reached the maximum length before its end.

    `score` is the log-probability divided by the length penalty, for any beam size. `tokens` are its tokens, including
    the end token if it was generated; `pairs.Draft` takes them.
    """

    text: str
    score: float
    log_probability: float
    finished: bool
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, found: Hypothesis, text: str) -> GeneratedText:
        """Make a generated text of a hypothesis and its decoded text."""
        return cls(
            text=text,
            score=found.score,
            log_probability=found.log_probability,
            finished=found.finished,
            tokens=found.tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of random outputs, each of a line with a seed of its own, whatever other lines there are.

    The n outputs of line k draw from the seeds `seed + k * n` and following. `top_k` keeps the most likely tokens, and
    `top_p` those that together have this probability (Holtzman et al. 2020).
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def after(self, outputs: int) -> Sampling:
        """Return the settings for the lines after this number of outputs."""
        return replace(self, seed=self.seed + outputs)


EMPTY_TEXT = GeneratedText(text="", score=0.0, log_probability=0.0, finished=True)  # the output for a blank line


class Writer:
    """A trained encoder-decoder, or an ensemble of several with the same vocabularies.

    `longest` is the longest target in training, in tokens, which bounds the length of outputs (`length_limit`). Only
    the first `limit` tokens of a source are read, as in training; `too_long` finds longer sources. Lines are decoded in
    batches of similar length, and the batch does not change their outputs. Methods call `show(done, total)` to report
    progress.
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
        """Load the model of a run, or an ensemble of several with the same vocabularies."""
        if not folders:
            raise ValueError("load needs at least one folder, got none")
        place = own_device(device)
        opened = [run_folder.open_run(folder) for folder in folders]
        configs = [run_folder.config_of(path, cls.task, Seq2SeqTaskConfig) for path in opened]
        tokenizers = [tokenizers_class(config.model).load(path) for config, path in zip(configs, opened, strict=True)]
        for path, other in zip(opened[1:], tokenizers[1:], strict=True):
            if type(other) is not type(tokenizers[0]):
                raise ValueError(
                    f"all models of an ensemble must copy words, or none, but {path} and {opened[0]} differ"
                )
            if tuple(other) != tuple(tokenizers[0]):
                raise ValueError(f"an ensemble must share its vocabularies, but those of {path} and {opened[0]} differ")
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
        coverage: float = 0.0,
        prefixes: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        show: ShowProgress | None = None,
    ) -> list[GeneratedText]:
        """Return the best output for each line by beam search; a beam of 1 is greedy."""
        found = self.n_best(
            lines,
            n=1,
            beam=beam,
            alpha=alpha,
            min_length=min_length,
            max_length=max_length,
            no_repeat=no_repeat,
            coverage=coverage,
            prefixes=prefixes,
            sampling=sampling,
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
        coverage: float = 0.0,
        prefixes: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        show: ShowProgress | None = None,
    ) -> list[list[GeneratedText]]:
        """Return the n best outputs for each line, best first.

        `alpha` is the exponent of the length penalty of Wu et al. 2016. Outputs have at most `max_length` tokens, by
        default `length_limit`, and never repeat a sequence of `no_repeat` tokens. They have at least `min_length`
        tokens, unless `no_repeat` leaves only the end token. A blank line gives an empty output.

        `coverage` is the weight beta of the coverage penalty of Wu et al. 2016, for source tokens that got little
        attention. `prefixes`, one for each line, are the beginnings of the outputs; lengths and scores are those of the
        tokens after them. With `sampling` outputs are drawn at random instead of searched, and ranked by score.
        """
        check_not_a_string(lines, "lines")
        check_beam(n if sampling else beam, n)
        for line in (lines := list(lines)):
            check_text(line, "a line")
        forced = self._encode_prefixes([""] * len(lines) if prefixes is None else prefixes, len(lines))
        stepper, penalize = self._watching_coverage(coverage if sampling is None else 0.0)
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
            at = [places[row] for row in rows]
            starts: Any = self._starts(len(rows))
            if prefixes is not None:
                starts = [torch.cat([start, forced[place]]) for start, place in zip(starts, at, strict=True)]
            if sampling is not None:
                best = draw_n(stepper, batch, starts, n=n, alpha=alpha, sampling=sampling, lines=at, **limits)
            else:
                best = search_n_best(
                    stepper, batch, starts, n=n, beam=beam, alpha=alpha, coverage=penalize(batch), **limits
                )
            for row, place, hypotheses in zip(rows, at, best, strict=True):
                found[place] = [self._decode_text(one, texts[row], forced[place].tolist()) for one in hypotheses]
        return found

    def _encode_prefixes(self, prefixes: Sequence[str], lines: int) -> list[Tensor]:
        """Return the tokens of the beginning of each output; raise for words that the vocabulary lacks."""
        check_not_a_string(prefixes, "prefixes")
        if len(prefixes) != lines:
            raise ValueError(f"prefixes must hold one text for each of the {lines:,} lines, got {len(prefixes):,}")
        target = self.tokenizers.target
        found = []
        for text, ids in zip(prefixes, target.encode_all([text.strip() for text in prefixes]), strict=True):
            if target.unk in ids:
                raise ValueError(f"the prefix {text!r} has a token that the target vocabulary lacks; use other words")
            found.append(torch.tensor(ids, dtype=torch.long, device=self.device))
        return found

    def _watching_coverage(self, beta: float) -> tuple[Any, Callable[[Any], decode.Coverage | None]]:
        """Return a stepper that records the attention whose coverage counts, and the penalty of a batch."""
        if not beta:
            return self._stepper, lambda batch: None
        if len(self.models) > 1:
            raise ValueError(f"coverage needs exactly one model, got {len(self.models)}; leave it out for an ensemble")
        [model] = self.models
        layers = word_alignment.cross_layers(model)  # raises if there is none
        name, stepper = "source", self._stepper
        if isinstance(model, Transformer):
            name = f"cross.{len(layers) // 2}"
            stepper = model.watched(name)

        def penalize(batch: Any) -> decode.Coverage:
            keep = torch.arange(batch["source"].shape[1], device=self.device) < batch["source_lengths"][:, None]
            return decode.Coverage(beta, name, keep)

        return stepper, penalize

    def score(self, pairs: Sequence[TextPair], *, show: ShowProgress | None = None) -> list[float]:
        """Compute log p(target | source) of each pair, including the end token."""
        found = [0.0] * len(pairs)
        examples = self.tokenizers.encode(self._cut(pairs))
        for rows, batch in self._batches(examples, show):
            targets = [[examples[row]["target"].tolist()] for row in rows]
            scored = decode.score(self._stepper, batch, self._starts(len(rows)), targets)
            for row, [one] in zip(rows, scored, strict=True):
                found[row] = one.log_probability
        return found

    def loss(self, pairs: Sequence[TextPair]) -> MetricValue:
        """Compute the mean -log p per target token."""
        if not pairs:
            raise ValueError("loss needs at least one pair, got none")
        tokens = int(self.tokenizers.encode(pairs).lengths["target"].sum())
        return MetricValue(-sum(self.score(pairs)) / tokens, f"nats per token, {tokens:,} tokens")

    def tape(self, pairs: Sequence[TextPair]) -> Tape:
        """Capture all attention of the model over these pairs, one batch row per pair."""
        if len(self.models) > 1:
            raise ValueError(f"a capture needs exactly one model, got {len(self.models)}; load one of them")
        if not 0 < len(pairs) <= MAX_CAPTURED_PAIRS:
            raise ValueError(f"a capture holds 1 to {MAX_CAPTURED_PAIRS} pairs, got {len(pairs)}; give fewer")
        pairs = self._cut(pairs)
        batch = self.tokenizers.encode(pairs).batch(range(len(pairs)), pad=self.tokenizers.pad, device=self.device)
        return word_alignment.tape_of(self.models[0], self.tokenizers, pairs, batch)

    def read(self, source: str) -> str:
        """Return the part of a source that is read: its text up to the limit, in which the end token counts."""
        if self.limit is None or len(spans := self.tokenizers.source.spans(source)) < self.limit:
            return source
        return source[: spans[self.limit - 2].end] if self.limit > 1 else ""

    def too_long(self, sources: Sequence[str]) -> list[bool]:
        """Return for each source whether it has more tokens than are read."""
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

    def _decode_text(self, one: Hypothesis, line: str, prefix: Sequence[int] = ()) -> GeneratedText:
        whole = replace(one, tokens=(*prefix, *one.tokens))
        return GeneratedText.of(whole, self.tokenizers.text(whole.tokens, line))


def search_n_best(
    stepper: Any,
    source: Any,
    prefix: Tokens,
    *,
    n: int,
    beam: int,
    alpha: float,
    coverage: decode.Coverage | None = None,
    **limits: Any,
) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each source row; greedy search (beam 1) gets the same kind of score."""
    length = Gnmt(alpha)
    if beam > 1 or coverage is not None:
        return decode.beam(stepper, source, prefix, width=beam, n_best=n, length=length, coverage=coverage, **limits)
    found = decode.greedy(stepper, source, prefix, **limits)
    return [[replace(one, score=one.log_probability / length(len(one.tokens)))] for one in found]


def draw_n(
    stepper: Any,
    source: Any,
    prefix: Tokens,
    *,
    n: int,
    alpha: float,
    sampling: Sampling,
    lines: Sequence[int],
    **limits: Any,
) -> list[list[Hypothesis]]:
    """Return n random hypotheses of each source row, the best first; `lines` are the numbers of the rows' lines."""
    length = Gnmt(alpha)
    drawn = decode.sample(
        stepper,
        source,
        prefix,
        samples=n,
        seed=[(sampling.seed + line * n) % SEEDS for line in lines],
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        **limits,
    )
    scored = [[replace(one, score=one.log_probability / length(len(one.tokens))) for one in row] for row in drawn]
    return [sorted(row, key=lambda one: -one.score) for row in scored]


def length_limit(longest: int, *, min_length: int = 0, max_length: int | None = None) -> int:
    """Return the maximum number of output tokens: `max_length`, or else 1.5 x the longest target in training, plus 10.

    >>> length_limit(40), length_limit(40, max_length=500)
    (70, 500)
    """
    return max(longest * 3 // 2 + 10, min_length) if max_length is None else max_length


def check_beam(beam: int, n: int) -> None:
    """Raise if `n` is larger than the beam."""
    check_int("beam", beam, least=1)
    check_int("n", n, least=1)
    if n > beam:
        raise ValueError(f"n must be at most beam, got n={n} and beam={beam}; pass beam={n} or more")


def build_model(network: Network) -> nn.Module:
    """Build the model of a config."""
    match network:
        case PointerConfig():
            return Pointer(network)
        case Seq2SeqConfig():
            return Seq2Seq(network)
        case TransformerConfig():
            return Transformer(network)


def tokenizers_class(network: Network) -> type[Tokenizers]:
    """Return the tokenizers class of a model; one that copies gives unknown words ids of their own."""
    return CopyTokenizers if isinstance(network, PointerConfig) else Tokenizers
