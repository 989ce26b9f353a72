"""PyTorch's private functions do here what the package relies on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from regard import torch_internals as internals


def test_transforms_and_forward_mode_are_seen_only_inside():
    seen = []

    def look(x):
        seen.append((internals.functorch_transform() is not None, internals.in_dual_level()))
        return x

    look(torch.ones(()))
    torch.func.vmap(look)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(()))
    assert seen == [(False, False), (True, False), (False, True)]


def test_wrappers_of_transforms_are_unwrapped_level_by_level():
    seen = []

    def look(x):
        seen.append(internals.transform_levels())
        inner, dim = internals.unwrap_transform(x, 2)
        seen.append((dim, internals.unwrap_transform(inner, 1)[1], internals.unwrap_transform(x, 1)))
        seen.append(internals.innermost_tensor(x).shape)
        with internals.outside_transforms():
            seen.append(internals.transform_levels())
        return x

    torch.vmap(lambda x: torch.func.vjp(look, x)[0])(torch.ones(3, 2))
    assert seen == [[(1, True), (2, False)], (None, 0, None), (3, 2), []]


def test_a_backward_pass_is_seen_only_while_it_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((internals.in_backward(), internals.is_batched_gradient(grad))))
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [(True, False), (True, True)]
    assert not internals.in_backward()


def test_autocast_is_seen_for_any_device():
    assert not internals.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.is_any_autocast_enabled()


def test_a_function_that_recompiles_too_often_may_be_given_more():
    class Counted:
        compiled = 0

    def count(graph, inputs):
        Counted.compiled += 1
        return graph.forward

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x + x.shape[0], backend=count, fullgraph=True, dynamic=False)
    with internals.recompile_limit(2):
        fn(torch.ones(1)), fn(torch.ones(2))
        with pytest.raises(internals.recompile_limit_error()):
            fn(torch.ones(3))
        with internals.recompile_limit(4):
            fn(torch.ones(3))
    torch._dynamo.reset()
    assert Counted.compiled == 3


@pytest.mark.parametrize("causal", [False, True])
def test_the_cpu_kernel_gives_the_log_sum_exp_and_its_gradients(causal):
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    out, lse = internals.cpu_flash_attention(q, k, v, scale=0.5, causal=causal)
    s = q @ k.mT * 0.5
    s = s.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf) if causal else s
    torch.testing.assert_close(lse, s.logsumexp(-1))
    torch.testing.assert_close(out, s.softmax(-1) @ v)


def test_the_backward_of_the_cpu_kernel_takes_added_numbers():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    added, grad = torch.randn(1, 2, 9, 9), torch.randn(1, 2, 9, 8)
    want = torch.autograd.grad((q @ k.mT * 0.5 + added).softmax(-1) @ v, (q, k, v), grad)
    with torch.no_grad():
        out, lse = internals.cpu_flash_attention(q, k, v, scale=0.5, added=added)
        got = internals.cpu_flash_attention_backward(grad, q, k, v, out, lse, scale=0.5, added=added)
    torch.testing.assert_close(tuple(got), want)


def test_the_choice_of_a_kernel_is_that_of_the_public_function():
    q = torch.randn(1, 2, 9, 8)
    assert internals.choose_sdp_kernel(q, q, q, None, 0.0, False) == 1  # flash
    assert internals.choose_sdp_kernel(q, q, q, None, 0.5, False) == 0  # with dropout: the matrix is stored
    torch.testing.assert_close(internals.SDPA(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_a_mode_may_leave_the_stack_before_those_above_it():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    outer, inner = Mode(), Mode()
    assert not internals.is_function_mode_enabled()
    internals.push_function_mode(outer)
    internals.push_function_mode(inner)
    try:
        assert internals.function_mode_stack() == [outer, inner]
        assert internals.is_function_mode_enabled()
        assert internals.pop_function_mode() is inner
    finally:
        while internals.function_mode_stack():
            internals.pop_function_mode()


def test_hooks_are_counted_and_those_of_all_modules_are_known():
    before = internals.next_hook_id()
    handle = nn.Linear(1, 1).register_forward_hook(lambda *given: None)
    assert internals.next_hook_id() > before
    hooks = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        forward, pre = internals.global_module_hooks()
        assert len(forward) == 1
        assert not pre
    finally:
        hooks.remove(), handle.remove()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_scripted_modules_are_of_the_classes_named():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert isinstance(traced, internals.SCRIPTED_MODULES)
    assert not isinstance(nn.Linear(2, 2), internals.SCRIPTED_MODULES)


def test_what_torch_compile_marks_carries_the_names_we_look_for():
    def fn(x):
        return x

    assert getattr(torch.compile(fn), internals.COMPILED_FUNCTION) is fn
    assert getattr(torch.compiler.disable(fn), internals.NOT_COMPILED) is True


def test_many_tensors_are_multiplied_in_place():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    internals.multiply_all_(tensors, 3.0)
    assert [x.tolist() for x in tensors] == [[3, 3], [6, 6, 6]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_packed_weight_multiplies_as_the_weight_does():
    x, weight, bias = torch.randn(5, 65), torch.randn(33, 65), torch.randn(33)
    packed = internals.pack_linear_weight(weight, 5)
    torch.testing.assert_close(internals.packed_linear(x, packed, bias), F.linear(x, weight, bias))
