"""A sweep equals a loop of single edits, and runs the unchanged layers once."""

import pytest
import torch
from torch import nn

from regard import Causal
from regard.lens import Boost, CaptureWarning, Cut, Freeze, Scale, capture, edit, knockouts, sweep, words
from regard.nn import Attention

TOKENS = ["the", "cat", "saw", "the", "dog"]


class Counting(nn.Module):
    """A residual block that counts its passes."""

    def __init__(self):
        super().__init__()
        self.attention, self.passes = Attention(16, heads=4, mask=Causal()), 0

    def forward(self, x):
        self.passes += 1
        return x + self.attention(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Counting() for _ in range(4))).double().eval()


X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def metric(out):
    return out[:, -1].square().sum()


def by_loop(model, inputs, edits, metric, tokens=None):
    found = []
    for each in edits.values():
        with torch.no_grad(), edit(model, each, tokens):
            found.append(float(metric(model(inputs))))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    ("copies", "passes"),
    [
        (1, [1 + 16, 1 + 32, 1 + 48, 1 + 1 + 64]),  # and one pass that verifies
        (None, [1 + 1 + 1, 1 + 1 + 2, 1 + 1 + 3, 1 + 2 + 4]),  # and one that verifies the copies
        (7, [1 + 1 + 4, 1 + 1 + 8, 1 + 1 + 12, 1 + 2 + 16]),  # 7, 7, 1 and 1: a batch of 4 rows is as large as heads
    ],
)
def test_a_sweep_of_heads_and_groups_equals_a_loop_of_edits(model, copies, passes):
    with capture(model) as tape, torch.no_grad():
        plain = model(X)
    edits = knockouts(tape, keys=words(TOKENS), queries=-1)
    assert len(edits) == 4 * 4 * 4  # the groups are words by their labels
    want = by_loop(model, X, edits, metric)
    for block in model:
        block.passes = 0
    found = sweep(model, X, edits, metric, copies=copies)
    assert [block.passes for block in model] == passes
    torch.testing.assert_close(found.values, want, atol=1e-12, rtol=1e-12)
    assert found.plain == pytest.approx(float(metric(plain)))
    torch.testing.assert_close(found.effects, want - found.plain)
    assert found.grid().shape == (4, 16)
    assert found.axes()[0] == [f"{n}.attention" for n in range(4)]
    assert found.axes()[1][:2] == ["0 the", "0 cat"]
    assert found.grid()[1, 2] == found.effects[list(edits).index(("1.attention", 0, "saw"))]


def test_edits_of_several_layers_begin_at_the_first(model):
    edits = {
        "two": {"3.*": Boost(0, 2.0), "1.*": Scale(0, 0)},
        "all": {"*": Cut(keys=lambda text: words(text)["the"])},
        "last": {"3.attention": [Scale(1, 0), Cut(keys=1)]},
    }
    want = by_loop(model, X, edits, metric, TOKENS)
    for block in model:
        block.passes = 0
    found = sweep(model, X, edits, metric, TOKENS, copies=1)
    torch.testing.assert_close(found.values, want, atol=1e-12, rtol=1e-12)
    assert [block.passes for block in model] == [2, 3, 3, 5]
    assert found.grid().shape == (3, 1)


def test_copies_have_the_tokens_of_their_texts(model):
    texts = [TOKENS, ["a", "dog", "saw", "a", "cat"]]
    edits = {
        n: {"*": [Cut(keys=lambda text, n=n: words(text)["cat"], heads=n), Boost(-1, 1.0, queries=slice(n, None))]}
        for n in range(4)
    }
    want = by_loop(model, X, edits, metric, texts)
    found = sweep(model, X, edits, metric, texts)
    torch.testing.assert_close(found.values, want, atol=1e-12, rtol=1e-12)


class Mixing(nn.Module):
    """A model whose batch rows depend on each other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Counting(), Counting()

    def forward(self, x):
        x = self.first(x)
        return self.second(x - x.mean(0, keepdim=True))


class OneNumber(nn.Module):
    """A model that returns one number for the whole batch, as a loss is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Counting(), Counting()

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


@pytest.mark.parametrize("kind", [Mixing, OneNumber])
def test_a_model_whose_rows_cannot_be_told_apart_runs_one_set_after_the_other(kind):
    torch.manual_seed(0)
    model, edits = kind().double().eval(), knockouts({"first.attention": 4, "second.attention": 4})
    want = by_loop(model, X, edits, torch.Tensor.sum)
    model.first.passes = 0
    found = sweep(model, X, edits, torch.Tensor.sum)
    torch.testing.assert_close(found.values, want, atol=1e-12, rtol=1e-12)
    assert model.first.passes <= 1 + 4 + 1 + 1


def test_a_table_has_the_parts_of_the_labels(model):
    found = sweep(model, X, knockouts({"0.attention": 2, "3.attention": 2}), metric)
    table = found.table()
    assert list(table) == ["layer", "head", "value", "effect"]
    assert list(table["layer"]) == ["0.attention", "0.attention", "3.attention", "3.attention"]
    assert list(table["effect"]) == found.effects.tolist()
    assert repr(found).startswith("Sweep(4 edits; plain ")
    named = sweep(model, X, {"a": {"*": Scale(0, 0)}, "b": {"0.*": Scale(0, 0)}}, metric)
    assert list(named.table()["label"]) == ["a", "b"]


def test_a_model_with_a_state_runs_from_the_start():
    class Stateful(nn.Module):
        """What the first layer leaves behind is read by the second."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.left = Leaving(), Attention(16, heads=4), []

        def forward(self, x):
            self.first.left.clear()
            y = self.first(x)
            return self.second(y) + sum(self.first.left)

    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.left = Attention(16, heads=4), []

        def forward(self, x):
            out = self.attention(x)
            self.left.append(out.mean())
            return out

    model, edits = Stateful().double().eval(), knockouts(["first.attention", "second"])
    want = by_loop(model, X, edits, metric)
    message = "gives another output if what it computed before second is replayed"
    with pytest.warns(CaptureWarning, match=message):
        found = sweep(model, X, edits, metric)
    torch.testing.assert_close(found.values, want)


def test_what_a_sweep_cannot_run_is_refused(model):
    edits = knockouts(["0.attention"])
    with pytest.raises(ValueError, match=r"in training they may differ; write model.eval\(\)"):
        sweep(model.train(), X, edits, metric)
    model.eval()
    with pytest.raises(ValueError, match="copies must be 1 or more, got 0"):
        sweep(model, X, edits, metric, copies=0)
    with pytest.raises(ValueError, match="edits is empty"):
        sweep(model, X, {}, metric)
    with pytest.raises(ValueError, match="Freeze runs the model once more"):
        sweep(model, X, {"a": {"*": [Freeze(), Scale(0, 0)]}}, metric)
    with pytest.raises(ValueError, match=r"metric must return a number, got shape \(2, 5, 16\)"):
        sweep(model, X, edits, lambda out: out)
    with pytest.raises(ValueError, match="queries are those that do not see the keys"):
        knockouts(["0"], queries=-1)
    with pytest.raises(ValueError, match=r"no layer '9\.attention'"):
        sweep(model, X, knockouts(["9.attention"]), metric)


NAMES = "bart bert bloom deberta-v2 distilbert falcon gpt2 llama t5 vit".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("bert", "llama") else pytest.mark.libraries) for name in NAMES]
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_sweep_of_an_architecture_equals_a_loop_of_edits(name):
    architectures = pytest.importorskip("tests.lens.test_architectures")
    config = architectures.small(architectures.CONFIG_MAPPING[name])
    model = architectures.fused(config)
    given = architectures.inputs(model, config)
    with capture(model) as tape, torch.no_grad():
        model(**given)
    edits = knockouts(tape.layers, keys={"first": 0, "second": 1, "middle": slice(2, 4)}, queries=slice(3, None))
    edits |= knockouts({tape.layers[-1]: 2})

    def metric(out):
        return (out[0] * torch.linspace(-1, 1, out[0].shape[-1])).sum()

    passes = []
    hook = model.register_forward_hook(lambda *_: passes.append(0))
    found = sweep(model, given, edits, metric)
    hook.remove()
    assert len(passes) < len(edits)  # several sets of edits in each
    want = []
    for each in edits.values():
        with torch.no_grad(), edit(model, each):
            want.append(float(metric(model(**given))))
    torch.testing.assert_close(found.values, torch.tensor(want, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert found.effects.abs().max() > 1e-1
