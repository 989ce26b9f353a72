"""What is cached per term, and when it is made anew."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

import regard as R
from regard.ops import term_cache as module
from regard.ops.term_cache import cached_per_term, without_tensors


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(module, "_by_value", type(module._by_value)())
    monkeypatch.setattr(module, "_recent", {})


class Counter:
    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return self.made


def test_terms_without_tensors_are_known_by_value():
    make = Counter()
    assert cached_per_term(R.Causal() & R.Window(3), 1, make) == 1
    assert cached_per_term(R.Causal() & R.Window(3), 1, make) == 1
    assert cached_per_term(R.Causal() & R.Window(4), 1, make) == 2
    assert cached_per_term(R.Causal() & R.Window(3), 2, make) == 3
    assert cached_per_term(R.Causal() & R.Window(3), 1, make) == 1


def test_a_tuple_of_numbers_is_its_own_key():
    keys = (3, 5, 8)
    assert without_tensors(R.Padding(keys)) == (R.Padding, (keys,))
    mask = R.Padding(keys)
    assert without_tensors(mask)[1][0] is mask.keys
    assert without_tensors(R.Padding(torch.tensor(keys))) == (R.Padding, (torch.Tensor,))


def test_terms_made_anew_over_the_same_tensors_are_known():
    make = Counter()
    a, b = torch.tensor([3, 5]), torch.tensor([3, 5])
    assert cached_per_term(R.Causal() & R.Padding(a), 0, make) == 1
    assert cached_per_term(R.Causal() & R.Padding(a), 0, make) == 1
    assert cached_per_term(R.Causal() & R.Padding(b), 0, make) == 2
    assert cached_per_term(R.Padding(a), 0, make) == 3
    assert cached_per_term(R.Causal() & R.Padding(a), 0, make) == 1


def test_a_second_tensor_of_the_term_counts_too():
    make = Counter()
    a, b, c = (torch.tensor([3, 5]) for _ in range(3))
    assert cached_per_term(R.Documents(a, b), 0, make) == 1
    assert cached_per_term(R.Documents(a, c), 0, make) == 2
    assert cached_per_term(R.Documents(a, b), 0, make) == 3  # one memory a kind of term: the last tensors are known
    assert cached_per_term(R.Documents(a, b), 0, make) == 3


def test_a_tensor_changed_in_place_is_looked_at_again():
    make = Counter()
    lengths = torch.tensor([3, 5])
    assert cached_per_term(R.Padding(lengths), 0, make) == 1
    lengths[0] = 4
    assert cached_per_term(R.Padding(lengths), 0, make) == 2
    assert cached_per_term(R.Padding(lengths), 0, make) == 2


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
    assert [cached_per_term(R.Padding(lengths), 0, make) for _ in range(2)] == [1, 2]


def test_memory_does_not_keep_tensors_alive():
    lengths = torch.tensor([3, 5])
    watch = weakref.ref(lengths)
    cached_per_term(R.Padding(lengths), 0, Counter())
    del lengths
    gc.collect()
    assert watch() is None


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    make = Counter()
    for n in range(1, 6):
        cached_per_term(R.Window(n), 0, make)
    assert len(module._by_value) == 3
    assert cached_per_term(R.Window(5), 0, make) == 5
    assert cached_per_term(R.Window(1), 0, make) == 6


def test_a_term_used_again_is_known_by_its_identity_and_kept_so_that_no_other_gets_its_id(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    make, mask = Counter(), R.Causal() & R.Window(3)
    assert [cached_per_term(mask, 0, make) for _ in range(2)] == [1, 1]
    monkeypatch.setattr(module, "without_tensors", None)  # its fields are not looked at again
    assert cached_per_term(mask, 0, make) == 1
    monkeypatch.undo()
    for n in range(2, 30):  # masks that are made and dropped, whose memory the next may get
        assert cached_per_term(R.Window(n), 0, partial(int, n)) == n
        assert len(module._recent) <= module.MAX_ENTRIES


def test_two_rules_of_one_name_are_two_rules():
    rules = [R.Rule(lambda b, h, i, j: i > j), R.Rule(lambda b, h, i, j: i < j)]
    assert without_tensors(rules[0]) != without_tensors(rules[1])


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


@pytest.mark.parametrize("tensors", [False, True])
def test_threads_share_it(monkeypatch, tensors):
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    lengths = [torch.tensor([n, n]) for n in range(1, 9)] if tensors else [(n, n) for n in range(1, 9)]

    def work(seed):
        for n in range(400):
            k = (seed * 7 + n * n) % 8
            assert cached_per_term(R.Padding(lengths[k]), 0, partial(int, k)) == k

    with ThreadPoolExecutor(8) as pool:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for done in [pool.submit(work, seed) for seed in range(8)]:
                done.result()
        finally:
            sys.setswitchinterval(before)


def test_no_thread_evicts_what_another_has_just_found(monkeypatch):
    class Slow(OrderedDict):
        """Other threads run between two of its operations."""

        def get(self, key, default=None):
            found = super().get(key, default)
            time.sleep(1e-3)
            return found

    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    monkeypatch.setattr(module, "_by_value", Slow())

    def work(seed):
        for n in range(30):
            k = (n // 2 + seed) % 3 + 1
            assert cached_per_term(R.Window(k), 0, partial(int, k)) == k

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
