"""The lens: capture the attention of any PyTorch model at any length, then measure, trace, align or edit it."""

from .analysis.ablation import ablate, ablation_importance, importance
from .analysis.alignment import (
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
from .analysis.flow import (
    attention_flow,
    gradient_attention,
    norm_attention,
    relevance,
    rollout,
    rollout_matrix,
    value_norms,
)
from .analysis.head_clusters import head_clusters
from .analysis.head_measures import (
    Sinks,
    diagonality,
    duplicate_token,
    induction,
    locality,
    previous_token,
    retrieval,
    share,
    similarity,
    sinks,
)
from .analysis.head_roles import head_roles
from .analysis.pair_steps import PairSteps, pair_steps
from .analysis.positional_heads import positional
from .capture import capture
from .capture_warning import CaptureWarning
from .edits import (
    Boost,
    Cut,
    Freeze,
    From,
    Only,
    Scale,
    Sweep,
    Temperature,
    edit,
    generated,
    knockouts,
    load_pruned,
    prune,
    sweep,
)
from .interception.kernel_call import KernelCall, NotUnderstood
from .interception.operator_for_transformers import register_transformers
from .interception.registered import register_kernel
from .linter.check import check
from .linter.findings import AttentionBugError, CheckReport, Finding
from .monitoring.head_events import collapsed_entropy, dead_head, equal_heads, rising_logit, sink_head
from .monitoring.head_history import HeadEvent, HeadHistory
from .monitoring.monitor import Monitor
from .monitoring.qk_clip import ProjectionRows, qk_clip_
from .recording.edge_weights import EdgeWeights
from .recording.record import Extras
from .recording.reduced import Reduced
from .recording.sampled_weights import SampledWeights
from .recording.unseen import Unseen
from .tape.groups import Groups, lines, patches, sentences, spans, words
from .tape.tape import Tape

__all__ = [
    "AlignmentScore",
    "AttentionBugError",
    "Boost",
    "CaptureWarning",
    "CheckReport",
    "Cut",
    "EdgeWeights",
    "Extras",
    "Finding",
    "Freeze",
    "From",
    "Groups",
    "HeadEvent",
    "HeadHistory",
    "KernelCall",
    "Links",
    "Monitor",
    "NotUnderstood",
    "Only",
    "PairSteps",
    "ProjectionRows",
    "Reduced",
    "SampledWeights",
    "Scale",
    "Sinks",
    "Sweep",
    "Tape",
    "Temperature",
    "Unseen",
    "ablate",
    "ablation_importance",
    "alignment_score",
    "argmax_links",
    "attention_flow",
    "capture",
    "check",
    "collapsed_entropy",
    "dead_head",
    "diagonality",
    "duplicate_token",
    "edit",
    "equal_heads",
    "generated",
    "gradient_attention",
    "head_clusters",
    "head_errors",
    "head_roles",
    "importance",
    "induction",
    "knockouts",
    "lines",
    "load_pruned",
    "locality",
    "mutual_links",
    "norm_attention",
    "pair_steps",
    "patches",
    "positional",
    "previous_token",
    "prune",
    "qk_clip_",
    "read_pharaoh",
    "register_kernel",
    "register_transformers",
    "relevance",
    "retrieval",
    "rising_logit",
    "rollout",
    "rollout_matrix",
    "sentences",
    "share",
    "similarity",
    "sink_head",
    "sinks",
    "spans",
    "sweep",
    "value_norms",
    "word_weights",
    "words",
    "write_pharaoh",
]
