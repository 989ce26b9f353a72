"""Watch: which layer calls an attention, whatever else happens while it does."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.overrides import _get_current_function_mode_stack

import tests.lens.tiny_transformers as zoo
from regard.lens import CaptureWarning, ablate, capture
from regard.lens.eager.op_rules import OP_RULES
from regard.nn import Attention
from regard.nn.core import Core

D, H = 16, 2


def refuse(*_: object) -> None:
    raise LookupError("a hook of the user's own")


class Careful(nn.Module):
    """Goes on with a second layer where the first fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(D, H), Attention(D, H)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)
        except LookupError:
            return self.second(x)


def look(model):
    return capture(model)


def silence(model):
    return ablate(model, {"second": [0]})


@pytest.mark.parametrize("watch", [look, silence])
def test_a_hook_that_raises_says_so_itself(watch):
    model = Careful()
    model.second.register_forward_pre_hook(refuse)
    model.first.register_forward_pre_hook(refuse)
    with pytest.raises(LookupError, match="of the user's own"), watch(model):
        model(torch.randn(1, 5, D))


def test_a_layer_that_failed_before_it_began_ends_no_other():
    model = Careful()
    model.first.register_forward_pre_hook(refuse)
    with capture(model) as tape:
        model(torch.randn(1, 5, D))
    assert tape.layers == ["second"]
    with ablate(model, {"second": [0, 1]}):
        assert torch.equal(model(torch.zeros(1, 5, D)), model.second.out.bias.expand(1, 5, D))


class Interrupted(nn.Module):
    """Somebody loses patience in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.patience = Attention(D, H), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if not self.patience:
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("values", [False, True])
def test_after_an_interrupt_nothing_is_watched_any_more(values):
    model, x = Interrupted(), torch.randn(1, 3, D)
    model.patience = False
    with pytest.raises(KeyboardInterrupt), capture(model, values=values) as outer, capture(model) as inner:
        model(x)
    assert _get_current_function_mode_stack() == []
    F.scaled_dot_product_attention(x, x, x)
    model.patience = True
    assert len(outer) == len(inner) == 1
    with capture(model) as tape:
        model(x)
    assert list(tape) == [("layer", 0), ("", 0)]


class Named(nn.Module):
    """Parts whose names are those of parts of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return self.core(x, x, x)[0]


def test_a_part_of_the_users_own_keeps_its_name():
    model, x = nn.Sequential(Named(), Attention(D, H)), torch.randn(1, 3, D)
    with capture(model) as tape:
        model(x)
    assert list(tape) == [("0", 0), ("0.core", 0), ("1", 0)]
    cores = nn.ModuleList([Core(), Core()])
    model[0].cores = cores
    model[0].register_forward_pre_hook(lambda _, args: [core(*[args[0][:, None]] * 3) for core in cores] and None)
    with capture(model) as tape:
        model(x)
    assert list(tape) == [("0.cores.0", 0), ("0.cores.1", 0), ("0", 0), ("0.core", 0), ("1", 0)]
    with capture(model, layers="0.core") as tape:
        model(x)
    assert tape[0].shape == (1, H, 3, 3)
    with ablate(model, {"0": [0]}):  # its own, not that of the part
        without = model(x)
    torch.testing.assert_close(without, model[1](model[0].core(x, x, x)[0]))


class Compiled(nn.Module):
    """A layer that is seen, and one within a compiled function."""

    def __init__(self, then) -> None:
        super().__init__()
        self.first, self.second = Attention(D, H), Attention(D, H)
        self.then = torch.compile(lambda x: then(self, x), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x))


def by_the_kernel(model: Compiled, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def by_a_layer(model: Compiled, x: Tensor) -> Tensor:
    return model.second(x)


def without_attention(model: Compiled, x: Tensor) -> Tensor:
    return F.gelu(model.second.out(x)) * x.shape[1]


def at_lengths(model: nn.Module) -> None:
    for n in (5, 7, 9):  # from the second on, a compiler leaves the length open
        with torch.no_grad():
            model(torch.randn(1, n, D))


@pytest.fixture
def dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.compiled
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("then", [by_the_kernel, by_a_layer])
def test_attention_within_a_compiled_function_is_told(then):
    model = Compiled(then)
    message = r"its attention ran inside a torch.compile'd function.*set_stance\('force_eager'\)"
    with pytest.warns(UserWarning, match=message), capture(model) as tape:
        at_lengths(model)
    assert list(tape) == [("first", n) for n in range(3)]
    with torch.compiler.set_stance("force_eager"), capture(model) as tape:
        at_lengths(model)
    assert len(tape) == 6


@pytest.mark.usefixtures("dynamo")
def test_a_model_whose_attention_is_all_compiled_is_refused():
    model = Compiled(by_the_kernel)
    model.first = nn.Identity()
    with (
        pytest.raises(ValueError, match=r"its attention ran.*force_eager"),
        capture(model),
    ):
        at_lengths(model)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("values", [False, True])
def test_a_compiled_function_without_attention_runs_as_it_did(values):
    model = Compiled(without_attention)
    with capture(model, values=values) as tape:
        at_lengths(model)
    assert len(tape) == 3


class Bare(nn.Module):
    """Calls the kernel by itself."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return by_the_kernel(self, x) if x.shape[1] < 3 else sdpa(x[:, None], x[:, None], x[:, None])[:, 0]


def own_layer() -> nn.Module:
    return Attention(D, H)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(D, H, D, batch_first=True).eval()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("build", [Bare, own_layer, encoder_layer])
def test_a_layer_that_is_called_compiled_beside_others_is_told(build):
    model, x = nn.Sequential(Attention(D, H), build()), torch.randn(1, 5, D)
    fast = torch.compile(model[1], backend="aot_eager")
    message = "its attention ran inside a torch.compile'd function"
    with torch.no_grad(), pytest.warns(UserWarning, match=message), capture(model) as tape:
        fast(model[0](x))
    assert list(tape) == [("0", 0)]


@pytest.mark.usefixtures("dynamo")
def test_a_layer_without_attention_may_be_called_compiled():
    model, x = nn.Sequential(Attention(D, H), nn.Sequential(nn.Linear(D, D), nn.GELU())), torch.randn(1, 5, D)
    fast = torch.compile(model[1], backend="aot_eager")
    with torch.no_grad(), capture(model) as tape:
        fast(model[0](x))
    assert list(tape) == [("0", 0)]


@torch.compile(backend="eager")
def flexed(x, y):
    return flex_attention(x, y, y)


class Flexed(nn.Module):
    """One layer that is seen, and one that is not."""

    def forward(self, x):
        x = x[:, None]
        return flexed(F.scaled_dot_product_attention(x, x, x), x)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_attention_that_cannot_be_seen_beside_one_that_can_is_told():
    model, x = Flexed(), torch.randn(1, 16, 16)
    for _ in range(2):  # compiled, and as it was compiled
        told = pytest.warns(UserWarning, match="it calls flex_attention inside a torch.compile'd function")
        with told, torch.no_grad(), capture(model) as tape:
            model(x)
        assert len(tape) == 1


class ByHand(nn.Module):
    """Calls the kernel, and projects its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return self.out(sdpa(q, q, q).transpose(1, 2).flatten(2))


def under_vmap(model: nn.Module, x: Tensor) -> None:
    torch.vmap(model)(x[None])


def under_grad(model: nn.Module, x: Tensor) -> None:
    torch.func.grad(lambda y: model(y).sum())(x)


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.parametrize("run", [under_vmap, under_grad])
def test_a_kernel_inside_a_transform_of_torch_func_is_seen(run):
    model, x = ByHand(), torch.randn(1, 5, D)
    with torch.no_grad(), capture(model) as plain:
        model(x)
    with capture(model) as tape:
        run(model, x)
    torch.testing.assert_close(tape[0][:], plain[0][:])


TRANSFORMED = r"it ran inside a torch.func transform .*vmap.* outside of the transform"


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.parametrize("run", [under_vmap, under_grad])
@pytest.mark.parametrize("model", [Attention(D, H), nn.MultiheadAttention(D, H)], ids=["ours", "PyTorch's"])
def test_other_attention_inside_a_transform_of_torch_func_is_named(run, model):
    def call(x):
        return model(x) if isinstance(model, Attention) else model(x, x, x, need_weights=False)[0]

    with pytest.raises(ValueError, match=TRANSFORMED), capture(model):
        run(call, torch.randn(1, 5, D))


def test_gradients_of_heads_inside_a_transform_are_not_kept():
    with pytest.raises(ValueError, match=TRANSFORMED), capture(model := ByHand(), gradients=True):
        under_grad(model, torch.randn(1, 5, D))


def test_a_model_of_transformers_inside_a_transform_is_named():
    model = zoo.made(zoo.llama)
    embedded = model.get_input_embeddings()(zoo.ids(1)).detach()
    with pytest.raises(ValueError, match=TRANSFORMED), capture(model):
        torch.func.grad(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum())(embedded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout):
    x = torch.nested.nested_tensor([torch.randn(5, D), torch.randn(3, D)], layout=layout)
    kernel = ByHand()
    encoder = nn.TransformerEncoderLayer(D, H, 8, batch_first=True).eval()
    for model in (kernel, encoder) if layout == torch.jagged else (encoder,):
        with (
            torch.no_grad(),
            pytest.raises(TypeError, match=r"got a nested tensor; pad.*to_padded_tensor"),
            capture(model),
        ):
            model(x)


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@torch.no_grad()
def test_a_model_is_saved_within_the_block_without_the_lens() -> None:
    model, x = nn.TransformerEncoderLayer(D, H, D, batch_first=True).eval(), torch.randn(1, 5, D)
    with capture(model) as tape:
        want = model(x)
        data = saved(model)
    assert b"regard" not in data
    again = torch.load(io.BytesIO(data), weights_only=False)
    torch.testing.assert_close(again(x), want)
    assert len(tape) == 1


@torch.no_grad()
def test_a_generating_model_is_saved_within_the_block() -> None:
    model, ids = zoo.made(zoo.llama), zoo.ids()
    options = {"max_new_tokens": 3, "do_sample": False}
    with capture(model) as tape:
        want = model.generate(ids, **options)
        data = saved(model)
        again = torch.load(io.BytesIO(data), weights_only=False)
        assert torch.equal(again.generate(ids, **options), want)
    assert b"regard" not in data
    assert len(tape) == 2


class ByHandThenSdpa(nn.Module):
    """One attention written out by hand, in a part of its own, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.hand, self.other = Product(), Attention(D, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.hand(x))


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_a_rule_that_fails_does_not_stop_the_model(monkeypatch):
    def fail(call):
        raise KeyError("a case the rule did not think of")

    model, x = ByHandThenSdpa(), torch.randn(1, 5, D)
    want = model(x)
    monkeypatch.setitem(OP_RULES, "softmax", fail)
    failed = "following its call of softmax failed .KeyError.*report this as a bug"
    with pytest.warns(CaptureWarning, match=failed), capture(model) as tape:
        assert torch.equal(model(x), want)
    assert tape.layers == ["other"]
    assert [(each.layer, each.kind) for each in tape.unseen] == [("hand", "attention")]
    with pytest.raises(KeyError), ablate(model, {"other": [0]}):
        model(x)
