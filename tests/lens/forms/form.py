"""Form: one row of the tables, with small models that prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard import Added
from regard.lens import EdgeWeights, SampledWeights
from regard.lens.terms.changed_weights import Given
from tests.lens.unseen_layers import Beside, tokens

B, H, N, D = 2, 3, 11, 4
DIM = H * D

# What capture does with a form.
SEEN = "seen"
CHANGED = "seen, and marked in `tape.changed`"
UNSEEN = "listed in `tape.unseen`"
AUDIT = "listed in `tape.unseen` with `audit=True`"
REFUSED = "refused"
OUTCOMES = (SEEN, CHANGED, UNSEEN, AUDIT, REFUSED)

# What the tape keeps of a form that is seen.
TERMS = "q, k and terms"
SCORES = "q, k and a bias, queries x keys"
WEIGHTS = "weights, queries x keys"
EDGES = "`EdgeWeights`: a weight per edge and head"
SAMPLES = "`SampledWeights`: a place and a weight per sampled point"


@dataclass(kw_only=True)
class Example:
    """A small model that runs a form, and the matrices of its weights in float64, in the order of the tape."""

    model: nn.Module
    inputs: Sequence[Any]
    truth: Callable[[], list[Tensor]] = list


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of attention, what capture does with it, and models that prove it.

    `shown` is what the tape keeps; for a form that is not on the tape the kind in `tape.unseen`, or for a refused one a
    regular expression for the message.
    """

    name: str
    family: str
    outcome: str
    shown: str
    examples: Sequence[Callable[[], Example]]
    library: str | None = None  # fixture that installs stand-ins for a library


def kept(A: Any) -> str:
    """Return what the tape keeps of an entry."""
    if isinstance(A, EdgeWeights | SampledWeights):
        return EDGES if isinstance(A, EdgeWeights) else SAMPLES
    if isinstance(A.call.normalize, Given):
        return WEIGHTS
    return SCORES if isinstance(A.call.bias, Added) else TERMS


class Layer(nn.Module):
    """Attention by a function of q, k and v, each `b h n d`; it keeps q and k for the truth."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.num_heads, self.attend = H, attend
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in (2 * self.qkv(x)).chunk(3, -1))
        self.kept = q.detach(), k.detach()
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def softmax_of_dots(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1)


def by(attend: Callable[..., Tensor], weights: Callable[..., Any] = softmax_of_dots) -> Callable[[], Example]:
    """Return the builder of a layer that attends by a function, and of its weights, or a list of them, in float64."""

    def build() -> Example:
        layer = Layer(attend).eval()

        def truth() -> list[Tensor]:
            found = weights(*(x.double() for x in layer.kept))
            return found if isinstance(found, list) else [found]

        return Example(model=layer, inputs=[torch.randn(B, N, DIM)], truth=truth)

    return build


def beside(build: Callable[[], nn.Module]) -> Callable[[], Example]:
    """Return the builder of a layer that is not on the tape, named `other`, after one that is, named `seen`."""
    return lambda: Example(model=Beside(build()).eval(), inputs=[tokens()])
