"""Clusters of heads: which heads of all layers attend alike, by the cosine similarity of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...checks import check_number
from ...ops.weights import Weights
from ..layer_names import shown_name
from ..real_tokens import without_queries
from ..recording.recorder import Key
from ..tape.overview import as_table
from ..tape.tape import Tape
from .head_measures import CHUNK_ENTRIES, check_weights

SIMILARITY = 0.7  # mean similarity of two clusters that are joined
MAX_OPTIMAL_ORDER = 1024  # heads whose order is optimized, which takes time cubic in their number

Head = tuple[Key, int]  # a call of a layer, and the number of a head


def head_clusters(tape: Tape, *, similarity: float = SIMILARITY) -> Any:
    """Return a table with a row for each layer, call and head, heads that attend alike below each other.

    The similarity of two heads is <A_h, A_g> / (|A_h| |A_g|), over all batch rows and queries that are not padding (see
    `similarity`). The two clusters with the largest mean similarity between their heads are joined, again and again,
    while it is at least `similarity` (average linkage). `cluster` numbers the clusters in the order of the dendrogram,
    in which neighbours are alike too; `mean_similarity` is that to the other heads of the cluster, 1 for a head alone.

    Heads of layers with other numbers of queries and keys cannot be compared and are in clusters of their own.

    >>> import torch
    >>> from regard import Alibi, Causal, weights
    >>> q = k = torch.zeros(1, 3, 50, 4)
    >>> bias = Alibi(slopes=torch.tensor([1.0, 0.0, 1.1]))  # the first head and the last look at close tokens
    >>> tape = Tape({("layer", 0): weights(q, k, mask=Causal(), bias=bias)})
    >>> found = head_clusters(tape)
    >>> list(found["head"]), list(found["cluster"])
    ([1, 0, 2], [0, 1, 1])
    """
    check_number("similarity", similarity)
    tape.warn_partial("the table of clusters")
    rows: list[dict[str, Any]] = []
    for keys in comparable_layers(tape):
        *_, (_, inner) = products(tape, keys)
        heads = [(key, head) for key in keys for head in range(tape[key].shape[-3])]
        S = cosines(inner)
        for members in clusters(S, similarity):
            number = rows[-1]["cluster"] + 1 if rows else 0
            part = S[members][:, members]
            mean = (part.sum(1) - part.diagonal()) / max(1, len(members) - 1) if len(members) > 1 else [1.0]
            for at, alike in zip(members, mean, strict=True):
                (layer, call), head = heads[at]
                named = {"layer": shown_name(layer), "call": call, "head": head}
                rows.append({**named, "cluster": number, "mean_similarity": float(alike)})
    return as_table(rows)


def comparable_layers(tape: Tape) -> list[list[Key]]:
    """Return the calls of a tape, those with the same batch rows, queries and keys together."""
    found: dict[torch.Size, list[Key]] = {}
    for key, A in tape.items():
        shape = check_weights(A, f"tape[{shown_name(key[0])!r}]").shape
        found.setdefault(torch.Size((*shape[:-3], *shape[-2:])), []).append(key)
    return list(found.values())


def products(tape: Tape, keys: Sequence[Key]) -> Iterator[tuple[float, Float[Tensor, "heads heads"]]]:
    """Yield the share of the queries that is done, and <A_h, A_g> of all heads of some layers over these queries."""
    layers = [_real_weights(tape, key) for key in keys]
    *lead, _, i, j = layers[0].shape
    heads = sum(A.shape[-3] for A in layers)
    inner = torch.zeros(heads, heads, dtype=torch.float64)
    step = max(1, CHUNK_ENTRIES // max(1, heads * torch.Size(lead).numel() * j))
    yield 0.0, inner
    for start in range(0, i, step):
        with torch.no_grad():
            rows = [A[..., start : start + step, :].transpose(-3, 0).flatten(1).cpu() for A in layers]
            part = torch.cat(rows)
            inner += part @ part.T
        yield min(1.0, (start + step) / i), inner


def cosines(inner: Float[Tensor, "heads heads"]) -> Float[Tensor, "heads heads"]:
    """Divide products by the lengths of both factors; heads without any weight are similar to none."""
    lengths = inner.diagonal().sqrt()
    lengths = lengths[:, None] * lengths
    return torch.where(lengths > 0, inner / torch.where(lengths > 0, lengths, 1.0), 0.0).clamp(-1, 1)


def clusters(S: Float[Tensor, "heads heads"], similarity: float = SIMILARITY) -> list[list[int]]:
    """Return the heads of each cluster by average linkage, in the order of the dendrogram."""
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage  # type: ignore[import-untyped]
    from scipy.spatial.distance import squareform  # type: ignore[import-untyped]

    n = len(S)
    if n < 2:
        return [[at] for at in range(n)]
    distances = squareform((1 - S.double()).fill_diagonal_(0).clamp(min=0).numpy(), checks=False)
    tree = linkage(distances, "average", optimal_ordering=n <= MAX_OPTIMAL_ORDER)
    labels, order = fcluster(tree, 1 - similarity, "distance").tolist(), leaves_list(tree).tolist()
    found: dict[int, list[int]] = {}
    for at in order:  # the leaves of a cluster lie beside each other
        found.setdefault(labels[at], []).append(at)
    return list(found.values())


def _real_weights(tape: Tape, key: Key) -> Weights:
    """Return the weights of a layer, `b h i j`, with zeros in the rows of padding queries."""
    A, real = check_weights(tape[key]), tape.real_queries(key)
    A = A if len(A.shape) == 4 else A.select(batch=slice(None))  # flattens the leading dims
    return A if bool(real.all()) else without_queries(A, real)
