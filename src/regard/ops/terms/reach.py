"""How far back a mask reaches, and whether a term depends on absolute key positions: bounds for caches that forget."""

from __future__ import annotations

from .biases import Alibi, Bias, Relative, ScaledBias, Sum
from .masks import Causal, Diagonal, Dilated, Window
from .masks.mask_algebra import And, Mask, Not, Or
from .normalizers import Entmax, Hard, Normalizer, Sigmoid, SinkSoftmax, Softmax, Sparsemax, Tapered
from .scores import Additive, Bilinear, Cosine, Dot, Score
from .term import Term


def look_back(mask: Mask | None) -> int | None:
    """Return how many keys before its own a query may see.

    None if there is no bound, or if the mask depends on more than the distance i - j.
    """
    return _look_back(mask) if mask is not None and depends_on_distance_only(mask) else None


def depends_on_distance_only(mask: Mask) -> bool:
    """Return whether the distance i - j alone decides if a query sees a key."""
    match mask:
        case And() | Or():
            return depends_on_distance_only(mask.left) and depends_on_distance_only(mask.right)
        case Not():
            return depends_on_distance_only(mask.mask)
        case _:
            return isinstance(mask, (Causal, Window, Dilated, Diagonal))


def reads_key_positions(term: Term | None) -> bool:
    """Return whether a term depends on absolute key positions, which a cache that forgets old keys does not know.

    Any term of a user may.
    """
    match term:
        case Sum():
            return reads_key_positions(term.left) or reads_key_positions(term.right)
        case ScaledBias():
            return reads_key_positions(term.bias)
        case Tapered():
            return reads_key_positions(term.inner) or reads_key_positions(term.taper)
        case Bias():
            return not isinstance(term, (Alibi, Relative))
        case Normalizer():
            return not isinstance(term, (Softmax, SinkSoftmax, Sigmoid, Entmax, Sparsemax, Hard))
        case Score():
            return not isinstance(term, (Dot, Cosine, Bilinear, Additive))
        case _:
            return False


def _look_back(mask: Mask) -> int | None:
    match mask:
        case Window():
            return mask.reach[0]
        case Dilated():
            return (mask.width - 1) * mask.step
        case Diagonal():
            return 0
        case And() | Or():
            bounds = [n for n in (_look_back(mask.left), _look_back(mask.right)) if n is not None]
            if isinstance(mask, And):
                return min(bounds, default=None)
            return max(bounds) if len(bounds) == 2 else None
        case _:
            return None
