"""Reader: whatever shapes a kernel is handed, the tape says what it did."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from regard import Causal
from regard.lens import Tape, ablate, capture
from tests.lens.sdpa_layers import Bare, plain


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (1, 6), (3, 1, 6)], ids=str)
@pytest.mark.parametrize("kind", ["nothing hidden", "padding", "numbers"])
def test_one_row_for_all_queries_does_not_say_where_they_stand(shape, kind):
    q = torch.randn(2, 3, 6, 8)
    mask = torch.ones(shape, dtype=torch.bool)
    if kind != "nothing hidden":
        mask[..., 4:] = False
    model = Bare()
    with torch.no_grad(), capture(model) as tape:
        model(q, q, attn_mask=torch.where(mask, 0.0, -math.inf) if kind == "numbers" else mask)
    A = plain(q, q) if kind == "nothing hidden" else F.pad(plain(q, q[:, :, :4]), (0, 2))
    place = torch.arange(6)
    assert tape[0].call.offset == 0
    assert torch.allclose(tape[0].dense(), A, atol=1e-6)
    assert torch.allclose(tape[0].distance(), (A * (place[:, None] - place).abs()).sum(-1), atol=1e-5)


def test_one_column_for_all_keys_hides_rows():
    q, model = torch.randn(1, 1, 4, 8), Bare()
    mask = torch.tensor([[True], [True], [False], [True]])
    with torch.no_grad(), capture(model) as tape:
        model(q, q, attn_mask=mask)
    assert torch.allclose(tape[0].dense(), torch.where(mask, plain(q, q), 0.0), atol=1e-6)


def test_a_row_hidden_by_a_finite_number_is_told():
    q, model, mask = torch.randn(1, 1, 4, 8), Bare(), torch.zeros(4, 4)
    mask[2] = torch.finfo(torch.float32).min
    message = r"1 query row is fully masked with finite values \(first: row 2, all 4 keys\).*uniformly.*zeros"
    with torch.no_grad(), pytest.warns(UserWarning, match=message), capture(model) as tape:
        out = model(q, q, attn_mask=mask)
    assert torch.allclose(out[0, 0, 2], q[0, 0].mean(0), atol=1e-6)
    assert not tape[0][0, 0, 2].any()


@pytest.mark.parametrize("offset", [0, 3])
def test_a_row_of_padding_hidden_by_a_finite_number_is_nobody_s_business(offset):
    n, i, model = 7, 7 - offset, Bare()
    real = torch.arange(n) >= torch.tensor([[0], [5]])  # of the second text five are padding, on the left
    keep = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None]
    mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)[:, :, offset:]
    with torch.no_grad(), capture(model) as tape:
        model(torch.randn(2, 1, i, 8), torch.randn(2, 1, n, 8), attn_mask=mask)
    assert torch.equal(tape[0].dense() > 0, keep[:, :, offset:])


def test_a_row_hidden_by_minus_infinity_sees_nothing_indeed():
    q, model, mask = torch.randn(1, 1, 4, 8), Bare(), torch.zeros(4, 4)
    mask[2] = -math.inf
    with torch.no_grad(), capture(model) as tape:
        out = model(q, q, attn_mask=mask)
    assert torch.allclose(tape[0] @ q, out.nan_to_num(), atol=1e-6)


def test_what_is_no_number_hides_nothing():
    q, mask, model = torch.randn(1, 1, 3, 8), torch.zeros(3, 3), Bare()
    mask[1, 2] = math.nan
    with torch.no_grad(), capture(model) as tape:
        out = model(q, q, attn_mask=mask)
    assert torch.equal(tape[0].dense().isnan().all(-1), out.isnan().all(-1))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1, 2, 1, 8), (3, 2, 5, 8)),
        ((3, 2, 4, 8), (1, 2, 5, 8)),
        ((3, 1, 4, 8), (3, 2, 5, 8)),
        ((1, 4, 8), (3, 5, 8)),
        ((2, 1, 2, 4, 8), (1, 3, 2, 5, 8)),
    ],
    ids=str,
)
def test_tensors_that_are_broadcast_have_all_their_rows(queries, keys, tmp_path):
    q, k, model = torch.randn(queries), torch.randn(keys), Bare()
    with torch.no_grad(), capture(model) as tape:
        model(q, k)
    tape.save(tmp_path / "tape.safetensors")
    for one in (tape, Tape.load(tmp_path / "tape.safetensors")):
        assert torch.allclose(one[0].dense().flatten(), plain(q, k).flatten(), atol=1e-6)


def test_a_mask_written_to_in_inference_mode_is_read_again():
    q, k, model = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 6, 8), Bare()
    with torch.inference_mode(), capture(model) as tape:
        keep = torch.zeros(1, 6, dtype=torch.bool)
        for n in range(3):
            keep[:, n] = True
            model(q, k.clone(), attn_mask=keep)
    assert [int((tape[n].dense() > 0).sum()) for n in range(len(tape))] == [1, 2, 3]


def test_a_mask_is_of_heads_or_of_batch_rows_as_the_call_is():
    mask, model = torch.rand(4, 5, 5) > 0.3, Bare()
    mask |= torch.eye(5, dtype=torch.bool)
    heads, rows = torch.randn(1, 4, 5, 8), torch.randn(4, 5, 8)
    with torch.no_grad(), capture(model) as tape:
        model(heads, heads, attn_mask=mask)
        model(rows, rows, attn_mask=mask)
    assert torch.equal(tape[0].dense() > 0, mask[None])
    assert torch.equal(tape[1].dense() > 0, mask[:, None])


def test_a_batch_without_heads_has_one_head():
    q, model = torch.randn(3, 5, 8), Bare()
    with ablate(model, {"": [0]}):
        assert not model(q, q).any()


def test_a_tape_of_an_empty_batch_comes_back(tmp_path):
    q, model = torch.randn(0, 2, 5, 8), Bare()
    with torch.no_grad(), capture(model) as tape:
        model(q, q)
    tape.save(tmp_path / "tape.safetensors")
    assert tuple(Tape.load(tmp_path / "tape.safetensors")[0].shape) == (0, 2, 5, 5)


def test_measures_without_a_map_make_a_page(tmp_path):
    model, x = nn.MultiheadAttention(16, 2), torch.randn(5, 1, 16)
    with capture(model, keep=["entropy", "received"]) as tape:
        model(x, x, x)
    tape.page().save(tmp_path / "page.html")
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf8")


@pytest.mark.parametrize(("mask", "first"), [(causal_upper_left, 0), (causal_lower_right, 3)])
def test_causal_masks_that_hold_no_numbers_are_read_by_what_they_say(mask, first):
    q, k, model = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8), Bare()
    with torch.no_grad(), capture(model) as tape:
        out = model(q, k, attn_mask=mask(4, 7))
    hidden = torch.ones(4, 7, dtype=torch.bool).triu(1 + first)
    A = (q @ k.mT / 8**0.5).masked_fill(hidden, -math.inf).softmax(-1)
    assert torch.allclose(out, A @ k, atol=1e-6)
    found = tape[0].dense()  # without keys behind the last query
    assert torch.allclose(F.pad(found, (0, 7 - found.shape[-1])), A, atol=1e-6)
    assert (tape[0].call.mask, tape[0].call.offset) == (Causal(), first)


def test_equal_masks_of_several_layers_are_one_term_and_one_written_to_is_another():
    q, model = torch.randn(1, 2, 6, 8), nn.Sequential(Bare(), Bare(), Bare())
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    other = seen.clone()
    with torch.no_grad(), capture(model) as tape:
        model[0](q, q, attn_mask=seen.clone())
        model[1](q, q, attn_mask=other)
        other[3, 0] = False
        model[2](q, q, attn_mask=other)
    assert tape[0].call.mask is tape[1].call.mask
    assert tape[0].call.mask == Causal()
    assert tape[2][0, 0, 3, 0] == 0 != tape[1][0, 0, 3, 0]
