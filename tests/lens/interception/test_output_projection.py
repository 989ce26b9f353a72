"""The output projection is the linear map that takes the heads, joined, and nothing else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tests.lens.tiny_transformers as zoo
from regard.lens import capture

D, H = 16, 2


class Joined(nn.Module):
    """Attention by hand; what is made of its heads is each test's own."""

    def __init__(self, then) -> None:
        super().__init__()
        self.out, self.other, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return self.then(self, F.scaled_dot_product_attention(q, q, q), x)


def side_by_side(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


PROJECTED = {
    "batch first": lambda m, heads, x: m.out(side_by_side(heads)),
    "batch second": lambda m, heads, x: m.out(heads.permute(2, 0, 1, 3).flatten(2)),
    "batch and tokens as one": lambda m, heads, x: m.out(side_by_side(heads).flatten(0, 1)),
    "after another": lambda m, heads, x: m.other(x) * m.out(side_by_side(heads)),
    "by keyword": lambda m, heads, x: F.linear(side_by_side(heads), weight=m.out.weight),
    "as a product": lambda m, heads, x: torch.addmm(m.out.bias, side_by_side(heads)[0], m.out.weight.mT),
    "in another precision": lambda m, heads, x: F.linear(side_by_side(heads).bfloat16(), m.out.weight.bfloat16()),
}


UNPROJECTED = {
    "next layer": lambda m, heads, x: m.out(m.norm(x + side_by_side(heads))),
    "gated": lambda m, heads, x: m.out(side_by_side(heads) * x.sigmoid()),
    "heads interleaved": lambda m, heads, x: m.out(heads.permute(0, 2, 3, 1).flatten(2)),
}


@pytest.mark.parametrize("then", PROJECTED.values(), ids=PROJECTED)
def test_the_projection_is_the_linear_map_that_takes_the_heads(then):
    model = Joined(then)
    with torch.no_grad(), capture(model, values=True) as tape:
        model(torch.randn(1, 5, D))
    assert torch.equal(tape.extras(0).projection.float(), model.out.weight.to(tape.extras(0).projection.dtype).float())


@pytest.mark.parametrize("then", UNPROJECTED.values(), ids=UNPROJECTED)
def test_a_linear_map_of_something_else_is_not_the_projection(then):
    model = Joined(then)
    with torch.no_grad(), capture(model, values=True) as tape:
        model(torch.randn(1, 5, D))
    assert tape.extras(0).projection is None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_projection_may_belong_to_another_module(implementation):
    model = zoo.made(zoo.bert, implementation)
    with torch.no_grad(), capture(model, values=True) as tape:
        model(zoo.ids())
    for n, layer in enumerate(model.encoder.layer):
        assert torch.equal(tape.extras(n).projection, layer.attention.output.dense.weight)


def test_each_thread_finds_its_own_projections():
    meet = threading.Barrier(2, timeout=20)

    def together(m, heads, x):
        meet.wait()
        return m.out(side_by_side(heads))

    model = nn.ModuleList([Joined(together), Joined(together)])
    with torch.no_grad(), capture(model, values=True) as tape, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda layer: layer(torch.randn(1, 5, D)), model))
    for n, layer in enumerate(model):
        assert torch.equal(tape.extras(str(n)).projection, layer.out.weight)


def test_a_projection_is_copied_to_the_device():
    model, x = nn.MultiheadAttention(16, 2), torch.randn(5, 1, 16)
    before = model.out_proj.weight.detach().clone()
    with capture(model, values=True, to="cpu") as tape:
        model(x, x, x)
    with torch.no_grad():
        model.out_proj.weight.zero_()
    assert torch.equal(tape.extras(0).projection, before)
