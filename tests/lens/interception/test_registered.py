"""Kernels that a user has registered."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Causal
from regard.lens import CaptureWarning, KernelCall, NotUnderstood, capture, register_kernel
from tests.lens.fake_kernels import Opaque, own_kernel
from tests.lens.kernel_layers import HEADS, WIDTH, QkvLayer, qkv


def to_kernel_call(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return KernelCall(q=q, k=k, v=v)


def wrong_call(q, k, v):
    return replace(to_kernel_call(q, k, v), mask=Causal())


def refused_call(q, k, v):
    raise NotUnderstood("own_kernel is always dense")


@pytest.mark.parametrize(
    ("to_call", "message"),
    [
        (wrong_call, "0 was not recorded: the KernelCall registered for own_kernel does not reproduce its output"),
        (refused_call, "0 was not recorded: own_kernel is always dense"),
    ],
)
def test_a_registered_kernel_whose_call_is_wrong_is_not_recorded(to_call, message):
    model = nn.Sequential(QkvLayer(own_kernel), nn.Linear(HEADS * WIDTH, 12).double(), Sdpa())
    registered = register_kernel(own_kernel, to_call, output="b i (h e)")
    with registered, pytest.warns(CaptureWarning, match=message), capture(model) as tape:
        model(qkv())
    assert tape.layers == ["2"]


class Sdpa(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(*x[:, None].chunk(3, -1))


def test_a_kernel_is_registered_until_its_handle_is_removed():
    def kernel(q, k, v):
        return Opaque.apply(q, k, v)

    model, x = QkvLayer(lambda q, k, v: kernel(q, k, v)), qkv()
    handle = register_kernel(kernel, lambda q, k, v: KernelCall(q=q, k=k, v=v), output="b h i e")
    with capture(model) as tape:
        model(x)
    assert len(tape) == 1
    handle.remove()
    with pytest.raises(ValueError, match="no attention of QkvLayer was recorded"), capture(model):
        model(x)


@pytest.mark.parametrize("output", ["b h i", "b h i e e", "b (h i e", "q k v"])
def test_dims_of_an_output_must_be_b_h_i_and_e(output):
    with pytest.raises(ValueError, match="output must name the dims b, h, i and e once each"):
        register_kernel(own_kernel, to_kernel_call, output=output)


def test_only_functions_can_be_registered():
    with pytest.raises(TypeError, match="register_kernel takes two functions, got 3"):
        register_kernel(3, to_kernel_call)


def test_a_registered_kernel_without_a_batch_and_with_dropout_is_recorded():
    def kernel(q, k, v, p=0.0):  # h i d
        out = Opaque.apply(q, k, v)
        return (out * (torch.rand_like(out) > p), "more") if p else (out, "more")

    model = QkvLayer(lambda q, k, v: kernel(q[0], k[0], v[0], p=0.5)[0])
    call = lambda q, k, v, p=0.0: KernelCall(q=q[None], k=k[None], v=v[None], dropout=p)  # noqa: E731
    x = qkv()
    with register_kernel(kernel, call, output="h i e", dropout="p"), capture(model) as tape:
        model(x)
    q, k, _ = (part[:1] for part in x.chunk(3, -1))
    torch.testing.assert_close(tape[0][:], (q @ k.mT / WIDTH**0.5).softmax(-1))
