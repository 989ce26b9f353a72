"""Packed sequences and KV caches as masks and biases, whose memory is linear in the tokens."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.lens import Tape, capture
from regard.lens.terms.varlen import Sloped, VarlenSequences
from tests.lens.kernel_layers import HEADS, SLOPES, WIDTH, Held, assert_shows, capture_one, inputs, side_by_side


def test_packed_sequences_are_documents(flash):
    A, _ = capture_one(Held(flash.flash_attn_varlen_func, causal=True), *side_by_side((3, 1, 5), (3, 1, 5)))
    assert repr(A.call.mask) == "Causal() & Documents(int64[9])"


@pytest.mark.parametrize(
    ("slopes", "kind"),
    [(SLOPES, R.Alibi), (SLOPES.expand(2, -1), R.Alibi), (torch.stack((SLOPES, SLOPES.flip(0))), Sloped)],
)
def test_slopes_are_alibi_or_sloped(flash, slopes, kind):
    A, _ = capture_one(Held(flash.flash_attn_func, alibi_slopes=slopes), *inputs())
    assert type(A.call.bias) is kind


def test_slopes_are_copied(flash):
    slopes, (q, k, v) = SLOPES.clone(), inputs()
    want = flash.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)[2]
    layer = Held(flash.flash_attn_func, alibi_slopes=slopes)
    with capture(layer) as tape:
        layer(q, k, v)
        slopes.zero_()
    assert_shows(tape[0], want)


def test_sloped_checks_its_tensors():
    q = k = torch.randn(2, HEADS, 5, WIDTH)
    with pytest.raises(TypeError, match="Sloped slopes must be a tensor"):
        Sloped(1.0, torch.zeros(5))
    with pytest.raises(TypeError, match="Sloped center must be a tensor"):
        Sloped(torch.ones(1), 0)
    with pytest.raises(ValueError, match="Sloped slopes must broadcast"):
        weights(q, k, bias=Sloped(torch.ones(3, 1), torch.arange(5)))
    with pytest.raises(ValueError, match="Sloped center must broadcast"):
        weights(q, k, bias=Sloped(torch.ones(HEADS, 1), torch.arange(4)))
    torch.testing.assert_close(
        weights(q, k, bias=Sloped(SLOPES[:, None], torch.arange(5)))[:],
        weights(q, k, bias=R.Alibi(slopes=SLOPES))[:],
    )


def test_a_saved_tape_holds_its_terms(flash, tmp_path):
    args = side_by_side((2, 1, 3), (4, 1, 6))
    given = {"causal": True, "alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0), SLOPES))}
    layer = Held(flash.flash_attn_varlen_func, **given)
    with capture(layer) as tape:
        layer(*args)
    tape.save(tmp_path / "tape.safetensors")
    ((_, A),) = Tape.load(tmp_path / "tape.safetensors").items()
    assert_shows(A, flash.flash_attn_varlen_func(*args, **given, return_attn_probs=True)[2])


CPU = torch.device("cpu")


def test_sequences_of_equal_starts_are_documents():
    found = VarlenSequences.from_starts([0, 3, 4], [0, 3, 4], device=CPU)
    assert found.numbers.tolist() == [0, 0, 0, 1]
    assert (found.offset, found.positions) == (0, None)


@pytest.mark.parametrize(("at_end", "positions"), [(True, [2, 3, 4, 5]), (False, [0, 1, 4, 5])])
def test_queries_have_positions_among_the_keys_of_their_sequence(at_end, positions):
    found = VarlenSequences.from_starts([0, 2, 4], [0, 4, 6], at_end=at_end, device=CPU)
    assert found.positions.tolist() == [[positions]]
    assert (found.queries, found.keys, found.offset) == (4, 6, None)


@pytest.mark.parametrize(("at_end", "offset"), [(True, None), (False, 0)])
def test_one_sequence_has_one_offset_and_no_mask(at_end, offset):
    found = VarlenSequences.from_starts([0, 2], [0, 5], at_end=at_end, device=CPU)
    assert (found.own, found.offset, found.positions) == (None, offset, None)
    assert found.mask(None, None) is None


def test_caches_of_one_length_need_no_mask_and_others_are_padded():
    assert VarlenSequences.from_cache([5, 5], 2, device=CPU).own is None
    found = VarlenSequences.from_cache([3, 5], 2, device=CPU)
    assert repr(found.own) == "Padding((3, 5))"
    assert found.positions.tolist() == [[[1, 2]], [[3, 4]]]
    assert VarlenSequences.from_cache([], 2, device=CPU).keys == 0


@pytest.mark.parametrize(
    ("before", "after", "mask"),
    [
        (None, None, "None"),
        (None, 0, "Causal()"),
        (2, 0, "Causal() & Window(3)"),
        (2, 2, "Window(3)"),
        (2, 1, "Window(before=2, after=1)"),
    ],
)
def test_reaches_around_a_query_are_named_masks(before, after, mask):
    assert repr(VarlenSequences(5, 5).mask(before, after)) == mask
