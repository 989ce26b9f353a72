"""No step of a model that trains by CUDA graphs waits for a value: what would end a capture is seen without a GPU.

Of models without masks of keys, that is: on a CPU these are looked at, where it costs nothing. So are lengths.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="needs Triton, which comes with the development extras on Linux")

from regard.kernels import additive_scores, softmax
from regard.models import padding
from regard.ops.backends import triton
from tests.gpu.test_graphs import captioner, captions, convnet, labelled

MODELS = {
    "cbam": lambda: (convnet("cbam"), labelled(3)),
    "selective": lambda: (convnet("selective"), labelled(3)),
    "soft": lambda: (captioner("soft"), captions(2, 3)),
    "hard": lambda: (captioner("hard"), captions(2, 3)),
}
# A number, or how many there are, is asked for; or a tensor is made from numbers of Python's, which a GPU must fetch.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "lift_fresh")


class Waits(TorchDispatchMode):
    """Keeps what would wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        name = fn._schema.name.removeprefix("aten::")
        if name in WAITS:
            self.found.append(name)
        return fn(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_for_no_value(name, monkeypatch):
    monkeypatch.setattr(triton, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(padding, "can_read_values", lambda x: False)  # as those on a GPU are
    for kernels in (additive_scores, softmax):  # what they write does not matter
        monkeypatch.setattr(kernels, "launch", lambda *given, **named: None)
    model, batch = MODELS[name]()
    with Waits() as waits:
        model.train().loss(batch).sum.backward()
    assert waits.found == []


def test_a_wait_is_seen():
    with Waits() as waits:
        torch.ones(2).sum().item()
        torch.tensor([1, 2])
        torch.ones(2).nonzero()
    assert set(waits.found) == {"_local_scalar_dense", "lift_fresh", "nonzero"}
