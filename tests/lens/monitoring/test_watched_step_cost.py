"""A watched step runs the kernels of a plain one, a few operators for each layer, and a few at the end of the pass."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard.lens import Monitor
from regard.ops import weights as weights_module
from regard.ops.blocks.block_reducer import BlockReducer
from regard.ops.fused import kernel_reductions
from regard.ops.fused.kernel_reducer import KernelReducer

MAX_OPS_OF_LAYER = 24  # of which 14 are views, which launch nothing
MAX_OPS_OF_PASS = 60


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def llama(layers, device="cpu"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=31, num_hidden_layers=layers))
    model.set_attn_implementation("sdpa")
    return model.to(device).train()


def step(model, monitor, n=24, device="cpu"):
    """The operators of a forward pass under autocast, its loss, and the gradients of all parameters."""
    ids = torch.randint(0, 31, (2, n), generator=torch.Generator().manual_seed(3)).to(device)
    if monitor is not None:
        monitor.begin_step()
    with Operators() as operators, torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if monitor is not None:
        monitor.end_step()
    grads = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    return operators.ran, loss.detach(), grads


def test_under_autocast_each_layer_runs_its_kernel_once_with_the_bits_of_a_plain_step():
    model = llama(3)
    plain, loss, grads = step(model, None)
    ran, watched_loss, watched_grads = step(model, Monitor(model, every=1))
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert ran[kernel] == plain[kernel] == 3
    assert torch.equal(watched_loss, loss)
    assert all(map(torch.equal, watched_grads, grads))


@pytest.fixture
def kernels_of_a_gpu(monkeypatch):
    """The path of a GPU: measures by one kernel, which takes the row statistic; here every number is 1."""

    def measures(call, statistic, want, *others):
        b, h, i, j = call.shape
        whole, rows = torch.full((3 * b * h * i + b * h * j,), 1.0), b * h * i
        found = {
            name: whole.as_strided((b, h, i), (h * i, i, 1), n * rows).data
            for n, name in enumerate(("entropy", "max", "distance"))
        }
        return found | {"received": whole.as_strided((b, h, j), (h * j, j, 1), 3 * rows).data}

    monkeypatch.setattr(kernel_reductions, "reduce_by_kernel", measures)
    monkeypatch.setattr(
        weights_module,
        "choose_reducer",
        lambda call, statistic=None: KernelReducer(call, statistic, BlockReducer(call, statistic)),
    )
    # Only kernels of a CPU ignore NaN.
    monkeypatch.setattr("regard.lens.recording.recorder.lse_is_reliable", lambda q, k: True)


def added_operators(layers):
    """The operators that watching adds to a forward pass."""
    model = llama(layers)
    step(model, monitor := Monitor(model, every=1))
    return step(model, monitor)[0] - step(model, None)[0]


def test_a_watched_layer_adds_few_operators_and_waits_for_nothing(kernels_of_a_gpu):
    few, many = added_operators(2), added_operators(6)
    of_layer, of_pass = (many.total() - few.total()) / 4, few.total() - (many.total() - few.total()) / 2
    assert of_layer <= MAX_OPS_OF_LAYER, many - few
    assert of_pass <= MAX_OPS_OF_PASS, few
    copies = {"aten.clone.default", "aten.copy_.default", "aten.ones.default"}
    assert not copies & (many - few).keys()
    assert "aten._local_scalar_dense.default" not in many  # the host would wait for the device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_each_layer_runs_its_kernel_once_with_the_bits_of_a_plain_step():
    model = llama(3, "cuda")
    plain, loss, grads = step(model, None, 700, "cuda")
    again = step(model, None, 700, "cuda")[2]
    ran, watched_loss, watched_grads = step(model, Monitor(model, every=1), 700, "cuda")
    kernels = {name for name in plain if "attention" in name}
    assert kernels
    assert all(ran[name] == plain[name] for name in kernels)
    assert torch.equal(watched_loss, loss)
    if all(map(torch.equal, again, grads)):  # some kernels add gradients in any order
        assert all(map(torch.equal, watched_grads, grads))
