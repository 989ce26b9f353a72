"""Functions of torch.jit.script are observed by their Python originals; the model goes on with their own outputs."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lens import ablate, capture

pytestmark = pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated")

B, H, N, D = 2, 3, 5, 4


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1), v)


def softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1)


def softmax_in_place(s: Tensor) -> Tensor:
    s -= s.amax(-1, keepdim=True)
    e = s.exp_()
    return e / e.sum(-1, keepdim=True)


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    return torch.matmul(q, k.mT).masked_fill(hidden, float("-inf"))


def random(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(torch.softmax(torch.matmul(q, k.mT), -1), 0.5, True) @ v


def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.softmax(torch.matmul(q, k.mT), -1)
    return a @ v, a


CACHED = cache(torch.jit.script)


@pytest.fixture(scope="module")
def scripted():
    functions = (attention, softmax, softmax_in_place, causal_scores, random, both)
    return {f.__name__: torch.jit.script(f) for f in functions}


class Layer(nn.Module):
    """Calls `run` with its functions and with q, k and v."""

    def __init__(self, functions, run):
        super().__init__()
        torch.manual_seed(0)
        self.functions, self.run = functions, run
        self.qkv = nn.Linear(H * D, 3 * H * D)

    def forward(self, x):
        return self.run(self.functions, *self.parts(x))

    def parts(self, x):
        return [t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]


RUNS = {
    "all of it": lambda f, q, k, v: f["attention"](q, k, v, 1.0),
    "the softmax": lambda f, q, k, v: f["softmax"](q @ k.mT) @ v,
    "the scores": lambda f, q, k, v: f["causal_scores"](q, k).softmax(-1) @ v,
    "scores and softmax": lambda f, q, k, v: f["softmax"](f["causal_scores"](q, k)) @ v,
    "output and weights": lambda f, q, k, v: f["both"](q, k, v)[0],
    "scripted by the layer": lambda f, q, k, v: torch.jit.script(attention)(q, k, v, 1.0),
    "held by a cache": lambda f, q, k, v: CACHED(attention)(q, k, v, 1.0),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_a_scripted_function_is_seen(scripted, run, context):
    layer, x = Layer(scripted, RUNS[run]), torch.randn(B, N, H * D)
    with context():
        for _ in range(3):  # TorchScript optimizes after the first runs
            want = layer(x)
        with capture(layer) as tape:
            got = layer(x)
        q, k, _ = layer.parts(x)
    assert torch.equal(got, want)
    (A,) = tape.values()
    s = q @ k.mT
    s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf) if "scores" in run else s
    torch.testing.assert_close(A[:], s.softmax(-1))
    assert not tape.unseen


def test_scripted_functions_are_called_as_before_once_the_last_capture_ends(scripted):
    first, second = (Layer(scripted, RUNS["all of it"]) for _ in range(2))
    x, call = torch.randn(B, N, H * D), torch.jit.ScriptFunction.__call__
    with capture(first) as outer:
        with capture(second) as inner:
            second(x)
        first(x)
    assert outer.layers == inner.layers == [""]
    assert torch.jit.ScriptFunction.__call__ == call


def test_gradients_and_random_numbers_are_those_of_the_model(scripted):
    layer, x = (
        Layer(scripted, lambda f, q, k, v: F.dropout(f["attention"](q, k, v, 1.0), 0.5)),
        torch.randn(B, N, H * D),
    )

    def run():
        torch.manual_seed(3)
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.qkv.weight.grad.clone()

    want = [run() for _ in range(3)][-1]
    with capture(layer):
        got = run()
    assert torch.equal(got, want)


HIDDEN = {
    "random": lambda f, q, k, v: f["random"](q, k, v),
    "within vmap": lambda f, q, k, v: torch.vmap(f["attention"], (0, 0, 0, None))(q, k, v, 1.0),
    "it writes to its argument": lambda f, q, k, v: f["softmax_in_place"](q @ k.mT) @ v,
}


@pytest.mark.parametrize("run", HIDDEN)
def test_a_function_whose_original_cannot_be_run_again_is_named(scripted, run):
    model = nn.ModuleList([Layer(scripted, HIDDEN[run]), Layer(scripted, RUNS["the softmax"])])
    x = torch.randn(B, N, H * D)
    with torch.no_grad(), pytest.warns(UserWarning, match="0 was not recorded"), capture(model) as tape:
        [layer(x) for layer in model]
    assert [each.layer for each in tape.unseen] == ["0"]
    assert tape.layers == ["1"]


def test_an_ablated_model_runs_its_scripted_functions(scripted):
    layer, x = Layer(scripted, RUNS["all of it"]), torch.randn(B, N, H * D)
    with torch.no_grad(), ablate(layer, {}):
        out = layer(x)
    torch.testing.assert_close(out, layer(x))
