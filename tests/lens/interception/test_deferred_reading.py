"""A plain pass of a fast model waits for nothing: what it attended to is read when somebody looks."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from regard import Causal, weights
from regard.lens import capture
from regard.lens.interception import sdpa as statistic
from regard.lens.interception import transformers
from regard.lens.recording.recorder import Recorder
from regard.lens.terms.interpret import Interpreter
from regard.models import Gpt, GptConfig
from tests.lens.host_calls import calls_of
from tests.lens.tiny_transformers import llama, t5

WAITS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default")


class Launched(TorchDispatchMode):
    """Counts the operations that run, each of which costs the host of a GPU microseconds."""

    def __init__(self):
        super().__init__()
        self.each = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.each[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Waits(Launched):
    """Counts what makes a host wait for its device."""

    @property
    def count(self):
        return sum(self.each[name] for name in WAITS)


@torch.no_grad()
def test_a_plain_pass_is_read_when_somebody_looks_and_never_makes_a_device_wait(monkeypatch):
    model, ids = llama(), torch.arange(14).view(2, 7)
    read, inside = Interpreter.read, []
    monkeypatch.setattr(Interpreter, "read", lambda *args, **kwargs: inside.append(1) or read(*args, **kwargs))
    with Waits() as plain:
        expected = model(ids, use_cache=False).logits
    with Waits() as watched, capture(model) as tape:
        out = model(ids, use_cache=False).logits
    assert torch.equal(out, expected)
    assert watched.count == plain.count
    assert not inside
    assert [A.call.mask for A in tape.values()] == [Causal()] * 2
    assert len(inside) == 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("short", "added"),
    [pytest.param(2**13, {}, id="short"), pytest.param(0, {"aten._fused_sdp_choice.default": 2}, id="long")],
)
def test_a_captured_pass_launches_what_the_plain_one_does(monkeypatch, short, added):
    monkeypatch.setattr(statistic, "CHEAP_ENTRIES", short)
    model, ids = llama(), torch.arange(14).view(2, 7)
    with Launched() as plain:
        model(ids, use_cache=False)
    with Launched() as watched, capture(model) as tape:
        model(ids, use_cache=False)
    assert watched.each - plain.each == added
    assert plain.each - watched.each == {}
    for A in tape.values():
        told = A.known_statistic.squeeze(-1)
        assert (told - weights(A.call.q, A.call.k, mask=Causal()).lse).abs().max() < 1e-5


@torch.no_grad()
def test_a_captured_attention_takes_few_calls_of_the_host():
    added = {}
    for layers in (1, 2):
        model, ids = llama(), torch.arange(7)[None]
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers

        def plain(model=model, ids=ids):
            model(ids, use_cache=False)

        def watched(model=model, plain=plain):
            with capture(model):
                plain()

        plain(), watched()
        added[layers] = calls_of(watched) - calls_of(plain)
    assert added[2] - added[1] <= 130  # with the walk that names the parts of a layer and asks which of them are opaque
    assert added[1] <= 480  # with the two methods of `generate` that each block replaces


@torch.no_grad()
def test_of_a_model_that_asks_an_interface_only_the_whole_is_hooked():
    model = llama()
    with capture(model):
        model(torch.arange(7)[None], use_cache=False)
        hooked = [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
    assert hooked == [model]


@torch.no_grad()
def test_a_layer_that_writes_to_its_queries_raises_when_it_is_asked_for(monkeypatch):
    model = llama()
    monkeypatch.setattr(transformers, "is_own", lambda *_: True)  # other functions are read at once

    def scaled(module, q, k, v, mask, **kwargs):
        return q.mul_(0.5).transpose(1, 2), None

    AttentionInterface.register("scaled", scaled)
    model.config._attn_implementation = "scaled"
    try:
        with capture(model) as tape:
            model(torch.arange(7)[None], use_cache=False)
    finally:
        del AttentionInterface._global_mapping["scaled"]
    with pytest.raises(RuntimeError, match="was changed in place"):
        tape[0].dense()


@torch.no_grad()
def test_calls_keep_their_order_whether_they_waited_or_not():
    model, ids = llama(), torch.arange(7)[None]
    keep = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    with capture(model) as tape:
        model(ids, use_cache=False)
        model(ids[:, :5], use_cache=False)
        model(ids, attention_mask=keep, use_cache=False)
    first, second = tape.layers
    assert list(tape) == [(first, 0), (second, 0), (first, 1), (second, 1), (first, 2), (second, 2)]
    assert [A.shape[-1] for A in tape.calls(first)] == [7, 5, 7]


@torch.no_grad()
def test_a_pass_that_waits_is_not_part_of_the_generation_after_it():
    model, ids = llama().eval(), torch.arange(3, 8)[None]
    with capture(model) as tape:
        model(ids[:, :4], use_cache=False)
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=False)
    assert [A.shape[-1] for A in tape.calls(tape.layers[0])] == [4, 7]


@torch.no_grad()
def test_a_bias_of_queries_by_keys_is_not_held_while_it_waits(monkeypatch):
    later = []
    monkeypatch.setattr(Recorder, "record_deferred", lambda self, name, call: later.append(name))
    model = t5()
    with capture(model):
        model(input_ids=torch.arange(3, 8)[None], decoder_input_ids=torch.arange(3, 6)[None], use_cache=False)
    assert not any("SelfAttention" in name for name in later)


class Repeating(nn.Module):
    """Layers that repeat their keys for grouped queries, as many models do."""

    def forward(self, q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v)


def test_of_keys_that_are_repeated_one_look_a_layer_is_enough():
    model = nn.ModuleList(Repeating() for _ in range(3))
    calls = [(torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)) for _ in model]
    model.forward = lambda calls: [layer(*call) for layer, call in zip(model, calls, strict=True)]
    with torch.no_grad(), capture(model) as tape, Waits() as waits:
        model(calls)
    assert [A.call.k.shape[1] for A in tape.values()] == [2, 2, 2]
    assert waits.count == 5  # two heads, four times, twice, then once for each other layer


def test_layers_that_cannot_attend_are_left_alone():
    model = Gpt(GptConfig(vocabulary=9, dim=8, depth=2, heads=2))
    with capture(model) as tape:
        coins = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        assert coins
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in coins)
        model(torch.tensor([[1, 2, 3]]))
    assert len(tape) == 2


def _generated(model, ids, tokens):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)


def _swapped_rows(model, ids):
    """A loop of its own over a cache, whose rows are swapped after some steps, as a search does."""
    out = model(ids, use_cache=True)
    for step in range(6):
        if step == 3:
            out.past_key_values.reorder_cache(torch.tensor([1, 0]))
        out = model(ids[:, :1] + step, past_key_values=out.past_key_values, use_cache=True)


def _changed_keys(model, ids):
    """A loop of its own over a cache, whose keys change after some steps, so that a new text begins."""
    out = model(ids, use_cache=True)
    for step in range(6):
        if step == 3:
            for layer in out.past_key_values.layers:
                layer.keys = layer.keys * 2
        out = model(ids[:, :1] + step, past_key_values=out.past_key_values, use_cache=True)


RUNS = {
    "generate": lambda model, ids: _generated(model, ids, 7),
    "swapped rows": _swapped_rows,
    "changed keys": _changed_keys,
}


@torch.no_grad()
@pytest.mark.parametrize("run", RUNS)
def test_steps_that_are_held_are_recorded_as_those_that_are_not(run, monkeypatch):
    model, ids = llama(), torch.arange(14).view(2, 7)
    model.generation_config.eos_token_id = None
    held = []
    hold = Recorder.hold_step
    monkeypatch.setattr(Recorder, "hold_step", lambda self, step: held.append(step) or hold(self, step))
    with capture(model) as tape:
        RUNS[run](model, ids)
    monkeypatch.setattr(Recorder, "can_hold", lambda *_: False)
    with capture(model) as one_by_one:
        RUNS[run](model, ids)
    assert held
    assert list(tape) == list(one_by_one)
    for key in tape:
        torch.testing.assert_close(tape[key].dense(), one_by_one[key].dense())


@torch.no_grad()
def test_a_generation_waits_no_more_often_for_more_tokens():
    model, ids = llama(), torch.arange(14).view(2, 7)
    model.generation_config.eos_token_id = None
    added = []
    for tokens in (4, 12):
        with Waits() as plain:
            _generated(model, ids, tokens)
        with Waits() as watched, capture(model) as tape:
            _generated(model, ids, tokens)
        added.append(watched.count - plain.count)
        assert all(A.shape[2] == 6 + tokens for A in tape.values())
    assert added[0] == added[1]


def test_on_a_gpu_steps_are_held_up_to_a_share_of_its_free_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (2**34, 2**35))
    model = llama()
    with capture(model) as tape:
        model(torch.arange(7)[None])
    recorder = tape._recorder
    assert [recorder._held_limit(torch.device("cuda")) for _ in range(2)] == [2**30, 2**30]
    assert len(asked) == 1
    assert recorder._held_limit(torch.device("cpu")) == 2**27


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_a_step_under_capture_never_waits_for_a_gpu():
    model, ids = llama().cuda(), torch.arange(14).view(2, 7).cuda()
    with capture(model):
        out = model(ids, use_cache=True)
        out = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                out = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
