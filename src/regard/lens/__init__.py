"""The lens: capture what any model attends to, at any length; measure it, follow it, align by it."""

from .alignment import (
    AlignmentScore,
    Links,
    alignment_score,
    argmax_links,
    head_errors,
    mutual_links,
    read_pharaoh,
    word_weights,
    write_pharaoh,
)
from .capture import capture
from .flow import (
    attention_flow,
    gradient_attention,
    norm_attention,
    relevance,
    rollout,
    rollout_matrix,
    value_norms,
)
from .groups import Groups, lines, patches, sentences, spans, words
from .heads import ablate, ablation_importance, importance
from .measures import (
    Sinks,
    diagonality,
    duplicate_token,
    induction,
    locality,
    previous_token,
    share,
    similarity,
    sinks,
)
from .record import Extras
from .reduced import Reduced
from .tape import Tape

__all__ = [
    "AlignmentScore",
    "Extras",
    "Groups",
    "Links",
    "Reduced",
    "Sinks",
    "Tape",
    "ablate",
    "ablation_importance",
    "alignment_score",
    "argmax_links",
    "attention_flow",
    "capture",
    "diagonality",
    "duplicate_token",
    "gradient_attention",
    "head_errors",
    "importance",
    "induction",
    "lines",
    "locality",
    "mutual_links",
    "norm_attention",
    "patches",
    "previous_token",
    "read_pharaoh",
    "relevance",
    "rollout",
    "rollout_matrix",
    "sentences",
    "share",
    "similarity",
    "sinks",
    "spans",
    "value_norms",
    "word_weights",
    "words",
    "write_pharaoh",
]
