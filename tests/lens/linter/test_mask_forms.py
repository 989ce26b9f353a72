"""Masks are read by trying: their shape, and whether True means attend or hide."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens.linter.call_adapter import CallAdapter
from regard.lens.linter.mask_forms import expected_meaning, read_mask
from regard.nn import Attention


class Masked(nn.Module):
    """Attention under a mask that `prepare` turns into True = may attend."""

    def __init__(self, prepare):
        super().__init__()
        self.prepare, self.linear = prepare, nn.Linear(6, 6)

    def forward(self, x, mask=None):
        keep = None if mask is None else self.prepare(mask)
        return F.scaled_dot_product_attention(x, self.linear(x), x, attn_mask=keep)


def first(adapter, argument="mask"):
    readings = read_mask(adapter, argument, n=7)
    return (readings[0].form.name, readings[0].means) if readings else None


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda mask: mask.bool(), ("n n of bool", "attend")),
        (lambda mask: ~mask.bool(), ("n n of bool", "hide")),
        (lambda mask: mask.bool()[:, None] if mask.ndim == 2 and len(mask) == 3 else 1 / 0, ("b n of bool", "attend")),
        (lambda mask: mask if mask.is_floating_point() else 1 / 0, ("n n of 0 and -inf", "attend")),
    ],
)
def test_the_form_of_a_mask_is_found(prepare, expected):
    assert first(CallAdapter(Masked(prepare), dim=6)) == expected


def test_a_mask_that_hides_nothing_has_no_meaning():
    readings = read_mask(CallAdapter(Masked(lambda mask: None), dim=6), "mask", n=7)
    assert readings
    assert all(reading.means is None for reading in readings)


def test_masks_of_the_library_and_lengths_are_passed():
    adapter = CallAdapter(Attention(12, 3))
    assert first(adapter, "mask") == ("a mask of regard", "attend")
    assert first(adapter, "keep") == ("b n of bool", "attend")


def test_a_reading_turns_keep_into_the_argument():
    reading = read_mask(CallAdapter(nn.MultiheadAttention(12, 3)), "key_padding_mask", n=7)[0]
    keep = torch.tensor([[True, False]])
    assert reading.means == "hide"
    assert reading(keep)["key_padding_mask"].tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("key_padding_mask", "hide"), ("src_key_padding_mask", "hide"), ("attention_mask", "attend"), ("mask", None)],
)
def test_names_that_libraries_agree_on_have_a_meaning(name, meaning):
    assert expected_meaning(name) == meaning
