"""The roles of heads: which look at the previous token, copy, rest on a sink, or follow positions alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...checks import check_number
from ...ops.weights import Weights
from ..capture_warning import CaptureWarning
from ..layer_names import shown_calls, shown_name
from ..real_tokens import RealTokens, says_cross
from ..recording.recorder import Key
from ..tape.overview import as_table
from ..tape.tape import Tape
from . import head_measures as measures
from .positional_heads import positional as positional_score

SHORTEST_TEXT = 16  # queries; in a shorter text even attention passes the thresholds by chance
Text = tuple[Sequence[str] | None, Sequence[str] | None]  # the tokens of the queries and of the keys
NARROW_ROLES = ("previous_token", "induction", "duplicate_token", "retrieval")


def head_roles(
    tape: Tape,
    *,
    previous_token: float = 0.4,
    induction: float = 0.4,
    duplicate_token: float = 0.4,
    retrieval: float = 0.4,
    sink: float = 0.3,
    positional: float = 0.6,
) -> Any:
    """Return a table with a row for each layer, call and head: its scores, and the roles that they name.

    | role | score, t_i the token at position i |
    |---|---|
    | `previous_token` | mean_i A[i, i - 1] |
    | `induction` | mean_i of the attention to keys that follow an earlier t_i, over queries with one |
    | `duplicate_token` | mean_i of the attention to an earlier t_i, over queries with one |
    | `retrieval` | mean_i of the attention to an earlier t_(i + 1), over queries with one, if none follows a t_i |
    | `sink` | the share of attention that rests on sinks, keys j with mean_i A_ij above the threshold |
    | `positional` | the function `positional`: 1 if each row is the row before, moved by one key |

    The condition of `retrieval` leaves out copies that an induction head finds too. A head has a role if its score is
    above the threshold, the argument of that name. `positional` is only named if none of the first four is: they are
    narrower. `sink=0.3` is that of Gu et al. 2025; the others are a choice.

    Queries and keys that are padding do not count, and the batch rows of a call are averaged, each query once. A score
    is NaN if no query counts, if the tape has no tokens for the layer (`tape.tokens = ...`), and in a cross-attention
    for all roles but `sink`. The tokens must repeat at several distances: where a text is one sequence twice, a head
    that looks a fixed distance back has the score of an induction head too.

    >>> import torch
    >>> from regard import Alibi, Causal, weights
    >>> from regard.lens import Tape
    >>> q = k = torch.zeros(1, 1, 50, 4)
    >>> tape = Tape({("layer", 0): weights(q, k, mask=Causal(), bias=Alibi(slopes=torch.tensor([0.5])))})
    >>> tape.tokens = [f"word {n}" for n in range(50)]
    >>> list(head_roles(tape)["roles"])
    ['positional']
    """
    thresholds = {
        "previous_token": previous_token,
        "induction": induction,
        "duplicate_token": duplicate_token,
        "retrieval": retrieval,
        "sink": sink,
        "positional": positional,
    }
    for name, threshold in thresholds.items():
        check_number(name, threshold)
    tape.warn_partial("the table of roles")
    rows: list[dict[str, Any]] = []
    without_tokens: list[str] = []
    too_short: list[str] = []
    for key, shown in zip(tape, shown_calls(tape), strict=True):
        found = layer_roles(tape, key, thresholds)
        if found.lacks_tokens:
            without_tokens.append(shown)
        if found.is_too_short:
            too_short.append(shown)
        for head, (scores, roles) in enumerate(zip(found.scores, found.roles, strict=True)):
            named = {"layer": shown_name(key[0]), "call": key[1], "head": head}
            rows.append({**named, **scores, "roles": ", ".join(roles)})
    _warn(without_tokens, too_short)
    return as_table(rows)


# The default threshold of each role, by name.
THRESHOLDS: Mapping[str, float] = {
    name: parameter.default for name, parameter in signature(head_roles).parameters.items() if name != "tape"
}


class LayerRoles(NamedTuple):
    """The scores and the roles of each head of a layer."""

    scores: list[dict[str, float]]
    roles: list[list[str]]
    lacks_tokens: bool  # in a self-attention, so that the scores for copies are NaN
    is_too_short: bool


def layer_roles(
    tape: Tape, key: Key, thresholds: Mapping[str, float] = THRESHOLDS, *, heads: Sequence[int] | None = None
) -> LayerRoles:
    """Return the scores and roles of one layer, or of some of its heads, without the warnings of `head_roles`."""
    A = measures.check_weights(tape[key], f"tape[{shown_name(key[0])!r}]")
    A = A if heads is None else A.select(heads=list(heads))
    real = RealTokens(tape.real_queries(key), tape.real_keys(key), is_causal=False)
    texts = [tape.tokens_of(key, batch=row) for row in range(len(real.queries))]
    is_self = _is_self_attention(key[0], A, real, texts)
    found = {name: [math.nan] * A.shape[-3] for name in thresholds}
    found |= {name: x.tolist() for name, x in _scores(A, real, texts, thresholds["sink"], is_self=is_self).items()}
    scores = [{name: found[name][head] for name in thresholds} for head in range(A.shape[-3])]
    return LayerRoles(
        scores,
        [_roles(each, thresholds) for each in scores],
        lacks_tokens=is_self and all(keys is None for _, keys in texts),
        is_too_short=int(real.queries.sum(1).max()) < SHORTEST_TEXT,
    )


def _scores(
    A: Weights, real: RealTokens, texts: Sequence[Text], sink: float, *, is_self: bool
) -> dict[str, Float[Tensor, " h"]]:
    """Return the scores of a layer that can be computed, the mean over the queries that count in all batch rows."""
    A = A if len(A.shape) == 4 else A.select(batch=slice(None))  # flattens the leading dims
    queries = real.queries.to(A.device)
    scores = {"sink": _over_texts(measures.sinks(A, threshold=sink, queries=queries).share, queries)}
    if not is_self:
        return scores
    scores["previous_token"] = _over_texts(measures.previous_token(A, queries=queries), queries)
    scores["positional"] = _over_texts(positional_score(A, queries=queries), queries)
    if all(keys is None for _, keys in texts):
        return scores
    ids = token_ids([keys for _, keys in texts], real.keys).to(A.device)
    first, i = A.call.first_position, A.shape[-2]
    counted = {name: x[:, first : first + i] & queries for name, x in repeats(ids).items()}
    for name, measure, before in (
        ("induction", measures.induction, "token"),
        ("duplicate_token", measures.duplicate_token, "token"),
        ("retrieval", measures.retrieval, "next token"),
    ):
        scores[name] = _over_texts(measure(A, ids, queries=counted[before]), counted[before])
    return scores


def token_ids(texts: Sequence[Sequence[str] | None], real: Bool[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return a number for each different token; -1 for padding, and for texts that are None."""
    numbers: dict[str, int] = {}
    ids = torch.full(real.shape, -1)
    for row, text in enumerate(texts):
        if text is not None:
            ids[row] = torch.tensor([numbers.setdefault(token, len(numbers)) for token in text], dtype=torch.long)
    return ids.masked_fill(~real.cpu(), -1)


def repeats(ids: Int[Tensor, "b n"]) -> dict[str, Bool[Tensor, "b n"]]:
    """Return the positions whose token occurred before, and those whose next token did, but never after this token."""
    following = torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), -1)], 1)
    count = int(ids.max()) + 1 if ids.numel() else 0
    n = ids.shape[1]
    position = torch.arange(n, device=ids.device).expand_as(ids)
    pairs = torch.unique(ids * (count + 1) + following, return_inverse=True)[1].view_as(ids)
    known, has_next = ids >= 0, (ids >= 0) & (following >= 0)
    first_token, first_pair = (_first_occurrences(x, valid) for x, valid in ((ids, known), (pairs, has_next)))
    first_following = first_token.gather(1, following.clamp(min=0))
    return {
        "token": known & (first_token.gather(1, ids.clamp(min=0)) < position),
        "next token": has_next & (first_following < position) & (first_pair.gather(1, pairs) == position),
    }


def _first_occurrences(ids: Tensor, valid: Tensor) -> Tensor:
    """Return the first position of each id in each row, `b count`; n for an id that is not there."""
    n = ids.shape[1]
    position = torch.where(valid, torch.arange(n, device=ids.device), n)
    found = ids.new_full((len(ids), max(int(ids.max()) + 1, 1) if ids.numel() else 1), n)
    return found.scatter_reduce(1, ids.clamp(min=0), position, "amin")


def _is_self_attention(layer: str, A: Weights, real: RealTokens, texts: Sequence[Text]) -> bool:
    """Whether the queries are tokens among the keys: by the tokens if they are known, else by the layer's name."""
    first, (*_, i, j) = A.call.first_position, A.shape
    if not 0 <= first <= j - i:
        return False
    known = [(queries, keys[first : first + i]) for queries, keys in texts if queries is not None and keys is not None]
    if known:
        return all(list(queries) == list(keys) for queries, keys in known)
    return not says_cross(layer, real)


def _roles(scores: Mapping[str, float], thresholds: Mapping[str, float]) -> list[str]:
    roles = [name for name, threshold in thresholds.items() if scores[name] > threshold]
    is_narrow = any(role in NARROW_ROLES for role in roles)
    return [role for role in roles if not (is_narrow and role == "positional")]


def _over_texts(score: Tensor, counted: Tensor) -> Tensor:
    """Average `b h` over the batch rows, each by its queries that count; NaN if none do."""
    counts = counted.sum(1)[:, None].to(score.dtype)
    return ((score * counts).sum(0) / counts.sum(0)).double().cpu()


def _warn(without_tokens: Sequence[str], too_short: Sequence[str]) -> None:
    if without_tokens:
        warnings.warn(
            f"induction, duplicate_token and retrieval are NaN in {', '.join(without_tokens)}, as the tape has no "
            "tokens for their keys; set tape.tokens",
            CaptureWarning,
            stacklevel=3,
        )
    if too_short:
        warnings.warn(
            f"the text of {', '.join(too_short)} has fewer than {SHORTEST_TEXT} tokens, where even attention passes "
            "the thresholds by chance; capture a longer one",
            CaptureWarning,
            stacklevel=3,
        )
