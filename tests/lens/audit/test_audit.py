"""capture(audit=True) names every layer that mixes positions and left no entry, and changes nothing of the model."""

from __future__ import annotations

import random
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from regard.lens import CaptureWarning, capture
from regard.models import Gpt, GptConfig
from tests.lens import unseen_layers as ways
from tests.lens.unseen_layers import DIM, Beside, Layer, renamed, tokens


@pytest.fixture
def dynamo():
    yield
    torch._dynamo.reset()


def audited(model, x, *, audit=True):
    """The tape of a model, and its warnings."""
    with warnings.catch_warnings(record=True) as raised, torch.no_grad():
        warnings.simplefilter("always")
        with capture(model, audit=audit) as tape:
            model(x)
    return tape, [str(each.message) for each in raised if each.category is CaptureWarning]


def known_of(tape):
    """All layers that a tape shows or names."""
    return {*tape.layers, *(each.layer for each in tape.unseen)}


WRITTEN = [
    ways.exp_over_sum,
    ways.log_softmax,
    ways.logsumexp,
    ways.relu,
    ways.squared_relu,
    ways.sigmoid,
    ways.softmax_plus_one,
    ways.special,
    ways.over_heads,
    ways.written_out,
]


@pytest.mark.parametrize("attend", WRITTEN, ids=lambda f: f.__name__)
def test_no_way_to_write_attention_is_missed_in_silence(attend):
    tape, _ = audited(Beside(Layer(attend)), tokens())
    assert known_of(tape) == {"seen", "other"}


@pytest.mark.parametrize("kind", [ways.MSDeformAttn, ways.GATConv, ways.AttentionPool])
@pytest.mark.parametrize("named", [True, False], ids=["named", "renamed"])
def test_layers_of_detectors_graphs_and_pools_are_not_missed(kind, named):
    tape, _ = audited(Beside((kind if named else renamed(kind))()), tokens())
    assert known_of(tape) == {"seen", "other"}


@pytest.mark.parametrize(
    ("kind", "expected"), [(ways.MSDeformAttn, "deformable attention"), (ways.GATConv, "graph attention")]
)
def test_known_classes_are_named_without_an_audit(kind, expected):
    tape, raised = audited(Beside(kind()), tokens(), audit=False)
    assert "other" in tape.layers or [(each.layer, each.kind) for each in tape.unseen] == [("other", expected)]
    assert "other" in tape.layers or len(raised) == 1


def test_a_softmax_that_is_summed_elementwise_is_named_without_an_audit():
    tape, _ = audited(Beside(ways.AttentionPool()), tokens(), audit=False)
    assert known_of(tape) == {"seen", "other"}


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_functions_and_forwards_are_named(audit, warm):
    compiled = torch.compile(ways.written_out, backend="aot_eager")
    for other in (Layer(compiled), ways.Compiled()):
        model = Beside(other)
        if warm:
            with torch.no_grad():
                model(tokens())
        tape, raised = audited(model, tokens(), audit=audit)
        assert tape.layers == ["seen"]
        assert [(each.layer, each.kind) for each in tape.unseen] == [("other", "compiled function")]
        assert len(raised) == 1


@pytest.mark.parametrize("audit", [False, True])
def test_scripted_functions_are_not_missed(audit):
    for attend in (ways.scripted_attention, lambda q, k, v: ways.scripted_softmax(q @ k.mT) @ v):
        tape, _ = audited(Beside(Layer(attend)), tokens(), audit=audit)
        assert known_of(tape) == {"seen", "other"}


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.usefixtures("dynamo")
def test_a_compiled_function_that_does_not_attend_is_not_named(backend):
    tape, raised = audited(Beside(Layer(torch.compile(lambda q, k, v: q * k + v, backend=backend))), tokens())
    assert (tape.unseen, raised) == ([], [])


class Plain(nn.Module):
    """Layers that mix nothing: an MLP, a gate, a batch of experts."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.LayerNorm(DIM), nn.Dropout(0.5))
        self.gate, self.experts = nn.Linear(DIM, 3), nn.Parameter(torch.randn(3, DIM, DIM))

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        return (gates[..., None] * torch.einsum("bnd,kde->bnke", self.mlp(x), self.experts)).sum(2)


@pytest.mark.parametrize("training", [False, True])
def test_experts_and_dropout_are_no_mixing_and_gates_are_named_as_gates(training):
    tape, raised = audited(Beside(Plain()).train(training), tokens())
    assert [each.kind for each in tape.unseen] == ["expert gate"]
    assert len(raised) == 1


class Mixed(nn.Module):
    """Layers of PyTorch that mix positions as they are, in b c n."""

    def __init__(self):
        super().__init__()
        self.conv, self.point = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 1)
        self.norm, self.rnn = nn.BatchNorm1d(DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.pool = nn.AvgPool1d(3, 1, 1)

    def forward(self, x):
        return self.rnn(self.pool(self.norm(self.point(self.conv(x.mT)))).mT)[0]


@pytest.mark.parametrize("training", [False, True])
def test_layers_of_pytorch_are_named_as_what_they_are(training):
    tape, _ = audited(Beside(Mixed()).train(training), tokens())
    kinds = {each.layer.removeprefix("other."): each.kind for each in tape.unseen}
    expected = {"conv": "convolution", "rnn": "recurrence", "pool": "pooling", "norm": "norm"}
    assert kinds == {name: kind for name, kind in expected.items() if training or name != "norm"}


class Stateful(nn.Module):
    """A norm with running averages, dropout, counts, and a list that grows."""

    def __init__(self):
        super().__init__()
        self.seen, self.norm, self.drop = Beside(Layer(ways.sigmoid)), nn.BatchNorm1d(DIM), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.history.append(random.random() + np.random.rand())
        self.last = self.drop(self.norm(self.seen(x).mT).mT)
        return self.last


def test_an_audit_changes_no_output_and_no_state():
    torch.manual_seed(0)
    models, found = [Stateful().train() for _ in range(2)], []
    models[1].load_state_dict(models[0].state_dict())
    for model, audit in zip(models, (False, True), strict=True):
        calls = []
        model.norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with capture(model, audit=audit):
                out = model(tokens())
                out.square().sum().backward()
        after = (torch.rand(3), torch.tensor([random.random(), *np.random.rand(2)]), model.last, torch.tensor(calls))
        grads = [x.grad for x in model.parameters()]
        found.append([out, *after, torch.tensor(model.history), *model.state_dict().values(), *grads])
        assert all(module.training for module in model.modules())
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layer_that_keeps_a_state_is_not_taken_for_mixing():
    class Counting(nn.Module):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return x * self.calls

    tape, _ = audited(Beside(Counting()), tokens())
    assert tape.unseen == []


def test_a_first_call_with_a_filled_cache_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        refused = pytest.warns(CaptureWarning, match="the audit of LlamaForCausalLM did not run: its first call had a")
        with refused, capture(model, audit=True):
            model(ids[:, :1], past_key_values=cache)
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            with capture(model, audit=True) as tape:
                out = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert tape.unseen == []
    assert tape[0].shape == (1, 2, out.shape[1] - 1, out.shape[1] - 1)


def test_submodules_alone_are_not_audited():
    model = Beside(Plain())
    refused = pytest.warns(CaptureWarning, match="the model itself was not called in the block")
    with refused, capture(model, audit=True):
        model.seen(tokens())


def test_a_model_that_cannot_be_copied_or_repeated_is_told_of():
    class Once(nn.Module):
        done: ClassVar = []

        def forward(self, x):
            if self.done:
                raise RuntimeError("it is over")
            self.done.append(1)
            return x

    model = Beside(Once())
    refused = pytest.warns(CaptureWarning, match="its first call cannot be repeated: RuntimeError: it is over")
    with refused, capture(model, audit=True) as tape:
        model(tokens())
    assert len(tape) == 1


def test_layers_of_regard_are_all_on_the_tape():
    model = Gpt(GptConfig.llama(vocabulary=9, dim=16, depth=2, heads=4)).eval()
    tape, raised = audited(model, torch.tensor([[1, 2, 3, 4]]))
    assert (len(tape), tape.unseen, raised) == (2, [], [])
