"""PyTorch's fused kernels: which of them runs, and what each is given."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.ops.backends import torch_kernels as kernels


@pytest.mark.parametrize(
    ("d", "dtype", "sure"),
    [
        (64, torch.bfloat16, True),
        (128, torch.float16, True),
        (8, torch.float16, True),
        (64, torch.float32, False),
        (60, torch.bfloat16, False),
        (136, torch.bfloat16, False),
    ],
)
def test_where_the_flash_kernel_is_certain_pytorch_is_not_asked(d, dtype, sure, monkeypatch):
    monkeypatch.setattr(kernels, "has_flash", lambda device: True)
    q = torch.zeros(1, 1, 4, d, dtype=dtype)
    assert kernels.is_surely_fused(q) == sure
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert not kernels.is_surely_fused(q)
    monkeypatch.setattr(kernels, "has_flash", lambda device: False)
    assert not kernels.is_surely_fused(q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [8, 64, 120, 128])
@pytest.mark.parametrize("n", [1, 7, 129, 4096])
def test_what_is_taken_for_certain_is_what_pytorch_answers(n, d, dtype):
    for causal in (False, True):
        for grad in (False, True):
            q, k, v = (torch.randn(2, 3, n, d, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3))
            assert kernels.is_surely_fused(q)
            assert kernels.choose_kernel(q, k, v, added=None, causal=causal, dropout=0.0).is_fused


@pytest.mark.parametrize(
    ("capability", "flash"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True), ((13, 0), False)]
)
def test_the_flash_kernel_is_for_certain_gpus(capability, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert kernels.has_flash.__wrapped__(0) == flash


@pytest.mark.parametrize("j", [32, 30])
def test_a_mask_that_all_heads_share_is_not_copied_for_each(j):
    """Rows must be aligned to 16 entries, in memory."""
    q, added = torch.zeros(2, 8, 5, 4), torch.randn(2, 1, 1, j)
    aligned = kernels._align_rows(added, q)
    assert torch.equal(aligned, added.expand(2, 8, 5, j))
    assert aligned.stride()[1:3] == (0, 0)
    assert aligned.stride(0) % 16 == 0
