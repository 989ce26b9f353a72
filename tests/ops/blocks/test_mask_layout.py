"""What is remembered of a mask, and when it is worked out anew."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import regard as R
from regard.ops.blocks import mask_layout as module
from regard.ops.blocks.mask_layout import layout, remembered, skeleton
from regard.ops.call import Call
from tests.cases import MASKS
from tests.oracle import Shape


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(module, "_by_value", type(module._by_value)())


class Counter:
    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return self.made


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_tiles_and_keys_are_those_of_the_mask_written_out(case, monkeypatch):
    monkeypatch.setattr(module, "TILE", 8)
    monkeypatch.setattr(module, "ENTRIES", 500)
    for shape in (Shape(b=2, h=2, g=1, i=21, j=21), Shape(b=2, h=2, g=1, i=9, j=30)):
        if not case.fits(shape):
            continue
        torch.manual_seed(0)
        mask = case.terms(*case.tensors(shape))["mask"]
        q, k = torch.randn(2, 2, shape.i, 4), torch.randn(2, 1, shape.j, 4)
        call = Call.of(q, k, k, mask=mask)
        found = layout(mask, call)
        dense = mask.over(call.whole()).expand(call.shape)
        for r in range(found.some.shape[2]):
            for c in range(found.some.shape[3]):
                tile = dense[:, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8]
                some, full = (x.expand(2, 2, -1, -1)[:, :, r, c] for x in (found.some, found.full))
                assert (some | ~tile.any(-1).any(-1)).all(), "a tile with visible entries is called empty"
                assert (~full | tile.all(-1).all(-1)).all(), "a tile with hidden entries is called full"
        seen = dense.any(2).any(1)
        if found.seen is None:
            assert seen.all() or module._holds(mask, R.Rule)
        else:
            assert torch.equal(found.seen[:, 0, 0].expand(2, -1), seen)


def test_terms_without_tensors_are_known_by_value():
    make = Counter()
    assert remembered(R.Causal() & R.Window(3), 1, make) == 1
    assert remembered(R.Causal() & R.Window(3), 1, make) == 1
    assert remembered(R.Causal() & R.Window(4), 1, make) == 2
    assert remembered(R.Causal() & R.Window(3), 2, make) == 3
    assert remembered(R.Causal() & R.Window(3), 1, make) == 1


def test_terms_made_anew_over_the_same_tensors_are_known():
    make = Counter()
    a, b = torch.tensor([3, 5]), torch.tensor([3, 5])
    assert remembered(R.Causal() & R.Padding(a), 0, make) == 1
    assert remembered(R.Causal() & R.Padding(a), 0, make) == 1
    assert remembered(R.Causal() & R.Padding(b), 0, make) == 2
    assert remembered(R.Padding(a), 0, make) == 3
    assert remembered(R.Causal() & R.Padding(a), 0, make) == 1


def test_a_second_tensor_of_the_term_counts_too():
    make = Counter()
    a, b, c = (torch.tensor([3, 5]) for _ in range(3))
    assert remembered(R.Documents(a, b), 0, make) == 1
    assert remembered(R.Documents(a, c), 0, make) == 2
    assert remembered(R.Documents(a, b), 0, make) == 3  # one memory a kind of term: the last tensors are known
    assert remembered(R.Documents(a, b), 0, make) == 3


def test_a_tensor_changed_in_place_is_looked_at_again():
    make = Counter()
    lengths = torch.tensor([3, 5])
    assert remembered(R.Padding(lengths), 0, make) == 1
    lengths[0] = 4
    assert remembered(R.Padding(lengths), 0, make) == 2
    assert remembered(R.Padding(lengths), 0, make) == 2


def test_memory_changed_behind_a_tensor_is_looked_at_again():
    buffer = np.array([[True, True, False, False]])
    keep = torch.from_numpy(buffer)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    R.attend(q, k, v, mask=R.Padding(keep))
    buffer[:] = True
    torch.testing.assert_close(R.attend(q, k, v, mask=R.Padding(keep)), R.attend(q, k, v))
    keep.data[:, 1:] = False
    want = R.attend(q, k, v, mask=R.Padding((1,)))
    torch.testing.assert_close(R.attend(q, k, v, mask=R.Padding(keep)), want)


def test_inference_tensors_are_never_remembered():
    make = Counter()
    with torch.inference_mode():
        lengths = torch.tensor([3, 5])
    assert [remembered(R.Padding(lengths), 0, make) for _ in range(2)] == [1, 2]


def test_memory_does_not_keep_tensors_alive():
    lengths = torch.tensor([3, 5])
    watch = weakref.ref(lengths)
    remembered(R.Padding(lengths), 0, Counter())
    del lengths
    gc.collect()
    assert watch() is None


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    make = Counter()
    for n in range(1, 6):
        remembered(R.Window(n), 0, make)
    assert len(module._by_value) == 3
    assert remembered(R.Window(5), 0, make) == 5
    assert remembered(R.Window(1), 0, make) == 6


def test_two_rules_of_one_name_are_two_rules():
    rules = [R.Rule(lambda b, h, i, j: i > j), R.Rule(lambda b, h, i, j: i < j)]
    assert skeleton(rules[0]) != skeleton(rules[1])


def test_what_a_rule_shows_is_not_remembered():
    limit = torch.tensor(3)
    mask = R.Rule(lambda b, h, i, j: j < limit)
    q, k = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    assert layout(mask, Call.of(q, k, k, mask=mask)).seen is None


def test_flex_hands_over_the_same_tiles_for_every_layer_and_new_ones_for_new_lengths():
    from tests.backends import flex_on_the_cpu

    q, k, v = torch.randn(3, 2, 2, 40, 16)
    lengths = torch.tensor([40, 7])
    want = [R.attend(q, k, v, mask=R.Causal() & R.Padding(n), backend="reference") for n in (lengths, lengths - 3)]
    with flex_on_the_cpu():
        for _ in range(2):
            out = R.attend(q, k, v, mask=R.Causal() & R.Padding(lengths), backend="flex")
            torch.testing.assert_close(out, want[0])
        lengths -= 3
        out = R.attend(q, k, v, mask=R.Causal() & R.Padding(lengths), backend="flex")
    torch.testing.assert_close(out, want[1])


def test_garbage_in_keys_that_nobody_sees_changes_nothing_on_flex():
    from tests.backends import flex_on_the_cpu

    q, k, v = torch.randn(3, 2, 2, 40, 16)
    mask = R.Padding(torch.tensor([40, 7]))
    want = R.attend(q, k, v, mask=mask, backend="reference")
    k[1, :, 7:], v[1, :, 7:] = torch.nan, torch.inf
    with flex_on_the_cpu():
        torch.testing.assert_close(R.attend(q, k, v, mask=mask, backend="flex"), want)
