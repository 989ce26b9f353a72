"""The clip scales the scores of heads above the bound, by exactly their factor, and of no other head."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import regard.nn as rn
from regard import Causal, Cosine, Dot
from regard.lens import Monitor, ProjectionRows, capture, qk_clip_

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 30}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 30, "n_positions": 16}
MODELS = {
    "attention": lambda: rn.Attention(32, heads=4, mask=Causal()),
    "grouped": lambda: rn.Attention(32, heads=4, kv_heads=2, rotary=rn.Rotary(8), mask=Causal()),
    "multihead": lambda: rn_like(nn.MultiheadAttention(32, 4, batch_first=True)),
    "multihead kdim": lambda: rn_like(nn.MultiheadAttention(32, 4, kdim=32, vdim=16, bias=False, batch_first=True)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**GROUPED)),
    "gpt2": lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=32)),
}


class rn_like(nn.Module):
    """PyTorch's layer with the arguments of ours."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        values = x if self.layer.vdim == x.shape[-1] else x[..., : self.layer.vdim]
        return self.layer(x, x, values, need_weights=False)[0]


def build(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases are zeros at the start
            parameter.data += torch.randn_like(parameter) / 3
    return model


def run(model):
    takes_tokens = hasattr(model, "config")
    return model(TOKENS if takes_tokens else X)


def scores(model):
    """The scores of the first layer, b h i j."""
    with torch.no_grad(), capture(model) as tape:
        run(model)
    return tape[0].scores.dense()


def heads_of(model):
    monitor = Monitor(model)
    with monitor:
        run(model)
    return monitor


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_heads_above_the_bound_are_scaled_to_it_and_no_others(name):
    model = build(name)
    before, monitor = scores(model), heads_of(model)
    layer = monitor.history.layers[0]
    logits = monitor.history.latest("logit", layer)
    bound = logits.sort().values[1:3].mean().item()  # two heads are above
    assert bound > 0
    clipped = qk_clip_(model, monitor, bound)
    assert set(clipped[layer]) == set((logits > bound).nonzero().flatten().tolist())
    assert clipped[layer][int(logits.argmax())] == logits.max().item()
    gamma = torch.where(logits > bound, bound / logits, 1.0)
    torch.testing.assert_close(scores(model), before * gamma[:, None, None], atol=1e-5, rtol=1e-5)
    assert (gamma == 1).any()
    assert heads_of(model).history.latest("logit", layer).amax() <= bound * (1 + 1e-5)


def test_queries_and_keys_of_an_ungrouped_head_share_its_factor():
    model = build("attention")
    monitor = heads_of(model)
    query, key = model.query.weight.clone(), model.key.weight.clone()
    logit = monitor.history.latest("logit", "").amax().item()
    qk_clip_(model, monitor, logit / 4)
    head = int(monitor.history.latest("logit", "").argmax())
    rows = slice(8 * head, 8 * head + 8)
    torch.testing.assert_close(model.query.weight[rows], query[rows] / 2)
    torch.testing.assert_close(model.key.weight[rows], key[rows] / 2)


def test_heads_below_the_bound_leave_every_weight_as_it_is():
    model = build("grouped")
    monitor, before = heads_of(model), [x.clone() for x in model.parameters()]
    assert qk_clip_(model, monitor, 1e3) == {}
    assert all(map(torch.equal, model.parameters(), before))


class Fused(nn.Module):
    """A layer that no family knows, with one map for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_the_maps_of_another_layer_are_given_by_the_user():
    model = nn.Sequential(Fused())
    monitor, before = heads_of(model), scores(model)
    bound = monitor.history.latest("logit", "0").amin().item() / 2
    with pytest.raises(ValueError, match=r"projections of '0', a Fused, are not known; pass qk_clip_\(..., projecti"):
        qk_clip_(model, monitor, bound)

    def rows(layer):
        weight, bias = layer.qkv.weight, layer.qkv.bias
        return ProjectionRows(weight, bias, 0, 32), ProjectionRows(weight, bias, 32, 32)

    qk_clip_(model, monitor, bound, projections={"*": rows})
    gamma = bound / monitor.history.latest("logit", "0")
    torch.testing.assert_close(scores(model), before * gamma[:, None, None], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="has 4 heads, but its queries have 31"):
        qk_clip_(model, monitor, bound, projections={"0": lambda layer: (replace(rows(layer)[0], count=31),) * 2})


REFUSED = {
    "a norm of ours": (lambda: rn.Attention(32, heads=4, qk_norm=rn.RMSNorm), "a clip is meaningless"),
    "cosine": (lambda: rn.Attention(32, heads=4, score=Cosine(0.1)), "a clip is meaningless"),
    "a norm": (lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED, head_dim=8)), "is meaningless"),
    "latent": (
        lambda: rn.LatentAttention(32, heads=4, latent=16, head_dim=8, rotary_dim=4),
        "heads share a part of their keys",
    ),
    "a cap": (lambda: rn.Attention(32, heads=4, score=Dot(cap=5.0)), "a score other than q . k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_whose_logits_do_not_follow_its_projections_is_refused(name):
    make, message = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    with pytest.raises(ValueError, match=message):
        qk_clip_(model, heads_of(model), 1e-6)


def test_a_monitor_clips_after_each_watched_step_and_says_so_once():
    lines, model = [], build("attention")
    monitor = Monitor(model, every=1, clip=0.2, say=lines.append)
    for factor in (1, 1, 2, 2, 1):  # the size of the queries after each step
        with monitor:
            run(model)
        assert heads_of(model).history.latest("logit", "").amax() <= 0.2 * (1 + 1e-5)
        with torch.no_grad():
            for parameter in model.query.parameters():
                parameter.mul_(factor)
    clipped = [(event.step, event.head) for event in monitor.history.events if event.kind == "clipped"]
    assert {step for step, _ in clipped} == {1, 4}
    assert len(lines) == len(clipped)
    assert lines[0].startswith("step 1 · clipped · (model), head 0: largest logit ")
    assert lines[0].endswith("clipped to 0.2")


def test_logits_that_are_not_finite_are_refused():
    model = build("attention")
    model.query.weight.data.fill_(torch.inf)
    monitor = Monitor(model, rules=())
    with monitor:
        run(model)
    monitor.history.latest("logit", "")[0] = torch.inf
    with pytest.raises(ValueError, match="the logits of '\\(model\\)' are not finite at step 1; go back"):
        qk_clip_(model, monitor)
