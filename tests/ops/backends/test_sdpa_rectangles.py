"""Padding and packed texts on the CPU: one call of the kernel for each rectangle that the mask leaves visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as R
from regard import attend
from regard.ops.backends import sdpa, sdpa_rectangles
from regard.ops.backends.sdpa_rectangles import Rectangle, plan_rectangles
from regard.ops.call import Call
from tests.ops.inputs import qkv

LEFT = torch.arange(40) >= torch.tensor([[3], [0]])
IDS = torch.tensor([0] * 9 + [1] * 20 + [2] * 11)
MASKS = {
    "lengths": R.Padding((17, 40)),
    "one length is 0": R.Padding((0, 25)),
    "left": R.Padding(LEFT),
    "causal, right": R.Causal() & R.Padding((17, 40)),
    "causal, left": R.Causal() & R.Padding(LEFT),
    "both sides": R.Padding((30, 40)) & R.Padding(LEFT),
    "packed": R.Documents(IDS),
    "packed, causal": R.Documents(IDS) & R.Causal(),
    "packed by row": R.Documents(torch.stack((IDS, IDS.flip(0)))),
    "packed and padded": R.Documents(IDS) & R.Padding((25, 40)),
    "unlike queries": R.Documents(torch.tensor([1, 1, 0, 5] * 10), IDS),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """However small a call is, it is cut."""
    monkeypatch.setattr(sdpa_rectangles, "ENTRIES_PER_CALL", -(10**9))  # a gift


def rectangles(mask, i=40, j=40, **given):
    q, k, v = qkv(i, j)
    return plan_rectangles(Call.of(q, k, v, mask=mask, **given))


def test_texts_are_cut_into_what_they_show():
    whole = slice(0, 40)
    assert rectangles(MASKS["lengths"]) == (
        Rectangle(slice(0, 1), whole, slice(0, 17)),
        Rectangle(slice(1, 2), whole, whole),
    )
    assert rectangles(MASKS["causal, right"])[:2] == (
        Rectangle(slice(0, 1), slice(0, 17), slice(0, 17), causal=True),
        Rectangle(slice(0, 1), slice(17, 40), slice(0, 17)),
    )
    documents = slice(0, 9), slice(9, 29), slice(29, 40)
    assert rectangles(MASKS["packed"]) == tuple(Rectangle(slice(0, 2), each, each) for each in documents)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shared", [1, 2])
def test_outputs_statistics_and_gradients_are_those_of_the_matrix(name, shared):
    leaves = [x.double().requires_grad_() for x in qkv(shared=shared)]
    call = Call.of(*leaves, mask=MASKS[name])
    assert plan_rectangles(call)
    out, lse = sdpa.plan(call).run()
    want = attend(*leaves, mask=MASKS[name], backend="reference")
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse[..., 0], R.weights(*leaves[:2], mask=MASKS[name], backend="reference").lse)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, want))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", MASKS)
def test_hidden_garbage_changes_nothing(name):
    leaves = [x.requires_grad_() for x in qkv()]
    clean = attend(*leaves, mask=MASKS[name])
    seen = R.weights(*leaves[:2], mask=MASKS[name], backend="reference").dense().sum((1, 2)) > 0  # b j
    q, k, v = (x.detach().clone() for x in leaves)
    for x in (k, v):
        x.transpose(1, 2)[~seen] = float("nan")
    dirty = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*dirty, mask=MASKS[name], backend="sdpa")
    torch.testing.assert_close(out, clean)
    for one, other in zip(*(torch.autograd.grad(y.sum(), x) for y, x in ((out, dirty), (clean, leaves))), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["causal, right", "packed, causal"])
def test_garbage_in_the_future_of_a_text_does_not_reach_its_past(name):
    q, k, v = qkv()
    clean = attend(q, k, v, mask=MASKS[name])
    v[0, :, 12] = float("nan")
    out = attend(q, k, v, mask=MASKS[name])
    torch.testing.assert_close(out[0, :, :12], clean[0, :, :12])
    torch.testing.assert_close(out[1], clean[1])
    assert out[0, :, 12].isnan().all()


REFUSED = {
    "holes": R.Padding(torch.arange(40)[None] % 3 > 0),
    "scattered documents": R.Documents(torch.arange(40) % 2),
    "a window": R.Window(3) & R.Padding((17, 40)),
    "causal alone": R.Causal(),
    "or": R.Causal() | R.Padding((17, 40)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_of_other_forms_are_not_cut(name):
    assert rectangles(REFUSED[name]) is None


def test_queries_that_continue_a_text_are_not_cut():
    assert rectangles(R.Causal() & R.Padding((17, 40)), i=10, offset=5) is None
    assert rectangles(R.Causal() & R.Padding((17, 40)), i=1)  # the last query sees every key


def test_a_small_gain_is_not_worth_more_calls(monkeypatch):
    monkeypatch.undo()
    assert rectangles(R.Padding((39, 40))) is None


@given(st.data())
def test_any_packing_and_padding_is_the_matrix(data):
    b, i, j = (data.draw(st.integers(1, n)) for n in (3, 12, 12))
    same = data.draw(st.booleans())
    i = j if same else i
    starts, stops = (torch.tensor(data.draw(st.lists(st.integers(0, j), min_size=b, max_size=b))) for _ in range(2))
    at = torch.arange(j)
    mask = R.Padding((at >= starts[:, None]) & (at < stops[:, None]))
    if data.draw(st.booleans()):
        query_ids, key_ids = (
            torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))).sort().values for n in (i, j)
        )
        mask = mask & (R.Documents(query_ids) if same else R.Documents(query_ids, key_ids))
    if data.draw(st.booleans()):
        mask = mask & R.Causal()
    q, k, v = (torch.randn(b, 2, n, 4, dtype=torch.float64) for n in (i, j, j))
    call = Call.of(q, k, v, mask=mask, offset=data.draw(st.integers(-3, 12)))
    torch.testing.assert_close(
        sdpa.plan(call).run()[0], attend(q, k, v, mask=mask, offset=call.offset, backend="reference")
    )


def test_padding_that_changed_before_the_backward_changes_nothing():
    lengths, (q, k, v) = torch.tensor([17, 40]), qkv()
    v.requires_grad_()
    out = attend(q, k, v, mask=R.Padding(lengths), backend="sdpa")
    before = torch.autograd.grad(out.sum(), v, retain_graph=True)[0]
    lengths.fill_(3)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0], before)
