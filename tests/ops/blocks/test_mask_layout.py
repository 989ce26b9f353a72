"""The tiles and keys that a mask leaves visible."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard.ops.blocks import mask_layout as module
from regard.ops.blocks.mask_layout import mask_layout
from regard.ops.call import Call
from tests.cases import MASKS
from tests.oracle import Shape


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_tiles_and_keys_are_those_of_the_mask_written_out(case, monkeypatch):
    monkeypatch.setattr(module, "TILE", 8)
    monkeypatch.setattr(module, "ENTRIES_PER_CHUNK", 500)
    for shape in (Shape(b=2, h=2, g=1, i=21, j=21), Shape(b=2, h=2, g=1, i=9, j=30)):
        if not case.fits(shape):
            continue
        torch.manual_seed(0)
        mask = case.terms(*case.tensors(shape))["mask"]
        q, k = torch.randn(2, 2, shape.i, 4), torch.randn(2, 1, shape.j, 4)
        call = Call.of(q, k, k, mask=mask)
        found = mask_layout(mask, call)
        dense = mask.over(call.whole()).expand(call.shape)
        for r in range(found.some.shape[2]):
            for c in range(found.some.shape[3]):
                tile = dense[:, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8]
                some, full = (x.expand(2, 2, -1, -1)[:, :, r, c] for x in (found.some, found.full))
                assert (some | ~tile.any(-1).any(-1)).all(), "a tile with visible entries is called empty"
                assert (~full | tile.all(-1).all(-1)).all(), "a tile with hidden entries is called full"
        seen = dense.any(2).any(1)
        if found.seen is None:
            assert seen.all() or module.contains_rule(mask)
        else:
            assert torch.equal(found.seen[:, 0, 0].expand(2, -1), seen)


def test_what_a_rule_shows_is_not_remembered():
    limit = torch.tensor(3)
    mask = R.Rule(lambda b, h, i, j: j < limit)
    q, k = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    assert mask_layout(mask, Call.of(q, k, k, mask=mask)).seen is None


def test_garbage_in_keys_that_nobody_sees_changes_nothing_on_flex():
    from tests.backends import flex_on_the_cpu

    q, k, v = torch.randn(3, 2, 2, 40, 16)
    mask = R.Padding(torch.tensor([40, 7]))
    want = R.attend(q, k, v, mask=mask, backend="reference")
    k[1, :, 7:], v[1, :, 7:] = torch.nan, torch.inf
    with flex_on_the_cpu():
        torch.testing.assert_close(R.attend(q, k, v, mask=mask, backend="flex"), want)
