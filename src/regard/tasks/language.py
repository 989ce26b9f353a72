"""Language modelling: predict and generate text token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from ..data import Batches, Tokenizer, Windows, ids_of
from ..data.text import check_not_a_string, check_reiterable, check_text, lines_in
from ..decode import greedy, sample
from ..decode.sampling import SEEDS, check_top_k_and_top_p
from ..lens import Tape, capture
from ..models import Gpt, GptConfig
from ..nn.losses import cross_entropy_per_target
from ..train import InverseSquareRoot, Outcome, Progress, Recipe, own_device
from ..train.dataclass_json import check_types
from . import run_folder
from .data_checks import report_lines
from .dry_run import example_lines, unknown_line
from .encoded_dataset import EncodedExamples, in_batches
from .fine_tuning import FineTuning, check_kept
from .metrics import MetricValue
from .seq2seq_task import ShowProgress
from .setup import Setup, Start, run
from .vocabulary import TOKENIZER, Vocabulary

TASK = "language"
LOGITS_PER_BATCH = 2**25  # in evaluation, to bound memory

Ids = np.ndarray[Any, np.dtype[Any]]
ModelConfigFunction = Callable[[Tokenizer], GptConfig]


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings:
    """Settings of a language model; called with a tokenizer, they return the config of the model.

    `gpt` is GPT-2 (Radford et al. 2019), `llama` has rotary positions, RMSNorm and SwiGLU (Touvron et al. 2023).
    """

    kind: Annotated[
        Literal["gpt", "llama"], "Architecture: GPT-2, or Llama (rotary positions, RMSNorm and SwiGLU).", "--model"
    ] = "gpt"
    length: Annotated[int, "Context length, and length of a training window, in tokens."] = 256
    dim: Annotated[int, "Width of hidden states."] = 256
    depth: Annotated[int, "Number of layers."] = 4
    heads: Annotated[int, "Number of attention heads."] = 4
    kv_heads: Annotated[int | None, "Number of key and value heads. Default: --heads."] = None
    hidden: Annotated[int | None, "Width of feed-forward layers. Default: 4 x --dim (gpt) or 8/3 x --dim (llama)."] = (
        None
    )
    dropout: Annotated[float, "Dropout probability in training."] = 0.1
    attention_dropout: Annotated[
        float, "Dropout probability of attention weights; above 0 it takes most of the time of a step on a CPU."
    ] = 0.0

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, tokenizer: Tokenizer) -> GptConfig:
        """Return the config for this vocabulary."""
        if self.kind == "llama":
            llama = GptConfig.llama(
                vocabulary=len(tokenizer),
                length=self.length,
                dim=self.dim,
                depth=self.depth,
                heads=self.heads,
                kv_heads=self.kv_heads,
                hidden=self.hidden,
            )
            return replace(llama, dropout=self.dropout, attention_dropout=self.attention_dropout)
        return GptConfig(
            vocabulary=len(tokenizer),
            length=self.length,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
        )


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The content of `config.json`."""

    model: GptConfig


Model = LanguageModelSettings  # short, for `language.Model(...)`
DEFAULT_MODEL, DEFAULT_VOCABULARY = LanguageModelSettings(), Vocabulary()
RECIPE = Recipe(
    steps=10_000,
    rate=InverseSquareRoot(1e-3, warmup=400),
    evaluate_every=500,
    save_every=500,
    metric="loss",
)


def train(
    lines: Iterable[str],
    *,
    out: str | Path,
    valid: Iterable[str] | None = None,
    recipe: Recipe = RECIPE,
    model: ModelConfigFunction = DEFAULT_MODEL,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    tokens: int = 8192,
    stride: int | None = None,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    show: Progress | None = None,
    base: str | Path | FineTuning | None = None,
) -> Outcome:
    """Train a language model on the lines of a text, into the folder `out`.

        train(Lines("a.txt"), valid=Lines("b.txt"), out="runs/a")
        LanguageModel.load("runs/a").generate("Once upon")

    The text is one long row of tokens, including line ends, cut into windows of the model's length; a batch has as many
    windows as fit into `tokens`. Windows start `stride` tokens apart, by default their length; with a smaller stride an
    epoch shows each token after several different beginnings, which delays overfitting. `lines` may be iterated more
    than once. An evaluation returns `perplexity` per word, `bits` per character and `loss` per token; all three rank
    models alike, except that the perplexity is capped at e^700, which text without spaces can reach. Other arguments
    are as in `translation.train`.
    """

    check_reiterable(lines, "lines")
    check_not_a_string(valid, "valid")

    check_kept(base, model=model != DEFAULT_MODEL, vocabulary=vocabulary != DEFAULT_VOCABULARY)

    def prepare(start: Start) -> Setup:
        begun = start.checkpoint
        tokenizer = vocabulary.learn(lines) if begun is None else _tokenizer_of(begun)
        config = LanguageConfig(model=model(tokenizer)) if begun is None else _config_of(begun)
        if tokens < config.model.length:
            raise ValueError(
                f"a batch must have room for a window of {config.model.length} tokens, got tokens={tokens}"
            )
        judged = None if valid is None else list(valid)
        batches = Batches(
            _windows(_row(lines, tokenizer), config.model.length, stride),
            _window,
            rows=tokens // config.model.length,
            pad=tokenizer.pad,
            seed=recipe.seed,
            shard=(start.group.rank, start.group.size),
        )
        if recipe.forcing is not None:
            raise ValueError("forcing needs a recurrent decoder, and language models have none; leave it out")
        setup = Setup(
            model=Gpt(config.model),
            batches=batches,
            evaluate=None if judged is None else _judge(judged, tokenizer),
            files={run_folder.CONFIG: run_folder.config_text(TASK, config), TOKENIZER: tokenizer.to_json()},
            describe=lambda: _describe(lines, judged, tokenizer, config.model.length),
        )
        report_lines(start, lines, judged)
        if judged is not None:
            start.say(
                f"evaluations in training cut the text into windows of {config.model.length} tokens; regard evaluate "
                "predicts each token from at least half a window by default (--overlap 0 cuts it as in training)"
            )
        return setup

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


class LanguageModel:
    """A trained language model.

        model = LanguageModel.load("runs/a")
        print(model.generate("Once upon", temperature=0.8)[0])

    It reads a text as one row of tokens, in which each line ends with an end token.
    """

    def __init__(self, model: Gpt, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.length = model.config.length
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str | None = None) -> LanguageModel:
        """Load the model of a run."""
        path = run_folder.open_run(folder)
        model = Gpt(_config_of(path).model)
        run_folder.load_weights(model, path)
        return cls(model.to(own_device(device)), _tokenizer_of(path))

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        until_line_end: bool = False,
    ) -> list[str]:
        """Generate `samples` continuations of the prompt, of `tokens` tokens or up to the end of the line.

        A temperature of 0 takes the most likely token at each step. When the context is full, generation continues with
        its second half.
        """
        check_text(prompt)
        for name, value in (("tokens", tokens), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if temperature < 0:
            raise ValueError(
                f"temperature must be at least 0, got {temperature}; 0 takes the most likely token at each step"
            )
        check_top_k_and_top_p(top_k, top_p)
        end = self.tokenizer.eos if until_line_end else None
        before, last = self._prompt_tokens(prompt)
        written: list[tuple[int, ...]] = [()] * samples
        going = list(range(samples))
        while going and (done := len(written[going[0]])) < tokens:
            seen = [(*before, *written[row]) for row in going]
            if len(seen[0]) >= self.length:
                seen = [row[-max(1, self.length // 2) :] for row in seen]
            prefix = torch.tensor(seen, device=self.device)
            limits: dict[str, Any] = {
                "end": end,
                "max_length": min(tokens - done, max(1, self.length - prefix.shape[1])),
                "forbid": self.tokenizer.unwritten,
            }
            if temperature == 0:
                found = greedy(self.model, None, prefix, **limits)
            else:
                limits |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
                # Each row has its own seed; rows of the next context window continue with the following seeds.
                limits["seed"] = (seed + samples * done) % SEEDS if done else seed
                found = [one for [one] in sample(self.model, None, prefix, **limits)]
            for row, one in zip(going, found, strict=True):
                written[row] += one.tokens
            going = [row for row, one in zip(going, found, strict=True) if not one.finished]
        return [self._text(last, row) for row in written]

    def room(self, prompt: str) -> int:
        """Return how many tokens fit into the context after a prompt."""
        return max(0, self.length - len(self._prompt_tokens(prompt)[0]))

    def score(self, lines: Sequence[str], *, show: ShowProgress | None = None) -> list[float]:
        """Compute log p of each line, including its end, as the first line of a text."""
        check_not_a_string(lines, "lines")
        rows = [np.array([self.tokenizer.eos, *ids]) for ids in self.tokenizer.encode_all(lines, eos=True)]
        return [-cost for cost in self._costs(rows, self.length // 2, show)]

    def tape(self, text: str) -> Tape:
        """Capture all attention of the model while it reads a text."""
        row = _row(lines_in(text), self.tokenizer)[:-1]
        if len(row) > self.length:
            raise ValueError(f"the text has {len(row)} tokens, but the model reads at most {self.length}; shorten it")
        ids = torch.as_tensor(row.astype(np.int64), device=self.device)[None]
        with capture(self.model, self.tokenizer.labels(row.tolist())) as tape, torch.no_grad():
            logits = self.model(ids)
        tape.predict(logits, ids, self.tokenizer.labels)
        return tape

    def evaluate(
        self, lines: Iterable[str], *, overlap: int | None = None, show: ShowProgress | None = None
    ) -> dict[str, MetricValue]:
        """Compute `perplexity` per word, `bits` per character and `loss` per token of a text.

        The perplexity is exp(-log p / words), where words are separated by spaces and each line end counts as a word.
        This is the word-level perplexity of the literature, so models with different vocabularies can be compared, as
        long as none has unknown tokens. Each token, except at the start of the text, is predicted from at least
        `overlap` tokens, by default half of the model's length.
        """
        check_not_a_string(lines, "lines")
        lines = list(lines)
        overlap = self.length // 2 if overlap is None else overlap
        if not 0 <= overlap < self.length:
            raise ValueError(
                f"overlap must be at least 0 and less than the model's length of {self.length}, got {overlap}"
            )
        row = _row(lines, self.tokenizer)
        [cost] = self._costs([row], overlap, show)
        words, characters = (sum(map(len, parts)) + len(lines) for parts in (map(str.split, lines), lines))
        return {
            "perplexity": MetricValue(
                math.exp(min(cost / words, 700)), f"per word, {words:,} words including line ends"
            ),
            "bits": MetricValue(cost / math.log(2) / characters, f"per character, {characters:,} characters"),
            "loss": MetricValue(cost / (len(row) - 1), f"nats per token, {len(row) - 1:,} tokens"),
        }

    def _costs(self, rows: Sequence[Ids], overlap: int, show: ShowProgress | None) -> list[float]:
        """Compute -log p of each row without its first token, in overlapping windows."""
        owners, firsts, windows = [], [], []
        for number, ids in enumerate(rows):
            for start in range(0, max(1, len(ids) - 1 - overlap), self.length - overlap):
                owners.append(number)
                firsts.append(overlap if start else 0)
                windows.append(ids[start : start + self.length + 1])
        costs, done = [0.0] * len(rows), 0
        examples = EncodedExamples(windows, lambda some: {"ids": some})
        tokens = max(self.length + 1, LOGITS_PER_BATCH // len(self.tokenizer))
        pad = {"ids": self.tokenizer.pad}
        for chosen, batch in in_batches(examples, tokens=tokens, pad=pad, device=self.device):
            read, targets = batch["ids"][:, :-1], batch["ids"][:, 1:]
            positions = torch.arange(targets.shape[1], device=self.device)
            first = torch.tensor([firsts[one] for one in chosen], device=self.device)
            counted = (positions >= first[:, None]) & (positions < batch["ids_lengths"][:, None] - 1)
            with torch.no_grad():
                each = cross_entropy_per_target(self.model(read).float(), targets, counted=counted)
            for one, cost in zip(chosen, each.double().sum(1).tolist(), strict=True):
                costs[owners[one]] += cost
            done += len(chosen)
            if show is not None:
                show(done, len(windows))
        return costs

    def _prompt_tokens(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, which begins with an end token like every line, and those of its last line."""
        *lines, last = self.tokenizer.encode_all(prompt.split("\n"))
        return [self.tokenizer.eos, *(token for line in lines for token in (*line, self.tokenizer.eos)), *last], last

    def _text(self, begun: Sequence[int], tokens: Sequence[int]) -> str:
        """Decode tokens, with end tokens as line ends, as the continuation of an unfinished line."""
        lines = [list(begun)]
        for token in tokens:
            if token == self.tokenizer.eos:
                lines.append([])
            else:
                lines[-1].append(token)
        text = "\n".join(self.tokenizer.decode(line) for line in lines)
        return text[len(self.tokenizer.decode(begun)) :]


def _windows(row: Ids, size: int, stride: int | None) -> ConcatDataset[Any]:
    """Return the windows over a row, started again at each multiple of the stride below the window size."""
    if stride is not None and stride < 1:
        raise ValueError(f"stride must be at least 1 token, got {stride}")
    firsts = range(0, min(size, len(row) - 1), stride or size)
    return ConcatDataset([cast(Any, Windows(row[first:], size=size)) for first in firsts])


def _window(ids: Ids) -> dict[str, Ids]:
    return {"ids": ids}


def _row(lines: Iterable[str], tokenizer: Tokenizer) -> Ids:
    """Return all lines as one row of ids, which begins with an end token."""
    ids = ids_of(lines, tokenizer)
    return np.concatenate([np.array([tokenizer.eos], ids.dtype), ids])


def _describe(lines: Iterable[str], valid: list[str] | None, tokenizer: Tokenizer, length: int) -> list[str]:
    """Return the size, the vocabulary and the first tokens of the text, for a dry run."""
    found = []
    texts = {"text": lines} if valid is None else {"text": lines, "validation text": valid}
    for name, some in texts.items():
        row, count = _row(some, tokenizer), sum(1 for _ in some)
        found.append(f"{name}: {count:,} lines, {len(row):,} tokens")
        found.append(unknown_line(name, tokenizer, [row]))
    return [*found, *example_lines("window", [_row(lines, tokenizer)[:length].tolist()], tokenizer)]


def _config_of(checkpoint: Path) -> LanguageConfig:
    return run_folder.config_of(checkpoint, TASK, LanguageConfig)


def _tokenizer_of(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_json(run_folder.read_text(checkpoint, TOKENIZER))


def _judge(valid: list[str], tokenizer: Tokenizer) -> Callable[[Gpt], dict[str, float]]:
    if not valid:
        raise ValueError("valid has no lines; leave it out to train without validation")

    def evaluate(model: Gpt) -> dict[str, float]:
        found = LanguageModel(model, tokenizer).evaluate(valid, overlap=0)
        return {name: measured.value for name, measured in found.items()}

    return evaluate
