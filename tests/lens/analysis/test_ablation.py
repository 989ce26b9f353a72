"""Heads switched off and weighed: in our layers, in PyTorch's, and wherever the fused function is called."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from regard import Causal, attend
from regard.lens import capture
from regard.lens.analysis.ablation import ablate, ablation_importance, importance
from regard.nn import Attention

close = torch.testing.assert_close
DIM, HEADS = 12, 4


class Foreign(nn.Module):
    """Somebody's attention, over the fused function."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def heads(self, x):
        return (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inside(x).chunk(3, -1))

    def forward(self, x):
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class ByHand(Foreign):
    """The same over the operator, its keys shared by pairs of heads."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out(attend(q, k[:, ::2], v[:, ::2], mask=Causal()).transpose(1, 2).flatten(2))


class Torch(nn.Module):
    def __init__(self, need_weights, batch_first=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


LAYERS = {
    "ours": (lambda: Attention(DIM, HEADS, mask=Causal()), "layer", "out"),
    "foreign": (Foreign, "layer", "out"),
    "by hand": (ByHand, "layer", "out"),
    "torch": (lambda: Torch(False), "layer.attention", "attention.out_proj"),
    "torch with weights": (lambda: Torch(True), "layer.attention", "attention.out_proj"),
    "torch, batch second": (lambda: Torch(True, batch_first=False), "layer.attention", "attention.out_proj"),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def build(kind):
    make, name, projection = LAYERS[kind]
    model = nn.Sequential()
    model.add_module("layer", make().double().eval())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, name, model.get_submodule(f"layer.{projection}")


def silenced(model, projection, heads, x):
    """The same by hand: the columns of those heads taken out of the output projection."""
    kept = projection.weight.detach().clone()
    with torch.no_grad():
        projection.weight.view(DIM, HEADS, -1)[:, heads] = 0
        out = model(x)
        projection.weight.copy_(kept)
    return out


@every_layer
@pytest.mark.parametrize("heads", [[0], [2, 1], [0, 1, 2, 3], [3], []])
def test_an_ablated_head_adds_nothing(kind, heads):
    model, name, projection = build(kind)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    plain = model(x)
    with ablate(model, {name: heads}):
        out = model(x)
    close(out, silenced(model, projection, heads, x))
    assert torch.equal(model(x), plain)


@every_layer
def test_no_gradient_passes_an_ablated_head(kind):
    model, name, projection = build(kind)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    with ablate(model, {name: [1]}):
        model(x).sum().backward()
    grads = projection.weight.grad.view(DIM, HEADS, -1)
    assert grads[:, 1].abs().max() == 0
    assert grads[:, 0].abs().max() > 0


def test_ablation_reaches_layers_inside_pytorch_encoders_on_their_fast_path():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    with torch.no_grad():
        plain = model(x)
        with ablate(model, {"layers.1.self_attn": [0]}):
            out = model(x)
        close(out, silenced(model, model.layers[1].self_attn.out_proj, [0], x))
        close(model(x), plain)


def test_ablations_nest():
    model, name, projection = build("ours")
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    with ablate(model, {name: [0]}), ablate(model, {name: [2]}):
        out = model(x)
    close(out, silenced(model, projection, [0, 2], x))


def test_a_layer_may_be_named_by_its_core():
    model, _, projection = build("ours")
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    with ablate(model, {"layer.core": [1]}):
        out = model(x)
    close(out, silenced(model, projection, [1], x))


def test_an_error_inside_leaves_no_hook_behind():
    model, name, _ = build("ours")
    with pytest.raises(KeyError), ablate(model, {name: [0]}):
        raise KeyError
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match="x must have dims"), ablate(model, {name: [0]}):
        model(x[..., 1:])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_forward_that_fails_inside_does_not_confuse_what_follows():
    model, name, projection = build("foreign")
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    q = torch.randn(3, 1, HEADS, 4, 3)
    with ablate(model, {name: [0]}):
        with pytest.raises(RuntimeError):
            model(x[..., 1:])
        assert F.scaled_dot_product_attention(*q)[:, 0].abs().max() > 0  # no layer of the model
        out = model(x)
    close(out, silenced(model, projection, [0], x))


class Calling(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_layers_that_call_a_kernel_by_themselves_are_named():
    model = nn.Sequential(Calling(), nn.Linear(3, 3), nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2))
    named = r"its attention layers are \['0', '2', '3.self_attn'\]"
    with pytest.raises(ValueError, match=named), ablate(model, {"1.0": [0]}):
        pass


def test_bad_layers_and_heads_are_named():
    model, name, _ = build("ours")
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    with (
        pytest.raises(ValueError, match=r"no layer 'layers'; its attention layers are \['layer'\]"),
        ablate(model, {"layers": [0]}),
    ):
        pass
    with pytest.raises(IndexError, match="heads of 'layer' must be from 0 to 3"), ablate(model, {name: [4]}):
        model(x)
    with (
        pytest.raises(RuntimeError, match=r"no attention was found in \['layer.out'\]"),
        ablate(model, {"layer.out": [0]}),
    ):
        model(x)
    with pytest.raises(RuntimeError, match="call backward within the block"), importance(model):
        model(x)
    with pytest.raises(RuntimeError, match=r"no attention was found in \['layer.out'\]; the layers that attended"):
        ablation_importance(model, lambda: model(x).sum(), ["layer.out"])


@every_layer
def test_importance_is_the_sum_over_tokens_of_output_times_gradient(kind):
    model, name, projection = build(kind)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    # The input of the output projection is the heads side by side, whatever the layer.
    joined = []
    if kind in ("ours", "foreign", "by hand"):
        handle = projection.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
        out = model(x)
        handle.remove()
        (grad,) = torch.autograd.grad(out.square().sum(), joined[0])
        dots = (joined[0] * grad).unflatten(-1, (HEADS, -1)).sum(-1).abs()
        expected = dots.sum((0, 1))
    else:
        attention = model.layer.attention
        layer = Attention.from_torch(attention)
        turned = x if attention.batch_first else x.transpose(0, 1)
        layer.out.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
        (grad,) = torch.autograd.grad(layer(turned).square().sum(), joined[0])
        expected = (joined[0] * grad).unflatten(-1, (HEADS, -1)).sum(-1).abs().sum((0, 1))
    with importance(model) as scores:
        model(x).square().sum().backward()
    assert list(scores) == [name]
    close(scores[name], expected)


def test_importance_is_the_sum_of_attention_times_its_gradient():
    layer = Attention(DIM, HEADS, mask=Causal()).double()
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    A = layer.weights(x).dense().detach().requires_grad_()
    v = layer.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    loss = layer.out((A @ v).transpose(1, 2).flatten(2)).square().sum()
    (grad,) = torch.autograd.grad(loss, A)
    with importance(layer) as scores:
        layer(x).square().sum().backward()
    close(scores[""], (A * grad).sum(-1).abs().sum((0, 2)))


def test_importance_lists_layers_in_the_order_of_the_forward_pass():
    model, x = nn.Sequential(*(Attention(DIM, heads=HEADS) for _ in range(12))), torch.randn(2, 5, DIM)
    with importance(model) as scores:
        model(x).square().mean().backward()
        assert list(scores) == [str(n) for n in range(12)]
        model(x).square().mean().backward()
    with capture(model) as tape:
        model(x)
    assert list(scores) == [name for name, _ in tape]


def test_importance_adds_up_over_batches():
    model, name, _ = build("ours")
    x = torch.randn(4, 5, DIM, dtype=torch.float64)
    with importance(model) as scores:
        for part in x.split(2):
            model(part).square().sum().backward()
    with importance(model) as whole:
        model(x).square().sum().backward()
    close(scores[name], whole[name])


@every_layer
def test_ablation_importance_is_the_loss_without_each_head(kind):
    model, name, projection = build(kind)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    costs = ablation_importance(model, lambda: model(x).square().mean())
    whole = model(x).square().mean().item()
    expected = [silenced(model, projection, [n], x).square().mean().item() - whole for n in range(HEADS)]
    close(costs[name], torch.tensor(expected, dtype=torch.float64))
    assert list(ablation_importance(model, lambda: 0.0 * model(x).sum(), [name])) == [name]


def test_a_hugging_face_model_is_seen_by_its_layer_names():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(32, (2, 7))
    with importance(model) as scores:
        model(ids, labels=ids).loss.backward()
    assert {name: len(score) for name, score in scores.items()} == {f"model.layers.{n}.self_attn": 4 for n in (0, 1)}
    with torch.no_grad():
        with ablate(model, {"model.layers.0.self_attn": [1]}):
            out = model(ids).logits
            with capture(model):
                close(model(ids).logits, out)
        with capture(model) as tape, ablate(model, {"model.layers.0.self_attn": [1]}):
            close(model(ids).logits, out)
            assert set(ablation_importance(model, lambda: model(ids).logits.sum())) == set(scores)
        assert tape
        model.model.layers[0].self_attn.o_proj.weight[:, 4:8] = 0
        close(out, model(ids).logits)


class Again(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList([layer(), layer()]), reentrant

    def forward(self, x):
        for layer in self.layers:
            run = layer if self.reentrant is None else partial(checkpoint, layer, use_reentrant=self.reentrant)
            x = x + run(x)
        return x


def by_torch():
    return nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("layer", [Foreign, ByHand, by_torch, lambda: Attention(DIM, HEADS)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_are_without_their_heads_again(layer, reentrant):
    torch.manual_seed(0)
    plain = Again(layer, None)
    again = Again(layer, reentrant)
    again.load_state_dict(plain.state_dict())
    name = "layers.1.self_attn" if layer is by_torch else "layers.1"
    x, scores = torch.randn(2, 5, DIM), []
    for model in (plain, again):
        with ablate(model, {name: [0, 2]}):
            model(x.clone().requires_grad_()).square().sum().backward()
        with importance(model) as found:
            model(x.clone().requires_grad_()).square().sum().backward()
        scores.append(found)
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        close(a.grad, b.grad)
    assert scores[0].keys() == scores[1].keys()
    for layer_name, score in scores[0].items():
        close(score, scores[1][layer_name])


def test_heads_are_off_in_every_thread():
    model, x = nn.Sequential(Foreign(), Foreign()), torch.randn(1, 5, DIM)
    with torch.no_grad(), ablate(model, {"1": [1]}), ThreadPoolExecutor(2) as pool:
        right = model(x)
        for found in pool.map(torch.no_grad()(model), [x] * 8):
            close(found, right)
    assert not _get_current_function_mode_stack()
    with pytest.raises(AssertionError):
        close(model(x), right)


def test_a_model_that_is_one_layer_is_ablated_as_a_tape_shows_it():
    model, x = Attention(DIM, HEADS), torch.randn(2, 5, DIM)
    with ablate(model, {"(model)": [1]}):
        shown = model(x)
    with ablate(model, {"": [1]}):
        assert torch.equal(model(x), shown)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ("all", TypeError, r"heads of '\(model\)' must be a list of their numbers, as in \[0, 3\], got 'all'"),
        (3, TypeError, "must be a list of their numbers, as in .*, got 3; write \\[3\\]"),
        ([1.5], TypeError, r"heads of '\(model\)' must be whole numbers, got 1.5"),
        (torch.tensor(3), TypeError, "must be a list of their numbers, as in .*, got 3; write"),
        (torch.tensor([True, False]), TypeError, "must be whole numbers, got True"),
        ([0, -1], IndexError, r"heads of '\(model\)' must be from 0 to 3, got \[-1, 0\]"),
        ([4], IndexError, "must be from 0 to 3, got"),
    ],
)
def test_heads_that_are_no_numbers_of_heads_are_refused(heads, error, message):
    model, x = Attention(DIM, HEADS), torch.randn(2, 5, DIM)
    with pytest.raises(error, match=message), ablate(model, {"": heads}):
        model(x)


@pytest.mark.parametrize("kind", [tuple, iter, np.array, torch.tensor])
def test_numbers_of_heads_may_come_in_any_list(kind):
    model, x = Attention(DIM, HEADS), torch.randn(2, 5, DIM)
    with ablate(model, {"": [1, 3]}):
        right = model(x)
    with ablate(model, {"": kind([3, 1, 1])}):
        assert torch.equal(model(x), right)


def test_a_model_that_is_one_layer_is_told_of_as_a_tape_shows_it():
    model, x = Attention(DIM, HEADS), torch.randn(2, 5, DIM)
    with pytest.raises(ValueError, match=r"its attention layers are \['\(model\)'\]"), ablate(model, {"a": [0]}):
        pass
    with pytest.raises(RuntimeError, match=r"no attention was found in \['\(model\)'\]"), ablate(model, {"": [0]}):
        pass
    with pytest.raises(RuntimeError, match=r"in \['core'\]; the layers that attended are \['\(model\)'\]"):
        ablation_importance(model, lambda: model(x).sum(), ["core"])
    shown = ablation_importance(model, lambda: model(x).sum(), ["(model)"])
    close(shown, ablation_importance(model, lambda: model(x).sum()))
