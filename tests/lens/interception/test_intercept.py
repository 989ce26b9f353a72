"""One interception: every entrance can be captured, ablated and masked, and the list of entrances is the same."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from regard import Causal, Window
from regard.lens import ablate, capture, importance
from regard.lens.interception.intercept import intercept
from tests.lens.entrances import ENTRANCES, NO_BACKWARD, build, libraries  # noqa: F401
from tests.lens.kernel_layers import HEADS, WIDTH, qkv

transformers = pytest.importorskip("transformers")


pytest.importorskip("transformers.models.llama.modeling_llama")  # it would look for the stand-ins of libraries


pytestmark = [
    pytest.mark.usefixtures("libraries"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning"),
]


B, N = 2, 7


close = torch.testing.assert_close


def add_mask(seen, mask):
    """The attention with one more mask beside its own."""
    return seen._replace(mask=mask if seen.mask is None else seen.mask & mask, statistic=None)


class Masking:
    """Consumer that hides pairs beside those that the model hides."""

    def __init__(self, mask):
        self.mask, self.layers = mask, []

    def observe(self, attention):
        self.layers.append(attention.layer)
        return attention.replaced_by(add_mask(attention.interpret_or_raise(), self.mask))


class Watching:
    """Consumer that changes nothing."""

    def observe(self, attention):
        attention.interpret()
        return attention.out


every_entrance = pytest.mark.parametrize("entrance", ENTRANCES)


with_gradients = pytest.mark.parametrize("entrance", [name for name in ENTRANCES if name not in NO_BACKWARD])


def reference(x, keep):
    """b i h e, by plain PyTorch."""
    q, k, v = (part.transpose(1, 2) for part in x.chunk(3, -1))
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@every_entrance
def test_every_entrance_can_be_captured(entrance):
    model, x = build(entrance), qkv()
    plain = model(x)
    with capture(model) as tape:
        out = model(x)
    assert torch.equal(out, plain)
    assert list(tape) == [("0", 0)]
    v = x.chunk(3, -1)[2].transpose(1, 2)
    close((tape[0] @ v).transpose(1, 2), plain)


@every_entrance
def test_every_entrance_can_be_ablated(entrance):
    model, x = build(entrance), qkv()
    plain = model(x)
    with ablate(model, {"0": [1, 2]}):
        out = model(x)
    assert not out[:, :, [1, 2]].any()
    assert torch.equal(out[:, :, [0, 3]], plain[:, :, [0, 3]])
    assert torch.equal(model(x), plain)


@every_entrance
def test_a_mask_can_be_added_at_every_entrance(entrance):
    model, x = build(entrance), qkv()
    plain, masking = model(x), Masking(Causal())
    with intercept(model, masking):
        out = model(x)
    assert masking.layers == ["0"]
    close(out, reference(x, torch.ones(N, N, dtype=torch.bool).tril()))
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("entrance", ["attend", "sdpa"])
def test_the_kernel_of_a_replaced_call_does_not_run(entrance):
    ran = []

    class Counting(Masking):
        def observe(self, attention):
            out = super().observe(attention)
            ran.append("out" in vars(attention))
            return out

    model, x = build(entrance), qkv()
    with intercept(model, Counting(Causal())):
        model(x)
    with intercept(model, Watching()):
        close(model(x), reference(x, torch.ones(N, N, dtype=torch.bool)))
    assert ran == [False]


@every_entrance
def test_a_consumer_that_changes_nothing_leaves_every_bit(entrance):
    model, x = build(entrance), qkv()
    plain = model(x)
    with intercept(model, Watching()):
        assert torch.equal(model(x), plain)


@with_gradients
def test_gradients_pass_through_an_added_mask(entrance):
    model, x = build(entrance), qkv().requires_grad_()
    keep = torch.ones(N, N, dtype=torch.bool).tril()
    weight = torch.randn(B, N, HEADS, WIDTH, dtype=torch.float64)
    with intercept(model, Masking(Causal())):
        (out,) = torch.autograd.grad((model(x) * weight).sum(), x)
    (want,) = torch.autograd.grad((reference(x, keep) * weight).sum(), x)
    close(out, want)


@with_gradients
def test_heads_of_every_entrance_are_weighed(entrance):
    model, x = build(entrance), qkv().requires_grad_()
    with importance(model) as scores:
        model(x).square().sum().backward()
    close(scores["0"], 2 * model(x).detach().square().sum(-1).sum((0, 1)))


@every_entrance
@pytest.mark.parametrize("outer", ["ablate", "capture"])
def test_a_capture_and_an_ablation_nest(entrance, outer):
    model, x = build(entrance), qkv()
    first, second = ablate(model, {"0": [1]}), capture(model)
    first, second = (first, second) if outer == "ablate" else (second, first)
    with first as one, second as other:
        out = model(x)
    tape = other if outer == "ablate" else one
    assert not out[:, :, 1].any()
    v = x.chunk(3, -1)[2].transpose(1, 2)
    close((tape[0] @ v).transpose(1, 2), build(entrance)(x))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mask_can_be_added_to_multihead_attention(need_weights, batch_first):
    model = nn.MultiheadAttention(16, 4, batch_first=batch_first).double().eval()
    x = torch.randn(B, N, 16, dtype=torch.float64)
    hidden = ~torch.ones(N, N, dtype=torch.bool).tril()
    inputs = x if batch_first else x.transpose(0, 1)
    want, _ = model(inputs, inputs, inputs, need_weights=need_weights, attn_mask=hidden)
    with intercept(model, Masking(Causal())):
        out, _ = model(inputs, inputs, inputs, need_weights=need_weights)
    close(out, want)
    with intercept(model, Masking(Causal())):
        alone, _ = model(inputs[0], inputs[0], inputs[0]) if batch_first else model(*3 * [inputs[:, 0]])
    close(alone, want[0] if batch_first else want[:, 0])


def registered_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scores = query @ key.repeat_interleave(2, 1).mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None


IMPLEMENTATIONS = ["sdpa", "eager", "flex_attention", "registered"]


@pytest.fixture
def llama(registries, monkeypatch):
    registries.AttentionInterface.register("registered", registered_attention)
    masks = transformers.AttentionMaskInterface()
    transformers.AttentionMaskInterface.register("registered", masks["eager"])
    # The graph of FlexAttention is what is intercepted: to make code of it takes longer than all else.
    compiled = torch.compile(flex_attention, backend="eager")
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention.__call__", lambda _: compiled)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=19,
    )
    return transformers.LlamaModel(config).eval()


LLAMA_LAYERS = ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_a_model_of_transformers_is_captured_ablated_and_masked_on_every_implementation(llama, implementation):
    ids = torch.arange(2 * N).view(2, N) % 19
    plain = llama(ids).last_hidden_state
    keep = torch.ones(N, N, dtype=torch.bool).tril() & torch.ones(N, N, dtype=torch.bool).triu(-1)
    windowed = llama(ids, attention_mask=keep.expand(2, 1, N, N)).last_hidden_state
    llama.set_attn_implementation(implementation)
    with capture(llama) as tape:
        close(llama(ids).last_hidden_state, plain, atol=1e-5, rtol=1e-4)
    assert tape.layers == LLAMA_LAYERS
    masking = Masking(Window(2))
    with intercept(llama, masking):
        close(llama(ids).last_hidden_state, windowed, atol=1e-5, rtol=1e-4)
    assert masking.layers == LLAMA_LAYERS
    with ablate(llama, {LLAMA_LAYERS[0]: [1]}):
        out = llama(ids).last_hidden_state
    llama.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
    close(out, llama(ids).last_hidden_state, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False])
def test_a_function_of_transformers_does_not_run_if_its_call_is_replaced(llama, monkeypatch, own):
    monkeypatch.setattr("regard.lens.interception.transformers.is_own", lambda *_: own)
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs.get("output_attentions"))
        return registered_attention(*args, **kwargs)

    transformers.AttentionInterface.register("registered", counted)
    llama.set_attn_implementation("registered")
    ids = torch.arange(2 * N).view(2, N) % 19
    with intercept(llama, Masking(Window(2))):
        llama(ids)
    assert len(calls) == (0 if own else 2)  # only its output tells what another function does
    calls.clear()
    with intercept(llama, Watching()):
        llama(ids)
    assert len(calls) == 2


def test_layers_that_are_computed_again_are_masked_again():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("sdpa")

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    x = qkv().requires_grad_()
    with intercept(Again(), Masking(Causal())):
        pass
    model = Again()
    with intercept(model, Masking(Causal())):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    keep = torch.ones(N, N, dtype=torch.bool).tril()
    (want,) = torch.autograd.grad(reference(x, keep).square().sum(), x)
    close(grad, want)
