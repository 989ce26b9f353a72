"""Train an encoder-decoder on pairs of texts, for any task from one text to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from ..data.row_checks import pair_key
from ..data.text import check_reiterable
from ..models import TransformerConfig
from ..train import Outcome, Progress, Recipe
from . import run_folder
from .batching import Batching
from .data_checks import report_rows
from .dry_run import example_lines, length_line, unknown_line
from .encoded_dataset import EncodedExamples
from .fine_tuning import FineTuning
from .metrics import MetricValue
from .pairs import TextPair, Tokenizers, check_pairs
from .seq2seq_task import GREEDY_EVALUATIONS, Network, Seq2SeqTaskConfig, build_model, tokenizers_class
from .setup import Setup, Start, run


class Evaluator(Protocol):
    """A predictor with an evaluation, such as `Translator`."""

    def evaluate(self, pairs: Sequence[TextPair], *, beam: int) -> dict[str, MetricValue]: ...


def train(
    task: str,
    writer: Callable[..., Evaluator],
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
    base: str | Path | FineTuning | None,
) -> Outcome:
    """Train a new model, or resume the run in `out`; validate with `writer`, the class of the predictor.

    `new` builds the config and the tokenizers of a new model. `limit` is the number of source tokens that the predictor
    reads, if training truncates sources.
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
        judged = None if valid is None else list(valid)
        examples = tokenizers.encode(pairs)
        batches = batching.over(examples, pad=tokenizers.pad, seed=recipe.seed, group=start.group, say=start.say)
        if recipe.forcing is not None and isinstance(network, TransformerConfig):
            raise ValueError("forcing needs a recurrent decoder, got a Transformer; leave it out")
        longest = min(batching.limit, int(examples.lengths["target"].max()))
        if config is None:
            config = Seq2SeqTaskConfig(model=network, longest=longest, limit=limit)
        elif start.fresh:
            config = replace(config, longest=max(config.longest, longest))
        setup = Setup(
            model=build_model(network),
            batches=batches,
            evaluate=None if judged is None else _judge(writer, judged, tokenizers, config, say=start.say),
            files={run_folder.CONFIG: run_folder.config_text(task, config), **tokenizers.files()},
            describe=lambda: _describe(examples, tokenizers, judged),
        )
        report_rows(start, map(pair_key, pairs), None if judged is None else map(pair_key, judged), "pairs")
        return setup

    return run(prepare, recipe, out=out, resume=resume, files=files, device=device, show=show, base=base)


def _judge(
    writer: Callable[..., Evaluator],
    valid: list[TextPair],
    tokenizers: Tokenizers,
    config: Seq2SeqTaskConfig,
    *,
    say: Callable[[str], None],
) -> Callable[[nn.Module], dict[str, float]]:
    if not valid:
        raise ValueError("valid has no pairs; leave it out to train without validation")
    if (limit := config.limit) is not None:
        lengths = map(len, tokenizers.encode_sources([pair.source for pair in valid]))
        if long := sum(length > limit for length in lengths):
            say(
                f"{long:,} of {len(valid):,} validation documents have more than {limit} tokens; only the first "
                f"{limit} are read"
            )

    say(GREEDY_EVALUATIONS)

    def evaluate(model: nn.Module) -> dict[str, float]:
        squad_scores = writer([model], tokenizers, longest=config.longest, limit=config.limit)
        return {name: measured.value for name, measured in squad_scores.evaluate(valid, beam=1).items()}

    return evaluate


def _describe(examples: EncodedExamples, tokenizers: Tokenizers, valid: Sequence[TextPair] | None) -> list[str]:
    """Return the lengths, the vocabularies and the first examples of the data, for a dry run."""
    sides = {"source": tokenizers.source, "target": tokenizers.target}
    data = {"training": examples} if valid is None else {"training": examples, "validation": tokenizers.encode(valid)}
    lines = []
    for name, encoded in data.items():
        rows = [encoded[n] for n in range(len(encoded))]
        for side, one in sides.items():
            lines.append(length_line(f"{name} {side}", "texts", encoded.lengths[side]))
            lines.append(unknown_line(f"{name} {side}", one, [row[side] for row in rows]))
    for side, one in sides.items():
        lines += example_lines(side, [examples[n][side].tolist() for n in range(min(2, len(examples)))], one)
    return lines
