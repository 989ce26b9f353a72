"""The atlas of a capture's heads: the roles of the heads of a layer, and clusters of heads that attend alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...lens.analysis.head_clusters import SIMILARITY, clusters, comparable_layers, cosines, products
from ...lens.analysis.head_roles import SHORTEST_TEXT, THRESHOLDS, layer_roles
from ...ops.weights import Weights
from .captures import ApiError, Library
from .wire_format import EXACT, Certainty

PASSES = 6  # over the weights of a layer, to score its heads
MAX_STEP_WEIGHTS = 2**29  # times passes, in one background step: some heads, at least one
MAX_PRODUCTS = 2**38  # multiplications for similarities of all weights; with more they are of cells


def roles_work(library: Library, capture: int, layer: int) -> int:
    """Return how many weights the roles of a layer's heads take; raises `ApiError` if that is too many."""
    A = library.weights(capture, layer, 0)
    work = PASSES * A.shape.numel()
    if work > MAX_STEP_WEIGHTS * A.shape[1]:
        raise ApiError(409, "the roles of heads over a text of this length take too long here", "call head_roles(tape)")
    return work


def roles_of_layer(library: Library, capture: int, layer: int) -> Iterator[float | bytes]:
    """Score the heads of a layer, one after the other: yield the share that is done, at last the scores and roles.

    They are of the weights as they were captured, over all texts of the batch.
    """
    of, A = library.capture(capture), library.weights(capture, layer, 0)
    heads, step = A.shape[1], max(1, MAX_STEP_WEIGHTS * A.shape[1] // max(1, PASSES * A.shape.numel()))
    scores: list[dict[str, float | None]] = []
    roles: list[list[str]] = []
    notes: list[str] = []
    for first in range(0, heads, step):
        found = layer_roles(of.tape, of.keys[layer], heads=range(heads)[first : first + step])
        scores += [{name: _digits(x) for name, x in each.items()} for each in found.scores]
        roles += found.roles
        if found.lacks_tokens:
            notes.append("without tokens, induction, duplicate token and retrieval are not known")
        if found.is_too_short:
            notes.append(f"in a text of fewer than {SHORTEST_TEXT} tokens even attention passes the thresholds")
        yield min(first + step, heads) / heads
    thresholds = dict(THRESHOLDS)
    yield _json({"scores": scores, "roles": roles, "notes": list(dict.fromkeys(notes)), "thresholds": thresholds})


def clusters_work(library: Library, capture: int) -> int:
    """Return how many weights the clusters of a capture's heads take, those of the stored maps if all are too many."""
    of = library.capture(capture)
    return sum(A.shape.numel() for A in map(of.entry, range(len(of.keys)))) if _is_exact(library, capture) else 0


def clusters_of_capture(library: Library, capture: int) -> Iterator[float | bytes]:
    """Cluster the heads of a capture: yield the share that is done, at last lists of (layer, head), one per cluster.

    Similarities are of all weights or, of a long text, of the cells of thumbnails; `state` and `cell` say which.
    """
    of = library.capture(capture)
    found: list[list[tuple[int, int]]] = []
    certainty, cell = EXACT, (1, 1)
    if _is_exact(library, capture):
        groups = comparable_layers(of.tape) if of.keys else []
        for number, keys in enumerate(groups):
            inner = torch.zeros(0, 0)
            for done, so_far in products(of.tape, keys):
                inner = so_far
                yield (number + done) / len(groups)
            heads = [(of.keys.index(key), head) for key in keys for head in range(of.tape[key].shape[-3])]
            found += [[heads[at] for at in members] for members in clusters(cosines(inner))]
    else:
        by_size: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
        for layer in range(len(of.keys)):
            overview, known = library.overview(capture, layer)
            thumbs, (n_i, n_j) = overview.thumbs, of.entry(layer).shape[-2:]
            if not thumbs.numel():
                continue
            cell = max(cell, (-(-n_i // thumbs.shape[-2]), -(-n_j // thumbs.shape[-1])))
            certainty = known if known.state != "exact" else certainty
            by_size.setdefault((thumbs.shape[0], n_i, n_j, *thumbs.shape[2:]), []).append((layer, thumbs))
        for layers in by_size.values():
            heads = [(layer, head) for layer, thumbs in layers for head in range(thumbs.shape[1])]
            cells = torch.cat([thumbs.transpose(0, 1).flatten(1) for _, thumbs in layers]).double()
            found += [[heads[at] for at in members] for members in clusters(cosines(cells @ cells.T))]
        certainty = certainty if certainty.state != "exact" or max(cell) == 1 else Certainty("pooled")
    shown = {"state": certainty.state, "of": certainty.of, "cell": cell}
    yield _json({"clusters": found, "similarity": SIMILARITY, **shown})


def _is_exact(library: Library, capture: int) -> bool:
    """Whether the similarities of a capture's heads are those of all weights."""
    of = library.capture(capture)
    entries = [of.tape[key] for key in of.keys]
    if not all(isinstance(A, Weights) for A in entries):
        return False
    heads = sum(A.shape[-3] for A in entries)
    return heads * sum(A.shape.numel() for A in entries) <= MAX_PRODUCTS


def _digits(x: float) -> float | None:
    """Return a score to six digits; None for NaN, which JSON cannot hold."""
    return None if math.isnan(x) else float(f"{x:.6g}")


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
