"""LayerPlans: layers that call the same functions are recorded by one plan, and only if it is proved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from regard.lens import CaptureWarning, capture
from regard.lens.interception import layer_plans
from regard.lens.interception.layer_plans import RunLog

D, H, N = 16, 2, 9


class Layer(nn.Module):
    """Attention as people write it, by hand or by PyTorch's kernel."""

    def __init__(self, fused: bool = False, scale: float = 0.3) -> None:
        super().__init__()
        self.heads, self.fused, self.scale = H, fused, scale
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.given: dict[str, object] = {}

    def between(self, A):
        return A

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (y.view(b, n, H, D // H).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **self.given)
        else:
            heads = self.between((q @ k.mT * self.scale).softmax(-1)) @ v
        return x + self.out(heads.transpose(1, 2).reshape(b, n, D))

    def by_hand(self, x):
        q, k, _ = (y.view(len(x), -1, H, D // H).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return (q @ k.mT * self.scale).softmax(-1)


@pytest.fixture
def planned(monkeypatch):
    """For each logged run whether a plan was applied; no plans from other tests."""
    applied = []
    original = RunLog.find_attentions

    def counted(self, *args):
        result = original(self, *args)
        applied.append(result is not None)
        return result

    monkeypatch.setattr(RunLog, "find_attentions", counted)
    monkeypatch.setattr(layer_plans, "_KNOWN", type(layer_plans._KNOWN)())
    return applied


def inputs(b=2):
    return torch.randn(b, N, D)


def check(model, x, given=None):
    """Compare what is recorded with the weights of each layer."""
    with torch.no_grad():
        with capture(model) as tape:
            out = model(x)
        assert torch.equal(out, model(x))
        for name, layer in model.named_children():
            A = layer.by_hand(x) if given is None else given
            assert_close(tape[name][:], A)
            x = layer(x)
    return tape


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_equal_layers_are_recorded_by_one_plan(planned, fused, b):
    model = nn.Sequential(*(Layer(fused) for _ in range(3)))
    for _ in range(3):
        check(model, inputs(b))
    assert planned[-1]


def test_a_plan_is_made_for_each_layer_that_calls_other_functions_or_numbers(planned):
    check(nn.Sequential(Layer(), Layer(scale=0.7), Layer(True), Layer(), Layer(True, scale=0.1)), inputs())
    check(nn.Sequential(Layer(scale=0.9)), inputs())


class Hidden(Layer):
    """Once asked, it changes its weights where no function mode sees it."""

    asked = False

    def between(self, A):
        if self.asked:
            with torch._C.DisableTorchFunction():
                A.copy_(A.flip(-1))
        return A


class Other(Layer):
    """Once asked, it averages by weights that no function mode has seen."""

    asked = False

    def between(self, A):
        if self.asked:
            with torch._C.DisableTorchFunction():
                return A.flip(-1)
        return A


@pytest.mark.parametrize("kind", [Hidden, Other])
def test_a_layer_that_behaves_differently_the_second_time_is_not_believed(planned, kind):
    model = nn.Sequential(*(kind() for _ in range(2)), Layer())
    for _ in range(3):
        check(model, inputs())
    model[1].asked = True
    with torch.no_grad(), pytest.warns(CaptureWarning), capture(model) as tape:
        model(inputs())
    assert tape.layers == ["0", "2"]


class Rectified(nn.Module):
    """It rectifies its queries after it attended; once asked, in place."""

    asked = ""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)

    def heads(self, x):
        return self.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2)

    def forward(self, x):
        q = self.heads(x)
        out = F.scaled_dot_product_attention(q, q, q)
        rectified = F.relu(q, True) if self.asked == "by place" else F.relu(q, inplace=self.asked == "by name")
        return (rectified + out).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["by place", "by name"])
def test_queries_that_a_later_run_writes_to_are_read_before(planned, how):
    model, x = nn.Sequential(*(Rectified() for _ in range(3))).eval(), inputs()
    with torch.no_grad():
        for _ in range(2):
            with capture(model):
                model(x)
        model[1].asked = how
        with capture(model, to="cpu") as tape:
            model(x)
        q = model[1].heads(model[0](x))
    assert_close(tape["1"].dense(), torch.softmax(q @ q.mT / 2, -1))


class Same(Layer):
    """Once asked, it changes its weights through a tensor that counts no writes."""

    asked = False

    def between(self, A):
        if self.asked:
            with torch._C.DisableTorchFunction():
                A.data.copy_(A.flip(-1))
        return A


def test_rows_of_the_weights_are_compared_on_every_run(planned):
    model = nn.Sequential(Same(), Same())
    for _ in range(3):
        check(model, inputs())
    before = len(planned)
    model[1].asked = True
    with torch.no_grad(), pytest.warns(CaptureWarning), capture(model) as tape:
        model(inputs())
    assert tape.layers == ["0"]
    assert False in planned[before:]


def test_a_mask_tensor_is_read_in_every_call(planned):
    layer = Layer(True)
    model = nn.Sequential(layer)
    check(model, inputs())
    for width in (1, 2, 3):
        mask = torch.ones(N, N, dtype=torch.bool).tril().triu(1 - width)
        layer.given = {"attn_mask": mask}
        x = inputs()
        with torch.no_grad():
            with capture(model) as tape:
                model(x)
            q, k, _ = (y.view(2, N, H, D // H).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1))
            assert_close(tape[0][:], (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1))


def test_causal_calls_have_plans_too(planned):
    model = nn.Sequential(*(Layer(True) for _ in range(4)))
    for layer in model:
        layer.given = {"is_causal": True}
    for _ in range(3):
        with torch.no_grad(), capture(model) as tape:
            model(inputs())
    assert planned[-1]
    assert "Causal()" in repr(tape)


def test_kept_measures_and_chosen_heads_are_those_of_a_full_analysis(planned):
    model, x = nn.Sequential(*(Layer() for _ in range(2))), inputs()
    with torch.no_grad():
        with capture(model, keep=["entropy"]) as first:
            model(x)
        for _ in range(2):
            with capture(model, keep=["entropy"]) as again, capture(model, heads=[1], layers="1") as chosen:
                model(x)
        assert_close(again["1"].entropy(), first["1"].entropy())
        assert_close(chosen["1"][:], model[1].by_hand(model[0](x))[:, 1:])


def test_training_is_analyzed_in_full():
    model, x = nn.Sequential(Layer(), Layer()), inputs()
    for _ in range(3):
        with capture(model) as tape:
            model(x).sum().backward()
    assert_close(tape["0"][:], model[0].by_hand(x).detach())
