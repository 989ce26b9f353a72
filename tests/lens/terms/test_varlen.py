"""Packed sequences and KV caches as masks and biases, whose memory is linear in the tokens."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard import weights
from regard.lens import Tape, capture
from regard.lens.terms.varlen import Sloped
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
