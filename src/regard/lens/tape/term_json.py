"""Terms as JSON: a term is an object with its class name and fields, and its tensors go into a `TensorBox` beside it.

Class names are looked up in the table `TERMS`, so a file can hold numbers but never code. A mask that contains a
function, which no file can hold, is evaluated and written as bits.
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
from ..terms.changed_weights import Given, Scaled
from ..terms.infer_mask import Packed, Rows
from ..terms.pair_bias import PairBias
from ..terms.rectified import Rectified
from ..terms.varlen import Sloped

TERMS: dict[str, type[Term]] = {
    cls.__name__: cls
    for cls in (
        *(masks.Causal, masks.Window, masks.Dilated, masks.Chunked, masks.Diagonal, masks.Prefix, masks.Global),
        *(
            masks.Near,
            masks.Neighborhood,
            masks.Padding,
            masks.Documents,
            masks.Blocks,
            masks.Dense,
            mask.And,
            mask.Or,
            mask.Not,
            Packed,
        ),
        *(biases.Alibi, biases.Relative, biases.Logarithmic, biases.Clipped, biases.Gaussian, biases.Added, biases.Sum),
        *(biases.ScaledBias, Sloped, PairBias),
        *(scores.Dot, scores.Cosine, scores.Bilinear, scores.Additive, scores.Location, Until),
        *(normalizers.Softmax, normalizers.SinkSoftmax, normalizers.Sigmoid, normalizers.Sparsemax),
        *(normalizers.Entmax, normalizers.Hard, normalizers.Tapered, Rectified, Given, Scaled),
    )
}
MAX_TERM_DEPTH = 128  # 128 masks joined by & are 127 deep
MAX_INT = 2**53  # largest offset, size or field of a term: positions are int64, and stay far from their limit


class TensorBox:
    """The tensors of a file by name. A tensor that several entries share is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._alive: list[Tensor] = []  # keeps the memory alive whose addresses are keys of `_names`
        self._addresses: set[int] = set()  # memory of the tensors in the box; safetensors refuses shared memory

    def add(self, x: Tensor) -> str:
        """Add a tensor and return the name it is stored under."""
        identity = x.data_ptr(), x.shape, x.stride(), x.dtype, x.device
        if identity not in self._names:
            self._names[identity] = f"t{len(self._names)}"
            self._alive.append(x)
            copy = x.detach().cpu().contiguous()
            memory = copy.untyped_storage()
            is_shared = memory.nbytes() != copy.nbytes or memory.data_ptr() in self._addresses
            copy = copy.clone() if is_shared else copy
            self._addresses.add(copy.untyped_storage().data_ptr())
            self.tensors[self._names[identity]] = copy
        return self._names[identity]


def to_json(term: Any, box: TensorBox, depth: int = 0) -> Any:
    """Convert a term, or the value of a term's field, to JSON; tensors are added to the box."""
    _check_depth(depth)
    if isinstance(term, Tensor):
        return {"tensor": box.add(term)}
    if isinstance(term, Term):
        fields = {field.name: to_json(getattr(term, field.name), box, depth + 1) for field in dataclasses.fields(term)}
        return {"term": type(term).__name__, **fields}
    if isinstance(term, tuple):
        return [to_json(value, box, depth + 1) for value in term]
    return term.item() if hasattr(term, "item") else term


def from_json(source: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """Rebuild the term, or the value of a field, that `to_json` wrote; `ValueError` for anything else."""
    _check_depth(depth)
    if isinstance(source, list):
        return tuple(from_json(value, tensors, depth + 1) for value in source)
    if not isinstance(source, dict):
        return check_size(source) if type(source) is int else source
    if source.keys() == {"tensor"}:
        return tensor_named(source["tensor"], tensors)
    fields = dict(source)
    name = fields.pop("term", None)
    if not isinstance(name, str) or name not in TERMS:
        raise ValueError(f"unknown term {name!r}; known are {', '.join(TERMS)}")
    check_fields(name, fields, *(field.name for field in dataclasses.fields(TERMS[name])))
    return TERMS[name](**{field: from_json(value, tensors, depth + 1) for field, value in fields.items()})


def _check_depth(depth: int) -> None:
    if depth > MAX_TERM_DEPTH:
        raise ValueError(f"terms may be nested up to {MAX_TERM_DEPTH} deep in a tape file")


def check_size(value: int) -> int:
    """Return a whole number; `ValueError` if its absolute value is above 2**53."""
    if abs(value) > MAX_INT:
        raise ValueError(f"whole numbers may be up to 2**53, got one of {len(str(abs(value)))} digits")
    return value


def evaluate_functions(term: Term | None, A: Weights) -> Term | None:
    """Return a term that a file can hold: the term itself, or the bits of a mask that contains a function."""
    if term is None or _is_known(term):
        return term
    if not isinstance(term, Mask):
        raise ValueError(f"{term!r} cannot be saved: tape files have no term {type(term).__name__}")
    whole = A.call.whole()
    b, h, i, j = A.call.shape

    def block(start: int, stop: int) -> Tensor:
        part: Block = dataclasses.replace(whole, rows=slice(start, stop))
        return term.over(part).expand(b, h, stop - start, j)

    return Packed.of(Rows((b, h, i, j), block, A.device))


def tensor_named(name: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of this name; `ValueError` if the file does not have it."""
    if not isinstance(name, str) or name not in tensors:
        raise ValueError(f"the file has no tensor {name!r}")
    return tensors[name]


def check_fields(what: str, source: Any, *expected: str) -> None:
    """Raise unless a JSON object has exactly the expected fields."""
    if not isinstance(source, dict) or source.keys() != set(expected):
        got = ", ".join(map(str, source)) if isinstance(source, dict) else type(source).__name__
        raise ValueError(f"{what} must have the fields {', '.join(expected)}, got {got}")


def _is_known(term: Term) -> bool:
    """Whether the term and all terms within it are in the table."""
    values = [getattr(term, field.name) for field in dataclasses.fields(term)]
    return type(term) is TERMS.get(type(term).__name__) and all(_is_known(x) for x in values if isinstance(x, Term))
