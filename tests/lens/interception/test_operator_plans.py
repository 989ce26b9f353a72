"""OperatorPlans: later runs of a planned layer are recorded by their operators, and only if they keep to the plan."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from regard import torch_internals
from regard.lens import CaptureWarning, capture
from regard.lens.interception import layer_plans, operator_watch
from regard.lens.interception.operator_plans import OperatorRun
from regard.lens.interception.operator_watch import can_watch, set_watcher
from tests.lens.host_calls import calls_of

pytestmark = pytest.mark.skipif(not can_watch(), reason="this version of PyTorch lets no operators be watched")

D, H, N = 16, 2, 9
SWITCH = {"on": ""}  # decides what a layer does where no attribute and no argument shows it


class Layer(nn.Module):
    """Attention by hand or by PyTorch's kernel, which goes by a global switch."""

    def __init__(self, fused: bool = False, scale: float = 0.3) -> None:
        super().__init__()
        self.heads, self.fused, self.scale = H, fused, scale
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def split(self, x):
        return (y.view(len(x), -1, H, D // H).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))

    def forward(self, x):
        q, k, v = self.split(x)
        on = SWITCH["on"]
        if on == "skip":
            return x
        if on == "strides":
            q = q.contiguous()
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=on == "causal")
        else:
            A = (q @ k.mT * (0.9 if on == "scale" else self.scale)).softmax(-1)
            if on == "flip":
                A = A.flip(-1)
            if on == "in place":
                A.mul_(0.5)
            if on == "unseen write":
                A.data.copy_(A.flip(-1))
            heads = A @ v
        if on == "twice":
            heads = heads + (q @ k.mT).softmax(-1) @ v
        if on == "queries":
            q.data.mul_(2)
        if on == "error":
            raise RuntimeError("a layer failed")
        return x + self.out(heads.transpose(1, 2).reshape(x.shape))

    def by_hand(self, x):
        q, k, _ = self.split(x)
        return (q @ k.mT * self.scale).softmax(-1)


class Switched(Layer):
    """The layer of a model that the switch concerns."""

    def forward(self, x):
        on, SWITCH["on"] = SWITCH["on"], self.wanted()
        try:
            return super().forward(x)
        finally:
            SWITCH["on"] = on

    @staticmethod
    def wanted():
        return WANTED[0]


WANTED = [""]


@pytest.fixture
def watched(monkeypatch):
    """The class of each module whose run was watched; no plans from other tests."""
    begun = []
    original = OperatorRun.__init__

    def counted(self, runs, key, plan, parts, **kwargs):
        begun.append(type(parts[-1]))
        original(self, runs, key, plan, parts, **kwargs)

    monkeypatch.setattr(OperatorRun, "__init__", counted)
    monkeypatch.setattr(layer_plans, "_KNOWN", type(layer_plans._KNOWN)())
    yield begun
    WANTED[0] = ""
    assert set_watcher(None) is None
    assert torch_internals.function_mode_stack() == []


def inputs(b=2):
    return torch.randn(b, N, D)


def check(model, x):
    """Compare what is recorded with the weights of each layer, and the output with that of the plain model."""
    with torch.no_grad():
        with capture(model) as tape:
            out = model(x)
        assert torch.equal(out, model(x))
        for name, layer in model.named_children():
            assert_close(tape[name][:], layer.by_hand(x))
            x = layer(x)
    return tape


def learn(model):
    for _ in range(3):
        check(model, inputs())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_a_planned_layer_is_recorded_by_its_operators(watched, fused, b):
    model = nn.Sequential(*(Layer(fused) for _ in range(3)))
    for _ in range(4):
        check(model, inputs(b))
    assert watched


@pytest.mark.parametrize("fused", [False, True])
def test_all_layers_of_a_deep_model_are_watched(watched, fused):
    model, x = nn.Sequential(*(Layer(fused) for _ in range(12))), inputs()
    for _ in range(3):  # the first layer has an input of another origin than the others
        check(model, x)
    before = len(watched)
    check(model, x)
    assert watched[before:] == [Layer] * 12


@pytest.mark.parametrize(("fused", "most"), [(False, 210), (True, 160)])
def test_a_watched_layer_takes_few_calls_of_the_host(watched, fused, most):
    added = []
    for layers in (4, 8):
        model, x = nn.Sequential(*(Layer(fused) for _ in range(layers))).requires_grad_(False), inputs(1)

        def captured(model=model, x=x):
            with capture(model) as tape:
                model(x)
            assert len(tape.layers) == len(model)

        for _ in range(4):
            captured()
        added.append(calls_of(captured) - calls_of(lambda model=model, x=x: model(x)))
    assert added[1] - added[0] <= 4 * most


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fused", [False, True])
def test_modes_of_gradients_have_plans_of_their_own(watched, fused):
    model, x = nn.Sequential(*(Layer(fused) for _ in range(3))), inputs()
    learn(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        for _ in range(3):
            with mode(), capture(model) as tape:
                out = model(x)
            assert_close(tape["2"][:], model[2].by_hand(model[1](model[0](x))).detach())
        with torch.inference_mode():
            given = x.clone()
        with torch.no_grad(), capture(model) as tape:
            model(given)
        assert_close(tape["0"][:], model[0].by_hand(x).detach())
        assert_close(out.detach(), model(x).detach())


def test_gradients_are_those_of_the_plain_model(watched):
    model, x = nn.Sequential(Layer(), Layer(True)).requires_grad_(False), inputs().requires_grad_()
    for _ in range(4):
        with capture(model) as tape:
            (found,) = torch.autograd.grad(model(x).square().sum(), x)
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        assert torch.equal(found, expected)
    assert_close(tape["0"][:], model[0].by_hand(x).detach())


@pytest.mark.parametrize("on", ["flip", "in place", "unseen write", "scale", "twice", "strides"])
def test_a_layer_that_runs_otherwise_is_named_and_analyzed_in_full_the_next_time(watched, on):
    model = nn.Sequential(Layer(), Switched(), Layer())
    learn(model)
    before = len(watched)
    WANTED[0] = on
    with torch.no_grad(), pytest.warns(CaptureWarning, match="once more"), capture(model) as tape:
        model(inputs())
    assert len(watched) > before
    assert tape.layers == (["0", "1", "2"] if on == "twice" else ["0", "2"])  # the second attention is left out
    assert [each.layer for each in tape.unseen] == ["1"]
    WANTED[0] = "scale" if on == "unseen write" else on  # no analysis can see that write
    x = inputs()
    with torch.no_grad(), capture(model) as tape:
        model(x)
        q, k, _ = model[1].split(model[0](x))
    assert "1" in tape.layers
    entry = tape["1", 0] if on == "twice" else tape["1"]
    A = (q @ k.mT * (0.9 if WANTED[0] == "scale" else 0.3)).softmax(-1)
    A = {"flip": A.flip(-1), "in place": A / 2}.get(on, A)
    assert_close(entry.dense(), A)


def test_a_call_of_the_kernel_with_other_arguments_is_read_at_once(watched):
    model, x = nn.Sequential(Layer(True), Switched(True), Layer(True)), inputs()
    learn(model)
    before = len(watched)
    WANTED[0] = "causal"
    with torch.no_grad():
        with capture(model) as tape:
            model(x)
        assert len(watched) > before
        assert tape.layers == ["0", "1", "2"]
        assert repr(tape).count("Causal()") == 1
        q, k, _ = model[1].split(model[0](x))
        hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
        assert_close(tape["1"][:], (q @ k.mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1))
        assert_close(tape["2"][:], model[2].by_hand(model[1](model[0](x))))


@pytest.mark.parametrize("on", ["twice", "strides"])
def test_a_kernel_beside_other_operators_or_on_other_strides_is_named(watched, on):
    model = nn.Sequential(Layer(True), Switched(True))
    learn(model)
    WANTED[0] = on
    with torch.no_grad(), pytest.warns(CaptureWarning, match="otherwise"), capture(model) as tape:
        model(inputs())
    assert [each.layer for each in tape.unseen] == ["1"]
    with torch.no_grad(), capture(model) as tape:
        model(inputs())
    assert "1" in tape.layers


def test_a_layer_that_does_not_attend_this_time_is_not_named(watched):
    model = nn.Sequential(Layer(), Switched())
    learn(model)
    WANTED[0] = "skip"
    with torch.no_grad(), capture(model) as tape:
        model(inputs())
    assert tape.layers == ["0"]
    assert tape.unseen == []


@pytest.mark.parametrize("fused", [False, True])
def test_queries_that_are_written_after_the_call_are_those_of_the_call(watched, fused):
    model = nn.Sequential(Layer(fused), Switched(fused))
    learn(model)
    WANTED[0] = "queries"
    x = inputs()
    with torch.no_grad():
        with capture(model) as tape:
            model(x)
        assert_close(tape["1"][:], model[1].by_hand(model[0](x)))


def test_an_attribute_that_changes_is_seen_before_the_run(watched):
    model = nn.Sequential(Layer(), Layer())
    learn(model)
    before = len(watched)
    model[1].scale, model[1].fused = 0.7, True
    check(model, inputs())
    assert watched[before:] == [Layer]  # the other one


def test_a_method_that_is_replaced_is_seen_before_the_run(watched, monkeypatch):
    model = nn.Sequential(Layer(), Layer())
    learn(model)
    original = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, x: original(self, x) * 2)
    before = len(watched)
    check(model, inputs())
    assert watched[before:] == []


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_left_behind_by_a_layer_that_fails(watched, fused):
    model = nn.Sequential(Layer(fused), Switched(fused))
    learn(model)
    WANTED[0] = "error"
    with pytest.raises(RuntimeError, match="a layer failed"), torch.no_grad(), capture(model):
        model(inputs())
    assert torch_internals.function_mode_stack() == []
    assert set_watcher(None) is None
    WANTED[0] = ""
    check(model, inputs())


def test_captures_within_captures_and_in_threads_are_right(watched):
    model, x = nn.Sequential(Layer(), Layer(True)), inputs()
    learn(model)
    with torch.no_grad():
        with capture(model) as outer, capture(model) as inner:
            model(x)
        for tape in outer, inner:
            assert_close(tape["0"][:], model[0].by_hand(x))
        tapes = {}

        def work(n):
            with torch.no_grad(), capture(model) as tapes[n]:
                for _ in range(3):
                    model(x)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tape in tapes.values():
            assert len(tape) == 6
            for call in range(3):
                assert_close(tape["1", call][:], model[1].by_hand(model[0](x)))


@pytest.mark.parametrize("fused", [False, True])
def test_measures_and_single_heads_are_kept_of_watched_runs(watched, fused):
    model, x = nn.Sequential(Layer(fused), Layer(fused)), inputs()
    learn(model)
    A = model[0].by_hand(x)
    with torch.no_grad():
        with capture(model, keep=["entropy"]) as tape:
            model(x)
        assert_close(tape["0"].entropy(), torch.special.entr(A).sum(-1))
        with capture(model, heads=[1]) as tape:
            model(x)
        assert_close(tape["0"][:], A[:, 1:])


def test_counted_calls_are_recorded_while_they_count(watched):
    model, x = nn.Sequential(Layer(True), Layer(True)), inputs()
    learn(model)
    counting = [False]
    with torch.no_grad(), capture(model) as tape:
        tape._recorder.counts = lambda: counting[0]
        model(x)
        counting[0] = True
        model(x + 1)
    assert len(tape) == 2
    assert_close(tape["0"][:], model[0].by_hand(x + 1))


def test_a_cache_that_no_attribute_shows_is_read_as_it_grows(watched):
    class Held:
        keys = None

    class Cached(Layer):
        def forward(self, x):
            q, k, v = self.split(x)
            self.held.keys = k if self.held.keys is None else torch.cat((self.held.keys, k), 2)
            return (
                F.scaled_dot_product_attention(q, self.held.keys, self.held.keys).transpose(1, 2).reshape(x.shape)
                + v.sum()
            )

    model = nn.Sequential(Cached())
    for _ in range(4):
        model[0].held = Held()
        for step in range(3):
            with torch.no_grad(), capture(model) as tape:
                model(torch.randn(1, 1, D))
            assert tape[0].shape[-1] == step + 1


def test_a_cache_that_grows_is_analyzed_in_full(watched):
    class Cached(Layer):
        keys = None

        def forward(self, x):
            q, k, v = self.split(x)
            self.keys = k if self.keys is None else torch.cat((self.keys, k), 2)
            return F.scaled_dot_product_attention(q, self.keys, self.keys).transpose(1, 2).reshape(x.shape) + v.sum()

    model = nn.Sequential(Cached())
    for step in range(5):
        with torch.no_grad(), capture(model) as tape:
            model(torch.randn(1, 1, D))
        assert tape[0].shape[-1] == step + 1


@pytest.mark.filterwarnings("ignore::regard.lens.CaptureWarning")
def test_a_function_that_is_compiled_during_a_watched_run_is_let_alone(watched):
    compiled = torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend="eager")
    compiles = [False]

    class Compiled(Layer):
        def forward(self, x):
            y = super().forward(x)
            return y + (compiled(y) if compiles[0] else y)

    model, x = nn.Sequential(Compiled(), Compiled(True)), inputs()
    learn(model)
    before, compiles[0] = len(watched), True
    with torch.no_grad():
        with capture(model) as tape:
            out = model(x)
        assert len(watched) > before
        assert_close(out, model(x))
        assert_close(tape["0"][:], model[0].by_hand(x))


@pytest.mark.parametrize("fused", [False, True], ids=["by hand", "SDPA"])
def test_without_watched_operators_the_tape_is_the_same(fused, monkeypatch):
    model, x = nn.Sequential(*(Layer(fused) for _ in range(4))).eval(), torch.randn(2, N, D)
    tapes = []
    for switch in (operator_watch._SWITCH[0], None):
        monkeypatch.setattr(operator_watch, "_SWITCH", [switch])
        for _ in range(3):
            with capture(model) as tape, torch.no_grad():
                model(x)
        tapes.append(tape)
    assert [list(tape) for tape in tapes] == [list(tapes[0])] * 2
    for name in tapes[0]:
        assert_close(tapes[1][name].dense(), tapes[0][name].dense())
