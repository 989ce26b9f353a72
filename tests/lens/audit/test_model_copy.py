"""A copy of a model shares its parameters and nothing else; a filled cache is refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from regard.lens.audit.model_copy import CannotAudit, copy_inputs, copy_model, map_tensors, tensors_in


def test_parameters_are_shared_and_buffers_are_not():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].weight.grad = torch.ones(3, 3)
    model[1].kept = model[1].weight * 2  # no leaf of autograd, which deepcopy refuses
    model.register_forward_hook(lambda *_: pytest.fail("hooks are left out"))
    copied = copy_model(model)
    copied(torch.randn(4, 3)).sum().backward()
    assert copied[1].weight.data_ptr() == model[1].weight.data_ptr()
    assert copied[0].running_mean.any()
    assert not model[0].running_mean.any()
    assert torch.equal(model[1].weight.grad, torch.ones(3, 3))


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copied = copy_model(model)
    assert copied[0].weight is copied[1].weight


def test_a_model_that_cannot_be_copied_says_why():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(CannotAudit, match="it cannot be copied: TypeError: cannot pickle"):
        copy_model(model)


class Cache:
    def __init__(self, n):
        self.n = n

    def get_seq_length(self):
        return self.n


@pytest.mark.parametrize(
    "cache", [Cache(2), ((torch.ones(1), torch.ones(1)),), object()], ids=["object", "tuple", "own"]
)
def test_a_filled_cache_is_refused(cache):
    with pytest.raises(CannotAudit, match="filled cache, past_key_values"):
        copy_inputs((), {"past_key_values": cache})


def test_an_empty_cache_is_left_out():
    x = torch.ones(2)
    args, kwargs = copy_inputs((x, [x]), {"past_key_values": Cache(0), "use_cache": True, "mask": None})
    assert kwargs == {"past_key_values": None, "use_cache": False, "mask": None}
    x.zero_()
    assert args[0].all()
    assert args[1][0].all()


def test_nested_values_keep_their_types():
    nested = (1, [torch.ones(1)], {"a": (torch.ones(2), "b")})
    assert [len(x) for x in tensors_in(nested)] == [1, 2]
    assert map_tensors(len, nested) == (1, [1], {"a": (2, "b")})
