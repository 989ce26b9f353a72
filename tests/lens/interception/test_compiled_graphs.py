"""Graphs of torch.compile show their attention calls, and graphs with other attention do not run watched."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard.lens.interception.compiled_models as compiled_models
from regard import Causal, Padding
from regard.lens import Cut, Monitor, Scale, capture, edit, knockouts, sweep
from regard.lens.interception.compiled_graphs import WatchedCall
from regard.lens.interception.graph_masks import GraphMask
from regard.lens.recording.store import Store
from regard.lens.terms import interpret
from regard.models import Gpt, GptConfig
from regard.nn import Attention
from tests.lens.sdpa_layers import D, H, Layer, Stack, tokens

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("dynamo")]


def graphs() -> int:
    """The number of graphs that were compiled since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def refusal(model: nn.Module) -> str | None:
    """The reason why a module has no watched graphs; None if it has."""
    return compiled_models._GRAPHS[model].refused


def aot(model: nn.Module, **options) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True, **options)


class Masked(nn.Module):
    """SDPA under a mask of numbers, with fewer heads for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(kv_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
        return self.layer(x, attn_mask=mask)


class Multi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


FUSED = {
    "sdpa": Stack,
    "masked": Masked,
    "multi head": Multi,
    "ours": lambda: nn.Sequential(Attention(D, H, mask=Causal()), Attention(D, H)),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_the_graph_is_compiled_once_and_its_output_is_that_of_the_plain_graph(name, trains):
    model, x = FUSED[name]().train(trains), tokens()
    with torch.set_grad_enabled(trains):
        with capture(model) as expected:
            model(x)
        compiled = aot(model)
        plain, count = compiled(x), graphs()
        for _ in range(2):
            with capture(compiled) as tape:
                watched = compiled(x)
            assert torch.equal(watched, plain)
            assert graphs() == count + 1
            assert list(tape) == list(expected)
            for key, A in tape.items():
                assert type(A.call.mask) is type(expected[key].call.mask)
                torch.testing.assert_close(A.dense(), expected[key].dense())
        assert torch.equal(compiled(x), plain)
        assert graphs() == count + 1
    assert refusal(model) is None


def test_gradients_are_those_of_the_plain_graph_to_the_bit():
    model, x, found = Stack(), tokens(), []
    compiled = aot(model)
    for watches in (False, True):
        model.zero_grad()
        with capture(compiled) if watches else torch.enable_grad():
            compiled(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@torch.no_grad()
def test_other_lengths_and_open_lengths_are_seen():
    model = Stack()
    compiled = aot(model)
    for n in (5, 7, 9, 11):
        x = tokens(n)
        plain = compiled(x)
        with capture(compiled) as tape:
            assert torch.equal(compiled(x), plain)
        assert len(tape) == 3
        assert tape[2].shape == (2, H, n, n)
    assert refusal(model) is None


@torch.no_grad()
def test_a_monitor_of_measures_keeps_no_tensors():
    model, x = Stack().train(), tokens()
    compiled, histories = aot(model), []
    with torch.enable_grad():
        for watched in (model, compiled):
            with (monitor := Monitor(watched, every=1)):
                watched(x).sum().backward()
            histories.append(monitor.history["entropy"])
    torch.testing.assert_close(histories[1], histories[0])
    assert refusal(model) is None


@torch.no_grad()
def test_options_of_a_capture_hold_in_a_graph(tmp_path):
    model, x = Stack(), tokens()
    compiled = aot(model)
    with capture(model) as expected:
        model(x)
    with capture(compiled, layers="layers.1", heads=[2]) as tape:
        compiled(x)
    assert tape.layers == ["layers.1"]
    torch.testing.assert_close(tape[0].dense(), expected["layers.1"].dense()[:, [2]])
    with capture(compiled, keep=["entropy"]) as tape:
        compiled(x)
    torch.testing.assert_close(tape[1].entropy(), expected[1].entropy())
    with capture(compiled, to=tmp_path) as tape:
        compiled(x)
    torch.testing.assert_close(tape[1].dense(), expected[1].dense())
    with pytest.raises(MemoryError, match=r"layers\.0"), capture(compiled, budget="1KB"):
        compiled(x)
    assert refusal(model) is None
    with capture(compiled, values=True) as tape:  # the projection follows the call, outside of what a graph shows
        compiled(x)
    assert tape.extras("layers.0").v.shape == (2, H, 9, D // H)


@torch.no_grad()
def test_autocast_gives_the_tensors_of_the_kernel():
    model, x = Stack(), tokens()
    compiled = aot(model)
    with torch.autocast("cpu", torch.bfloat16):
        with capture(model) as expected:
            model(x)
        with capture(compiled) as tape:
            compiled(x)
    assert tape[0].call.q.dtype == expected[0].call.q.dtype == torch.bfloat16
    torch.testing.assert_close(tape[0].dense(), expected[0].dense())
    assert refusal(model) is None


@torch.no_grad()
def test_what_runs_as_written_in_the_block_is_seen_too():
    model, x = Stack(), tokens()
    compiled = aot(model)
    with capture(compiled) as tape:
        compiled(x)
        model(x)
        compiled.layers[0](x)
        compiled(x)
    assert [call for layer, call in tape if layer == "layers.0"] == [0, 1, 2, 3]
    assert [call for layer, call in tape if layer == "layers.1"] == [0, 1, 2]
    assert refusal(model) is None


@torch.no_grad()
def test_blocks_of_a_class_share_their_watched_graph():
    model, x = Stack(), tokens()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    plain, count = model(x), graphs()
    for _ in range(2):
        with capture(model) as tape:
            assert torch.equal(model(x), plain)
        assert tape.layers == ["layers.0", "layers.1", "layers.2"]
        assert graphs() == count + 1
    assert torch.equal(model(x), plain)


class Padded(nn.Module):
    """Three layers under the mask of padding that is given."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, attn_mask=keep[:, None, None])
        return x


class Lower(nn.Module):
    """Three layers, each of which makes the same causal mask and repeats its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kv_heads=2, repeat=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            n = torch.arange(x.shape[1])
            x = x + layer(x, attn_mask=n[:, None] >= n)
        return x


def count_masks_read(monkeypatch) -> list:
    """Return a list that grows by each mask that is read as terms."""
    read, terms_of = [], interpret._terms_of

    def counted(*given):
        read.append(given)
        return terms_of(*given)

    monkeypatch.setattr(interpret, "_terms_of", counted)
    return read


@torch.no_grad()
def test_a_mask_that_depends_on_no_input_is_read_once_and_not_computed_for_the_lens(monkeypatch):
    model, x = Lower(), tokens()
    with capture(model) as expected:
        model(x)
    compiled = aot(model, dynamic=False)
    read, copies = count_masks_read(monkeypatch), []
    monkeypatch.setattr(interpret, "_copies", lambda k, v: copies.append(k))
    for _ in range(2):
        with capture(compiled) as tape:
            compiled(x)
        assert tape[0].call.k.shape == (2, 2, 9, D // H)
        for key, A in tape.items():
            assert repr(A.call.mask) == "Causal()"
            torch.testing.assert_close(A.dense(), expected[key].dense())
    assert len(read) == 1
    assert not copies  # the graph shows them
    with edit(compiled, {"*": Scale(0, 0)}), capture(compiled) as tape:  # its graph has the mask, of the same entries
        compiled(x)
    assert repr(tape[2].call.mask) == "Causal()"
    assert refusal(model) is None


@torch.no_grad()
def test_a_mask_of_an_input_is_read_once_in_each_run(monkeypatch):
    model, keep = Padded(), torch.arange(9) < torch.tensor([[9], [6]])
    compiled = aot(model)
    compiled(tokens(), keep)
    read = count_masks_read(monkeypatch)
    with capture(compiled) as tape:
        compiled(tokens(), keep)
        compiled(tokens(), keep.flip(0))
    assert len(read) == 2
    for layer in tape.layers:
        assert isinstance(tape[layer, 0].call.mask, Padding)
        assert torch.count_nonzero(tape[layer, 0].dense()[1, ..., 6:]) == 0
        assert torch.count_nonzero(tape[layer, 1].dense()[0, ..., 6:]) == 0
    assert refusal(model) is None


@torch.no_grad()
def test_a_layer_that_is_not_wanted_does_not_read_the_mask_for_those_that_are():
    model, keep = Padded(), torch.arange(9) < torch.tensor([[9], [6]])
    compiled = aot(model)
    with capture(compiled, layers="layers.2") as tape:
        compiled(tokens(), keep)
    assert torch.count_nonzero(tape[0].dense()[1, ..., 6:]) == 0


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["sdpa", "multi head", "ours"])
def test_the_log_sum_exp_is_that_of_the_kernel(name, backend, trains, monkeypatch):
    model, x = FUSED[name]().train(trains), tokens()
    with torch.set_grad_enabled(trains):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled(x)
        with capture(compiled) as tape:
            compiled(x)
    for A in tape.values():
        assert A.known_statistic is not None
        q, k = A.call.q.double(), A.call.k.double()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if isinstance(A.call.mask, Causal):
            scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(A.known_statistic[..., 0].double(), scores.logsumexp(-1), atol=1e-6, rtol=1e-6)
    assert refusal(model) is None


@torch.inference_mode()
def test_inference_mode_has_the_log_sum_exp_too():
    model, x = Stack(), tokens()
    compiled = aot(model)
    plain = compiled(x)
    with capture(compiled) as tape:
        assert torch.equal(compiled(x), plain)
    assert all(A.known_statistic is not None for A in tape.values())
    assert refusal(model) is None


@torch.no_grad()
def test_queries_and_keys_of_a_graph_are_copied_once(monkeypatch):
    model, x = Lower(), tokens()
    compiled = aot(model, dynamic=False)
    for _ in range(2):  # the compiler calls the operator in another way in the first run
        with capture(compiled) as tape:
            compiled(x)
        monkeypatch.setattr(Store, "copy", lambda store, x: pytest.fail("a second copy"))
    assert len(tape) == 3


class Expanded(nn.Module):
    """SDPA over heads that are repeated as transformers repeats them."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        k = q[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize(("build", "calls", "repeat"), [(Lower, 3, "repeat_interleave"), (Expanded, 1, "reshape")])
def test_the_operator_gets_values_as_they_are_before_they_are_repeated(build, calls, repeat):
    found, model = [], build()

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=False)
    with capture(compiled) as tape:
        compiled(tokens())
    assert len(tape) == calls
    assert tape[0].call.k.shape[1] == 2
    watched = [node for node in found[-1].graph.nodes if "watch_call" in str(node.target)]
    for node in watched:
        key, value, mask = node.args[4:7]
        assert mask is None
        assert repeat in str(key.args[0].target)
        assert repeat not in str(value.args[0].target)
        assert (value.target == "select") == (build is Expanded)
    assert len(watched) == calls


class CudaGraphs:
    """A backend that would record CUDA graphs."""

    config = {"triton.cudagraphs": True}  # noqa: RUF012

    def __call__(self, graph, inputs):
        return graph.forward


@torch.no_grad()
def test_a_model_on_a_gpu_under_cuda_graphs_runs_as_written(monkeypatch):
    model, x = Stack(), tokens()
    compiled = torch.compile(model, backend=CudaGraphs(), fullgraph=True)
    monkeypatch.setattr(compiled_models, "_is_on_gpu", lambda module: True)
    with capture(compiled) as tape:
        compiled(x)
    assert len(tape) == 3
    assert "CUDA graphs" in refusal(model)


class HeadsFirst(nn.Module):
    """SDPA over tensors h b n d."""

    def forward(self, x: Tensor) -> Tensor:
        q = F.linear(x, torch.eye(D)).unflatten(-1, (H, -1)).permute(2, 0, 1, 3)
        return F.scaled_dot_product_attention(q, q, q).permute(1, 2, 0, 3).flatten(2)


class ThreeDims(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Numpy(nn.Module):
    """Code of NumPy, of which a graph does not show what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() @ x.mT.numpy()) @ x


class Exponentials(nn.Module):
    """Attention by exp and sums, after one by the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        weights = torch.exp(x @ x.mT / 9)
        return weights @ x / weights.sum(-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("build", "reason", "layers"),
    [
        (HeadsFirst, "heads of its queries are not in dim 1", [""]),
        (ThreeDims, "3 dims", [""]),
        (lambda: nn.Sequential(Layer(), Numpy()), "it calls wrapped_matmul", ["0"]),
        (Exponentials, "depends on another one, or on weights", ["layer", ""]),
        (lambda: nn.TransformerEncoderLayer(D, H, batch_first=True).eval(), "transformer_encoder_layer", ["self_attn"]),
        (lambda: nn.Sequential(Layer(), nn.Softmax(-1)), "it calls softmax", ["0"]),
    ],
)
def test_a_graph_that_may_hold_other_attention_runs_as_written(build, reason, layers):
    model, x = build(), tokens()
    with capture(model) as expected:
        model(x)
    compiled = aot(model)
    compiled(x)
    for _ in range(2):
        with capture(compiled) as tape:
            compiled(x)
        assert tape.layers == layers
        for key, A in tape.items():
            torch.testing.assert_close(A.dense(), expected[key].dense())
    assert reason in refusal(model)


@torch.no_grad()
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_compiles_the_watched_graph(mode):
    model = Gpt(GptConfig.llama(vocabulary=60, dim=32, depth=1, heads=4)).eval()
    ids = torch.randint(0, 60, (2, 9))
    with capture(model) as expected:
        model(ids)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    plain = compiled(ids)
    with capture(compiled) as tape:
        watched = compiled(ids)
    assert torch.equal(watched, plain)
    assert torch.equal(compiled(ids), plain)
    torch.testing.assert_close(tape[0].dense(), expected[0].dense())
    assert refusal(model) is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["sdpa", "masked", "ours"])
def test_an_edit_changes_the_calls_of_a_graph(name):
    model, x = FUSED[name](), tokens()
    edits = {"*": [Cut(keys=0), Scale(1, 0.5)]}
    with edit(model, edits), capture(model) as expected:
        written = model(x)
    compiled = aot(model)
    plain, count = compiled(x), graphs()
    for _ in range(2):
        with edit(compiled, edits), capture(compiled) as tape:
            edited = compiled(x)
        torch.testing.assert_close(edited, written)
        assert graphs() == count + 1
        assert list(tape) == list(expected)
        for key, A in tape.items():
            torch.testing.assert_close(A.dense(), expected[key].dense())
    with edit(compiled, edits), edit(compiled, {"*": Scale(1, 2.0)}):
        twice = compiled(x)
    with edit(compiled, {"*": Cut(keys=0)}):
        torch.testing.assert_close(compiled(x), twice)
    assert torch.equal(compiled(x), plain)
    assert graphs() == count + 1
    assert refusal(model) is None


@torch.no_grad()
def test_a_sweep_of_a_compiled_model_is_that_of_the_model_as_written():
    model, x = Stack().eval(), tokens()
    heads = knockouts({f"layers.{n}": H for n in range(3)})
    found = [sweep(each, (x,), heads, metric=lambda out: out[0, 0, 0]).values for each in (model, aot(model))]
    torch.testing.assert_close(found[1], found[0])


ARCHITECTURES = """
albert apertus arcee aya_vision bert biogpt camembert clip_text_model clip_vision_model cohere cohere2 data2vec-text
deit dinov2 distilbert electra ernie eurobert exaone4 falcon gemma gemma3_text glm glm4 gpt2 gpt_neox granite helium
ijepa llama marian ministral3 mistral modernbert olmo olmo2 opt qwen2 qwen3 t5
""".split()  # noqa: SIM905


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_of_transformers_is_captured_compiled(name):
    pytest.importorskip("transformers")
    from tests.lens.test_architectures import CONFIG_MAPPING, fused, inputs, small

    config = small(CONFIG_MAPPING[name])
    model = fused(config)
    given = inputs(model, config)
    with capture(model) as expected:
        plain = model(**given)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with capture(compiled) as tape:
        watched = compiled(**given)[0]
    assert torch.equal(watched, plain)
    assert list(tape) == list(expected)
    assert not tape.unseen
    for key, A in tape.items():
        torch.testing.assert_close(A.dense(), expected[key].dense(), atol=2e-5, rtol=2e-5)
    assert refusal(model) is None


def test_the_mask_of_a_run_has_the_entries_of_its_latest_call():
    run = compiled_models._Run(None, [])
    first, later = torch.zeros(2, 2), torch.ones(2, 2)  # the graph may have written to the first since
    calls = [WatchedCall(None, None, None, x, 0.0, False, None, False, 3, 1, "layer", None) for x in (first, later)]
    one, other = map(run.mask_of, calls)
    assert one is other
    assert one.values() is later
    assert run.mask_of(calls[0]._replace(attn_mask=None, mask_number=None)) is None
    run.constants = {3: (known := GraphMask(lambda: first))}
    assert run.mask_of(calls[1]) is known
