"""Weights of another run: patched in exactly, in all heads or some, and frozen for one input."""

import pytest
import torch
from torch import nn

from regard import Alibi, Causal, Padding, Window, attend
from regard.lens import Boost, Cut, Freeze, From, NotUnderstood, Scale, capture, edit
from regard.nn import Attention
from tests.lens.edits.test_edit import split
from tests.lens.entrances import ENTRANCES, build, libraries  # noqa: F401
from tests.lens.kernel_layers import QkvLayer, qkv

pytestmark = [
    pytest.mark.usefixtures("libraries"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning"),
]
close = torch.testing.assert_close


def captured(model, x):
    with capture(model) as tape, torch.no_grad():
        model(x)
    return tape


def mixed(A, B, heads):
    """The weights A in these heads, B in the others."""
    found = B.clone()
    found[:, heads] = A[:, heads]
    return found


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("heads", [None, [0, 3]])
def test_the_weights_of_another_run_are_patched_in_at_every_entrance(entrance, heads):
    model, x = build(entrance), qkv()
    clean, corrupt = x, x.flip(1) * 0.5
    A, B = (captured(model, x)[0].dense() for x in (clean, corrupt))
    want = A if heads is None else mixed(A, B, heads)
    with edit(model, {"0": From(captured(model, clean), heads)}), capture(model) as tape:
        out = model(corrupt)
    close(out, (want @ split(corrupt)[2]).transpose(1, 2))
    close(tape[0].dense(), want)


@pytest.mark.parametrize("heads", [None, 2])
def test_terms_of_the_other_run_come_with_its_weights(heads):
    terms = {"mask": Causal(), "bias": None}

    def layer(q, k, v):
        return attend(*(x.transpose(1, 2) for x in (q, k[:, :, ::2], v[:, :, ::2])), **terms).transpose(1, 2)

    model, x = nn.Sequential(QkvLayer(layer)), qkv()
    tape = captured(model, x)
    terms.update(mask=Window(3) & Padding((7, 5)), bias=Alibi(4))
    corrupt = x.flip(1)
    A, B = tape[0].dense(), captured(model, corrupt)[0].dense()
    with edit(model, {"0": [From(tape, heads), Cut(keys=1, heads=2)]}), capture(model) as edited:
        model(corrupt)
    want = A if heads is None else mixed(A, B, [2])
    want[:, 2, :, 1] = 0
    want = want / want.sum(-1, keepdim=True).clamp(min=1e-12)
    close(edited[0].dense(), want)


def test_the_first_of_several_calls_on_a_tape_is_that_of_the_first_pass():
    model, x = build("sdpa"), qkv()
    with capture(model) as tape:
        model(x), model(-x * 2)
    with edit(model, {"0": From(tape)}), capture(model) as edited:
        model(x.flip(1)), model(x.flip(1))
    for n in range(2):
        close(edited["0", n].dense(), tape["0", n].dense())
    message = "the tape has 2 calls of it, and this is call 2 of the block"
    with pytest.raises(NotUnderstood, match=message), edit(model, {"0": From(tape)}):
        model(x), model(x), model(x)


def test_gradients_pass_through_the_values_alone():
    model, x = build("sdpa"), qkv()
    A = captured(model, x)[0].dense()
    for given in (From(captured(model, x)), Freeze()):
        own = x.clone().requires_grad_()
        with edit(model, {"0": given}):
            (grad,) = torch.autograd.grad(model(own).square().sum(), own)
        other = x.clone().requires_grad_()
        (want,) = torch.autograd.grad((A @ split(other)[2]).square().sum(), other)
        close(grad, want)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(16, heads=4, mask=Causal()), Attention(16, heads=4, mask=Causal())
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, past=None):
        x = x + self.dropout(self.first(x))
        return x + self.second(x)


@pytest.mark.parametrize("training", [False, True])
def test_frozen_weights_are_those_without_the_other_edits(training):
    model, x = Deep().double().train(training), torch.randn(2, 5, 16, dtype=torch.float64)
    torch.manual_seed(3)
    clean = captured(model, x)
    for other in (Scale(0, 0.0), Boost(1, 2.0)):
        torch.manual_seed(3)
        with edit(model, {"first": other, "second": [Freeze(heads=[1, 2])]}), capture(model) as tape:
            model(x)
        assert torch.equal(tape["second"][:, [1, 2]], clean["second"][:, [1, 2]])
        assert (tape["second"][:, 3] - clean["second"][:, 3]).abs().max() > 1e-4
    assert not model._forward_pre_hooks


def test_what_cannot_run_twice_is_refused():
    model, x = Deep(), torch.randn(2, 5, 16)
    edits = {"first": Scale(0, 0), "second": Freeze()}
    with pytest.raises(ValueError, match="past would be written twice"), edit(model, edits):
        model(x, past=1)
    model.norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="batch norm in training"), edit(model, edits):
        model(x)


def test_a_tape_that_does_not_fit_is_refused_by_name():
    model, x = build("sdpa"), qkv()
    named = nn.ModuleDict({"other": build("sdpa")[0]})
    with capture(named) as elsewhere:
        named["other"](x)
    with capture(model, keep=["entropy"]) as reduced:
        model(x)
    with capture(model, heads=[1]) as some:
        model(x)
    refused = {
        "its weights are 2 x 4 x 5 x 5 in the other run and 2 x 4 x 7 x 7 here": captured(model, x[:, :5]),
        "the tape does not have this layer; it has other": elsewhere,
        "the tape holds no queries and keys of it": reduced,
        "the tape holds some of its heads": some,
    }
    for message, tape in refused.items():
        with pytest.raises(NotUnderstood, match=message), edit(model, {"0": From(tape)}):
            model(x)
    with pytest.raises(TypeError, match="From takes a tape, got str"):
        From("tape")


def test_they_print_as_their_source():
    tape = captured(build("sdpa"), qkv())
    assert [repr(x) for x in (From(tape), From(tape, 1), Freeze(), Freeze([2, 1]))] == [
        "From(tape)",
        "From(tape, heads=(1,))",
        "Freeze()",
        "Freeze(heads=(1, 2))",
    ]
