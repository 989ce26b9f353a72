"""Writing: how an encoder-decoder learns from pairs of texts, whatever it is to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from ..data.text import check_reiterable
from ..models import TransformerConfig
from ..train import Outcome, Progress, Recipe
from . import run_folder
from .batching import Batching
from .metrics import MetricValue
from .pairs import TextPair, Tokenizers, check_pairs
from .seq2seq_task import Network, Seq2SeqTaskConfig, build_model, tokenizers_class
from .setup import Setup, Start, run


class Judge(Protocol):
    """A writer that can say how good it is, as `Translator` does."""

    def evaluate(self, pairs: Sequence[TextPair], *, beam: int) -> dict[str, MetricValue]: ...


def train(
    task: str,
    writer: Callable[..., Judge],
    new: Callable[[], tuple[Network, Tokenizers]],
    pairs: Iterable[TextPair],
    *,
    out: str | Path,
    valid: Iterable[TextPair] | None,
    recipe: Recipe,
    batching: Batching,
    limit: int | None = None,
    resume: bool,
    files: Mapping[str, str] | None,
    device: torch.device | str | None,
    show: Progress | None,
) -> Outcome:
    """Train what `new` makes of the pairs, or the model of the run in `out`, and judge it as the writer it becomes.

    `limit` is how many tokens of a source are read later, where training has cut them.
    """

    check_reiterable(pairs, "pairs")
    check_pairs(islice(pairs, 1))

    def prepare(start: Start) -> Setup:
        config: Seq2SeqTaskConfig | None = None
        if start.checkpoint is None:
            network, tokenizers = new()
        else:
            config = run_folder.config_of(start.checkpoint, task, Seq2SeqTaskConfig)
            network, tokenizers = config.model, tokenizers_class(config.model).load(start.checkpoint)
        examples = tokenizers.encode(pairs)
        batches = batching.over(examples, pad=tokenizers.pad, seed=recipe.seed, group=start.group, say=start.say)
        if recipe.forcing is not None and isinstance(network, TransformerConfig):
            raise ValueError("forcing feeds a recurrent decoder its own words, got a Transformer; leave it out")
        if config is None:
            longest = min(batching.limit, int(examples.lengths["target"].max()))
            config = Seq2SeqTaskConfig(model=network, longest=longest, limit=limit)
        return Setup(
            model=build_model(network),
            batches=batches,
            evaluate=None if valid is None else _judge(writer, list(valid), tokenizers, config, say=start.say),
            files={run_folder.CONFIG: run_folder.config_text(task, config), **tokenizers.files()},
        )

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show)


def _judge(
    writer: Callable[..., Judge],
    valid: list[TextPair],
    tokenizers: Tokenizers,
    config: Seq2SeqTaskConfig,
    *,
    say: Callable[[str], None],
) -> Callable[[nn.Module], dict[str, float]]:
    if not valid:
        raise ValueError("valid must hold at least one pair, got none; leave it out to train without validation")
    if (limit := config.limit) is not None:
        lengths = map(len, tokenizers.encode_sources([pair.source for pair in valid]))
        if long := sum(length > limit for length in lengths):
            say(
                f"{long:,} of {len(valid):,} documents to validate by have more than {limit} tokens, of which the rest "
                "is not read"
            )

    def evaluate(model: nn.Module) -> dict[str, float]:
        squad_scores = writer([model], tokenizers, longest=config.longest, limit=config.limit)
        return {name: measured.value for name, measured in squad_scores.evaluate(valid, beam=1).items()}

    return evaluate
