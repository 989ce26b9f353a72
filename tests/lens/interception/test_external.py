"""Kernels of libraries that are imported: read by their documented arguments, and ablated in every layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regard.lens import ablate, capture
from regard.lens.interception import intercept as interception
from tests.lens.kernel_layers import HEADS, WIDTH, Held, assert_not_recorded, inputs, side_by_side


def test_a_kernel_of_another_version_is_not_recorded(flash):
    def later(q, k, v, window_size=0):
        return q

    flash.flash_attn_func = later
    assert_not_recorded(
        Held(later, window_size=3),
        *inputs(),
        match="arguments of flash_attn_func differ from the documented",
    )


def test_float8_is_not_supported(flash):
    def small(q, k, v):
        return q.to(torch.bfloat16)

    flash.flash_attn_func = small
    small_ones = [x.to(torch.float8_e4m3fn) for x in inputs()]
    assert_not_recorded(Held(small), *small_ones, match=r"got tensors of torch\.float8_e4m3fn, which are not supported")


LAYOUTS = {
    "flash_attn_func": lambda: inputs(),
    "flash_attn_varlen_func": lambda: side_by_side((3, 4), (3, 4)),
    "memory_efficient_attention": lambda: inputs(),
    "b i d": lambda: [x[:, :, 0] for x in inputs()],
    "b i g h d": lambda: [x.unflatten(2, (2, 2)) for x in inputs()],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_ablated(flash, xformers, layout):
    function = getattr(flash, layout, xformers.memory_efficient_attention)
    layer, args = Held(function), LAYOUTS[layout]()
    whole = layer(*args)
    off = [0] if layout == "b i d" else [1, 3]
    with ablate(layer, {"": off}):
        without = layer(*args)
    assert without.is_contiguous()  # a model may take a view of it
    heads, rest = (x[:, :, None] if layout == "b i d" else x for x in (whole, without))
    heads, rest = (x.flatten(2, 3) if layout == "b i g h d" else x for x in (heads, rest))
    kept = [h for h in range(heads.shape[-2]) if h not in off]
    assert torch.equal(rest[..., kept, :], heads[..., kept, :])
    assert not rest[..., off, :].any()
    assert torch.equal(layer(*args), whole)


def test_only_imported_libraries_are_patched(monkeypatch):
    found = []
    monkeypatch.setattr(interception, "patched", lambda mode, parts, kernels: found.extend(kernels))
    interception.patched_kernels(SimpleNamespace(), [Held(None)])
    assert [kernel.function.__name__ for kernel in found] == ["flex_attention"]


@pytest.fixture
def llama():
    """Imported before there are stand-ins, which it would look for."""
    return pytest.importorskip("transformers.models.llama.modeling_llama")


def test_a_kernel_behind_the_interface_of_transformers_is_recorded_once(llama, flash, registries):
    def by_flash(module, q, k, v, mask, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash.flash_attn_func(q, k, v, softmax_scale=scaling, causal=True), None

    registries.AttentionInterface.register("standing_in", by_flash)
    config = registries.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=9
    )
    config._attn_implementation = "standing_in"

    class Around(nn.Module):
        """Attends once more, by code of its own."""

        def __init__(self):
            super().__init__()
            self.inner = llama.LlamaModel(config).eval()

        def forward(self, ids):
            from flash_attn import flash_attn_func

            x = self.inner(ids).last_hidden_state.unflatten(-1, (HEADS, WIDTH))
            return flash_attn_func(x, x, x)

    model = Around()
    with torch.no_grad(), capture(model) as tape:
        model(torch.tensor([[1, 2, 3]]))
    assert list(tape) == [("inner.layers.0.self_attn", 0), ("", 0)]
