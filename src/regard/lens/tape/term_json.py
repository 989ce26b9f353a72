"""Terms as JSON: by name, with their tensors in a box beside them.

Names are looked up in a table, so what is read can be numbers but never code. A mask with a function in it, which no
file can hold, is written as the bits it comes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...nn.memory_slots import Until
from ...ops.terms import biases, masks, normalizers, scores
from ...ops.terms.coordinates import Block
from ...ops.terms.masks import mask_algebra as mask
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.term import Term
from ...ops.weights import Weights
from ..terms.infer_mask import Packed, Rows
from ..terms.varlen import Sloped

TERMS: dict[str, type[Term]] = {
    cls.__name__: cls
    for cls in (
        *(masks.Causal, masks.Window, masks.Dilated, masks.Diagonal, masks.Prefix, masks.Global, masks.Near),
        *(masks.Padding, masks.Documents, masks.Blocks, masks.Dense, mask.And, mask.Or, mask.Not, Packed),
        *(biases.Alibi, biases.Relative, biases.Logarithmic, biases.Clipped, biases.Gaussian, biases.Added, biases.Sum),
        Sloped,
        *(scores.Dot, scores.Cosine, scores.Bilinear, scores.Additive, scores.Location, Until),
        *(normalizers.Softmax, normalizers.SinkSoftmax, normalizers.Sigmoid, normalizers.Sparsemax),
        *(normalizers.Entmax, normalizers.Hard, normalizers.Tapered),
    )
}


class Box:
    """Tensors on their way to a file, each once, however many entries share it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._alive: list[Tensor] = []
        self._taken: set[int] = set()  # memory that is in the box already

    def add(self, x: Tensor) -> str:
        """The name a tensor is stored under."""
        same = x.data_ptr(), x.shape, x.stride(), x.dtype, x.device
        if same not in self._names:
            self._names[same] = f"t{len(self._names)}"
            self._alive.append(x)
            own = x.detach().cpu().contiguous()
            memory = own.untyped_storage()
            own = own.clone() if memory.nbytes() != own.nbytes or memory.data_ptr() in self._taken else own
            self._taken.add(own.untyped_storage().data_ptr())
            self.tensors[self._names[same]] = own
        return self._names[same]


def written(term: Any, box: Box) -> Any:
    """A term, or a value of one, as JSON."""
    if isinstance(term, Tensor):
        return {"tensor": box.add(term)}
    if isinstance(term, Term):
        fields = {field.name: written(getattr(term, field.name), box) for field in dataclasses.fields(term)}
        return {"term": type(term).__name__, **fields}
    if isinstance(term, tuple):
        return [written(value, box) for value in term]
    return term.item() if hasattr(term, "item") else term


def read(source: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The term, or the value of one, that `written` wrote; `ValueError` for anything else."""
    if isinstance(source, list):
        return tuple(read(value, tensors) for value in source)
    if not isinstance(source, dict):
        return source
    if source.keys() == {"tensor"}:
        return tensor_of(source["tensor"], tensors)
    fields = dict(source)
    name = fields.pop("term", None)
    if name not in TERMS:
        raise ValueError(f"unknown term {name!r}; known are {', '.join(TERMS)}")
    check_fields(name, fields, " ".join(field.name for field in dataclasses.fields(TERMS[name])))
    return TERMS[name](**{field: read(value, tensors) for field, value in fields.items()})


def saveable(term: Term | None, A: Weights) -> Term | None:
    """The term, or for a mask with a function in it, which no file can hold, the bits it comes to."""
    if term is None or _known(term):
        return term
    if not isinstance(term, Mask):
        raise ValueError(f"{term!r} cannot be saved: {type(term).__name__} is not a term a file can name")
    whole = A.call.whole()
    b, h, i, j = A.call.shape

    def block(start: int, stop: int) -> Tensor:
        part: Block = dataclasses.replace(whole, rows=slice(start, stop))
        return term.over(part).expand(b, h, stop - start, j)

    return Packed.of(Rows((b, h, i, j), block, A.device))


def _known(term: Term) -> bool:
    values = [getattr(term, field.name) for field in dataclasses.fields(term)]
    return type(term) is TERMS.get(type(term).__name__) and all(_known(x) for x in values if isinstance(x, Term))


def tensor_of(name: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of that name; `ValueError` where there is none."""
    if name not in tensors:
        raise ValueError(f"a tensor {name!r} is named but not there")
    return tensors[name]


def check_fields(what: str, given: Any, expected: str) -> None:
    """Raise unless an object has exactly these fields, named in one string."""
    if not isinstance(given, dict) or given.keys() != set(expected.split()):
        got = ", ".join(map(str, given)) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"{what} must have the fields {expected.replace(' ', ', ')}, got {got}")
