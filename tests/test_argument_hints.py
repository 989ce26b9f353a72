"""Argument names of PyTorch are refused with ours, and former names of ours work and warn."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import regard
from regard import Causal, argument_hints, attend, explain, weights
from regard.argument_hints import CALLS, LAYERS, OPERATOR, with_argument_hints
from regard.models import Bert, BertConfig, BertTagger, Gpt, GptConfig
from regard.nn import (
    Attention,
    AttentionPool,
    BahdanauAttention,
    ContextualEmbedding,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    Frozen,
    LuongAttention,
    SelfAttention2d,
)

KEEP = torch.arange(5) < torch.tensor([5, 3])[:, None]
IDS = torch.ones(2, 5, dtype=torch.long)


def layer():
    torch.manual_seed(0)
    return Attention(8, 2)


@pytest.mark.parametrize("make", [Attention, AttentionPool, SelfAttention2d])
def test_names_of_pytorch_are_told_in_ours(make):
    with pytest.raises(TypeError, match=f"^{make.__name__} has no num_heads=; write heads=$"):
        make(16, num_heads=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'anything'"):
        make(16, anything=2)


@pytest.mark.parametrize(("theirs", "ours"), LAYERS.items())
def test_each_argument_of_pytorch_raises_with_what_to_write(theirs, ours):
    with pytest.raises(TypeError, match=f"^Attention has no {theirs}=; write {re.escape(ours)}$"):
        Attention(16, 2, **{theirs: 1})


@pytest.mark.parametrize(("theirs", "ours"), OPERATOR.items())
@pytest.mark.parametrize("fn", [attend, weights, explain])
def test_each_argument_of_pytorchs_attention_raises_with_what_to_write(fn, theirs, ours):
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=f"^{fn.__name__} has no {theirs}=; write {re.escape(ours)}$"):
        fn(x, x, *([] if fn is weights else [x]), **{theirs: None})


@pytest.mark.parametrize(("theirs", "ours"), CALLS.items())
def test_each_argument_of_a_call_of_pytorchs_layers_raises_with_what_to_write(theirs, ours):
    x = torch.randn(2, 5, 8)
    with pytest.raises(TypeError, match=f"^Attention has no {theirs}=; write {re.escape(ours)}$"):
        layer()(x, **{theirs: None})
    with pytest.raises(TypeError, match=f"^Attention.weights has no {theirs}="):
        layer().weights(x, **{theirs: None})


def test_models_answer_the_names_of_other_libraries():
    with pytest.raises(TypeError, match=r"^Bert has no attention_mask=; write keep=attention_mask.bool\(\)"):
        Bert(BertConfig.tiny(vocabulary=9))(IDS, attention_mask=IDS)


def test_what_to_write_runs_and_means_the_same():
    """The advice for bool masks of `nn.MultiheadAttention`, whose True hides."""
    theirs, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    ours, hidden = Attention.from_torch(theirs), ~KEEP
    expected = theirs(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(x, keep=~hidden), expected)


def test_a_term_without_its_name_is_answered_with_the_names():
    x = torch.randn(1, 2, 5, 8)
    message = "attend takes 3 arguments without a name, q, k, v, got 4; name the others: score=, mask=, bias="
    with pytest.raises(TypeError, match=message):
        attend(x, x, x, Causal())
    with pytest.raises(TypeError, match="weights takes 2 arguments without a name, q, k, got 3"):
        weights(x, x, x)
    with pytest.raises(TypeError, match="Attention takes 3 arguments without a name, x, context, values, got 4; name"):
        layer()(*torch.randn(3, 2, 5, 8), KEEP)


def test_the_first_of_several_is_named_in_the_order_of_the_alphabet():
    with pytest.raises(TypeError, match="has no embed_dim="):
        Attention(num_heads=2, vdim=3, embed_dim=4)


def test_a_checked_init_keeps_its_name_and_takes_our_arguments():
    class Layer:
        @with_argument_hints(LAYERS)
        def __init__(self, width, *, heads):
            """Keep both."""
            self.given = width, heads

    assert Layer(16, heads=2).given == (16, 2)
    assert Layer.__init__.__doc__ == "Keep both."
    with pytest.raises(TypeError, match="Layer has no kdim=; write key_width="):
        Layer(16, heads=2, kdim=3)


def test_checked_functions_keep_their_signature():
    assert list(inspect.signature(attend).parameters)[:4] == ["q", "k", "v", "score"]
    assert "keep" in inspect.signature(Attention.forward).parameters


def block():
    return EncoderBlock(layer(), FeedForward(8, 8))


def cross():
    return DecoderBlock(layer(), layer(), FeedForward(8, 8))


X = torch.randn(2, 5, 8)
FORMER = {
    "attention": (layer, lambda m, **keep: m(X, **keep), "key_padding", "keep"),
    "weights": (layer, lambda m, **keep: m.weights(X, **keep)[...], "key_padding", "keep"),
    "remember": (layer, lambda m, **keep: m(X, m.remember(X, **keep)), "key_padding", "keep"),
    "encoder block": (block, lambda m, **keep: m(X, **keep), "key_padding", "keep"),
    "decoder block": (cross, lambda m, **keep: m(X, X, **keep), "key_padding", "keep"),
    "its context": (cross, lambda m, **keep: m(X, X, **keep), "context_padding", "context_keep"),
    "its memory": (cross, lambda m, **keep: m(X, m.remember(X, **keep)), "context_padding", "context_keep"),
    "pool": (lambda: AttentionPool(8), lambda m, **keep: m(X, **keep), "padding", "keep"),
    "bahdanau": (lambda: BahdanauAttention(8, 8, 8), lambda m, **keep: m(X, m.remember(X, **keep)), "padding", "keep"),
    "luong": (lambda: LuongAttention(8), lambda m, **keep: m(X, m.remember(X, **keep)), "padding", "keep"),
    "bert": (lambda: Bert(BertConfig.tiny(vocabulary=9)), lambda m, **keep: m(IDS, **keep), "padding", "keep"),
    "tagger": (
        lambda: BertTagger(Bert(BertConfig.tiny(vocabulary=9)), tags=2),
        lambda m, **keep: m(IDS, **keep),
        "padding",
        "keep",
    ),
    "gpt": (
        lambda: Gpt(GptConfig.llama(vocabulary=9, dim=8, depth=1, heads=2)),
        lambda m, **keep: m(IDS, **keep),
        "padding",
        "keep",
    ),
    "embedding": (
        lambda: ContextualEmbedding(Frozen(Bert(BertConfig.tiny(vocabulary=9)))),
        lambda m, **keep: m(IDS, **keep),
        "key_padding",
        "keep",
    ),
}


@pytest.mark.parametrize(("make", "call", "old", "new"), FORMER.values(), ids=FORMER)
def test_a_former_name_works_and_its_warning_says_what_true_means(make, call, old, new):
    torch.manual_seed(0)
    module = make().eval()
    expected = call(module, **{new: KEEP})
    with pytest.warns(DeprecationWarning, match=f"^{old}= of .* is now called {new}=: lengths, or True = a real key"):
        found = call(module, **{old: KEEP})
    assert torch.equal(found, expected)
    assert not torch.equal(found, call(module, **{new: torch.ones_like(KEEP)}))
    with pytest.raises(TypeError, match=f"got {old}= and {new}=, which are the same; write {new}= alone"):
        call(module, **{old: KEEP, new: KEEP})


def test_the_warning_points_at_the_line_of_the_user():
    """By default Python shows a DeprecationWarning only for code of `__main__`, so not for PyTorch's modules."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        block()(X, key_padding=KEEP)
    assert [x.filename for x in seen] == [__file__]
    assert str(Path(regard.__file__).parent) in argument_hints.HOME


def test_a_model_that_names_it_padding_is_called_by_that_name():
    class Model(torch.nn.Module):
        def forward(self, ids, *, padding):
            return (ids * padding)[..., None].double()

    assert torch.equal(ContextualEmbedding(Model())(IDS, keep=KEEP)[..., 0], KEEP.double())


def test_layers_compile_without_a_graph_break():
    module = torch.compile(layer(), fullgraph=True, backend="eager")
    torch.testing.assert_close(module(X, keep=KEEP), layer()(X, keep=KEEP))
