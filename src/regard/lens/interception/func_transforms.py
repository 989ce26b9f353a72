"""Read the tensors of torch.func transforms: inside vmap, grad and jvp a tensor is a wrapper of another.

Inside `torch.vmap` a function sees one slice of a batch; the wrapped tensor has the whole batch. A call is interpreted
on the wrapped tensors, outside of the transforms, so that their values can be read.
"""

from __future__ import annotations

from torch import Tensor

from ... import torch_internals

UNSUPPORTED = (
    "it ran inside a torch.func transform (vmap, grad, ...), where its tensors have no values; call the model outside "
    "of the transform, on a batch"
)


def unwrap_transforms(x: Tensor, *, ndim: int | None = None) -> Tensor:
    """Return the tensor of values, with the dims of the open vmaps in front, the outermost first.

    A tensor that a vmap does not map has 1 for its dim. With `ndim` the function sees a tensor of that many dims.
    """
    new = 0 if ndim is None else ndim - x.ndim
    levels, mapped = torch_internals.transform_levels(), {}
    for level, _ in reversed(levels):
        if (wrapped := torch_internals.unwrap_transform(x, level)) is not None:
            x, mapped[level] = wrapped
    dims, lead = list(range(x.ndim)), []
    for level, is_vmap in levels:
        if is_vmap:
            dim = mapped.get(level)
            lead.append(None if dim is None else dims.pop(dim))
    with torch_internals.outside_transforms():
        x = x.permute(*(dim for dim in lead if dim is not None), *dims)
        return x[(*(None if dim is None else slice(None) for dim in lead), *(None,) * new, ...)]


def is_true_everywhere(x: Tensor) -> bool:
    """Whether a boolean tensor is True in all elements, for all slices that the open vmaps map."""
    if torch_internals.functorch_transform() is None:
        return bool(x.all())
    x = torch_internals.innermost_tensor(x)
    with torch_internals.outside_transforms():
        return bool(x.all())
