"""Decoding: greedy search, beam search and sampling over any model that implements `Stepper`."""

from .averaging import average
from .beam import beam
from .ensemble import Ensemble
from .greedy import greedy
from .hypothesis import Hypothesis
from .penalties import Coverage, CoveragePenalty, Gnmt
from .sampling import sample
from .scoring import score
from .stepper import State, Stepper, replay_objection

__all__ = [
    "Coverage",
    "CoveragePenalty",
    "Ensemble",
    "Gnmt",
    "Hypothesis",
    "State",
    "Stepper",
    "average",
    "beam",
    "greedy",
    "replay_objection",
    "sample",
    "score",
]
