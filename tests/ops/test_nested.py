"""Jagged nested tensors: each text as if it stood alone, forward and backward, under every kind of term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard import (
    Added,
    Alibi,
    Bias,
    Causal,
    Chunked,
    Dot,
    Padding,
    Prefix,
    Score,
    SinkSoftmax,
    Sparsemax,
    Window,
    attend,
    explain,
    weights,
)
from regard.nn import Attention, Rotary
from regard.ops import nested

LENGTHS = {
    "alike": (5, 3, 7),
    "one long": (40, 2, 1, 3),
    "an empty one": (4, 0, 2),
    "one": (6,),
}
TERMS = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window((2, 3, 4, 9)), "bias": Alibi(4)},
    "sparse": {"mask": Causal(), "normalize": Sparsemax(), "score": Dot(cap=2.0)},
    "sink": {"normalize": SinkSoftmax(0.5)},
    "prefix": {"mask": Causal() | Prefix(2)},
    "chunks": {"mask": Causal() & Chunked(3)},
    "bias of a function": {"bias": Bias.of(lambda b, h, i, j: 0.1 * j + 0.2 * h)},
    "score of a function": {"score": Score.of(lambda score, b, h, i, j: score * (1 + j % 3))},
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def jagged(lengths: tuple[int, ...], heads: int, width: int) -> Tensor:
    texts = [torch.randn(n, heads, width, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(texts, layout=torch.jagged).requires_grad_()


def check(out: Tensor, want: list[Tensor], leaves: list[Tensor]) -> None:
    parts = out.unbind()
    for one, alone in zip(parts, want, strict=True):
        torch.testing.assert_close(one, alone)
    grads = [
        torch.autograd.grad(sum((x**2).sum() for x in texts), leaves, retain_graph=True) for texts in (parts, want)
    ]
    for one, alone in zip(*grads, strict=True):
        torch.testing.assert_close(*(x.values() if x.is_nested else x for x in (one, alone)))


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_text_is_attended_as_if_it_stood_alone(lengths, terms):
    leaves = [jagged(lengths, *sizes) for sizes in ((4, 8), (2, 8), (2, 6))]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = attend(q, k, v, **terms)
    want = [
        attend(*(x[None] for x in text), **terms)[0] for text in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    check(out, want, leaves)


def test_queries_and_keys_may_have_other_lengths_and_positions():
    leaves = [jagged((2, 1, 7), 4, 8), jagged((9, 3, 7), 4, 8), jagged((9, 3, 7), 4, 8)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    texts = list(zip(q.unbind(), k.unbind(), v.unbind(), strict=True))
    mask = Causal() & Window(5)
    want = [attend(*(x[None] for x in text), mask=mask)[0] for text in texts]
    check(attend(q, k, v, mask=mask), want, leaves)
    offsets = (3, 0, 2)
    want = [attend(*(x[None] for x in text), mask=mask, offset=n)[0] for text, n in zip(texts, offsets, strict=True)]
    check(attend(q, k, v, mask=mask, offset=offsets), want, leaves)


def test_tensors_of_terms_count_the_texts_as_batch_rows():
    leaves = [jagged((5, 3), 2, 8) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    table = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, bias=Added(table), mask=Padding((4, 3)))
    want = []
    for n, (length, text) in enumerate(zip((5, 3), zip(q.unbind(), k.unbind(), v.unbind(), strict=True), strict=True)):
        bias = Added(table[n : n + 1, :, :length, :length])
        want.append(attend(*(x[None] for x in text), bias=bias, mask=Padding(((4, 3)[n],)))[0])
    check(out, want, [*leaves, table])


def test_tensors_of_one_length_stand_beside_nested_ones():
    leaves = [torch.randn(3, 4, 1, 8).double().requires_grad_(), jagged((9, 3, 7), 2, 8), jagged((9, 3, 7), 2, 8)]
    q, k, v = leaves[0], *(x.transpose(1, 2) for x in leaves[1:])
    out = attend(q, k, v, mask=Causal())
    assert not out.is_nested
    want = [attend(*(x[None] for x in text), mask=Causal())[0] for text in zip(q, k.unbind(), v.unbind(), strict=True)]
    check(out, want, leaves)
    keys = torch.randn(3, 2, 6, 8).double()
    out = attend(jagged((2, 5, 1), 4, 8).transpose(1, 2), keys, keys)
    assert [tuple(x.shape) for x in out.unbind()] == [(4, 2, 8), (4, 5, 8), (4, 1, 8)]


def test_the_output_has_the_jagged_dim_of_the_queries():
    q = jagged((5, 3), 4, 8).transpose(1, 2)
    out = attend(q, q, q)
    assert out.shape == q.shape
    assert (out + q).transpose(1, 2).flatten(2).shape == (2, q.shape[2], 32)


@pytest.mark.parametrize("most", [0, 100])
@pytest.mark.parametrize("name", ["causal", "window", "sparse"])
def test_a_packed_row_gives_what_a_padded_batch_gives(name, most, monkeypatch):
    monkeypatch.setattr(nested, "MAX_PADDED", most)
    shapes = []
    real = nested.attend_nested

    def attend_and_note(q, k, v, *, attend, **options):
        def note(q, *rest, **terms):
            shapes.append(tuple(q.shape))
            return attend(q, *rest, **terms)

        return real(q, k, v, attend=note, **options)

    monkeypatch.setattr("regard.ops.operator.attend_nested", attend_and_note)
    test_each_text_is_attended_as_if_it_stood_alone((5, 3, 7), TERMS[name])
    assert shapes[0] == ((1, 4, 15, 8) if most == 0 else (3, 4, 7, 8))


@pytest.mark.parametrize("lengths", [(5, 2), (3, 3, 1)])
def test_layers_take_nested_tensors(lengths):
    layer = Attention(16, 4, kv_heads=2, mask=Causal()).double()
    texts = torch.nested.nested_tensor([torch.randn(n, 16).double() for n in lengths], layout=torch.jagged)
    out = layer(texts)
    for one, text in zip(out.unbind(), texts.unbind(), strict=True):
        torch.testing.assert_close(one, layer(text[None])[0])
    with pytest.raises(ValueError, match="nested tensors go through layers without rotary="):
        Attention(16, 4, rotary=Rotary(4)).double()(texts)


def test_what_is_not_a_batch_of_texts_is_refused():
    q = jagged((5, 3), 4, 8).transpose(1, 2)
    for call in (weights, lambda q, k: explain(q, k, k)):
        with pytest.raises(TypeError, match=r"which attend alone takes; take a text, q\.unbind\(\)\[0\]\[None\]"):
            call(q, q)
    with pytest.raises(ValueError, match=r"write q\.transpose\(1, 2\)"):
        attend(q.transpose(1, 2), q, q)
    with pytest.warns(UserWarning, match="prototype"):
        strided = torch.nested.nested_tensor([torch.zeros(4, 3, 8)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"must be a nested tensor of layout torch\.jagged, got torch\.strided"):
        attend(q, strided, q)
    with pytest.raises(ValueError, match=r"k and v must hold texts of the same lengths, got \[5, 3\] and \[3, 5\]"):
        attend(q, q, jagged((3, 5), 4, 8).transpose(1, 2))
    with pytest.raises(ValueError, match="q and k must have the same number of texts, got 2 and 1"):
        attend(q, *(jagged((3,), 4, 8).transpose(1, 2) for _ in range(2)))
    with pytest.raises(ValueError, match=r"k must have dims b h j d beside nested tensors, got shape \(2, 3\)"):
        attend(q, torch.zeros(2, 3), q)
