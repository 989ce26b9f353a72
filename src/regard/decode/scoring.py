"""Scoring: the log-probability of given sequences under a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_token_ids
from .backpointers import concat_attention
from .hypothesis import Hypothesis
from .prefix import TargetPrefix, Tokens, pieces
from .stepper import Stepper, advance, attention_of


@torch.no_grad()
def score(
    stepper: Stepper, source: Any, prefix: Tokens, targets: Sequence[Sequence[Sequence[int]]]
) -> list[list[Hypothesis]]:
    """Return log p(target | prefix, source) of every candidate; `targets[n]` are the candidates for source row n.

    To rank an n-best list of one model by another:

        found = beam(a, source, prefix, width=5, n_best=5, end=end, max_length=100)
        again = score(b, source, prefix, [[one.tokens for one in best] for best in found])
        ranked = [sorted(best, key=lambda one: -one.log_probability) for best in again]

    Candidates are scored without an end token unless they contain it. The score is the log-probability, without a
    length penalty. The source is read once per row, each candidate in few steps of many tokens; its attention is that
    of a forced alignment.
    """
    given = TargetPrefix.of(prefix, stepper)
    if len(targets) != len(given.common):
        raise ValueError(
            f"targets must hold a list of candidates for each of the {len(given.common)} rows, got {len(targets)}"
        )
    try:
        owners = [row for row, candidates in enumerate(targets) for _ in candidates]
        chosen = [tuple(map(int, candidate)) for candidates in targets for candidate in candidates]
    except TypeError as error:
        raise TypeError(
            f"targets must hold a list of candidates for each row, each a list of tokens ({error}); write [[tokens]]"
        ) from None
    if not chosen:
        return [[] for _ in targets]
    given, state = given.begin(stepper, source)
    rest = [row[:late] for row, late in zip(given.rest.tolist(), given.late.tolist(), strict=True)]
    last = given.common[:, -1].tolist()
    texts = [[last[row], *rest[row], *tokens] for row, tokens in zip(owners, chosen, strict=True)]
    longest = max(map(len, texts))
    device = given.common.device
    # Padding is read after the tokens of a shorter text and does not change their scores.
    read = torch.tensor([text + text[:1] * (longest - len(text)) for text in texts], device=device)
    state = state.select(torch.tensor(owners, device=device))
    gains, attention = _read(stepper, read, state)

    hypotheses: list[list[Hypothesis]] = [[] for _ in targets]
    for n, (row, tokens) in enumerate(zip(owners, chosen, strict=True)):
        scored = slice(len(rest[row]), len(rest[row]) + len(tokens))
        hypotheses[row].append(
            Hypothesis(
                tokens=tokens,
                score=(log_probability := gains[n, scored].sum().item()),
                log_probability=log_probability,
                log_probabilities=tuple(gains[n, scored].tolist()),
                finished=True,
                attention={name: x[n, :, scored] for name, x in attention.items()},
            )
        )
    return hypotheses


def _read(stepper: Stepper, tokens: Tensor, state: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probability of each token but the first, and the attention of its prediction."""
    gains, attention = [torch.empty(len(tokens), 0, dtype=torch.float64, device=tokens.device)], []
    for inputs, outputs in zip(pieces(tokens[:, :-1]), pieces(tokens[:, 1:]), strict=True):
        logits, state = advance(stepper, inputs, state)
        check_token_ids("targets", outputs, logits.shape[-1])
        gains.append((logits.gather(2, outputs[..., None])[..., 0] - logits.logsumexp(-1)).double())
        attention.append(attention_of(state))
    names = attention[0] if attention else ()
    return torch.cat(gains, 1).cpu(), {name: concat_attention([piece[name] for piece in attention]) for name in names}
