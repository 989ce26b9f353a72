"""Weights are believed only if they reproduce the output of the kernel."""

from __future__ import annotations

import pytest
import torch

import tests.lens.fake_kernels as fake
from tests.lens.kernel_layers import MISMATCH, SLOPES, WIDTH, Held, assert_not_recorded, capture_one, inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [{"causal": True}, {"window_size": (2, 1)}, {"alibi_slopes": 8 * SLOPES}])
def test_a_kernel_with_another_meaning_is_not_recorded(flash, given, dtype):
    flash.flash_attn_func = fake.from_the_top
    assert_not_recorded(Held(fake.from_the_top, **given), *inputs(5, 9, dtype=dtype), match=MISMATCH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [7, 63, 129])
def test_rounding_within_the_output_dtype_is_accepted(flash, monkeypatch, n, dtype):
    def rounded(q, k, v, causal=False):
        s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * WIDTH**-0.5
        A = s.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1).to(q.dtype)
        return torch.einsum("bhij,bjhe->bihe", A.float(), v.float()).to(q.dtype)

    flash.flash_attn_func = rounded
    q, k, v = inputs(n, n, dtype=dtype)
    A, _ = capture_one(Held(rounded, causal=True), q, k, v)
    assert repr(A.call.mask) == "Causal()"


@pytest.mark.parametrize("row", [0, 128])
def test_the_first_and_the_last_row_are_compared(flash, row):
    def off(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return out.index_fill(1, torch.tensor([row]), 0.5)

    flash.flash_attn_func = off
    assert_not_recorded(Held(off), *inputs(129, 129), match=MISMATCH)


def test_an_output_of_another_shape_is_not_recorded(flash):
    def wider(q, k, v):
        return torch.cat((v, v), -1)

    flash.flash_attn_func = wider
    assert_not_recorded(Held(wider), *inputs(), match=MISMATCH)
