"""edit: every edit at every entrance equals the dense definition, and nothing is left behind."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from regard import Alibi, Causal, Padding, attend
from regard.lens import (
    Boost,
    Cut,
    NotUnderstood,
    Only,
    Scale,
    Temperature,
    capture,
    edit,
    lines,
    patches,
    sentences,
    spans,
    words,
)
from regard.nn import Attention
from tests.lens.edits.dense_edits import dense_edited
from tests.lens.entrances import ENTRANCES, NO_BACKWARD, build, libraries  # noqa: F401
from tests.lens.kernel_layers import HEADS, WIDTH, QkvLayer, qkv

pytestmark = [
    pytest.mark.usefixtures("libraries"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning"),
]
N = 7
close = torch.testing.assert_close
EDITS = {
    "cut": [Cut(queries=-1, keys=slice(0, 3))],
    "cut in heads": [Cut(queries=[2, 5], keys=-2, heads=[0, 3])],
    "boost": [Boost(slice(1, 4), 2.5, heads=2)],
    "temperature": [Temperature([1, 2], 0.5)],
    "scale": [Scale(1, -2.0)],
    "only": [Only([0, 2])],
    "list": [Boost(0, 1.0, queries=slice(3, None)), Temperature(None, 3.0), Cut(keys=5), Only([1, 3]), Scale(1, 0.5)],
}
every_entrance = pytest.mark.parametrize("entrance", ENTRANCES)
every_edit = pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)


def split(x):
    return [part.transpose(1, 2) for part in x.chunk(3, -1)]


@every_entrance
@every_edit
def test_an_edit_at_every_entrance_equals_the_dense_definition(entrance, edits):
    model, x = build(entrance), qkv()
    plain = model(x)
    want, weights = dense_edited(*split(x), edits)
    with edit(model, {"0": edits}), capture(model) as tape:
        out = model(x)
    close(out, want.transpose(1, 2))
    close(tape[0].dense(), weights)
    assert torch.equal(model(x), plain)


@every_entrance
def test_edits_nest_inside_and_outside_of_a_capture(entrance):
    model, x = build(entrance), qkv()
    first, second = Boost(3, 1.0), Temperature([0, 1], 0.25)
    want, weights = dense_edited(*split(x), [first, second])
    with edit(model, {"*": first}), capture(model) as tape, edit(model, {"0": second}):
        out = model(x)
    close(out, want.transpose(1, 2))
    close(tape[0].dense(), weights)
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("entrance", [name for name in ENTRANCES if name not in NO_BACKWARD])
@every_edit
def test_gradients_pass_an_edit(entrance, edits):
    model, x = build(entrance), qkv().requires_grad_()
    weight = torch.randn(2, N, HEADS, WIDTH, dtype=torch.float64)
    with edit(model, {"0": edits}):
        (grad,) = torch.autograd.grad((model(x) * weight).sum(), x)
    (want,) = torch.autograd.grad((dense_edited(*split(x), edits)[0].transpose(1, 2) * weight).sum(), x)
    close(grad, want)


@every_edit
def test_a_model_of_layers_of_regard_is_edited(edits):
    layer = Attention(32, heads=4, kv_heads=2, mask=Causal(), bias=Alibi(4)).double()
    model, x = nn.Sequential(layer), torch.randn(2, N, 32, dtype=torch.float64)
    with capture(model, values=True) as tape:
        model(x)
    call, v = tape[0].call, tape.extras(0).v
    keep = torch.ones(N, N, dtype=torch.bool).tril()
    bias = (
        -torch.tensor([2.0**-2, 2**-4, 2**-6, 2**-8])[:, None, None]
        * (torch.arange(N)[:, None] - torch.arange(N)).abs()
    )
    want, weights = dense_edited(call.q, call.k, v, edits, keep=keep, bias=bias)
    with edit(model, {"0": edits}), capture(model) as edited, torch.no_grad():
        out = model(x)
        close(out, layer.out(want.transpose(1, 2).flatten(2)))
    close(edited[0].dense(), weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_returns_the_edited_weights(need_weights, batch_first):
    model = nn.MultiheadAttention(16, 4, batch_first=batch_first).double().eval()
    x = torch.randn(2, N, 16, dtype=torch.float64)
    hidden = torch.zeros(N, N, dtype=torch.bool)
    hidden[-1, :3] = True
    inputs = x if batch_first else x.transpose(0, 1)
    want, A = model(inputs, inputs, inputs, need_weights=need_weights, attn_mask=hidden)
    with edit(model, {"(model)": EDITS["cut"]}), capture(model) as tape:
        out, edited = model(inputs, inputs, inputs, need_weights=need_weights)
    close(out, want)
    assert tape[0][0, 0, -1, :3].tolist() == [0.0] * 3
    if need_weights:
        close(edited, A)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_the_real_tokens_of_each_row(side):
    lengths = torch.tensor([N, 4])
    real = torch.arange(N) < lengths[:, None]
    real = real.flip(1) if side == "left" else real
    model, x = nn.Sequential(QkvLayer(lambda q, k, v: masked(q, k, v, real))), qkv()
    edits = [Cut(queries=-1, keys=slice(0, 2)), Boost(-2, 1.5), Cut(queries=[0, 2], keys=3, heads=1)]
    keep = real[:, None, None]
    want, weights = dense_edited(*split(x), edits, keep=keep, real=real)
    with edit(model, {"0": edits}), capture(model) as tape:
        out = model(x)
    close(out[real], want.transpose(1, 2)[real])
    close(tape[0].dense().transpose(1, 2)[real], weights.transpose(1, 2)[real])


def masked(q, k, v, real):
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), mask=Padding(real)).transpose(1, 2)


def test_tokens_are_selected_by_groups_and_by_functions_of_each_row():
    texts = [["a", "##b", "c", "d", "e", "c"], ["d", "c", "c"]]
    real = torch.tensor([[True] * 6 + [False], [True] * 3 + [False] * 4])
    model, x = nn.Sequential(QkvLayer(lambda q, k, v: masked(q, k, v, real))), qkv()
    by_word = Cut(
        queries=lambda text: [n for n, token in enumerate(text) if token == "d"], keys=lambda t: words(t)["c"]
    )
    with edit(model, {"0": by_word}, texts), capture(model) as tape:
        model(x)
    A = tape[0].dense()
    assert torch.equal(A[0, :, 3] == 0, torch.tensor([[n in (2, 5, 6) for n in range(N)]] * HEADS))
    assert torch.equal(A[1, :, 0] == 0, torch.tensor([[n != 0 for n in range(N)]] * HEADS))
    assert (A[0, :, 0, :6] > 0).all()
    padded = [texts[0] + ["[PAD]"], texts[1] + ["[PAD]"] * 4]
    with edit(model, {"0": by_word}, padded), capture(model) as again:
        model(x)
    assert torch.equal(again[0].dense(), A)
    with edit(model, {"0": Cut(keys=words(texts[0])["ab"])}), capture(model) as cut:
        model(x)
    assert not cut[0].dense()[:, :, :, :2].any()


@pytest.mark.parametrize(
    ("chosen", "hidden"),
    [
        (sentences(["a", ".", "b", "c", ".", "d", "e"])["bc."], (2, 3, 4)),
        (lines(["a", "\n", "b", "c", "d", "e", "f"])[0], (0, 1)),
        (spans(7, {"subject": (1, 3)})["subject"], (1, 2)),
        (patches(2, 3)["1,0"], (4,)),
    ],
)
def test_groups_of_all_kinds_select_their_tokens(chosen, hidden):
    model = build("sdpa")
    with edit(model, {"*": Cut(keys=chosen)}), capture(model) as tape:
        model(qkv())
    assert tape[0].dense().eq(0).all((0, 1, 2)).nonzero().flatten().tolist() == list(hidden)


def test_threads_edit_the_same_model():
    model = build("sdpa")
    inputs = [qkv() * scale for scale in (0.5, 1.0, 2.0, 4.0)]
    edits = EDITS["list"]
    with edit(model, {"0": edits}), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model, inputs))
    for x, out in zip(inputs, found, strict=True):
        close(out, dense_edited(*split(x), edits)[0].transpose(1, 2))


def test_layers_that_are_computed_again_are_edited_again():
    model, x = build("written out"), qkv().requires_grad_()
    with edit(model, {"0": EDITS["cut"]}):
        out = checkpoint(model, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    (want,) = torch.autograd.grad(dense_edited(*split(x), EDITS["cut"])[0].square().sum(), x)
    close(grad, want)


def test_an_error_within_leaves_the_model_as_it_was():
    model, x = build("sdpa"), qkv()
    plain = model(x)
    with pytest.raises(KeyError), edit(model, {"0": Scale(0, 0)}):
        raise KeyError
    with (
        pytest.raises(IndexError, match=r"heads of '0' must be from 0 to 3, got \[4\]"),
        edit(model, {"0": Scale(4, 0)}),
    ):
        model(x)
    assert torch.equal(model(x), plain)
    assert not _get_current_function_mode_stack()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_pattern_without_layer_names_the_layers_there_are():
    model = nn.Sequential(Attention(16, heads=4), nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"no layer 'layers\.\*'; its attention layers are \['0'\]"):
        edit(model, {"layers.*": Scale(0, 0)}).__enter__()
    x = torch.randn(1, 3, 16)
    with (
        pytest.raises(RuntimeError, match=r"no attention was found in \['1'\] while editing; the layers .* are 0;"),
        edit(model, {"1": Scale(0, 0)}),
    ):
        model(x)


def test_an_edit_that_selects_no_token_raises():
    model, x = build("sdpa"), qkv()
    with pytest.raises(RuntimeError, match=r"Cut\(keys=9\) changed nothing"), edit(model, {"0": Cut(keys=9)}):
        model(x)


def test_attention_that_is_not_understood_is_refused_by_name():
    class Odd(nn.Module):
        def forward(self, x):
            q, k, v = split(x)
            scores = q.sum(-1, keepdim=True) + k.sum(-1)[..., None, :]
            return (scores.softmax(-1) * torch.linspace(0, 1, N, dtype=q.dtype) @ v).transpose(1, 2)

    class Rolled(nn.Module):
        def forward(self, x):
            q, k, v = split(x)
            return ((q @ k.mT).softmax(-1).roll(1, 1) @ v).transpose(1, 2)

    model = nn.Sequential(Odd())
    with pytest.raises(NotUnderstood, match="the attention of 0 cannot be replaced: "), edit(model, {"0": Cut(keys=0)}):
        model(qkv())
    message = (
        r"Cut\(keys=0\) cannot edit 0: its weights were changed after the softmax \(roll\), and Cut comes before it"
    )
    rolled = nn.Sequential(Rolled())
    with pytest.raises(NotUnderstood, match=message), edit(rolled, {"0": Cut(keys=0)}):
        rolled(qkv())
    with edit(rolled, {"0": Scale(1, 0)}):
        assert not rolled(qkv())[:, :, 1].any()


def test_a_softmax_that_never_averages_is_named():
    class Lost(nn.Module):
        def forward(self, x):
            q, k, v = split(x)
            return (q @ k.mT).softmax(-1).amax(-1, keepdim=True) * v

    model = nn.Sequential(QkvLayer(ENTRANCES["sdpa"]), Lost())
    message = "these layers ran as they are while editing: 1: "
    with pytest.raises(RuntimeError, match=message), edit(model, {"*": Cut(keys=0)}):
        model[1](model[0](qkv()).repeat(1, 1, 1, 3))


def test_other_arguments_are_refused():
    model = build("sdpa")
    with pytest.raises(TypeError, match="edits must be a dict from patterns"):
        edit(model, Scale(0, 0)).__enter__()
    with pytest.raises(TypeError, match=r"edits of '0' must be Cut, .* got 3"):
        edit(model, {"0": 3}).__enter__()


def test_a_key_that_no_query_sees_is_a_token_of_the_text_still():
    model, x = build("sdpa"), qkv()
    edits = [Boost(0, 1.0), Cut(keys=1), Temperature([0], 0.5)]
    want, weights = dense_edited(*split(x), [*edits, Cut(queries=2, keys=3)])
    with edit(model, {"0": edits}), edit(model, {"0": Cut(queries=2, keys=3)}), capture(model) as tape:
        out = model(x)
    close(out, want.transpose(1, 2))
    close(tape[0].dense(), weights)
    assert tape.real_keys("0").all()
